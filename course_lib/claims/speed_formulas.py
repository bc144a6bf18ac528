"""What claims on FLOPs, utilisation and days are recomputed with, and the published measurements beside them."""

from collections.abc import Sequence
from math import sqrt
from typing import Literal

from course_lib.config import ModelConfig, Recompute, preset
from course_lib.flops import attention_flops_per_token, flops_per_token, step_flops
from course_lib.hardware import (
    GPUS,
    PUBLISHED_BATCH_RAMPS,
    PUBLISHED_DP_THROUGHPUT,
    PUBLISHED_TP_SP_THROUGHPUT,
    PUBLISHED_TP_THROUGHPUT,
    peak_flops,
)
from course_lib.hardware import gpu as gpu_of
from course_lib.memory.states import count_parameters
from course_lib.timing.failures import Failures, young_interval_s
from course_lib.timing.rates import hfu, mfu, roofline_s, tokens_per_s
from course_lib.validate import Amount, Positive, Share, Size, checked, one_of

Values = dict[str, object]
DAY_S = 86_400

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


@checked
def layer_of_22b(how: Literal[tuple(LAYER_OF_22B_MS)], beside: Literal[tuple(LAYER_OF_22B_MS)] = "kept") -> Values:
    """How much longer a measured layer takes, as a share of another."""
    taken, base = sum(LAYER_OF_22B_MS[how]), sum(LAYER_OF_22B_MS[beside])
    return {"slower": taken / base - 1, "times": base / taken}


@checked
def recompute_flops(model: str, seq_len: Size, recompute: Recompute, compute_share: Share = 1.0) -> Values:
    """Extra FLOPs of recomputation over those of a step, of which computing takes a share."""
    none, again = (step_flops(preset(model), seq_len, seq_len, how) for how in ("none", recompute))
    extra = again / none - 1
    return {"flops": extra, "slower": extra * compute_share}


@checked
def published_steps(model: Literal[tuple(STEPS)], together: bool = True) -> Values:
    """What SP with selective in place of full recomputation gains a step of Megatron, or SP alone a layer; the MFU."""
    if not together:
        return layer_of_22b("kept, sequence parallel")
    layers, h, heads, batch, gpus, full_s, both_s = STEPS[model]
    config = ModelConfig(model, layers, h, heads, heads, 4 * h, 51_200, 2048, tied=True, family="gpt")
    flops = step_flops(config, batch * 2048, 2048)
    return {"times": full_s / both_s, "mfu": mfu(flops, both_s, gpus, GPUS["a100-80"].bf16_flops)}


@checked
def utilisation(model_flops: Positive, extra_flops: Amount, seconds: Positive, peak: Positive) -> Values:
    """MFU and HFU of a step, and the FLOPs over the peak without the seconds."""
    all_flops = model_flops + extra_flops
    return {
        "mfu": mfu(model_flops, seconds, 1, peak),
        "hfu": hfu(all_flops, seconds, 1, peak),
        "over_peak": model_flops / peak,
    }


@checked
def pass_flops(forward: Positive, again: Amount, frozen: bool = False) -> Values:
    """FLOPs of forward, backward and what is computed again: frozen matrices need no gradient of their own."""
    flops = (2 if frozen else 3) * forward + again
    return {"flops": flops, "full": 4 * forward, "speed": 3 * forward / flops}


@checked
def kernel_recompute(what: Literal["scores", "layer"], seq_len: Size = 8192) -> Values:
    """Seconds with recomputation over those without, by the roofline of an H100: of a fused kernel, of whole layers."""
    if what == "layer":
        return {"times": 1 + recompute_flops("llama-3.1-8b", seq_len, "full")["flops"]}
    gpu, s, head = GPUS["h100"], seq_len, 128
    flops, written = 3 * 4 * s * s * head, 2 * s * s * (4 + 5)
    kept_s, again_s = roofline_s(flops, written, gpu), roofline_s(flops + 2 * s * s * head, 16 * s * head, gpu)
    return {"times": again_s / kept_s}


@checked
def share_of_peak(tflops: Sequence[Positive], gpu: str, precision: str) -> Values:
    """Published TFLOP/s as shares of a GPU's dense peak."""
    peak = peak_flops(gpu_of(gpu), precision)
    return {"shares": [each * 1e12 / peak for each in tflops], "largest": max(tflops) * 1e12 / peak,
            "peak_tflops": peak / 1e12}  # fmt: skip


@checked
def without_recomputation(percent: Sequence[Positive]) -> Values:
    """MFU of utilisations that count the FLOPs of full recomputation."""
    share = 1 / (1 + recompute_flops("gpt3-175b", 2048, "full")["flops"])
    return {"mfu": [each * share for each in percent]}


@checked
def forward_flops(model: str, seq_len: Size) -> Values:
    """GFLOPs of one token's forward pass: 2 N, and attention's scores."""
    config = preset(model)
    return {"gflops": 2 * count_parameters(config) / 1e9, "scores": attention_flops_per_token(config, seq_len) / 1e9}


@checked
def training_time(
    billions: Positive,
    trillions: Positive,
    gpus: Size,
    tflops: Positive,
    flops_a_parameter: Literal[2, 6, 8] = 6,
) -> Values:
    """Time for so many tokens at that rate of each GPU: 2 FLOPs per parameter forward, 6 in training, 8 recomputing."""
    rate = tokens_per_s(flops_a_parameter * billions * 1e9, gpus, tflops * 1e12, 1.0)
    seconds = trillions * 1e12 / rate
    return {
        "tokens_per_s": rate,
        "billions_a_day": rate * DAY_S / 1e9,
        "hours": seconds / 3600,
        "days": seconds / DAY_S,
        "years_one_gpu": gpus * seconds / DAY_S / 365.25,
        "pflops": gpus * tflops / 1000,
    }


@checked
def speed_at_mfu(
    model: str, seq_len: Size, gpus: Size, gpu: str, percent: Positive, stated: Sequence[Positive]
) -> Values:
    """Tokens per second at that MFU of the dense BF16 peak, and the MFU in percent of other rates; attention counts."""
    flops, peak = flops_per_token(preset(model), seq_len), gpu_of(gpu).bf16_flops
    return {
        "tokens_per_s": tokens_per_s(flops, gpus, peak, percent / 100),
        "mfus": [100 * mfu(rate * flops, 1, gpus, peak) for rate in stated],
    }


@checked
def batch_ramp(run: str, seq_len: Size) -> Values:
    """First and last batch of a published run, in sequences and in millions of tokens, and where the last begins."""
    one_of("run", run, tuple(PUBLISHED_BATCH_RAMPS))
    ramp = PUBLISHED_BATCH_RAMPS[run]
    millions = list(ramp.values())
    steady = min(tokens for tokens, size in ramp.items() if size == millions[-1])
    return {
        "sequences": [1e6 * millions[0] / seq_len, 1e6 * millions[-1] / seq_len],
        "millions": [millions[0], millions[-1]],
        "last_from_billions": steady,
    }


@checked
def batch_range(runs: Sequence[str]) -> Values:
    """Smallest and largest of the final batches of published runs, in millions of tokens."""
    final = [batch_ramp(run, 4096)["millions"][1] for run in runs]
    return {"range": [min(final), max(final)]}


@checked
def batch_samples(millions: Positive, seq_len: Size) -> Values:
    """Sequences of a batch of so many million tokens."""
    return {"samples": millions * 1e6 / seq_len}


@checked
def token_budget(model: str, times: Size, seconds_a_step: Amount) -> Values:
    """One token budget in batches so many times smaller: steps, FLOPs, and time with a fixed cost of each step."""
    tokens, config = 2**20, preset(model)
    flops = [parts * step_flops(config, tokens // parts, 1024) for parts in (1, times)]
    compute_s = flops[0] / (0.4 * GPUS["h100"].bf16_flops)
    return {
        "steps": times,
        "flops": flops[1] / flops[0],
        "time": (compute_s + times * seconds_a_step) / (compute_s + seconds_a_step),
    }


@checked
def dp_fall(dp: Size, more: Size) -> Values:
    """How much the playbook's tokens/s per GPU fall between two sizes of data parallelism."""
    for name, value in (("dp", dp), ("more", more)):
        one_of(name, value, tuple(PUBLISHED_DP_THROUGHPUT))
    return {"fall": 1 - PUBLISHED_DP_THROUGHPUT[more] / PUBLISHED_DP_THROUGHPUT[dp]}


@checked
def tp_throughput(sp: bool = False) -> Values:
    """The playbook's scaling of TP: tokens/s per GPU, how they fall, the largest micro-batches."""
    measured = PUBLISHED_TP_SP_THROUGHPUT if sp else PUBLISHED_TP_THROUGHPUT
    rates, batches = [row[0] for row in measured.values()], [row[1] for row in measured.values()]
    falls = {tp: 1 - measured[tp][0] / measured[tp // 2][0] for tp in (16, 32)}
    return {
        "rates": rates,
        "falling": rates == sorted(rates, reverse=True) or rates[1:] == sorted(rates[1:], reverse=True),
        "falls": list(falls.values()),
        "batches": batches,
        "growing": batches == sorted(batches),
        "sp_at_8": 1 - PUBLISHED_TP_SP_THROUGHPUT[8][0] / PUBLISHED_TP_THROUGHPUT[8][0],
    }


@checked
def checkpoint_steps(write_s: Positive, hours_between_failures: Positive, step_s: Positive) -> Values:
    """Steps between checkpoints that lose least, by Young's interval."""
    return {"steps": young_interval_s(Failures(3600 * hours_between_failures, write_s)) / step_s}


@checked
def size_and_hours(small: str, large: str, small_mfu: Share, large_mfu: Share) -> Values:
    """Hours of a larger model over those of a smaller one, for the same tokens."""
    return {"times": count_parameters(preset(large)) / count_parameters(preset(small)) * small_mfu / large_mfu}


@checked
def four_weights(optimizer: Literal["sgd", "adam"]) -> Values:
    """Four weights on two GPUs, loss (w x)^2 / 2 with x = 1 and 2, one update with a learning rate of 0.1."""
    weights = [1.0, 2.0, 3.0, 4.0]
    outputs = [sum(weights) * x for x in (1.0, 2.0)]
    gradients = [output * x for output, x in zip(outputs, (1.0, 2.0), strict=True)]
    mean = sum(gradients) / 2
    m, v = (0.1 * mean) / (1 - 0.9), (0.001 * mean * mean) / (1 - 0.999)
    step = mean if optimizer == "sgd" else m / (sqrt(v) + 1e-8)
    return {"outputs": outputs, "gradients": gradients, "mean": mean, "updated": [w - 0.1 * step for w in weights]}


@checked
def gpu_ratio(
    gpu: str, other_gpu: str, precision: str = "bf16", other_precision: str = "bf16",
    limit: Literal["computing", "memory"] = "computing",
) -> Values:  # fmt: skip
    """Speed of a GPU over another's, where the dense peak or the memory bandwidth is the limit."""
    one, two = gpu_of(gpu), gpu_of(other_gpu)
    peaks = peak_flops(one, precision) / peak_flops(two, other_precision)
    return {"times": peaks if limit == "computing" else one.memory_bytes_per_s / two.memory_bytes_per_s}
