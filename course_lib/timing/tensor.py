"""Time of tensor and sequence parallelism: one layer on one rank, and which of its sums hide behind computing."""

from dataclasses import dataclass, replace

from course_lib.flops import attention_flops_per_token, attention_parameters, mlp_parameters
from course_lib.hardware import Cluster
from course_lib.run import Run, recipe_of
from course_lib.timing.collectives import collective_s, ranks_in_a_node
from course_lib.timing.rates import Utilisation
from course_lib.validate import checked

FUSED_BACKWARD = 2.5  # a flash kernel's backward, of its forward: five products in place of two, the scores made again


@dataclass(frozen=True)
class LayerPart:
    """Seconds of attention or the MLP in one layer on one rank: forward, backward, and of either its columns."""

    name: str
    forward_s: float
    backward_s: float
    column_s: float  # the forward of its column-parallel matrices, or one of the two products of their backward


def backward_of_scores(run: Run) -> float:
    """Return how long the backward pass of attention's scores takes, of their forward pass."""
    return FUSED_BACKWARD if run.attention == "fused" else 2


@checked
def layer_parts(run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation()) -> list[LayerPart]:
    """Model the two parts of a dense layer for one micro-batch."""
    config, layout = run.config, run.layout
    tokens = layout.micro_batch * (run.seq_len // layout.cp) / layout.tp
    rows = {"attention": config.d_model * config.num_heads * config.value_dim, "MLP": config.d_model * config.d_ff}
    parameters = {"attention": attention_parameters(config), "MLP": mlp_parameters(config)}
    scores_flops = attention_flops_per_token(replace(config, num_layers=1, moe=None), run.seq_len, utilisation.causal)
    parts = []
    for name, numel in parameters.items():
        product_s = 2 * tokens * numel / utilisation.matmul_flops_per_s(cluster)
        scores_s = tokens * scores_flops / utilisation.attention_flops_per_s(cluster) if name == "attention" else 0.0
        backward_s = 2 * product_s + backward_of_scores(run) * scores_s
        parts.append(LayerPart(name, product_s + scores_s, backward_s, product_s * (1 - rows[name] / numel)))
    return parts


def sum_and_gather_s(run: Run, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of one sum of a layer's activations, and of one gather: 0 without sequence parallelism."""
    layout = run.layout
    tokens = layout.micro_batch * (run.seq_len // layout.cp)
    payload_bytes = tokens * run.config.d_model * recipe_of(run.recipe).compute_bytes
    per_node = ranks_in_a_node(layout, cluster, "tp")
    names = ("reduce_scatter", "all_gather") if layout.sequence_parallel else ("all_reduce",)
    seconds = [collective_s(name, payload_bytes, layout.tp, cluster, per_node) for name in names]
    return seconds[0], sum(seconds[1:])


@checked
def hidden_s(run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation()) -> float:
    """Return the seconds of one layer's sums that computing hides.

    Backward's sums hide behind the weight gradients of the same column-parallel matrices, and a gather made again
    behind the gradients of their input. No sum of forward is hidden, since the next operation needs it.
    """
    sum_s, gather_s = sum_and_gather_s(run, cluster)
    hideable = (sum_s, gather_s) if run.layout.regather else (sum_s,)
    return sum(min(each_s, part.column_s) for part in layer_parts(run, cluster, utilisation) for each_s in hideable)
