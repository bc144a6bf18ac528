"""What the ledger's computations are written in: all names of MODULES, and below what several claims share.

Each function returns a dictionary of values by name.
"""
# ruff: noqa: F401  (computations are text, in ledger.toml)

from dataclasses import replace
from math import ceil, log, sqrt
from pathlib import Path

from course_lib import config, float_formats, flops, hardware, run, schedules, tensors, traffic
from course_lib.config import preset
from course_lib.estimate import estimate
from course_lib.hardware import GB, GIB, GPUS
from course_lib.hardware import gpu as gpu_of
from course_lib.hardware import link as link_of
from course_lib.layout import Layout, Mesh, mesh, partition, sequence_sharding
from course_lib.memory import activations, budget, flats, states
from course_lib.memory.activations import korthikanti_layer_bytes
from course_lib.memory.budget import Budget, budgets
from course_lib.run import Run
from course_lib.schedules import Costs, Simulation, instructions, make, simulate
from course_lib.tensors import count_parameters
from course_lib.timing import collectives, data, kernel, rates
from course_lib.traffic import Call, sent_bytes, stage_calls
from course_lib.traffic.collectives import call_counts
from course_lib.traffic.data import flat_calls
from course_lib.validate import read_toml

MODULES = (
    config, float_formats, flops, hardware, sequence_sharding, mesh, partition, activations, budget, flats,
    run, states, tensors, schedules, instructions, collectives, data, kernel, rates, traffic,
)  # fmt: skip
H100, DAY_S = GPUS["h100"], 86_400
H100_GIB = H100.usable_bytes / GIB
ENCODERS = ("xlm-r-large", "xlm-r-xl", "xlm-r-xxl")

_TABLES = read_toml(Path(__file__).with_name("published.toml"))
LAYER_OF_22B_MS: dict[str, tuple[float, float]] = _TABLES["layer_of_22b_ms"]
STEPS: dict[str, tuple[float, ...]] = _TABLES["steps"]


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


def zero_calls(stage: int, dp: int, micro_batches: int) -> list[Call]:
    """The collectives of a step of 1,000 parameters a rank."""
    run = Run(preset("toy"), Layout(dp=dp, zero_stage=stage, micro_batches=micro_batches), 64)
    return flat_calls(run, 1000 * dp, dp)


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
    listed = [call for call in stage_calls(run, 0)["tp"] if call.place in places]
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
