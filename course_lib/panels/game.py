"""A layout game (lesson 10): a job, a layout of yours by the estimate, and its rank in the list of the search."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import lru_cache

from course_lib.config import preset
from course_lib.hardware import CLUSTERS
from course_lib.layout import Layout
from course_lib.panels.controls import controls, layout_of, named, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.runs import compared
from course_lib.plan import Job, Plan, search, work_out
from course_lib.units import show_bytes

_SIZES = (  # model, GPUs, tokens of a sequence, tokens of a step
    ("llama-3.1-70b", 64, 4096, 2**20), ("llama-3.1-8b", 32, 32_768, 2**21), ("mixtral-8x7b", 64, 4096, 2**20),
    ("llama-3.1-70b", 128, 16_384, 2**21), ("llama-3.1-8b", 16, 8192, 2**20), ("mixtral-8x22b", 128, 4096, 2**21),
    ("llama-3.1-405b", 512, 8192, 2**22),
)  # fmt: skip
JOBS = {
    f"{model}, {gpus} x {name}, {seq_len:,} tokens, {tokens // seq_len:,} sequences a step": Job(
        preset(model), cluster, gpus, seq_len, tokens, "bf16-master-fp32-grads"
    )
    for name, cluster in CLUSTERS.items()
    for model, gpus, seq_len, tokens in _SIZES
}
WORKING = ("compute", "launches", "update")  # parts of a step in which a GPU does not wait


def job_of_day(day: date) -> str:
    """Return the name of a day's job: each of them once, then all of them again."""
    return list(JOBS)[day.toordinal() % len(JOBS)]


def layout_for(job: Job, values: Mapping) -> Layout:
    """Return the layout of these sizes; dp and the micro-batches follow from the job.

    Raises   ValueError for what does not divide
    """
    cut = values["tp"] * values["pp"] * values["cp"]
    dp, odd_ranks = divmod(job.num_gpus, cut)
    micro_batches, odd_rows = divmod(job.sequences, max(1, dp * values["micro_batch"]))
    if odd_ranks or not dp:
        raise ValueError(f"tp x pp x cp is {cut}, which does not divide {job.num_gpus} GPUs; choose smaller sizes")
    if odd_rows or not micro_batches:
        raise ValueError(
            f"dp ({dp}) x micro-batch ({values['micro_batch']}) does not divide {job.sequences} sequences; choose a "
            "smaller micro-batch, or more tp, pp or cp"
        )
    with_tp, schedule = values["tp"] > 1, "interleaved" if values["v"] > 1 else "1f1b"
    follows = {"dp": dp, "micro_batches": micro_batches, "sequence_parallel": with_tp, "regather": with_tp}
    return layout_of({**values, **follows, "schedule": schedule})


def _draw_game(job: str, **values) -> Shown:
    """Memory and time of the layout, and what it waits for."""
    asked = JOBS[job]
    layout = layout_for(asked, values)
    yours = work_out(asked, layout)
    charts, said = compared("Your layout", {"yours": yours.run}, "yours", asked.cluster, asked.engine)
    waits = 1 - sum(yours.seconds_by_part[part] for part in WORKING) / yours.step_s
    said = f"{job}. dp {layout.dp}, {layout.micro_batches} micro-batches: {said.removeprefix('yours: ')}"
    return charts, f"{said} It waits {waits:.0%} of the step, and trains {yours.tokens_per_s:,.0f} tokens per second."


@lru_cache(maxsize=len(JOBS))
def listed(job: str) -> Plan:
    """Return what the search lists of a job."""
    return search(JOBS[job])


def _draw_rank(job: str, **values) -> Shown:
    """The layout among all that the search lists, fastest first, and the best one beside it."""
    found, yours = listed(job), work_out(JOBS[job], layout_for(JOBS[job], values))
    best, num_faster = found.fastest, sum(one.step_s < yours.step_s * (1 - 1e-9) for one in found.ranked)
    runs = {"best": best.run} | ({"yours": yours.run} if yours.run != best.run else {})
    charts, _ = compared("Yours and the best", runs, "best", JOBS[job].cluster, JOBS[job].engine)
    if not yours.fits:
        return (
            charts,
            f"Your layout does not fit: {show_bytes(yours.missing_bytes)} too many. The best is {best.layout}.",
        )
    rank = f"Rank {num_faster + 1} of the {len(found.ranked)} fastest that fit"
    if num_faster == len(found.ranked):
        rank = f"All {num_faster} layouts of the list are faster"
    behind = yours.step_s / best.step_s - 1
    said = f"{rank}, of {found.num_tried:,} tried. Your step takes {behind:.1%} longer than the best, {best.layout}."
    return charts, said


GAME = Panel(
    "The layout game",
    {"job": Control("job", named(JOBS), next(iter(JOBS)))}
    | controls(tp=(8, powers(1, 8)), pp=(1, powers(1, 16)), cp=(1, powers(1, 16)), ep=(1, powers(1, 64)))
    | controls(zero_stage=3, micro_batch=(1, powers(1, 8)), v=(1, named((1, 2))), recompute="none"),
    _draw_game,
    {"today's job": ({"job": job_of_day(date.today())}, "")},
    {"Rank": _draw_rank},
)
