"""One job of the learner's through all chapters: what each technique would hold, send and wait for on it.

    sheet("my-8b", model="llama-3.1-8b", gpus=16)       # chapter 01: choose; the choice stays in a file
    sheet("my-8b").upto("04")                           # the end of a lesson: its rows, and what comes next
    sheet("my-8b").decide("dp=16,zero_stage=3,micro_batches=8")      # the learner's own layout, kept as well
    sheet("my-8b").plan()                               # chapter 12: the layout decided last, with its estimate

The file, runs/sheets/NAME.json beside notebooks/, holds words alone: the job and the layouts decided on. Every number
is worked out anew by `estimate`, so a sheet is never older than the package.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from course_lib.estimate import Estimate
from course_lib.hardware import GB, cluster_of, gpu
from course_lib.layout import Layout
from course_lib.plan.job import Job, work_out
from course_lib.plan.search import search
from course_lib.plan.techniques import techniques_of
from course_lib.shapes import read_model
from course_lib.traffic import sent
from course_lib.validate import Checked, Size, checked, read_json, show

_HEAD = f"{'chapter, technique':30}{'holds':>9}  {'room':13}{'sends':>10}{'step':>10}  waits"
_CUTS_MEMORY = {  # what takes most of a card -> what cuts it
    "parameters": "ZeRO-3 (04), tp (05) or pp (08)",
    "gradients": "ZeRO-2 (04), tp (05) or pp (08)",
    "optimizer": "ZeRO-1 (04)",
    "activations": "recomputation (2b), sequence parallelism (06) or cp (07)",
    "logits": "a loss in chunks (2b) or tp (05)",
    "temporary": "a loss in chunks (2b) or tp (05)",
    "gathered": "no prefetch, or tp (05)",
}
_CUTS_WAITING = {  # what a step waits for most -> what makes it less
    "tp": "a smaller tp: it sends in every layer (05)",
    "cp": "a smaller cp (07)",
    "ep": "experts inside a node (09)",
    "bubble": "more micro-batches, or interleaving (08)",
    "transfer": "fewer stages (08)",
    "waiting": "fewer stages (08)",
    "data": "a larger micro-batch, or more of them for each sum (03)",
}


@dataclass(frozen=True)
class Choice(Checked):
    """What a learner trains, in words, as the file has it; the newest of the layouts decided on stands last."""

    model: str = "llama-3.1-8b"
    gpus: Size = 16
    gpu: str = "h100"
    network: str = "efa"
    per_node: Size = 8
    seq_len: Size = 8192
    batch_tokens: Size = 2**20
    decided: tuple[str, ...] = ()

    def job(self, gpus: int | None = None) -> Job:
        """Return it as the planner takes it; with other GPUs, all else the same."""
        cluster = cluster_of(gpu(self.gpu), self.network, per_node=self.per_node)
        config = read_model(self.model, self.seq_len).config
        return Job(config, cluster, gpus or self.gpus, self.seq_len, self.batch_tokens)


@dataclass(frozen=True)
class Row:
    """A technique on the job: its estimate, or why it cannot be."""

    chapter: str
    name: str
    estimate: Estimate | None = None
    refusal: str = ""

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank of the first, a middle or the last stage sends in a step, the most of them."""
        ranks = self.estimate.layout.world_size
        return max(sum(sent(self.estimate.run, rank).values()) for rank in {0, ranks // 2, ranks - 1})

    def line(self) -> str:
        told = f"{self.chapter} {self.name}".strip()
        if self.estimate is None:
            return f"{told:30}{self.refusal}"
        one, waits = self.estimate, {part: self.estimate.seconds_by_part[part] for part in _CUTS_WAITING}
        share = sum(waits.values()) / one.step_s
        most = f" most for {max(waits, key=waits.get)}" if share >= 0.001 else ""
        return (
            f"{told:30}{one.memory_bytes / GB:6.1f} GB  {one.room:13}{self.sent_bytes / GB:7.1f} GB"
            f"{one.step_s:8.2f} s  {share:5.1%}{most}"
        )


@dataclass(frozen=True)
class Sheet:
    """A name and a choice; its rows are worked out when they are asked for."""

    name: str
    choice: Choice

    def rows(self, upto: str = "12") -> list[Row]:
        """The techniques of the chapters up to this one, in their order, then the layouts decided on."""
        choice, job = self.choice, self.choice.job()
        techniques = techniques_of(job.config, choice.gpus, job.sequences, choice.per_node)
        rows = [
            self._row(one.chapter, one.name, one.layout, 1 if one.splits == "nothing" else None)
            for one in techniques
            if one.chapter <= upto
        ]
        if upto >= "10":
            rows.append(self._row("10", "the planner's first", None))
        return rows + [self._row("", "decided: layout " + str(n + 1), text) for n, text in enumerate(choice.decided)]

    def upto(self, chapter: str) -> None:
        """Print the sheet as far as a chapter has taught it, and what the job lacks then."""
        rows, choice = self.rows(chapter), self.choice
        print(f"{self.name}: {choice.model} on {choice.gpus} {gpu(choice.gpu).name}, {choice.seq_len:,} tokens,",
              f"{choice.batch_tokens:,} a step (modelled)")  # fmt: skip
        print(_HEAD, *(row.line() for row in rows), next_step(rows), sep="\n")

    def decide(self, layout: str) -> "Sheet":
        """Keep a layout of the learner's own, if the job can be trained so; return the sheet with it."""
        work_out(self.choice.job(), Layout.parse(layout))
        return _kept(replace(self, choice=replace(self.choice, decided=(*self.choice.decided, layout))))

    def plan(self) -> Estimate:
        """Return the plan that the sheet has become: the layout decided last, else the planner's first."""
        job, decided = self.choice.job(), self.choice.decided
        return work_out(job, Layout.parse(decided[-1])) if decided else search(job).best

    def compare_with_fastest(self, layout: Layout) -> str:
        """Say whether a layout fits the job, and which share of the fastest layout's speed it reaches."""
        one, fastest = work_out(self.choice.job(), layout), search(self.choice.job(), enough=1).fastest
        said = f"{self.choice.model} on {self.choice.gpus} GPUs, {layout}: {one.memory_bytes / GB:.1f} GB, {one.room}"
        share = fastest.step_s / one.step_s
        return f"{said} (modelled)\n{share:.0%} of the speed of the fastest of the search, {fastest.layout}"

    def _row(self, chapter: str, name: str, layout: str | None, gpus: int | None = None) -> Row:
        """A layout's row, or the planner's first without one."""
        try:
            if layout is None:
                return Row(chapter, name, search(self.choice.job()).best)
            job, cut = self.choice.job(gpus), Layout.parse(layout)
            if cut.sequences_per_step != job.sequences:
                return Row(chapter, name, refusal=f"not possible: {job.sequences:,} sequences over dp {cut.dp}")
            return Row(chapter, name, work_out(job, cut))
        except ValueError as refused:
            return Row(chapter, name, refusal=f"not possible: {refused}".partition(";")[0])


def next_step(rows: list[Row]) -> str:
    """One sentence: what is missing where nothing fits yet, else what the fastest that fits waits for most."""
    told = [row for row in rows if row.estimate is not None]
    fitting = [row for row in told if row.estimate.room == "fits"]
    if not fitting:
        nearest = min(told, key=lambda row: row.estimate.memory_bytes)
        one, sizes = nearest.estimate, nearest.estimate.bytes_by_kind
        kind = max(sizes, key=sizes.get)
        over, most = (max(0, size - one.usable_bytes) / GB for size in (one.memory_bytes, one.memory_range[1]))
        return (
            f"Next: nothing fits yet. The nearest ({nearest.name}) lacks {over:.1f} GB, or {most:.1f} GB\n"
            f"at the upper end of the estimate's error. Most is {kind} ({sizes[kind] / GB:.1f} GB).\n"
            f"What cuts that: {_CUTS_MEMORY.get(kind, 'more GPUs')}."
        )
    best = min(fitting, key=lambda row: row.estimate.step_s)
    part = max(_CUTS_WAITING, key=best.estimate.seconds_by_part.get)
    share = best.estimate.seconds_by_part[part] / best.estimate.step_s
    if share < 0.03:
        return (
            f"Next: {best.name} fits and waits for less than 3 % of its step; less waiting cannot win more than that."
        )
    told = f"Next: {best.name} is the fastest that fits; it waits {share:.1%} of its step for {part}."
    return f"{told}\nWhat cuts that: {_CUTS_WAITING[part]}."


def _file(name: str) -> Path:
    """NAME.json in runs/sheets beside notebooks/, from a notebook or from the folder above; else of the working folder.
    The environment variable COURSE_SHEETS names another folder."""
    here = Path.cwd()
    root = next((path for path in (here, *here.parents[:2]) if (path / "notebooks").is_dir()), here)
    return Path(os.environ.get("COURSE_SHEETS") or root / "runs" / "sheets") / f"{name}.json"


def _kept(one: Sheet) -> Sheet:
    path = _file(one.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(one.choice), indent=2) + "\n", encoding="utf-8")
    except OSError as refused:
        print(f"the sheet is not kept: {path} cannot be written ({refused.strerror}); choose again in each notebook")
    return one


@checked
def sheet(name: str, **choice) -> Sheet:
    """Return the sheet of that name: with a choice, a new one; without, the one in the file, else the course's own job.

    choice   fields of Choice: model, gpus, gpu, network, per_node, seq_len, batch_tokens
    """
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"name is {show(name)}; it must be letters, digits, - and _, such as my-8b")
    if unknown := set(choice) - set(Choice.__dataclass_fields__):
        raise ValueError(f"a sheet has no {', '.join(sorted(unknown))}; give {', '.join(Choice.__dataclass_fields__)}")
    path = _file(name)
    if choice or not path.exists():
        made = Sheet(name, Choice(**choice))
        made.choice.job()
        return _kept(made) if choice else made
    told = read_json(path)
    try:
        made = Choice(**{**told, "decided": tuple(told.get("decided", ()))})
        made.job()
    except (TypeError, AttributeError, ValueError) as wrong:
        raise ValueError(f"{path} is no sheet ({wrong}); delete it, or choose again in chapter 01") from None
    return Sheet(name, made)
