"""Which layout: for a job by hand or by the search (lesson 11), as a game (lesson 10), or with its files (the page)."""

from collections.abc import Mapping
from datetime import date
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from course_lib import hardware
from course_lib.config import MOE_PRESETS, PRESETS, preset
from course_lib.engines import ENGINES
from course_lib.hardware import CLUSTERS, GPUS, gpu
from course_lib.layout import Layout
from course_lib.memory.states import state_bytes
from course_lib.panels.controls import cluster_of, controls, layout_of, named, of_table, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.runs import compared
from course_lib.panels.svg import bars
from course_lib.plan import Job, Plan, explain, export, options_table, search, work_out
from course_lib.plan.measured import MODELS
from course_lib.plan.search import one_of_each_kind
from course_lib.run import recipe_of
from course_lib.shapes import Shape, read_model
from course_lib.tensors import LoRA
from course_lib.units import read_tokens, show_bytes


def layout_for(job: Job, values: Mapping) -> Layout:
    """Return the layout of these sizes, dp and micro-batches by the job, SP by tp; raises ValueError for misfits."""
    axes = [axis for axis in ("tp", "pp", "cp") if axis in values]
    cut = values["tp"] * values["pp"] * values.get("cp", 1)
    dp, odd_ranks = divmod(job.num_gpus, cut)
    micro_batches, odd_rows = divmod(job.sequences, max(1, dp * values["micro_batch"]))
    if odd_ranks or not dp:
        raise ValueError(
            f"{' x '.join(axes)} is {cut}, which does not divide {job.num_gpus} GPUs; choose smaller sizes"
        )
    if odd_rows or not micro_batches:
        raise ValueError(
            f"dp ({dp}) x micro-batch ({values['micro_batch']}) does not divide {job.sequences} sequences; choose a "
            f"smaller micro-batch, or more {', '.join(axes[:-1])} or {axes[-1]}"
        )
    with_tp, schedule = values["tp"] > 1, "interleaved" if values.get("v", 1) > 1 else "1f1b"
    follows = {"dp": dp, "micro_batches": micro_batches, "sequence_parallel": with_tp, "schedule": schedule}
    return layout_of({**values, **follows, "regather": with_tp})


def job_of(values: Mapping) -> Job:
    """Return the job of these values for nanotron, whose rates are fitted; raises ValueError unless GPUs fill nodes."""
    tokens, model = values["seq_len"] * values["sequences"], MODELS[values["model"]]
    return Job(model, cluster_of(values), values["gpus"], values["seq_len"], tokens, engine="nanotron")


def _draw_plan(**values) -> Shown:
    job = job_of(values)
    layout, title = layout_for(job, values), f"{values['model']} on {values['gpus']} GPUs"
    charts, said = compared(title, {"layout": job.run(layout)}, "layout", job.cluster, job.engine)
    return charts, f"{layout}{said.removeprefix('layout')}"


def plan_shown(found: Plan) -> Shown:
    """Bars of the layout that a plan takes and of the five fastest; in words the one that it takes."""
    runs = {_short(one.layout): one.run for one in (found.best, *found.ranked[:5])}
    title, best = f"Of {found.num_tried} layouts", found.best.layout
    charts, said = compared(title, runs, _short(best), found.job.cluster, found.job.engine)
    return charts, f"The planner takes {best}: {said.partition(': ')[2]}"


def _short(layout: Layout) -> str:
    sizes = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp")} | {"rows": layout.micro_batch}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return " ".join(words + ["again"] * (layout.recompute != "none"))


PLAN = Panel(
    "A layout for a job",
    controls(model=("8B", named(MODELS)), gpus=64, between="efa", seq_len=(4096, powers(1024, 16_384)), sequences=256)
    | controls(gpu=("h100", of_table(GPUS, lambda one: one.bf16_flops and one.memory_bytes >= 40e9)))
    | controls(tp=(8, powers(1, 8)), pp=(1, powers(1, 16)), zero_stage=1, micro_batch=1, recompute="none"),
    _draw_plan,
    slow={"Search": lambda **values: plan_shown(search(job_of(values)))},
)

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


def _draw_game(job: str, **values) -> Shown:
    asked = JOBS[job]
    yours = work_out(asked, layout_for(asked, values))
    charts, said = compared("Your layout", {"yours": yours.run}, "yours", asked.cluster, asked.engine)
    waits = 1 - sum(yours.seconds_by_part[part] for part in WORKING) / yours.step_s
    layout = f"dp {yours.layout.dp}, {yours.layout.micro_batches} micro-batches"
    said = f"{job}. {layout}: {said.removeprefix('yours: ')} It waits {waits:.0%} of the step"
    return charts, f"{said}, and trains {yours.tokens_per_s:,.0f} tokens per second."


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
        missing = show_bytes(yours.memory_bytes - yours.usable_bytes)
        return charts, f"Your layout does not fit: {missing} too many. The best is {best.layout}."
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

_TUNED = {"all weights": None, "LoRA": LoRA(16), "QLoRA": LoRA(16, four_bits=True)}
_ROWS = 6


def _job_asked(values: Mapping, shape: Shape) -> Job:
    """Return the job of these values; raises ValueError for a text that is no number, or what does not go together."""
    if not values["gpus"].isdigit():
        raise ValueError(f"{values['gpus']!r} is no number of GPUs; give one such as 64")
    tokens, cluster = read_tokens(values["batch"]), hardware.cluster_of(gpu(values["gpu"]), values["between"])
    how = {name: values[name] for name in ("optimizer", "engine")} | {"fp8": values["precision"] == "fp8"}
    place = shape.config, cluster, int(values["gpus"]), values["seq_len"], tokens
    return Job(*place, lora=_TUNED[values["finetune"]], **how)


def _shape_asked(values: Mapping, file: str, text: str) -> Shape:
    """Return the model of the file's text, else the chosen preset; raises ValueError as `read_model`."""
    if not text:
        return read_model(values["model"], values["seq_len"])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "your-model" / (Path(file).name or "config.json")
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        return read_model(str(path), values["seq_len"])


def planned(values: Mapping, file: str = "", text: str = "") -> tuple[Shown, list[str], dict[str, str], dict[str, str]]:
    """Search a job as `course plan`: charts, lines, files, those not written; raises ValueError where nothing fits."""
    shape = _shape_asked(values, file, text)
    found = search(_job_asked(values, shape))
    told = [f"note: {sentence}" for sentence in shape.left_out.values()]
    table = options_table(one_of_each_kind(found.ranked)[:_ROWS], found.best)
    written = export(found.best, found.job.cluster.gpus_per_node, found.job.engine)
    return plan_shown(found), [*told, *table, "", *explain(found)], *written


def _draw_states(**values) -> Shown:
    """What training holds before any activation: which GPUs there must be at least."""
    job = _job_asked(values, _shape_asked(values, "", ""))
    states, device = state_bytes(job.config, recipe_of(job.recipe), job.optimizer, job.lora), job.cluster.gpu
    whole = {kind: getattr(states, kind) for kind in ("parameters", "gradients", "optimizer")}
    shared = {kind: size / job.num_gpus for kind, size in whole.items()}
    said = (
        f"{values['model']}: {show_bytes(states.total)} of states, {show_bytes(states.total / job.num_gpus)} for each "
        f"of {job.num_gpus:,} GPUs if all of them are sharded; {device.name} has {show_bytes(device.usable_bytes)}, "
        "for activations too. Press Plan for layouts."
    )
    rows = {"on one GPU": whole, "sharded over all": shared}
    return [bars("States, without activations", rows, marks={device.name: device.usable_bytes})], said


PLANNER = Panel(
    "What fits, and which layout",
    controls(model=("llama-3.1-8b", named([*PRESETS, *MOE_PRESETS])))
    | {"gpus": Control("GPUs", named(("8", "64", "512")), "8", "text")}
    | controls(gpu="h100", between="ib-ndr400", seq_len=(8192, powers(1024, 131_072)))
    | {
        "batch": Control("tokens a step", named(("512K", "1M", "4M")), "512K", "text"),
        "engine": Control("trained by", named(ENGINES), "course"),
        "finetune": Control("what is trained", named(_TUNED), "all weights"),
    }
    | controls(optimizer="adamw")
    | {"precision": Control("products in", named(("bf16", "fp8")), "bf16")},
    _draw_states,
)
