"""Graders of chapter 09, exercises 4 and 5: bytes of a layer, whose gradients are summed over whom."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.core import expect_close, expect_equal, fresh_seed, grader, numbers, run_ranks
from course_lib.parallel.expert import expert_groups

DP, EP = 4, 2


# ------------------------------------------------------------------------------------ 4. bytes of a layer
@grader
def check_sent_bytes(answer, rng):
    """A recomputed block with a narrow dispatch, from the table of rows; what stays at home costs nothing."""
    for _ in range(3):
        ranks, d_model, narrow, wide = rng.randrange(3, 7), rng.randrange(16, 100), 1, rng.choice([2, 4])
        rows = [[rng.randrange(1, 60) for _ in range(ranks)] for _ in range(ranks)]
        rank = rng.randrange(ranks)
        rows[rank][rank - 1] += 60 * ranks  # more goes out than comes back
        out = sum(n for dst, n in enumerate(rows[rank]) if dst != rank)
        back = sum(row[rank] for src, row in enumerate(rows) if src != rank)
        sizes, home = (d_model, narrow, wide), rows[rank][rank]
        want, once, of_all = (
            bytes_of_a_recomputed_layer(out, back, *sizes), d_model * (out * narrow + back * wide),
            3 * d_model * (out + back),
        )  # fmt: skip
        both = want + bytes_of_a_recomputed_layer(back, out, *sizes)
        with_home = bytes_of_a_recomputed_layer(out + home, back + home, *sizes)
        as_sent = bytes_of_a_recomputed_layer(out, out, *sizes)
        believed = {
            "what stays on the rank is not sent": with_home,
            "combine returns the rows that came from others, not those that I sent": as_sent,
            "forward runs twice: before its backward the block dispatches and combines once more": want - once,
            "this is forward, twice; gradients travel too": 2 * once,
            "only rows in dispatch are narrow; results and gradients have wide_bytes": of_all * narrow,
            "rows in dispatch have narrow_bytes per element": of_all * wide,
            "the gradients of dispatched rows are wide": want - d_model * back * (wide - narrow),
            "received rows are counted as well; return what this rank sends": both,
        }
        where = f"rows {rows}, rank {rank}, D = {d_model}, {narrow} and {wide} bytes per element: bytes"
        got = answer([list(row) for row in rows], rank, d_model, narrow, wide)
        expect_equal(got, want, where, {m: value for m, value in believed.items() if value != want})


def bytes_of_a_recomputed_layer(out: int, back: int, d_model: int, narrow_bytes: int, wide_bytes: int) -> int:
    """Return the bytes that a rank sends: dispatch and combine twice, and the gradients of both once."""
    forward = out * narrow_bytes + back * wide_bytes
    return d_model * (2 * forward + (out + back) * wide_bytes)


# ------------------------------------------------------------------------------------ 5. whose gradients
@grader
def check_sum_gradients(answer, rng):
    """Four ranks, ep 2: the gradient of the mean over all tokens, of experts and of the rest."""
    size = rng.randrange(3, 9)
    everybody = run_ranks(_sum_on_this_rank, DP, answer, fresh_seed(rng), size)
    given_experts, given_rest = (torch.stack([seen[kind] for seen in everybody]) for kind in ("expert", "rest"))
    for rank, seen in enumerate(everybody):
        where, mine = f"rank {rank} of {DP}, ep {EP}", given_experts[rank % EP :: EP].sum(0)
        first = rank - rank % EP
        others, same_rest = given_experts[first : first + EP].sum(0), given_rest[rank % EP :: EP]
        per_expert = mine / (DP // EP)
        wrong = {
            "a mean over the ranks that have this expert: ep times too large; divide by all ranks of dp": per_expert,
            "summed over all ranks, those with other experts too": given_experts.sum(0) / DP,
            "summed over the ranks that exchange tokens; those have other experts": others / DP,
            "not summed: the same expert on another rank saw other tokens": given_experts[rank] / DP,
            "not divided: each rank's loss is a mean over its own tokens, of which there are dp": mine,
        }
        expect_close(seen["expert after"], mine / DP, f"{where}: an expert's gradient", wrong)
        wrong = {
            "not divided by the number of ranks": given_rest.sum(0),
            "the rest is on all ranks, not only on those with the same experts": same_rest.sum(0) / DP,
            "a mean over the ranks with the same experts; the rest is on all ranks": same_rest.mean(0),
        }
        expect_close(seen["rest after"], given_rest.mean(0), f"{where}: the gradient of the rest", wrong)


def _sum_on_this_rank(answer: Callable, seed: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    one, two = numbers(generator, 2, size, 2)
    groups, given = expert_groups(dist.group.WORLD, EP), {"expert": one.clone(), "rest": two.clone()}
    answer([one], [two], groups.ep, groups.expert_dp, groups.dp)
    return given | {"expert after": one, "rest after": two}
