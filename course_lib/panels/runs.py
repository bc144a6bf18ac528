"""Runs side by side, by the package's estimate: ZeRO, tensor, sequence, context parallelism, a whole layout, a plan.

Each panel says which runs its values mean; `compared` draws what the fullest rank of each holds and what a step's time
is spent on. Bytes are predicted, seconds modelled: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from course_lib.config import MOE_PRESETS, PRESETS, ModelConfig, preset
from course_lib.engines import ENGINES, Engine
from course_lib.estimate import estimate
from course_lib.hardware import GPUS, Cluster
from course_lib.layout import Layout
from course_lib.layout.mesh import links_of_axes
from course_lib.layout.partition import CP_METHODS, fewer_at_the_ends
from course_lib.memory.budget import fullest_budget
from course_lib.memory.ranks import for_length
from course_lib.memory.states import count_parameters, recipe_of
from course_lib.memory.zero import Offload
from course_lib.palette import KINDS
from course_lib.panels.controls import cluster_of, controls, layout_of, named, of_table, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Bars
from course_lib.plan import Job, search
from course_lib.plan.measured import MODELS
from course_lib.run import Run
from course_lib.schedules import SCHEDULES
from course_lib.traffic import sent
from course_lib.units import show_bytes, show_seconds

UNHIDDEN = replace(ENGINES["course"], hides_behind_weights=False)  # each sum of tensor parallelism is waited for


def compared(title: str, runs: Mapping[str, Run], chosen: str, cluster: Cluster, engine: str | Engine) -> Shown:
    """Bars of memory and of time for each run; in words the chosen one."""
    found = {label: estimate(run, cluster, engine) for label, run in runs.items()}
    by_axis = sent_by_axis(runs[chosen])
    place = {kind: index for index, kind in enumerate(KINDS)}
    memory = {
        label: dict(sorted(one.bytes_by_kind.items(), key=lambda kind: place.get(kind[0], len(KINDS))))
        for label, one in found.items()
    }
    times = {label: {part: s for part, s in one.seconds_by_part.items() if s} for label, one in found.items()}
    sends = {chosen: f", sends {show_bytes(sum(by_axis.values()))}"}
    shares = {label: f", MFU {one.mfu:.0%}" for label, one in found.items()}
    limits = {cluster.gpu.name: cluster.gpu.usable_bytes} if runs[chosen].device == "cuda" else {}
    one = found[chosen]
    axes = ", ".join(f"{axis} {show_bytes(size)}" for axis, size in by_axis.items())
    said = (
        f"{chosen}: {one.why}. A step sends from each GPU: {axes or 'nothing'}. Modelled, not measured: "
        f"{show_seconds(one.step_s)} a step, {one.tokens_per_s_per_gpu:,.0f} tokens per second and GPU, "
        f"MFU {one.mfu:.1%} ({one.causal_mfu:.1%} if half of attention counts)."
    )
    return [
        Bars(f"{title}: largest moment of the fullest GPU", memory, limits=limits, notes=sends, chosen=chosen),
        Bars("Modelled time of a step", times, "seconds", notes=shares, chosen=chosen),
    ], said


@lru_cache(maxsize=256)
def sent_by_axis(run: Run) -> dict[str, int]:
    """Return what a rank of the first stage sends in a step, without the few numbers of the norm."""
    return {axis: size for axis, size in sent(run).items() if axis != "world"}


# ------------------------------------------------------------------------------------ ZeRO (lesson 4)
_OFFLOADS = {
    "none": Offload(),
    "optimizer on the CPU": Offload(optimizer="host"),
    "optimizer on disk": Offload(optimizer="disk"),
    "optimizer, parameters on the CPU": Offload(optimizer="host", parameters="host"),
    "optimizer, parameters on disk": Offload(optimizer="disk", parameters="disk"),
}


def zero_runs(values: Mapping) -> dict[str, Run]:
    """Return a run for each stage; parameters leave the GPU at stage 3 alone.

    Raises   ValueError if the chosen stage cannot offload them
    """
    config, offload = preset(values["model"]), _OFFLOADS[values["offload"]]
    how = {"recipe": values["recipe"], "offload": offload}
    chosen, runs = Run(config, layout_of(values), values["seq_len"], **how), {}
    for stage in range(4):
        here = offload if stage == 3 else replace(offload, parameters="device")
        run = replace(chosen, layout=replace(chosen.layout, zero_stage=stage), offload=here)
        runs[f"stage {stage}" if stage else "plain DP"] = run
    return runs


def _draw_zero(**values) -> Shown:
    """All stages; of the chosen one also how often it sends its parameters' bytes, and what waits elsewhere."""
    runs, dp = zero_runs(values), values["dp"]
    chosen = list(runs)[values["zero_stage"]]
    title = f"{values['model']} on {dp:,} GPU{'s' * (dp > 1)}"
    forms, said = compared(title, runs, chosen, cluster_of(values), "course")
    if dp > 1:
        one_trip = count_parameters(runs[chosen].config) * recipe_of(values["recipe"]).param_bytes * (dp - 1) / dp
        times = sent_by_axis(runs[chosen])["data"] / one_trip
        said += f" Sent are {times:.2f} times the parameters' bytes, times (dp − 1) / dp."
    for place, size in fullest_budget(runs[chosen]).elsewhere.items():
        where = {"host": "In the host's memory", "disk": "On disk"}[place]
        said += f" {where}: {show_bytes(size)} for each GPU, {show_bytes(size * dp)} for all."
    return forms, said


ALL_MODELS = named(PRESETS)
LENGTHS = powers(64, 131_072)
ZERO = Panel(
    "ZeRO: what one GPU holds, and what a step sends",
    controls(model=("llama-3.1-8b", ALL_MODELS), zero_stage=3, dp=(8, powers(1, 1024)), gpu="h100", micro_batch=1)
    | controls(micro_batches=(1, powers(1, 64)), seq_len=(4096, LENGTHS), recipe="bf16-master", recompute="none")
    | controls(between="efa")
    | {"offload": Control("offload", named(_OFFLOADS), "none")},
    _draw_zero,
)


# ------------------------------------------------------------------------------------ tensor, sequence (lessons 5, 6)
MODES = {
    "TP": {},
    "TP + SP": {"sequence_parallel": True},
    "gathered again": {"sequence_parallel": True, "regather": True},
}


def _possible_tp(config: ModelConfig) -> list[int]:
    """Return the powers of two up to 64 to which the model's heads can be dealt out."""
    N, K, sizes = config.num_heads, config.num_kv_heads, [1 << power for power in range(7)]
    return [tp for tp in sizes if N % tp == 0 and (K % tp == 0 or tp % K == 0)]


def _tensor_run(values: Mapping, tp: int, mode: str = "TP") -> Run:
    """Return the run on tp ranks, in a mode of MODES; one rank has no sequence to divide.

    Raises   ValueError if the model's heads do not divide, or the sequence is longer than the model reads
    """
    layout = layout_of({**values, "tp": tp, **(MODES[mode] if tp > 1 else {})})
    return Run(preset(values["model"]), layout, values["seq_len"])


def _draw_tensor(**values) -> Shown:
    """One GPU alone, the chosen size of tp, half and twice of it, without sequence parallelism."""
    tp, sizes = values["tp"], _possible_tp(preset(values["model"]))
    _tensor_run(values, tp)  # says which sizes there are, if this is none
    shown = [size for size in sizes if size in (1, tp // 2, tp, 2 * tp)]
    runs = {f"tp {size}": _tensor_run(values, size) for size in shown}
    title = f"{values['model']}, {values['seq_len']:,} tokens"
    return compared(title, runs, f"tp {tp}", cluster_of(values), UNHIDDEN)


def _draw_sequence(**values) -> Shown:
    """One size of tp: alone, with sequence parallelism, and with inputs that are gathered again in backward."""
    runs = {mode: _tensor_run(values, values["tp"], mode) for mode in MODES}
    title = f"{values['model']}, {values['seq_len']:,} tokens, tp {values['tp']}"
    return compared(title, runs, values["mode"], cluster_of(values), UNHIDDEN)


_WHERE = controls(micro_batch=1, recompute="none", gpu="h100", inside="nvlink4", between="efa")
TENSOR = Panel(
    "Tensor parallelism",
    controls(model=("llama-3.1-8b", ALL_MODELS), tp=8, seq_len=(4096, LENGTHS)) | _WHERE,
    _draw_tensor,
)
TENSOR_SEQUENCE = Panel(
    "Sequence parallelism",
    controls(model=("llama-3.1-8b", ALL_MODELS), tp=8, seq_len=(65_536, LENGTHS))
    | {"mode": Control("parallelism", named(MODES), "gathered again")}
    | _WHERE,
    _draw_sequence,
)


# ------------------------------------------------------------------------------------ context (lesson 7)
def _context_runs(values: Mapping) -> dict[str, Run]:
    """Return the run without cp and by each method that is possible: tp with SP inside, ZeRO-1 over cp's ranks.

    Raises   ValueError if the chosen method is not, or the sequence does not divide
    """
    config = for_length(preset(values["model"]), values["seq_len"])
    base = values | {"zero_stage": 1, "sequence_parallel": values["tp"] > 1}
    runs = {"cp 1": Run(config, layout_of(base | {"cp": 1, "cp_method": "ring"}), values["seq_len"])}
    for method in CP_METHODS if values["cp"] > 1 else ():
        try:
            runs[f"cp {values['cp']}, {method}"] = Run(
                config, layout_of(base | {"cp_method": method}), values["seq_len"]
            )
        except ValueError:
            if method == values["cp_method"]:
                raise
    return runs


def _draw_context(**values) -> Shown:
    """Memory and a step without cp, and by each method."""
    runs, cp = _context_runs(values), values["cp"]
    chosen = f"cp {cp}, {values['cp_method']}" if cp > 1 else "cp 1"
    title = f"{values['model']}, {values['seq_len']:,} tokens, tp {values['tp']}"
    return compared(title, runs, chosen, cluster_of(values), "course")


CONTEXT = Panel(
    "Context parallelism",
    controls(model="llama-3.1-8b", seq_len=(131_072, powers(1024, 2**20)), tp=(8, powers(1, 8)), cp=4)
    | controls(cp_method="ring", cp_sharding="zigzag", recompute="none", gpu="h100", inside="nvlink4")
    | controls(between="ib-ndr400"),
    _draw_context,
)


# ------------------------------------------------------------------------------------ a whole layout (lesson 10)
_TOYS = ("toy", "toy-moe")  # predicted in FP32 on a CPU, as they are measured
_SHOWN_AXES = ("pp", "dp", "cp", "tp", "ep")


def layout_run(values: Mapping) -> Run:
    """Return the run of these values: BF16 with FP32 master weights, a toy in FP32 on a CPU.

    Raises   ValueError if there is no such layout, or the model cannot lie so: with the nearest that can
    """
    layout, config = layout_of(values), preset(values["model"])
    if values["fewer_at_ends"]:
        layers = fewer_at_the_ends(config.num_layers, layout.num_stages)
        layout = replace(layout, layers_of_stage=tuple(layers))
    recipe, device = ("fp32", "cpu") if values["model"] in _TOYS else ("bf16-master", "cuda")
    return Run(config, layout, values["seq_len"], recipe, device=device)


def _draw_layout(**values) -> Shown:
    """One layout with Megatron's kernels and overlap, and where its groups lie."""
    run, per_node = layout_run(values), values["gpus_per_node"]
    layout = run.layout
    engine = replace(ENGINES["megatron"], hides_ep=layout.schedule == "dualpipe_v")
    links, nodes = links_of_axes(layout.mesh, per_node, layout.ep, layout.folded), -(-layout.world_size // per_node)
    words = f"{replace(layout, layers_of_stage=None)}" + " (one layer less at both ends)" * values["fewer_at_ends"]
    inside = [axis for axis in _SHOWN_AXES if links[axis].kind == "node"]
    outside = [axis for axis in _SHOWN_AXES if links[axis].kind in ("network", "both")]
    where = f" In a node: {', '.join(inside)}." * bool(inside and nodes > 1)
    where += f" Over the network: {', '.join(outside)}." * bool(outside)
    title, axes = f"{values['model']} on {layout.world_size:,} GPUs", sent_by_axis(run)
    forms, said = compared(title, {"layout": run}, "layout", cluster_of(values), engine)
    ranks = f"{layout.world_size:,} ranks on {nodes:,} node{'s' * (nodes > 1)}"
    forms.insert(1, Bars("Bytes that a rank of the first stage sends in a step, by axis", {"sent": axes}))
    return forms, f"{words}: {ranks}.{where} Predicted: {said.removeprefix('layout: ')}"


KNOWN = {
    "Llama 3 405B, 16,384 GPUs": (
        {"model": "llama-3.1-405b", "between": "roce-400", "dp": 128, "tp": 8, "pp": 16, "schedule": "interleaved"}
        | {"v": 4, "fewer_at_ends": True, "micro_batches": 16},
        "Published: MFU 41 %, nothing recomputed (arXiv:2407.21783, table 4). The paper does not tell how many stages "
        "a GPU has; 4 are the course's choice.",
    ),
    "DeepSeek-V3, 2,048 GPUs": (
        {"model": "deepseek-v3", "inside": "nvlink-h800", "dp": 128, "tp": 1, "pp": 16, "ep": 64}
        | {"sequence_parallel": False, "schedule": "dualpipe_v", "micro_batches": 120, "recompute": "full"}
        | {"seq_len": 4096},
        "Published: 180,000 H800 hours for 10¹² tokens, 1,543 tokens per second and GPU, computing in FP8 and "
        "recomputing a little (arXiv:2412.19437). Here all is BF16, whole blocks are recomputed, and weight gradients "
        "that wait keep more than a GPU has: with schedule 1f1b it fits, and takes longer.",
    ),
    "70B on 32 A100": (
        {"model": "llama-3.1-70b", "gpu": "a100-80", "inside": "nvlink3", "between": "ib-hdr200", "dp": 2, "tp": 8}
        | {"pp": 2, "micro_batches": 16, "seq_len": 4096},
        "tp fills a node; two nodes are a pipeline, and there are two of these.",
    ),
    "one laptop (toy), 8 ranks": (
        {"model": "toy-moe", "dp": 2, "tp": 2, "pp": 2, "ep": 2, "micro_batches": 4, "seq_len": 64},
        "Small enough to be run here: press Measure.",
    ),
}
_LLAMAS = named(name for name, config in (PRESETS | MOE_PRESETS).items() if config.family == "llama")
LAYOUT = Panel(
    "A layout of five axes",
    controls(model=("llama-3.1-8b", _LLAMAS), gpu="h100", gpus_per_node=8, inside="nvlink4", between="ib-ndr400")
    | controls(seq_len=(8192, LENGTHS), micro_batch=1, micro_batches=8, recompute="none", regather=False, dp=4, cp=1)
    | controls(tp=4, sequence_parallel=True, pp=2, schedule=("1f1b", named(SCHEDULES)), v=1)
    | {"fewer_at_ends": Control("layers", (("evenly", False), ("one less at both ends", True)), False)}
    | controls(ep=1, zero_stage=1),
    _draw_layout,
    KNOWN,
)


# ------------------------------------------------------------------------------------ a plan (lesson 11)
def job_of(values: Mapping) -> Job:
    """Return the job of these values, trained by nanotron: its rates are fitted to measured runs.

    Raises   ValueError where GPUs do not fill nodes
    """
    tokens = values["seq_len"] * values["sequences"]
    model = MODELS[values["model"]]
    return Job(model, cluster_of(values), values["gpus"], values["seq_len"], tokens, engine="nanotron")


def _plan_layout(values: Mapping) -> Layout:
    """Return the layout of these values; dp and the micro-batches follow from the job.

    Raises   ValueError for what does not divide
    """
    ranks, rows = values["tp"] * values["pp"], values["micro_batch"]
    if values["gpus"] % ranks:
        raise ValueError(f"tp x pp is {ranks}, which does not divide {values['gpus']} GPUs; choose smaller ones")
    dp = values["gpus"] // ranks
    if values["sequences"] % (dp * rows):
        raise ValueError(
            f"dp ({dp}) x micro-batch ({rows}) does not divide {values['sequences']} sequences; choose a smaller "
            "micro-batch, or more sequences"
        )
    sizes = {"dp": dp, "micro_batches": values["sequences"] // (dp * rows), "sequence_parallel": values["tp"] > 1}
    return layout_of({**values, **sizes})


def _draw_plan(**values) -> Shown:
    """One layout, worked out as the planner would."""
    job, layout = job_of(values), _plan_layout(values)
    title = f"{values['model']} on {values['gpus']} GPUs"
    forms, said = compared(title, {"layout": job.run(layout)}, "layout", job.cluster, job.engine)
    return forms, f"{layout}{said.removeprefix('layout')}"


def _draw_search(**values) -> Shown:
    """The fastest layouts that fit, as the planner ranks them, and the one that it takes."""
    found = search(job_of(values))
    runs = {_short(one.layout): one.run for one in (found.best, *found.ranked[:5])}
    forms, said = compared(
        f"Of {found.num_tried} layouts", runs, _short(found.best.layout), found.job.cluster, found.job.engine
    )
    return forms, f"The planner takes {found.best.layout}: {said.partition(': ')[2]}"


def _short(layout: Layout) -> str:
    sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "rows": layout.micro_batch}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) + " again" * (
        layout.recompute != "none"
    )


PLAN = Panel(
    "A layout for a job",
    controls(model=("8B", named(MODELS)))
    | controls(gpu=("h100", of_table(GPUS, lambda one: one.bf16_flops and one.memory_bytes >= 40e9)))
    | {"gpus": Control("GPUs", powers(8, 512), 64, "slider")}
    | controls(between="efa", seq_len=(4096, powers(1024, 16_384)))
    | {"sequences": Control("sequences a step", powers(64, 4096), 256, "slider")}
    | controls(tp=(8, powers(1, 8)), pp=(1, powers(1, 16)), zero_stage=1, micro_batch=1, recompute="none"),
    _draw_plan,
    slow={"Search": _draw_search},
)
