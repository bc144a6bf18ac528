"""Runs side by side, by the package's estimate: ZeRO, tensor, sequence, context parallelism, a whole layout.

Each panel says which runs its values mean; `compared` draws what the fullest rank of each holds and what a step's time
is spent on. Bytes are predicted, seconds modelled: nothing is measured.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from course_lib.config import MOE_PRESETS, PRESETS, preset
from course_lib.engines import ENGINES, EngineFacts
from course_lib.estimate import estimate
from course_lib.hardware import Cluster
from course_lib.layout.mesh import links_of_axes
from course_lib.layout.partition import CP_METHODS, fewer_at_the_ends
from course_lib.memory.budget import fullest_budget
from course_lib.palette import KINDS
from course_lib.panels.controls import cluster_of, controls, layout_of, named, powers, run_of
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import bars
from course_lib.run import Offload, Run, recipe_of
from course_lib.schedules import SCHEDULES
from course_lib.tensors import count_parameters, for_length
from course_lib.traffic import sent
from course_lib.units import show_bytes, show_seconds

UNHIDDEN = replace(ENGINES["course"], hides_behind_weights=False)  # each sum of tensor parallelism is waited for
_PLACES = {kind: place for place, kind in enumerate(KINDS)}  # what is no kind of tensor stands behind them


def compared(title: str, runs: Mapping[str, Run], chosen: str, cluster: Cluster, engine: str | EngineFacts) -> Shown:
    """Bars of memory and of time for each run; in words the chosen one."""
    found = {label: estimate(run, cluster, engine) for label, run in runs.items()}
    one, by_axis = found[chosen], sent_by_axis(runs[chosen])
    memory = {
        label: dict(sorted(each.bytes_by_kind.items(), key=lambda kind: _PLACES.get(kind[0], len(KINDS))))
        for label, each in found.items()
    }
    sends = ", ".join(f"{axis} {show_bytes(size)}" for axis, size in by_axis.items()) or "nothing"
    said = (
        f"{chosen}: {one.why}. A step sends from each GPU: {sends}. Modelled, not measured: "
        f"{show_seconds(one.step_s)} a step, {one.tokens_per_s_per_gpu:,.0f} tokens per second and GPU, "
        f"MFU {one.mfu:.1%} ({one.causal_mfu:.1%} if half of attention counts)."
    )
    marks = {cluster.gpu.name: cluster.gpu.usable_bytes} if runs[chosen].device == "cuda" else {}
    notes = {chosen: f", sends {show_bytes(sum(by_axis.values()))}"}
    held = bars(f"{title}: largest moment of the fullest GPU", memory, marks=marks, notes=notes, chosen=chosen)
    seconds = {label: each.seconds_by_part for label, each in found.items()}
    notes = {label: f", MFU {each.mfu:.0%}" for label, each in found.items()}
    return [held, bars("Modelled time of a step", seconds, "seconds", notes=notes, chosen=chosen)], said


def _possible(values: Mapping, several: Mapping[str, Mapping], chosen: str, config=None) -> dict[str, Run]:
    """Return the run of each label with its changes of the values; of impossible ones the chosen raises ValueError."""
    runs = {}
    for label, changes in several.items():
        try:
            runs[label] = run_of({**values, **changes}, config)
        except ValueError:
            if label == chosen:
                raise
    return runs


@lru_cache(maxsize=256)
def sent_by_axis(run: Run) -> dict[str, int]:
    """Return what a rank of the first stage sends in a step, without the few numbers of the norm."""
    return {axis: size for axis, size in sent(run).items() if axis != "world"}


_OFFLOADS = {
    "none": Offload(),
    "optimizer on the CPU": Offload(optimizer="host"),
    "optimizer on disk": Offload(optimizer="disk"),
    "optimizer, parameters on the CPU": Offload(optimizer="host", parameters="host"),
    "optimizer, parameters on disk": Offload(optimizer="disk", parameters="disk"),
}
_STAGES = ("plain DP", "stage 1", "stage 2", "stage 3")


def zero_runs(values: Mapping) -> dict[str, Run]:
    """Return a run a stage, others than the chosen offloading parameters at 3 alone; raises ValueError as `Run`."""
    runs = {}
    for stage, label in enumerate(_STAGES):
        offload = _OFFLOADS[values["offload"]]
        if stage not in (3, values["zero_stage"]):
            offload = replace(offload, parameters="device")
        runs[label] = run_of({**values, "zero_stage": stage}, offload=offload)
    return runs


def _draw_zero(**values) -> Shown:
    """All stages; of the chosen one also how often it sends its parameters' bytes, and what waits elsewhere."""
    runs, dp, chosen = zero_runs(values), values["dp"], _STAGES[values["zero_stage"]]
    title, run = f"{values['model']} on {dp:,} GPU{'s' * (dp > 1)}", runs[chosen]
    charts, said = compared(title, runs, chosen, cluster_of(values), "course")
    if dp > 1:
        one_trip = count_parameters(run.config) * recipe_of(values["recipe"]).param_bytes * (dp - 1) / dp
        times = sent_by_axis(run)["data"] / one_trip
        said += f" Sent are {times:.2f} times the parameters' bytes, times (dp − 1) / dp."
    for place, size in fullest_budget(run).elsewhere.items():
        where = {"host": "In the host's memory", "disk": "On disk"}[place]
        said += f" {where}: {show_bytes(size)} for each GPU, {show_bytes(size * dp)} for all."
    return charts, said


ZERO = Panel(
    "ZeRO: what one GPU holds, and what a step sends",
    controls(model="llama-3.1-8b", zero_stage=3, dp=(8, powers(1, 1024)), gpu="h100", micro_batch=1)
    | controls(micro_batches=(1, powers(1, 64)), seq_len=4096, recipe="bf16-master", recompute="none", between="efa")
    | {"offload": Control("offload", named(_OFFLOADS), "none")},
    _draw_zero,
)

MODES = {
    "TP": {},
    "TP + SP": {"sequence_parallel": True},
    "gathered again": {"sequence_parallel": True, "regather": True},
}


def _draw_tensor(**values) -> Shown:
    """One GPU alone, half of the chosen size of tp, that size and twice of it, as far as heads divide."""
    tp, title = values["tp"], f"{values['model']}, {values['seq_len']:,} tokens"
    sizes = {f"tp {size}": {"tp": size} for size in sorted({1, max(1, tp // 2), tp, 2 * tp})}
    return compared(title, _possible(values, sizes, f"tp {tp}"), f"tp {tp}", cluster_of(values), UNHIDDEN)


def _draw_sequence(**values) -> Shown:
    """One size of tp: alone, with sequence parallelism, and with inputs that are gathered again in backward."""
    modes = MODES if values["tp"] > 1 else {mode: {} for mode in MODES}  # one rank has no sequence to divide
    title = f"{values['model']}, {values['seq_len']:,} tokens, tp {values['tp']}"
    return compared(title, _possible(values, modes, "TP"), values["mode"], cluster_of(values), UNHIDDEN)


_WHERE = controls(micro_batch=1, recompute="none", gpu="h100", inside="nvlink4", between="efa")
TENSOR = Panel("Tensor parallelism", controls(model="llama-3.1-8b", tp=8, seq_len=4096) | _WHERE, _draw_tensor)
TENSOR_SEQUENCE = Panel(
    "Sequence parallelism",
    controls(model="llama-3.1-8b", tp=8, seq_len=65_536)
    | {"mode": Control("parallelism", named(MODES), "gathered again")}
    | _WHERE,
    _draw_sequence,
)


def _draw_context(**values) -> Shown:
    """Memory and a step without cp, and by each method that is possible: tp with SP inside, ZeRO-1 over cp's ranks."""
    cp, config = values["cp"], for_length(preset(values["model"]), values["seq_len"])
    base = values | {"zero_stage": 1, "sequence_parallel": values["tp"] > 1}
    several = {"cp 1": {"cp": 1, "cp_method": "ring"}}
    several |= {f"cp {cp}, {method}": {"cp_method": method} for method in CP_METHODS if cp > 1}
    chosen = f"cp {cp}, {values['cp_method']}" if cp > 1 else "cp 1"
    title = f"{values['model']}, {values['seq_len']:,} tokens, tp {values['tp']}"
    return compared(title, _possible(base, several, chosen, config), chosen, cluster_of(values), "course")


def _llamas(presets: Mapping) -> tuple:
    return named(name for name, config in presets.items() if config.family == "llama")


CONTEXT = Panel(
    "Context parallelism",
    controls(model=("llama-3.1-8b", _llamas(PRESETS)), seq_len=(131_072, powers(1024, 2**20)), tp=(8, powers(1, 8)))
    | controls(cp=4, cp_method="ring", cp_sharding="zigzag", recompute="none", gpu="h100", inside="nvlink4")
    | controls(between="ib-ndr400"),
    _draw_context,
)

_TOYS = ("toy", "toy-moe")  # predicted in FP32 on a CPU, as they are measured


def layout_run(values: Mapping) -> Run:
    """Return the run in BF16 with FP32 masters, of a toy in FP32 on a CPU; raises ValueError with the nearest."""
    layers = None
    if values["fewer_at_ends"]:
        layers = tuple(fewer_at_the_ends(preset(values["model"]).num_layers, layout_of(values).num_stages))
    recipe, device = ("fp32", "cpu") if values["model"] in _TOYS else ("bf16-master", "cuda")
    return run_of({**values, "layers_of_stage": layers}, recipe=recipe, device=device)


def _draw_layout(**values) -> Shown:
    """One layout with Megatron's kernels and overlap, and where its groups lie."""
    run, per_node = layout_run(values), values["gpus_per_node"]
    layout, axes = run.layout, ("pp", "dp", "cp", "tp", "ep")
    links, nodes = links_of_axes(layout.mesh, per_node, layout.ep, layout.folded), -(-layout.world_size // per_node)
    said = f"{replace(layout, layers_of_stage=None)}" + " (one layer less at both ends)" * values["fewer_at_ends"]
    said += f": {layout.world_size:,} ranks on {nodes:,} node{'s' * (nodes > 1)}."
    for words, kinds in (("In a node", ("node",) * (nodes > 1)), ("Over the network", ("network", "both"))):
        here = [axis for axis in axes if links[axis].kind in kinds]
        said += f" {words}: {', '.join(here)}." * bool(here)
    engine = replace(ENGINES["megatron"], hides_ep=ENGINES["torchtitan"].hides_ep)
    title = f"{values['model']} on {layout.world_size:,} GPUs"
    (memory, time), predicted = compared(title, {"layout": run}, "layout", cluster_of(values), engine)
    by_axis = bars("Bytes that a rank of the first stage sends in a step, by axis", {"sent": sent_by_axis(run)})
    return [memory, by_axis, time], f"{said} Predicted: {predicted.removeprefix('layout: ')}"


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
LAYOUT = Panel(
    "A layout of five axes",
    controls(model=("llama-3.1-8b", _llamas(PRESETS | MOE_PRESETS)), gpu="h100", gpus_per_node=8, inside="nvlink4")
    | controls(between="ib-ndr400", seq_len=8192, micro_batch=1, micro_batches=8, recompute="none", regather=False)
    | controls(dp=4, cp=1, tp=4, sequence_parallel=True, pp=2, schedule=("1f1b", named(SCHEDULES)), v=1)
    | controls(fewer_at_ends=False, ep=1, zero_stage=1),
    _draw_layout,
    KNOWN,
)
