"""What claims on memory are recomputed with: functions over the formulas of memory/, each a dictionary of values."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log
from typing import Literal

from course_lib.config import Recompute, preset
from course_lib.hardware import GB, GIB
from course_lib.hardware import gpu as gpu_of
from course_lib.layout import Layout
from course_lib.layout.partition import kv_replication
from course_lib.memory.budget import NCCL_CHANNEL_BYTES, NCCL_CHANNELS, budgets, fits, saved_for_backward
from course_lib.memory.flats import BUCKET_BYTES
from course_lib.memory.papers import (
    korthikanti_bytes,
    korthikanti_layer_bytes,
    megatron_activation_bytes,
    selective_flops_share,
)
from course_lib.memory.ranks import narrow
from course_lib.memory.stages import stage_parameters
from course_lib.memory.states import (
    RECIPES,
    LoRA,
    count_parameters,
    lora_parameters,
    parameter_shapes,
    recipe_of,
    state_bytes,
)
from course_lib.memory.zero import ZeroStage, five_d_states, zero_bytes_per_parameter, zero_saving
from course_lib.run import Run
from course_lib.validate import Amount, Count, Index, Positive, Size, checked, one_of, whole

Values = dict[str, object]
H100_GIB = gpu_of("h100").usable_bytes / GIB
ENCODERS = ("xlm-r-large", "xlm-r-xl", "xlm-r-xxl")
FORMATS = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}  # bits of exponent and fraction


@checked
def recipe_bytes(recipe: str) -> Values:
    """Bytes of state per parameter, by kind."""
    parts = recipe_of(recipe)
    weights, gradients, optimizer = parts.param_bytes, parts.grad_bytes, parts.master_bytes + parts.moment_bytes
    return {
        "total": parts.bytes_per_param,
        "weights": weights,
        "gradients": gradients,
        "moments": parts.moment_bytes,
        "optimizer": optimizer,
        "optimizer_over_weights": optimizer / weights,
        "gradients_over_weights": gradients / weights,
        "falling": optimizer > gradients > weights,
    }


@checked
def state_table(billions: Sequence[Positive]) -> Values:
    """GB of states of models of so many billions of parameters."""
    plain, both = (RECIPES[name].bytes_per_param for name in ("bf16-master", "bf16-master-both-grads"))
    return {
        "plain": [size * plain for size in billions],
        "fp32_gradients": [size * both for size in billions],
    }


@checked
def parameter_rule(model: str, square: Amount = 12.0, linear: Amount = 13.0) -> Values:
    """N = h v + L (square h^2 + linear h) + 2 h, beside the exact count."""
    config = preset(model)
    h = config.d_model
    rule = h * config.vocab_size + config.num_layers * (square * h * h + linear * h) + 2 * h
    count = count_parameters(config)
    return {"rule_billions": rule / 1e9, "billions": count / 1e9, "share": rule / count}


@checked
def larger_model(model: str, width: Size = 1, depth: Size = 1) -> Values:
    """How many times the parameters of a model that is so many times as wide, and as deep."""
    config = preset(model)
    larger = replace(
        config,
        d_model=width * config.d_model,
        d_ff=width * config.d_ff,
        num_heads=width * config.num_heads,
        num_kv_heads=width * config.num_kv_heads,
        num_layers=depth * config.num_layers,
    )
    return {"times": count_parameters(larger) / count_parameters(config)}


@checked
def zero_gb(billions: Positive, dp: Size, stage: ZeroStage, gathered_layers: Count = 0, layers: Size = 32) -> Values:
    """GB of states of a rank; gathered_layers of stage 3 are there in BF16 beside its shards."""
    gathered = gathered_layers / layers * 2 * billions
    optimizer = billions * RECIPES["bf16-master"].bytes_per_param - 4 * billions
    return {
        "gb": billions * zero_bytes_per_parameter(stage, dp) + gathered,
        "weights_gb": 2 * billions / (dp if stage == 3 else 1),
        "bytes_per_parameter": zero_bytes_per_parameter(stage, dp) + gathered / billions,
        "optimizer_gb": optimizer / (dp if stage else 1),
        "without_gb": billions * zero_bytes_per_parameter(0, dp),
        "fits_80": billions * zero_bytes_per_parameter(stage, dp) + gathered <= 80,
        "gradient_share": 1 / dp if stage >= 2 else 1.0,
    }


@checked
def zero_savings(dp: Size) -> Values:
    """How many times fewer bytes of state each stage leaves on a rank."""
    savings = {f"stage_{stage}": zero_saving(stage, dp) for stage in (1, 2, 3)}
    return savings | {"stage_3_over_2": savings["stage_3"] / savings["stage_2"]}


@checked
def on_gpus(model: str, layout: str, seq_len: Size, gpu: str, recipe: str = "bf16-master") -> Values:
    """GB of the most loaded rank, by the course's own count, and of the GPU; the total, with overheads, must fit it."""
    device = gpu_of(gpu)
    run = Run(preset(model), Layout.parse(layout), seq_len, recipe)
    most = max(budgets(run), key=lambda rank: rank.total_bytes)
    return {
        "states_gb": most.states_bytes / GB,
        "activations_gb": most.activations / GB,
        "peak_gb": most.peak_bytes / GB,
        "total_gb": most.total_bytes / GB,
        "gpu_gb": device.usable_bytes / GB,
        "left_gb": (device.usable_bytes - most.states_bytes) / GB,
        "fits": fits(most, device),
    }


@checked
def state_layouts(model: str, layouts: Sequence[str]) -> Values:
    """GB of states of a rank of each layout."""
    gb = [five_d_states(preset(model), Layout.parse(layout)).total / GB for layout in layouts]
    return {"gb": gb, "largest_gb": max(gb)}


@checked
def same_activations(model: str, dp: Size, seq_len: Size) -> Values:
    """Activations of ZeRO-3, beside those of plain data parallelism."""
    runs = [Run(preset(model), Layout(dp=dp, zero_stage=stage), seq_len) for stage in (0, 3)]
    plain, sharded = (budgets(run)[0] for run in runs)
    return {
        "share": sharded.activations / plain.activations,
        "states_share": sharded.states_bytes / plain.states_bytes,
    }


@checked
def activations(
    model: str, seq_len: Size, batch: Size = 1, recompute: Recompute = "none", tp: Size = 1, sp: bool = False
) -> Values:
    """Korthikanti's activations of all layers. "selective" is also what fused attention leaves."""
    config = preset(model)
    layer = korthikanti_layer_bytes(config, batch, seq_len, recompute, tp, sp)
    per_sbh = layer / (batch * seq_len * config.d_model)
    total = config.num_layers * layer
    return {
        "gib": total / GIB,
        "gb": total / GB,
        "gb_a_layer": layer / GB,
        "per_sbh": per_sbh,
        "times_2sbhl": per_sbh / 2,
        "times_root": per_sbh * config.num_layers**0.5,
        "logits_gb": 4 * batch * seq_len * config.vocab_size / GB,
    }


@checked
def activation_growth(model: str, seq_len: Size, times: Size, recompute: Recompute = "none") -> Values:
    """How activations grow with the sequence: the exponent is 2 where they grow with its square."""
    short, long = (
        korthikanti_bytes(preset(model), 1, length, recompute) / GIB for length in (seq_len, times * seq_len)
    )
    return {"gib": [short, long], "times": long / short, "exponent": log(long / short) / log(times)}


@checked
def states_and_activations(
    model: str,
    seq_len: Size,
    recompute: Recompute = "selective",
    tp: Size = 1,
    sp: bool = False,
    cp: Size = 1,
    bytes_per_parameter: Size = 16,
) -> Values:
    """GiB of states and of activations of a rank of tp x cp, as the playbook draws them: 12 bytes without masters."""
    config = preset(model)
    states = bytes_per_parameter * count_parameters(config) / tp / GIB
    kept = config.num_layers * korthikanti_layer_bytes(config, 1, seq_len // cp, recompute, tp, sp) / GIB
    total = states + kept
    return {
        "states_gib": states,
        "activations_gib": kept,
        "total_gib": total,
        "share": kept / total,
        "fits": total <= H100_GIB,
    }


@checked
def zero_bars(model: str, seq_len: Size, dp: Size) -> Values:
    """GiB of a rank at stages 0 to 3, as the playbook draws them: 12 bytes per parameter, fused attention."""
    states, kept = (states_and_activations(model, seq_len)[name] for name in ("states_gib", "activations_gib"))
    stages = [zero_bytes_per_parameter(stage, dp, optimizer_bytes=8) for stage in range(4)]
    gib = [states * size / 16 + kept for size in stages]
    return {"gib": gib, "stage_3": gib[3], "stage_3_fits": gib[3] <= H100_GIB}


@checked
def sequence_parallel(model: str, seq_len: Size, tp: Size, base: Literal["tp", "one GPU"] = "tp") -> Values:
    """Activations under TP and under TP with SP, in units of s b h a layer, scores left out."""
    rows = [activations(model, seq_len, 1, "selective", size, sp) for size, sp in ((1, False), (tp, False), (tp, True))]
    whole, alone, both = (row["per_sbh"] for row in rows)
    return {
        "tp_sp": both,
        "times": alone / both,
        "divided_by": whole / both,
        "share": both / (alone if base == "tp" else whole),
        "gib": [row["gib"] for row in rows[1:]],
    }


@checked
def activation_rule(model: str, seq_len: Size, constant: Amount) -> Values:
    """s b h L (constant + 5 a s / h), beside the same with 34."""
    config = preset(model)
    right = korthikanti_layer_bytes(config, 1, seq_len) * config.num_layers
    sbhl = seq_len * config.d_model * config.num_layers
    rule = right + (constant - 34) * sbhl
    return {"gib": rule / GIB, "right_gib": right / GIB, "share": rule / right}


@checked
def recomputation(model: str, seq_len: Size, tp: Size = 1) -> Values:
    """What of a layer's activations the scores are, what full recomputation leaves, and what selective costs."""
    none, selective, full = (
        activations(model, seq_len, 1, how, tp)["per_sbh"] for how in ("none", "selective", "full")
    )
    return {
        "scores_share": 1 - selective / none,
        "full_share": full / none,
        "flops_share": selective_flops_share(preset(model), seq_len),
    }


@checked
def fused_attention(model: str, seq_len: Size) -> Values:
    """What fused attention saves for backward, beside standard attention with selective recomputation."""
    config = replace(preset(model), dropout=0.0)
    fused, again = (
        saved_for_backward(Run(config, Layout(recompute=recompute), seq_len, "bf16", attention)).activations
        for recompute, attention in (("none", "fused"), ("selective", "standard"))
    )
    return {"ratio": fused / again}


@checked
def checkpoint_every(model: str, seq_len: Size, every: Size) -> Values:
    """Activations if one of so many layers keeps its input, and the layers between run again at once."""
    config = preset(model)
    kept = config.num_layers // every * korthikanti_layer_bytes(config, 1, seq_len, "full")
    whole = korthikanti_layer_bytes(config, 1, seq_len, "selective")
    return {"share": (kept + every * whole) / (config.num_layers * whole)}


@checked
def recompute_total(model: str, batch: Size, seq_len: Size) -> Values:
    """How much full recomputation saves of activations, and of the whole with FP32 states."""
    config = preset(model)
    none, full = (korthikanti_bytes(config, batch, seq_len, how, working_set=True) for how in ("none", "full"))
    states = state_bytes(config, "fp32").total
    return {"activations_saved": 1 - full / none, "saved": 1 - (states + full) / (states + none)}


@checked
def accumulation(model: str, seq_len: Size, batch: Size, micro_batch: Size, micro_batches: Size) -> Values:
    """GB that accumulation saves beside one batch of that size."""
    config = preset(model)
    layouts = Layout(micro_batch=batch), Layout(micro_batch=micro_batch, micro_batches=micro_batches)
    once, accumulated = (budgets(Run(config, layout, seq_len))[0].peak_bytes / GB for layout in layouts)
    return {"saved_gb": once - accumulated}


@checked
def memory_over_dp(model: str, layout: str, larger_layout: str, seq_len: Size) -> Values:
    """Peak memory of a rank of the second layout, beside that of the first."""
    peaks = [budgets(Run(preset(model), Layout.parse(text), seq_len))[0].peak_bytes for text in (layout, larger_layout)]
    return {"share": peaks[1] / peaks[0]}


@checked
def stage_share(model: str, pp: Size, stage: Index) -> Values:
    """Weights of a stage beside an even part of the model."""
    config = preset(model)
    whole("stage", stage, 0, pp - 1)
    sizes = stage_parameters(config, [config.num_layers // pp] * pp)
    return {"gib": 2 * sizes[stage] / GIB, "times": sizes[stage] * pp / count_parameters(config)}


@checked
def lora(model: str, rank: Size, targets: Sequence[str]) -> Values:
    """What adapters of that rank train, beside weights that stay."""
    config = preset(model)
    trained, count = lora_parameters(config, LoRA(rank, tuple(targets))), count_parameters(config)
    return {"share": trained / count, "base_gb": 2 * count / GB, "percent_of_base_gb": 0.02 * count / GB}


@checked
def encoder_weights(bytes_per_parameter: Positive) -> Values:
    """GB of three encoders at so many bytes per parameter."""
    large, xl, xxl = (bytes_per_parameter * count_parameters(preset(name)) / GB for name in ENCODERS)
    return {"large": large, "xl": xl, "xxl": xxl}


@checked
def encoder_budget(model: str, batch: Size, seq_len: Size) -> Values:
    """GB with full recomputation and frozen BF16 weights: checkpoints, the layer that runs again, weights."""
    checkpoints = activations(model, seq_len, batch, "full")["gb"]
    layer = korthikanti_layer_bytes(preset(model), batch, seq_len) / GB
    weights = 2 * count_parameters(preset(model)) / GB
    return {"checkpoints_gb": checkpoints, "layer_gb": layer, "weights_gb": weights,
            "total_gb": checkpoints + layer + weights}  # fmt: skip


@checked
def autocast_share(model: str) -> Values:
    """States under autocast, beside those in FP32."""
    autocast, fp32 = (state_bytes(preset(model), recipe).total for recipe in ("autocast", "fp32"))
    return {"share": autocast / fp32, "gb": autocast / GB}


@checked
def float_format(precision: Literal["fp32", "bf16", "fp16"], value: Positive = 1e-8) -> Values:
    """Range of a number format, and whether a value is lost below it."""
    exponent_bits, fraction_bits = FORMATS[precision]
    smallest = 2.0 ** (2 - 2 ** (exponent_bits - 1) - fraction_bits)
    return {"exponent_bits": exponent_bits, "smallest": smallest, "underflows": value < smallest / 2}


@checked
def gpus_for_weights(model: str, gpu: str, unit: Literal["GB", "GiB"] = "GiB") -> Values:
    """GPUs that hold the BF16 weights and nothing else, if its memory, as sold, counts in GB or in GiB."""
    size = gpu_of(gpu).memory_bytes * (GB / GIB if unit == "GB" else 1)
    weights = 2 * count_parameters(preset(model))
    return {"weights_gb": weights / GB, "gpus": ceil(weights / size), "exact": weights / size}


@checked
def host_copies(model: str, ranks: Size, ranks_per_host: Size, loader: Literal["whole", "slices"] = "whole") -> Values:
    """GB of host memory while each rank loads the whole model, or its slice of it."""
    each = 2 * count_parameters(preset(model)) / GB / (ranks if loader == "slices" else 1)
    return {"host_gb": each * ranks_per_host, "times_fewer": ranks * each / (each * ranks_per_host)}


@checked
def host_memory(billions: Positive, host_gb: Positive) -> Values:
    """Whether a host holds the optimizer states of a model."""
    needed = billions * recipe_bytes("bf16-master")["optimizer"]
    return {"needed_gb": needed, "fits": needed <= host_gb}


@checked
def gpu_memory(gpu: str, unit: Literal["GB", "GiB"]) -> Values:
    """What CUDA reports as the GPU's memory."""
    return {"size": gpu_of(gpu).usable_bytes / (GIB if unit == "GiB" else GB)}


@checked
def nccl_buffers(groups: Size) -> Values:
    """GiB of NCCL's default buffers for so many groups of ranks."""
    return {"gib": groups * NCCL_CHANNELS * NCCL_CHANNEL_BYTES / GIB}


def default_bucket() -> Values:
    """MiB of a bucket of DDP by default."""
    return {"mib": BUCKET_BYTES / 2**20}


@checked
def token_bytes(model: str, seq_len: Size) -> Values:
    """Bytes of a token's id: Megatron's estimator counts 8 s b for it, beside everything else that it counts."""
    config = preset(model)
    bare = replace(config, num_layers=1, vocab_size=1)
    s, h = seq_len, config.d_model
    others = s * (18 * h + 4 * config.d_ff) + s * h + 4 * s * (h + 1)
    return {"bytes": (megatron_activation_bytes(bare, 1, s) - others) / s}


@checked
def tensor_cut(model: str, tp: Size) -> Values:
    """Whether a model can be cut for tp ranks, and how many of them share a key/value head."""
    config = preset(model)
    try:
        narrow(config, tp)
    except ValueError:
        return {"allowed": False, "copies": 0}
    return {"allowed": True, "copies": kv_replication(config, tp)}


@checked
def mlp_cut(width: Size, tp: Size) -> Values:
    """Shapes of an MLP's two matrices on a rank, (in, out), and which way q, k and v are cut."""
    one_of("tp", tp, [size for size in range(1, width + 1) if 4 * width % size == 0])
    return {"up": [width, 4 * width // tp], "down": [4 * width // tp, width]}


@checked
def cut_of(model: str, tp: Size, matrix: Literal["q", "k", "v", "o", "gate", "up", "down"]) -> Values:
    """Whether a rank of tp has columns or rows of a matrix, which is stored as (out, in)."""
    whole, local = (parameter_shapes(config) for config in (preset(model), narrow(preset(model), tp)))
    (name,) = [name for name in whole if name.endswith(f".{matrix}")]
    return {"cut": "columns" if whole[name][0][1] == local[name][0][1] else "rows"}
