"""The constants that are fitted to measured runs: twelve, each with its meaning, its unit and a plausible range."""

from dataclasses import dataclass, fields

from course_lib.validate import Amount, check_fields

REFERENCE_WIDTH = 4096  # at which dense_share holds

# What each constant may reasonably be; `benchmarks/fit_rates.py` stays within.
RANGES: dict[str, tuple[float, float]] = {
    "dense_share": (0.45, 0.75),
    "eager_passes": (8.0, 20.0),
    "fused_passes": (3.0, 8.0),
    "fp8_speedup": (1.2, 2.0),
    "width_gain": (0.0, 0.6),
    "activation_scale": (0.8, 1.5),
    "queued_tensors": (10.0, 100.0),
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
    width_gain            products of a very wide model are so much faster than those of one with d_model 4,096: their
                          share of the peak goes as d_model / (d_model + 4,096 width_gain); not of nanotron, whose runs
                          do not show it
    layer_launch_ms       least milliseconds of a layer, forward and backward, one kernel for each operation: launches

    Of nanotron alone:
    activation_scale      of what a layer keeps, over the bytes of its tensors: pieces of the allocator that they leave
    queued_tensors        tensors of a whole sequence that wait at most in the queue of launches, where tp ranks share
                          the sequence: it holds 1,024 kernels, of which about one in 23 is such a collective
    tp_hop_ms             milliseconds that a layer takes longer for each rank of a tp group over nodes: latency of its
                          collectives, which go from rank to rank
    tp_hop_waiting_ms     milliseconds of a layer's least time more for each rank of tp, where the ranks wait for each
                          other: in a pipeline over nodes, in a memory that is nearly full, over 64 nodes
    stall_s               seconds that a micro-batch waits at each neighbour of a stage, in a pipeline that stalls
    data_share            of the bandwidth measured over as many nodes (256 MB in a message) that gradients reach
    """

    dense_share: Amount = 0.554
    eager_passes: Amount = 13.1
    fused_passes: Amount = 3.0
    fp8_speedup: Amount = 1.51
    width_gain: Amount = 0.106
    activation_scale: Amount = 1.055
    queued_tensors: Amount = 44.7
    layer_launch_ms: Amount = 4.28
    tp_hop_ms: Amount = 0.384
    tp_hop_waiting_ms: Amount = 2.26
    stall_s: Amount = 0.554
    data_share: Amount = 1.115

    def share_at(self, d_model: int) -> float:
        """Share of the peak that products reach in a model of this width."""
        return self.dense_share * (1 + self.width_gain) / (1 + self.width_gain * REFERENCE_WIDTH / d_model)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; plausible: {least} to {most}")


RATES = Rates()  # of runs on H100, A100 and EFA: docs/PREDICTOR.md
assert set(RANGES) == {field.name for field in fields(Rates)}
