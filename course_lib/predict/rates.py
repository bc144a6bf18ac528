"""The constants that are fitted to measured runs: twelve, each with its meaning, its unit and a plausible range."""

from dataclasses import dataclass, fields

from course_lib.validate import Amount, check_fields

# What each constant may reasonably be; `benchmarks/fit_rates.py` stays within.
RANGES: dict[str, tuple[float, float]] = {
    "dense_share": (0.45, 0.75),
    "eager_passes": (8.0, 20.0),
    "fused_passes": (3.0, 8.0),
    "fp8_speedup": (1.2, 2.0),
    "activation_scale": (0.8, 1.5),
    "logits_bytes": (6.0, 12.0),
    "gathered_copies": (0.0, 2.0),
    "layer_launch_ms": (1.5, 5.0),
    "tp_hop_ms": (0.05, 1.5),
    "tp_hop_waiting_ms": (0.5, 6.0),
    "stall_s": (0.1, 3.0),
    "data_share": (0.3, 2.0),
}


@dataclass(frozen=True)
class Rates:
    """What fitted runs say of GPUs, of frameworks, and of nanotron on its cluster.

    Of every framework:
    dense_share           of a GPU's dense peak that products of matrices reach (0 to 1)
    eager_passes          times that small operations go over what a layer saves, forward and backward, one kernel for
                          each operation; the optimizer goes over its states as often
    fused_passes          the same where small operations are fused: torch.compile, Transformer Engine
    fp8_speedup           of FP8 products over BF16 ones, casts and scales counted in
    layer_launch_ms       least milliseconds of a layer, forward and backward, one kernel for each operation: launches

    Of nanotron alone:
    activation_scale      of what a layer keeps, over the count of its tensors (10 d_model + 4 d_ff a token, in bytes 2)
    logits_bytes          alive for each number of the logits at the peak of a rank that has embedding and head
    gathered_copies       tensors of a whole sequence that a layer keeps beside its shard, where tp ranks share it, in a
                          pipeline of three stages or more; twice as many without a pipeline
    tp_hop_ms             milliseconds more for each rank of tp: the layer's collectives go from rank to rank
    tp_hop_waiting_ms     the same where the ranks wait for each other: in a pipeline over nodes, in a memory that is
                          nearly full, over 64 nodes
    stall_s               seconds that a micro-batch waits at each neighbour of a stage, in a pipeline that stalls
    data_share            of the bandwidth measured over as many nodes (256 MB in a message) that gradients reach
    """

    dense_share: Amount = 0.567
    eager_passes: Amount = 13.5
    fused_passes: Amount = 3.0
    fp8_speedup: Amount = 1.47
    activation_scale: Amount = 1.06
    logits_bytes: Amount = 8.7
    gathered_copies: Amount = 0.75
    layer_launch_ms: Amount = 2.8
    tp_hop_ms: Amount = 0.40
    tp_hop_waiting_ms: Amount = 2.67
    stall_s: Amount = 0.55
    data_share: Amount = 1.16

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; plausible: {least} to {most}")


RATES = Rates()  # of runs on H100, A100 and EFA: docs/PREDICTOR.md
assert set(RANGES) == {field.name for field in fields(Rates)}
