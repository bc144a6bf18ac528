"""Every picture is shown once and closed, no text lies on another, and it takes few bytes of a notebook."""

from types import SimpleNamespace

import pytest
import torch
from harness import sampled
from pictures import look

from course_lib.cluster.failures import Failures
from course_lib.config import preset
from course_lib.hardware import GPUS, LINKS, Cluster, gpu
from course_lib.layout import SEQUENCE_SHARDINGS, Layout
from course_lib.measure import KINDS, Timeline
from course_lib.minimal.planner import front, plan
from course_lib.minimal.quantize import dynamic_code, normal_code
from course_lib.plan import work_out
from course_lib.plan.measured import measured_job, measured_runs
from course_lib.plots import (
    choosing,
    collectives,
    comparison,
    context,
    curves,
    data_parallel,
    experts,
    holdings,
    memory,
    pipeline,
    precision,
    tiles,
    timeline,
)
from course_lib.run import Run
from course_lib.schedules import Costs
from course_lib.timing import dp_spans, tensor_parallel_layer_spans

POWERS = [[10.0**rank * piece for piece in range(1, 5)] for rank in range(4)]
H100 = Cluster(GPUS["h100"], LINKS["nvlink4"], LINKS["efa"])
TILES = [{"all-gather": ([1], [1, 2]), "gather": ([1], [1, 2])}, {"all-gather": ([2], [1, 2]), "gather": ([2], None)}]
NUMBERS = torch.linspace(-1, 2, 12).tolist()
FLOW = data_parallel.FlowRow("gradients", "gradients", [[10.0, None], [None, 40.0]], "reduce-scatter")
STEP = Timeline([0.0, 1.0, 2.0], {kind: [4, 8, 4] for kind in KINDS}, [(1.0, "backward"), (2.0, "optimizer")])
WHOLE = [[0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23], [*range(6, 18)]]
LENGTHS = {f"cp {cp}": {1024 * k: 5e9 + 2e6 * 1024 * k / cp for k in (16, 64, 256, 1024)} for cp in (1, 2, 4, 8)}
JOB, RUNS = measured_job("8B", 64), measured_runs("8B", 64)
RANKED = plan(JOB)
NAMED = {f"{index} {choosing.cut_name(one.layout)}": one for index, one in enumerate(RANKED[:5], 1)}
LLAMA, HALF = preset("llama-3.1-8b"), Costs(0.5, 0.5, 0.5)
LAYERS = {label: tensor_parallel_layer_spans(Run(LLAMA, Layout(tp=8), 4096), H100, overlap=overlap)
          for label, overlap in (("one by one", False), ("gradient sums behind weight gradients", True))}  # fmt: skip
UNEVEN = [[100 + step * (expert - 3.5) for expert in range(8)] for step in range(24)]
SIXTEEN = Layout.parse("dp=4,tp=2,pp=2,ep=2,micro_batches=2,zero_stage=3")
PUBLISHED = {"TP": {2: 13923, 4: 12421, 8: 10903, 16: 6246, 32: 2146},
             "TP + SP": {2: 14167, 4: 13460, 8: 10889, 16: 6159, 32: 3610}}  # fmt: skip
MODELS = {"TP, modelled": {2: 14e3, 8: 12e3, 32: 2e3}, "TP + SP, modelled": {2: 14e3, 8: 12e3, 32: 3e3}}
ROW = SimpleNamespace(kind="peak", predicted_bytes=9, measured_bytes=10, error_percent=-10.0)

PICTURES = {
    "collectives": lambda: collectives.show_collectives(TILES, "t"),
    "ring, step by step": lambda: collectives.show_ring_all_reduce(POWERS, "t"),
    "squares": lambda: tiles.show_squares({"parameters": 40, "activations": 24}, "4 bytes", "Kinds"),
    "magnitudes": lambda: precision.show_magnitudes({"as they are": 10 ** torch.linspace(-9, 0, 100)}, "fp16"),
    "codes": lambda: precision.show_codes({"dynamic": dynamic_code().tolist(), "NF4": normal_code().tolist()}),
    "blocks": lambda: precision.show_blocks(NUMBERS, {"one scale": [0.0] * 12, "blocks": NUMBERS}, block_size=4),
    "replicas": lambda: data_parallel.show_replicas([[1, 2], [3, 4]], [2.5, 12.5], 7.5, (1, 0.25)),
    "buckets": lambda: data_parallel.show_buckets({"a": 4, "b": 6, "c": 2}, [["c", "b"], ["a"]], "t"),
    "flow": lambda: data_parallel.show_flow([FLOW, FLOW], "t"),
    "memory of a step": lambda: memory.show_step_memory({"stage 0": STEP, "stage 1": STEP}, "t"),
    "heads for tokens": context.show_heads_for_tokens,
    "mask": context.show_mask,
    "documents": lambda: context.show_documents([8, 12, 4], {"whole": WHOLE, "the same": WHOLE}),
    "work": lambda: context.show_work(SEQUENCE_SHARDINGS),
    "memory by length": lambda: context.show_memory_by_length(LENGTHS, gpu("h100"), "t"),
    "rows per expert": lambda: experts.show_rows_per_expert({"one": 128, "EP": 8192}, 7168, 2048, gpu("h100")),
    "front": lambda: choosing.show_front(RANKED, front(RANKED)),
    "by memory": lambda: choosing.show_by_memory(NAMED, "t"),
    "losses": lambda: choosing.show_losses({"one": [3.0, 2.0, 1.5], "other": [3.0, 2.5, 2.0]}, "Two rules"),
    "predicted": lambda: choosing.show_predicted(RUNS, [work_out(JOB, run.layout) for run in RUNS]),
    "scaling": lambda: choosing.show_scaling([8, 16, 32], {"fixed": [0.4, 0.3, 0.2], "grows": [0.4, 0.41, 0.4]}),
    "checkpoints": lambda: choosing.show_checkpoint_interval(Failures(10_000.0, 60.0, 300.0), "t"),
    "timeline": lambda: memory.show_memory_timeline(STEP, "t"),
    "comparison": lambda: comparison.show_comparison([ROW, ROW], "t"),
    "overlap": lambda: timeline.show_overlap({"a": dp_spans(1, 2, [0.5] * 3), "b": dp_spans(1, 2, [1.5])}, "t"),
    "a layer in time": lambda: timeline.show_overlap(LAYERS, "t"),
    "a layer in time, with letters": lambda: timeline.show_overlap(LAYERS, "t", keys=True),
    "alpha-beta": lambda: curves.show_alpha_beta(8, LINKS["efa"], title="t"),
    "throughput": lambda: curves.show_curves(MODELS, PUBLISHED, "t", "GPUs", "tokens per second and GPU"),
    "balance": lambda: experts.show_balance({"no balancing": UNEVEN, "aux": [[1] * 8] * 9, "bias": UNEVEN}),
    "traffic": lambda: experts.show_traffic([[5, 3, 2, 1], [1, 7, 2, 2], [3, 3, 1, 0], [4, 1, 1, 9]], 8192, "t"),
    "holdings": lambda: holdings.show_holdings(preset("toy-moe"), SIXTEEN),
}
NO_ROOM = {
    "at least 1 row": lambda: experts.show_rows_per_expert({}, 8, 8, gpu("h100")),
    "the layers of each stage": lambda: pipeline.show_stages_of_model([4, 4], [0, 1, 2]),
    "no simulation to draw": lambda: pipeline.show_schedules([]),
    "no bar to draw": lambda: choosing.show_options([]),
    "no option": lambda: choosing.show_front([], []),
    "one option for each run": lambda: choosing.show_predicted(RUNS, []),
    "as many values": lambda: choosing.show_scaling([8], {"a": [0.1, 0.2]}),
    "losses is empty": lambda: choosing.show_losses({}, "t"),
}


@pytest.mark.parametrize("said", NO_ROOM)
def test_what_cannot_be_drawn_is_told_in_a_sentence(said):
    with pytest.raises(ValueError, match=said):
        NO_ROOM[said]()


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*PICTURES], 12))
def test_a_picture_is_shown_once_with_no_text_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, 160_000, dpi="figure")
