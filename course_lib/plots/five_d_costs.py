"""What a layout costs, in pictures: memory along the pipeline, bytes by axis, a block's collectives, a step in time."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from course_lib.engines import ENGINES
from course_lib.flops import attention_flops_per_token, attention_parameters, forward_flops_per_token, head_parameters
from course_lib.hardware import GPU, Cluster
from course_lib.panels.svg import Box, Chart, bars
from course_lib.plots.concepts import show_charts
from course_lib.plots.memory import gpu_limits, kinds_of
from course_lib.run import Run
from course_lib.span import COMPUTE, Lanes, Span
from course_lib.timing import RATES, calls_s
from course_lib.timing.layer import Case, layer_times
from course_lib.traffic import Call, calls, sent_bytes
from course_lib.units import show_bytes, show_seconds
from course_lib.validate import Index, checked, read_toml


@checked
def show_pipeline_memory(of_ranks: Iterable, gpus: Mapping[str, float] | Iterable[GPU], title: str) -> None:
    """Show memory by kind of a pipeline's ranks, budgets or {kind: bytes}, against GPUs or `{name: bytes}`."""
    rows = {f"pp {place}": kinds_of(rank) for place, rank in enumerate(of_ranks)}
    show_charts(title, bars(title, rows, marks=gpu_limits(gpus)))


@checked
def show_costs(sent_bytes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
    """Show bytes by axis, of `traffic.sent` or a meter, and seconds by part, of `StepTime.parts`."""
    total, whole_s = sum(sent_bytes.values()), sum(seconds.values())
    if not total or not whole_s:
        raise ValueError("nothing is sent, or no part of a step takes time; give what a layout costs")
    most = max(sent_bytes, key=sent_bytes.get)
    said = f"{show_bytes(total)} sent by one rank in a step, {sent_bytes[most] / total:.0%} over {most}"
    share = f"{show_seconds(whole_s)} modelled, {seconds.get('compute', 0.0) / whole_s:.0%} computing"
    show_charts("What a layout costs", bars(said, {"sent": sent_bytes}), bars(share, {"step": seconds}, "seconds"))


_GATHERS = tuple((axis, "parameters", "all_gather") for axis in ("data", "expert_dp"))
_SCATTERS = tuple((axis, "gradients", "reduce_scatter") for axis in ("data", "expert_dp"))
BLOCK = read_toml(Path(__file__).with_name("block.toml"))
_OFTEN = Counter(chain(*chain(*BLOCK.values())))  # how often a block calls each


def calls_of(run: Run, rank: int, event: tuple[str, str, str]) -> list[Call]:
    """Return the calls of one step that an event of BLOCK stands for."""
    axis, *call = event
    return [one for one in calls(run, rank)[axis] if [one.place, one.collective] == call]


def block_charts(run: Run, rank: int) -> list[Chart]:
    """Return lanes of a block's forward and backward, in order: what computes, and what each collective sends.

    run   one micro-batch; the rank has one block
    """
    charts = []
    for name, groups in BLOCK.items():
        rows, notes, start = {"computes": []}, {}, 0.0
        for group in groups:
            stop = start + (1.5 if isinstance(group[0], str) else 1.0)
            for event in group:
                if isinstance(event, str):
                    rows["computes"].append(Box(start, stop, "computing", event))
                elif size := sent_bytes(calls_of(run, rank, event)) / _OFTEN[event]:
                    label = f"{event[0]} {'ring' if event[0] == 'cp' else event[2].replace('_', '-')}"
                    rows.setdefault(label, []).append(Box(start, stop, event[0]))
                    notes[label] = show_bytes(size)
            start = stop
        charts.append(Chart(f"{name}: in order, not time", rows, start, unit="place", notes=notes, ground=True))
    return charts


@checked
def show_block(run: Run, rank: Index, title: str) -> None:
    """Show a block with every collective of all axes, lane by lane; behind a lane the bytes that each call sends."""
    show_charts(title, *block_charts(run, rank))


def seconds_of_block(run: Run, rank: int, cluster: Cluster) -> dict:
    """Return the modelled seconds of each event of BLOCK over tp, ep and data, and by pass of its two parts.

    Computing is the clock's for a layer: a third of it forward, attention's part (qkv and out in it) by FLOPs.
    """
    config, case = run.config, Case(run, cluster, ENGINES["course"], RATES)
    times = layer_times(case, config.moe is not None)
    of_layers = forward_flops_per_token(config, run.seq_len) - 2 * head_parameters(config)
    scores = attention_flops_per_token(config, run.seq_len)
    share = (2 * config.num_layers * attention_parameters(config) + scores) / of_layers
    computing_s = times.total_s - times.tp_s - times.cp_s - times.ep_s
    passes = {"forward": computing_s / 3, "backward": 2 * computing_s / 3}
    found = {(name, "attn"): share * seconds for name, seconds in passes.items()}
    found |= {(name, "MoE"): (1 - share) * seconds for name, seconds in passes.items()}
    sent = [event for event in _OFTEN if event[0] in ("tp", "ep", "data", "expert_dp")]
    return found | {
        event: calls_s(calls_of(run, rank, event), run.layout, cluster, event[0]) / _OFTEN[event] for event in sent
    }


def step_spans(run: Run, rank: int, cluster: Cluster, blocks: int, micro_batches: int) -> list[Span]:
    """Model so many equal blocks over so many micro-batches, one after the other: lanes compute, tp, ep, data.

    What tp and ep send is waited for. With ZeRO-3 a block is gathered while the one before it computes.

    run   as of `block_charts`; the pipeline's own messages and waits are left out
    """
    seconds, lanes = seconds_of_block(run, rank, cluster), Lanes()
    passes = [name for name in BLOCK for _ in range(blocks)] * micro_batches

    def gather(after_s: float) -> float:
        return [lanes.add("data", "gather", seconds[event], after_s) for event in _GATHERS][-1].stop_s

    now_s = gather(0.0)
    for place, name in enumerate(passes, 1):
        gathered_s = gather(now_s) if place < len(passes) else 0.0
        for event in chain(*BLOCK[name][1:]):
            if event in _SCATTERS:
                lanes.add("data", "reduce-scatter", seconds[event], now_s)
            elif event in seconds:
                now_s = lanes.add(event[0], event[2], seconds[event], now_s).stop_s
            elif (name, event) in seconds:
                now_s = lanes.add(COMPUTE, f"{name} {event}", seconds[name, event], now_s).stop_s
        now_s = max(now_s, gathered_s)
    return lanes.spans
