"""What context parallelism sends: keys and values of other ranks' tokens, and their gradients, for one layer.

A block is the keys and values of one rank's tokens: 2 B s K H elements.

    ring         (cp - 1) blocks forward and again backward, and (cp - 1) blocks of gradients
    all_gather   the same bytes in three calls: gathered forward and again backward, gradients reduce-scattered
    ulysses      four all-to-alls forward (q, k, v, out), four backward: 2 (N + K) B s H elements each way, of which
                 each rank keeps a share of 1 / cp

Where values are W long, a block has B K s (H + W) elements, and Ulysses' each way (N + K) B s (H + W).
Gradients that are summed on the way travel in FP32 at least.

Source   Liu et al. 2023 (arXiv:2310.01889); Llama Team 2024 (arXiv:2407.21783), section 3.3.2;
         Jacobs et al. 2023 (arXiv:2309.14509)
"""

from dataclasses import replace

from course_lib.config import ModelConfig
from course_lib.layout.sequence_sharding import check_context
from course_lib.run import Run, recipe_of
from course_lib.tensors import narrow
from course_lib.traffic.collectives import Call
from course_lib.validate import checked


@checked
def attention_calls(run: Run) -> list[Call]:
    """List what the attention of one layer sends for one micro-batch over cp.

    Ulysses inside a ring is the sum of two runs: Ulysses over `inner` ranks on a sequence of S / outer tokens, and a
    ring over `outer` ranks that have heads / inner, as after tp = inner.
    """
    if run.layout.cp == 1:
        return []
    passes = [("attention forward", 1 if run.layout.recompute == "none" else 2), ("attention backward", 1)]
    return (_ulysses if run.layout.cp_method == "ulysses" else _blocks)(run, passes)


def _ulysses(run: Run, passes: list[tuple[str, int]]) -> list[Call]:
    layout, itemsize = run.layout, recipe_of(run.recipe).compute_bytes
    local = narrow(run.config, layout.tp)
    token_bytes = layout.micro_batch * (run.seq_len // layout.cp) * itemsize
    (N, K), (H, W) = (local.num_heads, local.num_kv_heads), (local.head_dim, local.value_dim)
    calls = []
    for place, count in passes:  # a core that is run again ends before its outputs are sent
        outputs = count - (layout.recompute == "selective" and place == "attention forward")
        of_each = ((N * H, count), (K * H, count), (K * W, count), (N * W, outputs))  # q, k, v, out
        calls += [Call(place, "all_to_all", width * token_bytes, layout.cp, itemsize, n) for width, n in of_each]
    return calls


def _blocks(run: Run, passes: list[tuple[str, int]]) -> list[Call]:
    layout, itemsize = run.layout, recipe_of(run.recipe).compute_bytes
    cp, sum_bytes = layout.cp, max(itemsize, 4)
    block = kv_block_bytes(replace(run.config, moe=None), layout.micro_batch, run.seq_len, cp, itemsize, layout.tp)
    summed = block // itemsize * sum_bytes
    if layout.cp_method == "all_gather":
        calls = [Call(place, "all_gather", cp * block, cp, itemsize, count) for place, count in passes]
        return [*calls, Call("attention backward", "reduce_scatter", cp * summed, cp, sum_bytes)]
    calls = [Call(place, "all_to_all", block, cp, itemsize, (cp - 1) * n, to_one=True) for place, n in passes]
    return [*calls, Call("attention backward", "all_to_all", summed, cp, sum_bytes, cp - 1, to_one=True)]


def kv_block_bytes(config: ModelConfig, batch_size: int, seq_len: int, cp: int, itemsize: int = 2, tp: int = 1) -> int:
    """Count keys and values of one rank's tokens in one layer: 2 B s K H numbers; latent attention's B s K (H + W)."""
    check_context(seq_len, cp, "contiguous")
    local = narrow(config, tp)
    return batch_size * seq_len // cp * local.num_kv_heads * (local.head_dim + local.value_dim) * itemsize
