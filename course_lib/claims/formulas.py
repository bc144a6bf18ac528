"""What the ledger's computations are written in: formulas of the package, and below what several claims share.

Each function returns a dictionary of values by name.
"""
# ruff: noqa: F401  (computations are text, in ledger.toml)

from dataclasses import replace
from math import ceil, log, sqrt

from course_lib.config import ModelConfig, preset
from course_lib.estimate import estimate
from course_lib.float_formats import BLOCK_FORMATS, FORMATS
from course_lib.flops import attention_flops_per_token, flops_per_token, step_flops
from course_lib.hardware import (
    CLUSTERS,
    GB,
    GIB,
    GPUS,
    LINKS,
    PUBLISHED_1F1B_FALLS,
    PUBLISHED_1F1B_THROUGHPUT,
    PUBLISHED_BATCH_RAMPS,
    PUBLISHED_DP_THROUGHPUT,
    PUBLISHED_TP_SP_THROUGHPUT,
    PUBLISHED_TP_THROUGHPUT,
    Cluster,
    peak_flops,
    published_link,
)
from course_lib.hardware import gpu as gpu_of
from course_lib.hardware import link as link_of
from course_lib.layout import Layout, Mesh
from course_lib.layout.block_pairs import pairs, pairs_of_ranks
from course_lib.layout.mesh import links_of_axes
from course_lib.layout.partition import even_layers, kv_replication
from course_lib.memory.activations import (
    block_terms,
    korthikanti_bytes,
    korthikanti_layer_bytes,
    selective_flops_share,
)
from course_lib.memory.budget import (
    NCCL_CHANNEL_BYTES,
    NCCL_CHANNELS,
    Budget,
    budgets,
    fits,
    saved_for_backward,
    states_of,
)
from course_lib.memory.flats import BUCKET_BYTES, flats_of, stage_parameters
from course_lib.memory.states import (
    RECIPES,
    LoRA,
    count_parameters,
    lora_parameters,
    narrow,
    parameter_shapes,
    recipe_of,
    state_bytes,
    zero_bytes_per_parameter,
)
from course_lib.run import Run
from course_lib.schedules import Costs, Simulation, bubble, interleaving_memory, make, peak_live, simulate
from course_lib.schedules.instructions import loop_placement
from course_lib.timing.collectives import collective_s, collective_steps
from course_lib.timing.data import accumulation_steps, dp_throughput, tokens_that_hide_a_gather
from course_lib.timing.failures import Failures, young_interval_s
from course_lib.timing.kernel import Roof, flash_bytes, occupancy, product_bytes, softmax_bytes, three_kernel_bytes
from course_lib.timing.rates import hfu, mfu, roofline_s, tokens_per_s
from course_lib.traffic import Call, attention_calls, calls, ring_all_reduce_bytes, sent_bytes
from course_lib.traffic.collectives import call_counts
from course_lib.traffic.data import flat_calls
from course_lib.traffic.tensor import tensor_calls

H100, DAY_S = GPUS["h100"], 86_400
H100_GIB = H100.usable_bytes / GIB
ENCODERS = ("xlm-r-large", "xlm-r-xl", "xlm-r-xxl")

# Milliseconds of forward and backward of one layer of 22B, TP 8, A100: Korthikanti 2022 (arXiv:2205.05198), table 4
LAYER_OF_22B_MS = {
    "kept": (7.7, 11.9),
    "kept, sequence parallel": (7.2, 11.8),
    "full": (7.7, 19.5),
    "selective": (7.7, 13.2),
    "selective, sequence parallel": (7.2, 13.1),
}
# Table 5: layers, hidden, heads, batch, GPUs; seconds of a step with full recomputation, and with both techniques
STEPS = {
    "22B": (48, 6144, 64, 4, 8, 1.42, 1.10),
    "175B": (96, 12288, 96, 64, 64, 18.13, 13.75),
    "530B": (105, 20480, 128, 280, 280, 49.05, 37.83),
    "1T": (128, 25600, 160, 512, 512, 94.42, 71.49),
}


# ---- memory


def fullest(model: str, layout: str, seq_len: int) -> Budget:
    """Bytes of the most loaded rank, by the course's own count."""
    return max(budgets(Run(preset(model), Layout.parse(layout), seq_len)), key=lambda rank: rank.total_bytes)


def states_and_activations(
    model: str,
    seq_len: int,
    recompute: str = "selective",
    tp: int = 1,
    sp: bool = False,
    cp: int = 1,
    bytes_per_parameter: int = 16,
) -> dict:
    """GiB of states and of activations of a rank of tp x cp, as the playbook draws them: 12 bytes without masters."""
    config = preset(model)
    states = bytes_per_parameter * count_parameters(config) / tp / GIB
    saved = config.num_layers * korthikanti_layer_bytes(config, 1, seq_len // cp, recompute, tp, sp) / GIB
    total = states + saved
    return {
        "states_gib": states,
        "activations_gib": saved,
        "total_gib": total,
        "share": saved / total,
        "fits": total <= H100_GIB,
    }


def sequence_parallel(model: str, seq_len: int, tp: int, base: str = "tp") -> dict:
    """Activations under TP and under TP with SP, in units of s b h a layer, scores left out; base: "tp", "one GPU"."""
    config = preset(model)
    cuts = ((1, False), (tp, False), (tp, True))
    of_layer = [korthikanti_layer_bytes(config, 1, seq_len, "selective", size, sp) for size, sp in cuts]
    whole, alone, both = (layer / (seq_len * config.d_model) for layer in of_layer)
    return {
        "tp_sp": both,
        "times": alone / both,
        "divided_by": whole / both,
        "share": both / (alone if base == "tp" else whole),
        "gib": [config.num_layers * layer / GIB for layer in of_layer[1:]],
    }


# ---- messages


def zero_calls(stage: int, dp: int, micro_batches: int) -> list[Call]:
    """The collectives of a step of 1,000 parameters a rank."""
    return flat_calls(
        Run(preset("toy"), Layout(dp=dp, zero_stage=stage, micro_batches=micro_batches), 64), 1000 * dp, dp
    )


def zero_phases(stage: int, micro_batches: int = 1, dp: int = 4) -> dict:
    """What a step sends in units of the parameters times (dp - 1) / dp: plain data parallelism sends 2."""
    listed = zero_calls(stage, dp, micro_batches)
    gathers = [call for call in listed if call.collective == "all_gather"]
    total = sum(sent_bytes([call]) for call in listed) / (2000 * dp * (dp - 1) // dp)
    return {
        "phases": total,
        "over_dp": total / 2,
        "gathered": gathers[0].place if gathers else "nothing",
        "collectives": " and ".join(sorted({call.collective for call in listed})),
        "all_reduces": sum(call.count for call in listed if call.collective == "all_reduce"),
        "forward_calls": sum(call.count for call in gathers) // 2 * (stage == 3),
    }


def tensor_sums(model: str, tp: int, seq_len: int, sp: bool = False, passes: int = 2) -> dict:
    """Collectives of a layer under TP, forward (passes 1) or forward and backward, and what they send in a step."""
    run = Run(preset(model), Layout(tp=tp, sequence_parallel=sp), seq_len)
    places, layers = ("layers forward", "layers backward")[:passes], run.config.num_layers
    listed = [call for call in tensor_calls(run, 0) if call.place in places]
    return {
        "calls_a_layer": sum(call.count for call in listed) / layers,
        "gathers": call_counts(listed).get("all_gather", 0) / layers,
        "payload_gb": sum(call.payload_bytes * call.count for call in listed) / GB,
        "sent": sent_bytes(listed),
        "forward_a_block": sum(call.count for call in listed if "forward" in call.place) / (2 * layers),
    }


def clocked(schedule: str, pp: int, micro_batches: int, v: int = 1) -> Simulation:
    """A schedule whose forward and backward take one slot each, as the charts of the claims have them."""
    return simulate(make(schedule, pp, micro_batches, v), Costs(1.0, 0.5, 0.5))
