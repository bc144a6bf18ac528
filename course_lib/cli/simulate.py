"""`course simulate`: what every stage of a layout holds, sends and computes, on a GPU that need not be here.

course simulate --model llama-3-405b --gpu h100-80g --layout dp=128,tp=8,pp=16,recompute=full --seq 8192
"""

from dataclasses import asdict
from json import dumps as as_json

from tyro.conf import OmitArgPrefixes, UseAppendAction

from course_lib.cli.asked import Device, Techniques, Tokens, model_asked
from course_lib.estimate.estimate import SPREAD
from course_lib.hardware import GB, GPU
from course_lib.layout import Layout
from course_lib.memory.budget import overheads_of
from course_lib.run import Run
from course_lib.units import aligned
from course_lib.validate import number, whole


def simulate_layout(
    model: str,
    layout: str,
    seq: Tokens,
    device: OmitArgPrefixes[Device] = Device(),
    how: OmitArgPrefixes[Techniques] = Techniques(),
    stage: UseAppendAction[tuple[int, ...]] = (),
    skew: float = 0.0,
    json: bool = False,
) -> int:
    """Tell memory by kind, bytes sent and FLOPs of a layout of thousands of ranks; 0 also where it does not fit.

    Args:
        model: a preset, such as llama-3.1-70b; a config.json of transformers or its folder; a JSON file with one shape
        layout: such as dp=8,tp=8,pp=4,zero_stage=1,recompute=full; without micro_batches it fills the pipeline
        seq: tokens of a sequence: 8192 or 8K
        device: the GPU whose memory it is held against
        how: what the engines have; they train all weights by AdamW, and are asked for nothing else
        stage: this pipeline stage alone; may be repeated; without it all stages
        skew: share of tokens that all choose the first expert
        json: all of it as JSON
    """
    from course_lib.simulate.cluster import simulate_ranks  # here: `course --help` needs no torch

    gpu = device.record(holds_alone=True)
    number("skew", skew, least=0, most=1)
    whole("seq", seq)
    recipe, fields = how.recipe_on(gpu), how.run_fields()
    asked = Run(model_asked(model, seq), layout_of(layout), seq, recipe, **fields)
    found = report(asked, simulate_ranks(asked, stage or None, skew), gpu)
    print(as_json(found, indent=2) if json else "\n".join(lines(found)))
    return 0


# --- from words to numbers


def layout_of(text: str) -> Layout:
    """The layout; without a word on micro_batches it has as many micro-batches as fill the pipeline.

    Raises   ValueError as `Layout.parse`
    """
    named = {part.partition("=")[0].strip(): part.partition("=")[2].strip() for part in text.split(",")}
    if "micro_batches" not in named and named.get("pp", "").isdecimal():
        rounds = 2 if named.get("schedule") in ("zbv", "dualpipe_v") else 1
        text += f",micro_batches={max(1, int(named['pp'])) * rounds}"
    return Layout.parse(text)


# --- from numbers to words


def report(run: Run, simulated: list, device: GPU) -> dict:
    """All that was found, as JSON can hold it; bytes are integers."""
    from course_lib.devices import peak_memory_bytes

    layout, usable = run.layout, device.usable_bytes
    ranks = [asdict(rank) | {"fits": rank.peak_bytes <= usable} for rank in simulated]
    peak_bytes = max(rank.peak_bytes for rank in simulated)
    most = SPREAD["other", "one stage" if layout.pp == 1 else "pipeline"].memory[1] * peak_bytes
    most += sum(overheads_of(run).values())
    return {
        "model": run.config.name,
        "gpu": {"name": device.name, "usable_bytes": usable},
        "layout": layout.to_dict(),
        "layout_text": str(layout),
        "world_size": layout.world_size,
        "seq_len": run.seq_len,
        "recipe": run.recipe,
        "tokens_per_step": layout.sequences_per_step * run.seq_len,
        "ranks": ranks,
        "peak_bytes": peak_bytes,
        "fits": peak_bytes <= usable,
        "room": "does not fit" if peak_bytes > usable else "tight" if most > usable else "fits",
        "nine_in_ten_bytes": round(most),
        "flops_of_all_ranks": sum(rank["flops"] for rank in ranks) * layout.world_size // layout.pp
        if len(ranks) == layout.pp
        else None,
        "seconds": round(sum(rank.seconds for rank in simulated), 3),
        "host_peak_bytes": peak_memory_bytes(),
    }


def lines(found: dict) -> list[str]:
    """The same for reading: memory by kind at the peak, bytes by axis, FLOPs, a line for each simulated rank."""
    ranks, device = found["ranks"], found["gpu"]
    text = [
        f"{found['model']} on {found['world_size']:,} x {device['name']}, {found['recipe']}",
        f"layout {found['layout_text']}; {found['seq_len']:,} tokens a sequence, {found['tokens_per_step']:,} a step",
        "",
        f"GB at the peak of a step; usable on this GPU: {device['usable_bytes'] / GB:.2f}",
    ]
    kinds = list(ranks[0]["peak_by_kind"])
    memory = [[name_of(rank), rank["layers"], *(gb(rank["peak_by_kind"][kind]) for kind in kinds)] for rank in ranks]
    for row, rank in zip(memory, ranks, strict=True):
        row += [gb(rank["peak_bytes"]), "yes" if rank["fits"] else "NO"]
    text += aligned([["stage", "layers", *kinds, "peak", "fits"], *memory], [0] * (4 + len(kinds)))

    axes = sorted({axis for rank in ranks for axis in rank["sent_by_axis"]})
    text += ["", "GB sent by one rank in a step, by axis; its TFLOPs"]
    sent = [[name_of(rank), *(f"{rank['sent_by_axis'].get(axis, 0) / 1e9:.2f}" for axis in axes)] for rank in ranks]
    for row, rank in zip(sent, ranks, strict=True):
        row.append(f"{rank['flops'] / 1e12:,.1f}")
    text += aligned([["stage", *axes, "TFLOPs"], *sent], [0] * (2 + len(axes)))

    return text + ["", what_fits(found), *notes(found)]


def what_fits(found: dict) -> str:
    largest = max(found["ranks"], key=lambda rank: rank["peak_bytes"])
    peak, usable = largest["peak_bytes"] / GB, found["gpu"]["usable_bytes"] / GB
    where = f"stage {name_of(largest)} needs {peak:.1f} GB of {usable:.1f}"
    if found["room"] == "does not fit":
        return f"does not fit: {where}; {advice(found['layout'], largest['peak_by_kind'])}"
    remain = f"{where}, {usable - peak:.1f} GB remain for what is no tensor (CUDA context, NCCL, fragments)"
    if found["room"] == "fits":
        return f"fits: {remain}"
    return f"tight: {remain}; with that nine in ten such runs needed at most {found['nine_in_ten_bytes'] / GB:.1f} GB"


def advice(layout: dict, by_kind: dict[str, int]) -> str:
    """What to try, going by what is largest."""
    if by_kind["activations"] >= by_kind["optimizer"]:
        ways = [] if layout["recompute"] == "full" else ["recompute=full"]
        if layout["tp"] > 1 and not (layout["sequence_parallel"] and layout["regather"]):
            ways.append("regather=true" if layout["sequence_parallel"] else "sequence_parallel=true")
        return f"activations are largest: try {' or '.join([*ways, 'more cp'])}"
    ways = [] if layout["zero_stage"] else ["zero_stage=1"]
    return f"states are largest: try {' or '.join([*ways, 'more pp', 'more tp'])}"


def notes(found: dict) -> list[str]:
    replayed = sum(rank["replayed"] for rank in found["ranks"])
    taped = f"; {replayed} instructions of micro-batches noted from a tape" if replayed else ""
    which = f"{len(found['ranks'])} of {found['layout']['pp']} ranks along pp"
    return [
        f"simulated {which}, at place 0 along dp, cp and tp{taped}",
        f"{found['seconds']:.1f} s, {found['host_peak_bytes'] / GB:.2f} GB of this machine's memory",
    ]


def name_of(rank: dict) -> str:
    return "+".join(map(str, rank["stages"]))


def gb(nbytes: int) -> str:
    return f"{nbytes / GB:.2f}"
