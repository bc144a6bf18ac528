"""A plan in the words of the chapters: fit, batch, throughput, as the Ultra-Scale Playbook goes about a layout."""

from collections.abc import Sequence

from course_lib.estimate import Estimate
from course_lib.hardware import GB
from course_lib.memory.states import state_bytes
from course_lib.plan.search import Plan
from course_lib.run import recipe_of
from course_lib.tensors import count_parameters
from course_lib.units import aligned
from course_lib.validate import checked

_STAGES = {1: "the optimizer's states", 2: "optimizer states and gradients", 3: "all states"}
_WORK = ("compute", "launches", "update")  # parts of a step that are no waiting for other ranks
_RECOMPUTED = {"selective": "attention's core runs again in backward", "full": "every layer runs again in backward"}


@checked
def explain(plan: Plan) -> list[str]:
    """Say why the best layout is the best, step by step, and why its neighbours lost."""
    lines = [*_fit(plan), *_batch(plan), *_throughput(plan)]
    if plan.rejected:
        lines.append("The nearest layouts that lost:")
    own = plan.best.layout.to_dict()
    for layout, reason in plan.rejected:
        other = {name: value for name, value in layout.to_dict().items() if value != own[name]}
        changes = ", ".join(f"{name}={value} instead of {own[name]}" for name, value in other.items())
        lines += [f"   {changes}", f"      {reason}"]
    return lines


def _fit(plan: Plan) -> list[str]:
    job, best = plan.job, plan.best
    layout, recipe, name = best.layout, recipe_of(job.recipe), job.cluster.gpu.name
    states = state_bytes(job.config, recipe, job.optimizer, job.lora).total
    each = f", {recipe.bytes_per_param} bytes each" if job.lora is None and job.optimizer == "adamw" else ""
    article = "an" if name[0] in "AEFHILMNORSX" else "a"  # names are spelled letter by letter: an H100
    lines = [
        f"1. Fit. {count_parameters(job.config) / 1e9:.2f} billion parameters{each}: {states / GB:,.0f} GB of states; "
        f"{article} {name} has {best.usable_bytes / GB:.1f} GB."
    ]
    cuts = {
        "tp": f"each matrix is cut over {layout.tp} GPUs of a node; tokens between them too",
        "pp": f"{layout.num_stages} stages of layers, schedule {layout.schedule}",
        "ep": f"the experts of a layer are spread over {layout.ep} GPUs",
        "cp": f"each sequence is cut into {job.seq_len // layout.cp:,} tokens for each GPU",
    }
    lines += [
        f"   {axis} {getattr(layout, axis)}: {words}." for axis, words in cuts.items() if getattr(layout, axis) > 1
    ]
    if layout.zero_stage:
        inside = f", {layout.dp_replicate} replicas (HSDP)" if layout.dp_replicate > 1 else ""
        what, ranks = _STAGES[layout.zero_stage], layout.shard_size
        lines.append(f"   ZeRO-{layout.zero_stage}: {what} are sharded over {ranks} GPUs{inside}.")
    again = _RECOMPUTED.get(layout.recompute, "nothing runs again, all activations are kept")
    lines.append(f"   recomputation {layout.recompute}: {again}.")
    few, most = (size / GB for size in best.memory_range)
    lines.append(f"   The fullest GPU needs {best.memory_in_words}: {best.room}.")
    return [*lines, f"   Nine in ten such runs needed {few:.1f} to {most:.1f} GB."]


def _batch(plan: Plan) -> list[str]:
    job, layout = plan.job, plan.best.layout
    lines = [
        f"2. Batch. dp {layout.dp} x micro-batch {layout.micro_batch} x {layout.micro_batches} micro-batches = "
        f"{job.sequences:,} sequences,",
        f"   and {job.sequences:,} x {job.seq_len:,} tokens are {job.batch_tokens:,} tokens a step.",
    ]
    low = job.sequences // job.num_gpus * job.num_gpus
    if low < job.sequences:  # why dp over all GPUs, the simplest layout, is not among them
        choose = " or ".join(f"{each:,}" for each in (low, low + job.num_gpus) if each)
        lines.append(
            f"   dp {job.num_gpus} alone is not possible: {job.sequences:,} sequences are no multiple of "
            f"{job.num_gpus:,} GPUs; {choose} would be."
        )
    return lines


def _throughput(plan: Plan) -> list[str]:
    best = plan.best
    shares = {name: seconds / best.step_s for name, seconds in best.seconds_by_part.items() if seconds > 0}
    told = ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda one: -one[1])[:5])
    less = 1 - best.tokens_per_s / plan.fastest.tokens_per_s
    slow, fast = best.speed_range
    chosen = [
        f"   The fastest is predicted {less:.1%} faster: less than a model can tell. Chosen among such: not tight, a "
        "large micro-batch, few axes, little ZeRO."
    ]
    return chosen * (less >= 0.0005) + [
        f"3. Throughput. A step takes {best.step_s:.2f} s (modelled): {told}.",
        f"   That is MFU {best.mfu:.1%}, {best.tokens_per_s / best.layout.world_size:,.0f} tokens/s for each GPU; nine "
        f"in ten such runs: {slow:,.0f} to {fast:,.0f}.",
    ]


@checked
def options_table(options: Sequence[Estimate], chosen: Estimate | None = None) -> list[str]:
    """A line for each layout, the chosen one marked: memory, room, MFU, tokens/s, what it waits for most."""
    rows = [("GB", "room", "MFU", "tokens/s/GPU", "waits most for", "layout")]
    for option in options if chosen is None or chosen in options else [*options, chosen]:
        waits = {name: seconds for name, seconds in option.seconds_by_part.items() if name not in _WORK}
        part = max(waits, key=waits.get)
        share = waits[part] / option.step_s
        waits_for = f"{part} {share:.1%}" if share >= 0.001 else "nothing"
        each = option.tokens_per_s / option.layout.world_size
        gb = f"{'->' if option is chosen else '  '}{option.memory_bytes / GB:>8.1f}"
        rows.append((gb, option.room, f"{option.mfu:.1%}", f"{each:,.0f}", waits_for, option.layout))
    return aligned(rows, (10, -7, 5, 12, -22, -1))
