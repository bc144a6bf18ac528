"""`course simulate`: what every stage of a layout holds, sends and computes, on a GPU that need not be here.

course simulate --model llama-3-405b --gpu h100-80g --layout dp=128,tp=8,pp=16,recompute=full --seq 8192
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from course_lib.config import preset
from course_lib.hardware import GPU, gpu
from course_lib.layout import Layout
from course_lib.measure.timeline import KINDS
from course_lib.training import peak_memory_bytes

GIB = 2**30


def add_simulate(commands) -> None:
    """The subcommand's options. Numbers stay text here, so that a wrong one is one line like all other errors."""
    sub = commands.add_parser("simulate", help="memory by kind, bytes sent and FLOPs of a layout of thousands of ranks")
    sub.add_argument("--model", required=True, help="a preset, such as llama-3.1-70b")
    sub.add_argument("--gpu", required=True, help="a GPU, such as h100")
    sub.add_argument("--layout", required=True, help="such as dp=8,tp=8,pp=4,zero=1,recompute=full")
    sub.add_argument("--seq", required=True, metavar="S", help="tokens of a sequence")
    sub.add_argument("--stage", action="append", metavar="N", help="this pipeline stage alone; may be repeated (all)")
    sub.add_argument("--micro-batch", metavar="B", help="sequences that go through the model at once (1)")
    sub.add_argument("--accumulation", metavar="M", help="micro-batches of a step (enough to fill the pipeline)")
    sub.add_argument("--precision", default="bf16-master", help="fp32, bf16-master (the default), or ...-fp32-grads")
    sub.add_argument("--skew", default="0", metavar="X", help="share of tokens that all choose the first expert (0)")
    sub.add_argument("--json", action="store_true", help="all of it as JSON")


def simulate(options: argparse.Namespace) -> int:
    """Runs the subcommand; 0 also where the model does not fit: that is an answer."""
    config, device = preset(options.model), gpu(options.gpu)
    seq_len, skew = whole("--seq", options.seq), share("--skew", options.skew)
    layout = layout_of(options.layout, options.micro_batch, options.accumulation)
    stages = [whole("--stage", stage, least=0) for stage in options.stage] if options.stage else "all"
    from course_lib.simulate.cluster import simulate as run  # here: `course doctor` needs none of it

    found = report(run(config, layout, seq_len, stages, options.precision, skew=skew), device)
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines(found)))
    return 0


# --- from words to numbers


def whole(name: str, text: str, least: int = 1) -> int:
    """Raises ValueError unless the text is a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} is {text!r}; it must be a whole number, {least} or more")
    return int(text)


def share(name: str, text: str) -> float:
    """Raises ValueError unless the text is a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError(f"{name} is {text!r}; it must be a number from 0 to 1")
    return number


def layout_of(text: str, micro_batch: str | None = None, accumulation: str | None = None) -> Layout:
    """The layout, and what options say beside it. Without a word on accumulation: as many as fill the pipeline.

    Raises   ValueError as `Layout.parse`, or if an option says again what the layout says
    """
    named = {part.partition("=")[0].strip(): part.partition("=")[2].strip() for part in text.split(",")}
    added = {"micro_batch": micro_batch, "accumulation": accumulation}
    for name, value in added.items():
        if value is not None:
            text += f",{name}={whole('--' + name.replace('_', '-'), value)}"
    if accumulation is None and "accumulation" not in named and named.get("pp", "").isdecimal():
        rounds = 2 if named.get("schedule") in ("zbv", "dualpipe_v") else 1
        text += f",accumulation={max(1, int(named['pp'])) * rounds}"
    return Layout.parse(text)


# --- from numbers to words


def report(simulation, device: GPU) -> dict:
    """All that was found, as JSON can hold it; bytes are integers."""
    layout, usable = simulation.layout, device.usable_bytes
    ranks = [asdict(rank) | {"fits": rank.peak_bytes <= usable} for rank in simulation.ranks]
    return {
        "model": simulation.config.name,
        "gpu": {"name": device.name, "usable_bytes": usable},
        "layout": layout.to_dict(),
        "layout_text": str(layout),
        "world_size": layout.world_size,
        "seq_len": simulation.seq_len,
        "precision": simulation.precision,
        "tokens_per_step": layout.sequences_per_step * simulation.seq_len,
        "ranks": ranks,
        "peak_bytes": simulation.peak_bytes,
        "fits": simulation.peak_bytes <= usable,
        "flops_of_all_ranks": sum(rank["flops"] for rank in ranks) * layout.world_size // layout.pp
        if len(ranks) == layout.pp
        else None,
        "seconds": round(simulation.seconds, 3),
        "host_peak_bytes": peak_memory_bytes(),
    }


def lines(found: dict) -> list[str]:
    """The same for reading: memory by kind at the peak, bytes by axis, FLOPs, a line for each simulated rank."""
    ranks, device = found["ranks"], found["gpu"]
    text = [
        f"{found['model']} on {found['world_size']:,} x {device['name']}, {found['precision']}",
        f"layout {found['layout_text']}; {found['seq_len']:,} tokens a sequence, {found['tokens_per_step']:,} a step",
        "",
        f"GiB at the peak of a step; usable on this GPU: {device['usable_bytes'] / GIB:.2f}",
    ]
    memory = [[name_of(rank), rank["layers"], *(gib(rank["peak_by_kind"][kind]) for kind in KINDS)] for rank in ranks]
    for row, rank in zip(memory, ranks):
        row += [gib(rank["peak_bytes"]), "yes" if rank["fits"] else "NO"]
    text += table(["stage", "layers", *KINDS, "peak", "fits"], memory)

    axes = sorted({axis for rank in ranks for axis in rank["sent_by_axis"]})
    text += ["", "GB sent by one rank in a step, by axis; its TFLOPs"]
    sent = [[name_of(rank), *(f"{rank['sent_by_axis'].get(axis, 0) / 1e9:.2f}" for axis in axes)] for rank in ranks]
    for row, rank in zip(sent, ranks):
        row.append(f"{rank['flops'] / 1e12:,.1f}")
    text += table(["stage", *axes, "TFLOPs"], sent)

    return text + ["", verdict(found), *notes(found)]


def verdict(found: dict) -> str:
    largest = max(found["ranks"], key=lambda rank: rank["peak_bytes"])
    peak, usable = largest["peak_bytes"] / GIB, found["gpu"]["usable_bytes"] / GIB
    where = f"stage {name_of(largest)} needs {peak:.1f} GiB of {usable:.1f}"
    if found["fits"]:
        return f"fits: {where}, {usable - peak:.1f} GiB remain for what is no tensor (CUDA context, NCCL, fragments)"
    return f"does NOT fit: {where}; {advice(found['layout'], largest['peak_by_kind'])}"


def advice(layout: dict, by_kind: dict[str, int]) -> str:
    """What to try, going by what is largest."""
    if by_kind["activations"] >= by_kind["optimizer"]:
        ways = [] if layout["recompute"] == "full" else ["recompute=full"]
        if layout["tp"] > 1 and not (layout["sequence_parallel"] and layout["regather"]):
            ways.append("regather=true" if layout["sequence_parallel"] else "sequence_parallel=true")
        return f"activations are largest: try {' or '.join([*ways, 'more cp'])}"
    ways = [] if layout["zero"] else ["zero=1"]
    return f"states are largest: try {' or '.join([*ways, 'more pp', 'more tp'])}"


def notes(found: dict) -> list[str]:
    replayed = sum(rank["replayed"] for rank in found["ranks"])
    taped = f"; {replayed} instructions of micro-batches noted from a tape" if replayed else ""
    which = f"{len(found['ranks'])} of {found['layout']['pp']} ranks along pp"
    return [
        f"simulated {which}, at place 0 along dp, cp and tp{taped}",
        f"{found['seconds']:.1f} s, {found['host_peak_bytes'] / GIB:.2f} GiB of this machine's memory",
    ]


def name_of(rank: dict) -> str:
    return "+".join(map(str, rank["stages"]))


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns, right-aligned."""
    columns = list(zip(head, *rows))
    widths = [max(len(str(cell)) for cell in column) for column in columns]
    return ["  ".join(f"{cell!s:>{width}}" for cell, width in zip(row, widths)) for row in (head, *rows)]
