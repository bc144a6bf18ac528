"""The constants that are fitted to measured runs: twelve, each with its meaning, its unit and a plausible range."""

from dataclasses import dataclass, fields

from course_lib.validate import Amount, check_fields

# What each constant may reasonably be; `benchmarks/fit_rates.py` stays within.
RANGES: dict[str, tuple[float, float]] = {
    "activation_scale": (0.8, 1.5),
    "logits_bytes": (4.0, 16.0),
    "gathered_copies": (0.0, 2.0),
    "gathered_copies_without_pipeline": (0.0, 4.0),
    "matmul_share": (0.3, 0.8),
    "narrow_width": (0.0, 3000.0),
    "layer_launch_ms": (0.5, 6.0),
    "tp_hop_ms": (0.05, 1.5),
    "tp_hop_in_pipeline_ms": (0.5, 6.0),
    "stall_s": (0.1, 3.0),
    "data_gb_per_s": (20.0, 450.0),
    "update_ps_per_byte": (0.3, 12.0),
}


@dataclass(frozen=True)
class Rates:
    """What fitted runs say of a framework on a cluster.

    activation_scale      of what a layer keeps, over the count of its tensors (10 d_model + 4 d_ff a token, in bytes 2)
    logits_bytes          alive for each number of the logits at the peak of a rank that has embedding and head
    gathered_copies       tensors of a whole sequence that a layer keeps beside its shard, where tp ranks share it, in a
                          pipeline of three stages or more
    gathered_copies_without_pipeline   the same without a pipeline
    matmul_share          of the GPU's dense peak that wide matrices reach (0 to 1)
    narrow_width          d_model at which that share is halved
    layer_launch_ms       least milliseconds of a layer, forward and backward: kernels' launches
    tp_hop_ms             more of these for each rank of tp: the layer's collectives go from rank to rank
    tp_hop_in_pipeline_ms the same where a pipeline goes from node to node: messages of stages come between
    stall_s               seconds that a micro-batch waits in each slot of a pipeline that stalls
    data_gb_per_s         of gradients through each GPU's port, over few nodes; half of it over six
    update_ps_per_byte    picoseconds of the optimizer for each byte of its states
    """

    activation_scale: Amount = 1.06
    logits_bytes: Amount = 9.5
    gathered_copies: Amount = 0.74
    gathered_copies_without_pipeline: Amount = 1.39
    matmul_share: Amount = 0.552
    narrow_width: Amount = 1090.0
    layer_launch_ms: Amount = 2.8
    tp_hop_ms: Amount = 0.40
    tp_hop_in_pipeline_ms: Amount = 2.61
    stall_s: Amount = 0.9
    data_gb_per_s: Amount = 185.0
    update_ps_per_byte: Amount = 5.3

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; plausible: {least} to {most}")


RATES = Rates()  # of nanotron on nodes of 8 H100 with EFA between them: docs/PREDICTOR.md
assert set(RANGES) == {field.name for field in fields(Rates)}
