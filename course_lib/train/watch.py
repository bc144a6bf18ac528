"""What the logs of a run say of it now: a row for each rank, and in a sentence who is slow, has stopped, or failed.

It reads JSON lines and runs nothing of the run: from another terminal, another machine, or after the run.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from course_lib.train import log as train_log
from course_lib.train.health import slowest_rank
from course_lib.units import aligned
from course_lib.validate import Amount, Index, Positive, Size, checked

_OWN_PARTS = ("forward_s", "backward_s", "optimizer_s")  # what a rank does alone: step_clock.py
STATES = {"end": "ended", "error": "failed"}
_ENDED = (*STATES.values(), "gone")
_LAST_BYTES = 1 << 16  # of each file: more than a hundred steps
WORDS = {"failed": "", "gone": "the process is gone", "suspended": "the process is suspended"}
SILENT_STEPS, SILENT_S = 20, 10.0  # a run that wrote nothing for so many of its steps, and so long, stands still


@dataclass(frozen=True)
class RankNow:
    """What the end of a rank's log says: its last step, and medians of its last ones. None: it did not say.
    own_s    seconds of a step in which it computed: forward, backward, optimizer
    wait_s   seconds of a step in which it waited for others
    age_s    since its last line
    state    "trains", "ended", "failed", or of a process of this machine that has not ended itself "gone", "suspended"
    error    its text, if it failed
    """

    rank: int
    step: int | None
    loss: float | None
    tokens_per_s: float | None
    memory_bytes: int | None
    peak_memory_bytes: int | None
    mfu: float | None
    step_s: float | None
    own_s: float | None
    wait_s: float | None
    age_s: float
    state: str
    error: str = ""


@dataclass(frozen=True)
class RunNow:
    """All ranks' rows, what is to be seen in them, and whether the run has ended."""

    ranks: list[RankNow]
    finding: str
    ended: bool


@checked
def read_run(folder: str | Path, whole: bool = True) -> dict[int, list[dict]]:
    """Return of each rank of a run all whole lines of its log, or those at its end.
    Raises   ValueError if the folder has no logs
    """
    files = {int(path.stem.removeprefix("rank")): path for path in (Path(folder) / "log").glob("rank*.jsonl")}
    if not files:
        raise ValueError(
            f"{folder} has no log/rank0.jsonl; give the folder of a run that was started with --log-folder"
        )
    return {rank: train_log.read(files[rank], None if whole else _LAST_BYTES) for rank in sorted(files)}


@checked
def look(folder: str | Path, window: Size = 20, now_s: Amount | None = None) -> RunNow:
    """Return what the logs say now; `window` is over how many steps medians are taken.
    Raises   ValueError if the folder has no logs
    """
    now_s = time.time() if now_s is None else now_s
    lines = read_run(folder, whole=False)
    ranks = [_rank_now(rank, of_rank, window, now_s) for rank, of_rank in lines.items()]
    own_s = [own_seconds(steps_of(of_rank)[-window:]) for of_rank in lines.values()]
    return RunNow(ranks, finding_of(ranks, own_s), all(one.state in _ENDED for one in ranks))


def steps_of(lines: Sequence[dict]) -> list[dict]:
    """The lines of the run's steps, in order: a step that is done again takes back those from it on."""
    steps: list[dict] = []
    for line in lines:
        if "step" in line and "loss" in line:
            while steps and steps[-1]["step"] >= line["step"]:
                steps.pop()
            steps.append(line)
    return steps


def own_seconds(steps: Sequence[dict]) -> list[float]:
    """The seconds of each step in which the rank computed; none where the log does not say."""
    of_steps = ([line.get(part) for part in _OWN_PARTS] for line in steps)
    return [sum(seconds) for seconds in of_steps if None not in seconds]


def _rank_now(rank: Index, lines: Sequence[dict], window: Size, now_s: Amount) -> RankNow:
    steps = steps_of(lines)[-window:]
    last, ends = (steps or [{}])[-1], (lines or [{}])[-1]

    def typical(name: str) -> float | None:
        found = [line[name] for line in steps if line.get(name) is not None]
        return median(found) if found else None

    own_s = own_seconds(steps)
    return RankNow(
        rank=rank,
        step=last.get("step"),
        loss=last.get("loss"),
        tokens_per_s=typical("tokens_per_s_per_rank"),
        memory_bytes=last.get("memory_bytes"),
        peak_memory_bytes=last.get("peak_memory_bytes"),
        mfu=typical("mfu"),
        step_s=typical("seconds"),
        own_s=median(own_s) if own_s else None,
        wait_s=typical("communication_s"),
        age_s=max(0.0, now_s - ends.get("time", now_s)),
        state=state_of(ends),
        error=ends.get("text", ""),
    )


def state_of(line: dict) -> str:
    """Return what became of a rank, by its last line; a process that was killed writes none, but this machine knows."""
    if line.get("event") in STATES:
        return STATES[line["event"]]
    if line.get("host") != socket.gethostname() or not {"pid", "time"} <= set(line):
        return "trains"
    try:
        process = psutil.Process(line["pid"])
        if process.create_time() > line["time"] or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "suspended" if process.status() == psutil.STATUS_STOPPED else "trains"
    except psutil.NoSuchProcess:
        return "gone"


def finding_of(ranks: Sequence[RankNow], own_s: Sequence[Sequence[Amount]], factor: Positive = 1.2) -> str:
    """Return in one sentence what to look at: an error, ranks that stopped, a run that stands still, a slow rank."""
    last = max(_done(one) for one in ranks)
    for state, what in WORDS.items():
        if lost := [one for one in ranks if one.state == state]:
            return f"{_named(lost)} stopped after {_done(lost[0])} steps: {what or lost[0].error}"
    if behind := [one for one in ranks if _done(one) < last - 1]:
        return f"{_named(behind)} stopped after {_done(behind[0])} steps, and others have done {last}"
    silent_s, step_s = min(one.age_s for one in ranks), max(one.step_s or 0.0 for one in ranks)
    if any(one.state == "trains" for one in ranks) and silent_s > max(SILENT_S, SILENT_STEPS * step_s):
        return f"no rank has written for {silent_s:.0f} s, and a step took {step_s:.2f} s: the run hangs, or was killed"
    slow = slowest_rank(own_s, factor) if len(ranks) > 1 and all(own_s) else None
    if slow is not None and ranks[slow].wait_s == min(one.wait_s for one in ranks):  # else nobody waits for it
        of_others = median(median(row) for row in own_s[:slow] + own_s[slow + 1 :])
        ratio = median(own_s[slow]) / of_others
        return f"rank {ranks[slow].rank} is slow: it computes {ratio:.1f} times as long as the median of the others"
    if len(ranks) == 1:
        return "one rank, which nobody waits for"
    if all(own_s):
        return "no rank is slow, none has stopped"
    return "no rank has stopped; the logs do not say how long each computes"


def _done(one: RankNow) -> int:
    return 0 if one.step is None else one.step + 1


def _named(ranks: Sequence[RankNow]) -> str:
    numbers = ", ".join(str(one.rank) for one in ranks)
    return f"ranks {numbers} have" if len(ranks) > 1 else f"rank {numbers} has"


# --- as text

COLUMNS = {
    "rank": 4, "steps": 6, "loss": 7, "tokens/s": 8, "MFU": 5, "memory": 8, "a step": 7, "computes": 8, "waits": 7,
    "last line": 9, "state": 8,
}  # fmt: skip


@checked
def run_table(run: RunNow) -> list[str]:
    """Return the lines of a table, a row for each rank, with the finding below it."""
    rows = [tuple(COLUMNS)]
    for one in run.ranks:
        cells = (
            str(one.rank),
            f"{_done(one):,}",
            _shown(one.loss, "{:.4f}"),
            _shown(one.tokens_per_s, "{:,.0f}"),
            _shown(one.mfu, "{:.1%}"),
            _shown(one.memory_bytes and one.memory_bytes / 1e6, "{:,.0f} MB"),
            *(_shown(seconds, "{:.3f} s") for seconds in (one.step_s, one.own_s, one.wait_s)),
            f"{one.age_s:.0f} s ago",
            one.state,
        )
        rows.append(cells)
    return [*aligned(rows, tuple(COLUMNS.values())), run.finding]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
