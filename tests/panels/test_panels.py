"""Panels: their numbers are those of the package's functions, their pictures fit and have words, they are quick."""

import json
import re
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from datetime import date

import pytest
import torch

from course_lib.authoring import ROOT
from course_lib.config import capacity_of, preset
from course_lib.estimate import estimate
from course_lib.float_formats import FORMATS
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.layout.experts import ExpertLayout
from course_lib.memory.activations import block_terms
from course_lib.memory.budget import budgets
from course_lib.minimal.eight_bits import quantized
from course_lib.model.moe import keep, limit_groups
from course_lib.panels import asked, one_gpu, runs
from course_lib.panels.collectives import COLLECTIVE, OVERLAP
from course_lib.panels.experts import EXPERTS, tokens_of
from course_lib.panels.one_gpu import BLOCKS, MEMORY, OPTIMIZER, PRECISION, RECOMPUTE, SCALED, SCALES, add, beside
from course_lib.panels.plans import GAME, JOBS, PLAN, job_of, job_of_day, layout_for, listed
from course_lib.panels.record import Control, Panel
from course_lib.panels.ring import PROGRAMS, RING, STEPS
from course_lib.panels.svg import COLORS, LARGEST_HEIGHT, WIDTH, Chart, bars, ticks_of
from course_lib.panels.synthetic_routing import best_groups, keep_fitting, synthetic_routing
from course_lib.plan import search, work_out
from course_lib.run import OPTIMIZERS, Run
from course_lib.tensors import count_parameters
from course_lib.timing import collective_s
from course_lib.traffic import ring_all_reduce_bytes, sent
from course_lib.traffic.routing import moe_traffic, plain_rows

PANELS = {listed.panel.title: listed.panel for listed in asked.PANELS.values()}
LLAMA_8B = preset("llama-3.1-8b")
REGATHERED = Layout(tp=8, sequence_parallel=True, regather=True)
FIVE_D = Layout(dp=4, tp=4, pp=2, zero_stage=1, sequence_parallel=True, micro_batches=8)
P8 = count_parameters(LLAMA_8B)
EFA = Cluster(gpu("h100"), link("nvlink4"), link("efa"))


def moves(panel: Panel) -> list[dict]:
    """Every change of one control from the start."""
    return [
        {name: value}
        for name, control in panel.controls.items()
        for _, value in control.options
        if control.kind in ("list", "slider")
    ]


def amounts(chart: Chart) -> dict[str, dict[str, float]]:
    """label -> part -> how much of it."""
    return {
        label: {
            part: sum(one.stop - one.start for one in boxes if one.part == part) for part in {b.part for b in boxes}
        }
        for label, boxes in chart.rows.items()
    }


def sums(chart: Chart) -> dict[str, float]:
    return {label: sum(parts.values()) for label, parts in amounts(chart).items()}


def texts_of(svg: str) -> list[ET.Element]:
    return [one for one in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text") if one.text]


# ---------------------------------------------------------------- what holds for all panels


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_each_change_of_a_control_gives_a_picture_that_fits_with_its_words_or_says_why_not(panel):
    shown = 0
    for change in [{}, *moves(panel)]:
        answer = panel.answer(**change)
        if not answer.possible:
            assert answer.said.startswith("Not possible. ") and answer.svg == "", change
            continue
        root = ET.fromstring(answer.svg)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        assert (width, height <= LARGEST_HEIGHT) == (WIDTH, True), (change, height)
        title, words = (root.findtext(f"{{http://www.w3.org/2000/svg}}{name}") for name in ("title", "desc"))
        assert title == panel.title and words == f"{title}. {answer.said}" and answer.said.endswith(".")
        assert all(
            -1 < float(one.attrib["x"]) < WIDTH + 1 and float(one.attrib["y"]) < height for one in texts_of(answer.svg)
        )
        shown += 1
    assert shown > len(moves(panel)) / 2


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_values_are_plain_and_others_than_the_controls_have_are_refused(panel):
    assert json.loads(json.dumps(panel.start)) == panel.start
    name = next(iter(panel.controls))
    with pytest.raises(ValueError, match=f"{name} is .*; choose from"):
        panel.answer(**{name: None})
    with pytest.raises(ValueError, match="this panel has no 'height'"):
        panel.answer(height=3)
    assert panel.answer() == panel.answer(**panel.start)


def slowness(reference_s: float = 0.0105) -> float:
    """How many times longer than on two quiet cores a loop takes here and now: other work must not fail a test."""
    start = time.process_time()
    sum(place * place for place in range(200_000))
    return max(1.0, (time.process_time() - start) / reference_s)


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_one_change_takes_20_ms(panel):
    """But for a model that is seen for the first time, whose tensors are listed once."""
    panel.answer()
    taken_ms = []
    for change in moves(panel):
        speed, start = slowness(), time.process_time()
        panel.answer(**change)
        if not {"model", "job"} & set(change):
            taken_ms.append(1000 * (time.process_time() - start) / speed)
    slow = [round(ms) for ms in taken_ms if ms > 20]
    assert statistics.median(taken_ms or [0]) < 15 and len(slow) <= len(taken_ms) / 20, slow


def test_panels_need_neither_torch_nor_numpy_matplotlib_or_yaml():
    """All of them drawn, and the planner's search, in a process where these cannot be imported: a browser has none."""
    code = (
        "import sys, importlib\n"
        "for name in ('torch', 'numpy', 'matplotlib', 'yaml', 'ipywidgets', 'IPython'): sys.modules[name] = None\n"
        "from course_lib.panels import asked, plans\n"
        "from course_lib.panels.record import Panel, answer_of\n"
        "found = [one for name, module in list(sys.modules.items()) if name.startswith('course_lib.panels.') "
        "for one in vars(module).values() if isinstance(one, Panel)]\n"
        "assert all(panel.answer().possible for panel in found)\n"
        "search = plans.PLAN.slow['Search']\n"
        "assert answer_of('', lambda: search(**plans.PLAN.start)).possible\n"
        "print(len({panel.title for panel in found}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.strip() == str(len(PANELS)), done.stderr[-2000:]


def test_colours_follow_the_theme_of_jupyter_and_else_the_readers_and_are_light_without_styles():
    svg = MEMORY.answer().svg
    found = {name: re.search(rf"light={name}\] svg.course-panel{{([^}}]*)}}", svg)[1] for name in ("true", "false")}
    assert "--ground:#fff" in found["true"] and "--ground:#181818" in found["false"]
    assert f"prefers-color-scheme:dark){{svg.course-panel{{{found['false']}" in svg
    assert all(one.attrib.get("fill", "").startswith("#") for one in texts_of(svg))


def test_axes_are_linear_from_0_and_a_bar_is_as_long_as_its_bytes():
    svg = runs.TENSOR.answer().svg
    memory = runs.TENSOR.answer().charts[0]
    assert ticks_of(0, 141, 8) == [0, 20, 40, 60, 80, 100, 120, 140]
    boxes = [
        one
        for one in ET.fromstring(svg).iter()
        if one.tag.endswith("rect") and one.attrib.get("fill") == COLORS["optimizer"]
    ]
    widths = [float(one.attrib["width"]) for one in boxes][: len(memory.rows)]
    sizes = [parts["optimizer"] for parts in amounts(memory).values()]
    assert [width / widths[0] for width in widths] == pytest.approx([size / sizes[0] for size in sizes], abs=0.01)


def test_what_is_written_is_escaped():
    words = Control("word", (), "", "text")
    panel = Panel("a < b", {"word": words}, lambda word: ([bars(word, {word: {"data": 1.0}})], word))
    assert ET.fromstring(panel.answer(word="<b>&").svg).findtext("{http://www.w3.org/2000/svg}desc") == "a < b. <b>&"


# ---------------------------------------------------------------- numbers


def test_the_memory_panel_is_the_budget_against_the_gpus():
    needed = budgets(Run(LLAMA_8B, Layout(), 4096))[0]
    answer = MEMORY.answer()
    (form,) = answer.charts
    assert sums(form)["largest moment"] == needed.total_bytes
    assert amounts(form)["between steps"]["optimizer"] == needed.optimizer
    assert form.marks == {gpu(key).name: gpu(key).usable_bytes for key in one_gpu.COMPARED}
    assert "141.4 GB = 131.7 GiB" in answer.said and "Fits: H200 SXM 141 GB, B200 (HGX) 180 GB." in answer.said
    assert "128.5 GB (119.7 GiB) for 8,030,261,248 parameters" in answer.said
    assert "choose at most 1024" in MEMORY.answer(model="gpt2", seq_len=2048).said


def test_the_panel_of_optimizers_has_a_bar_for_each():
    (form,) = OPTIMIZER.answer(recompute="full").charts
    for name in OPTIMIZERS:
        run = Run(LLAMA_8B, Layout(recompute="full"), 4096, optimizer=name)
        assert sums(form)[name] == budgets(run)[0].total_bytes


def test_a_collective_is_the_fastest_way_and_says_from_where_latency_decides():
    answer = COLLECTIVE.answer()
    ways, shares = answer.charts
    assert sums(ways)["ring, LL"] == pytest.approx(collective_s("all_reduce", 10**6, 8, EFA))
    assert f"a ring sends {ring_all_reduce_bytes(10**6, 8) / 1e6:.2f} MB a rank" in answer.said
    over = COLLECTIVE.answer(ranks=64)
    assert "64 ranks on 8 nodes" in over.charts[0].title
    assert min(sums(over.charts[0]).values()) == pytest.approx(collective_s("all_reduce", 10**6, 64, EFA))
    assert list(sums(shares).values()) == pytest.approx([1] * len(shares.rows))
    first = next(size for size, parts in amounts(shares).items() if parts["latency"] < 0.5)
    assert f"Latency decides below {first}" in answer.said


@pytest.mark.parametrize("name", one_gpu.SHOWN)
def test_formats_round_as_torch_does(name):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    values = [[value for _, value in control.options] for control in PRECISION.controls.values()]
    for weight, update in [(w, u) for w in values[0] for u in values[1]]:
        stored, change = (torch.tensor(value, dtype=torch.float64).to(dtype) for value in (weight, update))
        assert add(name, weight, update) == (stored.item(), change.item(), (stored + change).item()), (weight, update)


def test_precision_says_what_is_swallowed_and_what_underflows():
    said = lambda **values: PRECISION.answer(**values).said  # noqa: E731
    assert "bf16: 1 + 0.0009995 gives 1, the update is swallowed." in said()
    assert "fp16: 1 + 0 gives 1, the update underflows to zero." in said(update=1e-8)
    assert "overflows" in said(weight=1e5, update=1.0) and "fp16: 0 + 0.001" in said(weight=1e-8)


@pytest.mark.parametrize("name", SCALED)
def test_one_scale_stores_what_the_lesson_s_rounding_does(name):
    numbers, outliers = ([value for _, value in control.options] for control in SCALES.controls.values())
    for number, outlier in [(n, o) for n in numbers for o in outliers]:
        block = torch.tensor([[number, outlier]], dtype=torch.float64)
        assert beside(name, number, outlier) == pytest.approx(quantized(block, FORMATS[name])[0, 0].item(), rel=1e-12)


def test_recomputed_blocks_keep_their_input_alone_and_the_last_to_be_reached_is_the_fullest():
    kept = lambda **values: list(sums(RECOMPUTE.answer(**values).charts[1]).values())  # noqa: E731
    config, tokens = preset("llama-3.2-1b"), 4096
    block = tokens * sum(block_terms(config, tokens, "fused", "bf16-master").values())
    assert kept() == pytest.approx([block * (layer + 1) for layer in range(BLOCKS)], rel=1e-3)
    entered = tokens * config.d_model * 2
    everything = kept(blocks="1" * BLOCKS)
    assert everything == pytest.approx([block + entered * layer for layer in range(BLOCKS)], rel=1e-3)
    some = RECOMPUTE.answer(blocks="1" + "0" * (BLOCKS - 1))
    assert "1 of 16 blocks are computed again" in some.said and kept(blocks="1" + "0" * 15)[0] == pytest.approx(
        block, rel=1e-3
    )


def test_data_parallelism_counts_tokens_and_shows_what_is_not_hidden():
    late, early = OVERLAP.answer(overlap=False), OVERLAP.answer()
    parts = {}
    for name, answer in (("late", late), ("early", early)):
        boxes = answer.charts[0].rows["communication"]
        parts[name] = {
            part: sum(b.stop - b.start for b in boxes if b.part == part) for part in ("communication", "not hidden")
        }
    assert parts["late"]["communication"] == 0 < parts["early"]["not hidden"] < parts["late"]["not hidden"]
    assert sum(parts["early"].values()) == pytest.approx(sum(parts["late"].values()))
    size = 4 * count_parameters(preset("llama-3.2-1b")) / 12
    assert sum(parts["late"].values()) == pytest.approx(12 * collective_s("all_reduce", size, 8, link("efa")))
    assert "Global batch 65,536 tokens" in early.said and "262,144 tokens" in OVERLAP.answer(micro_batches=4).said
    alone = OVERLAP.answer(dp=1)
    assert alone.charts[0].rows["communication"] == [] and "100% of the ideal" in alone.said


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("panel", "label", "layout", "seq_len", "engine"),
    [
        (runs.ZERO, "stage 3", Layout(dp=8, zero_stage=3), 4096, "course"),
        (runs.ZERO, "plain DP", Layout(dp=8), 4096, "course"),
        (runs.TENSOR, "tp 8", Layout(tp=8), 4096, runs.UNHIDDEN),
        (runs.TENSOR_SEQUENCE, "gathered again", REGATHERED, 65_536, runs.UNHIDDEN),
        (runs.LAYOUT, "layout", FIVE_D, 8192, "megatron"),
    ],
    ids=["stage 3", "plain", "tp", "sp", "layout"],
)  # fmt: skip
def test_bars_of_memory_and_time_are_the_estimate(panel, label, layout, seq_len, engine):
    answer, run = panel.answer(), Run(LLAMA_8B, layout, seq_len)
    between = {runs.LAYOUT.title: "ib-ndr400"}.get(panel.title, "efa")
    found = estimate(run, Cluster(gpu("h100"), link("nvlink4"), link(between)), engine)
    assert amounts(answer.charts[0])[label] == pytest.approx(found.bytes_by_kind)
    assert sums(answer.charts[-1])[label] == pytest.approx(found.step_s)
    assert answer.charts[0].marks == {gpu("h100").name: gpu("h100").usable_bytes}
    if label == answer.charts[0].chosen:
        assert found.why in answer.said and f"{found.tokens_per_s_per_gpu:,.0f} tokens per second" in answer.said


@pytest.mark.parametrize(("stage", "trips"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_stage_of_zero_sends_two_or_three_times_the_parameters(stage, trips):
    said = runs.ZERO.answer(zero_stage=stage).said
    assert f"Sent are {trips}.00 times the parameters' bytes" in said
    assert "from each GPU: nothing" in runs.ZERO.answer(zero_stage=stage, dp=1).said


def test_stage_2_needs_less_than_stage_1_only_with_micro_batches():
    alone, many = (sums(runs.ZERO.answer(micro_batches=count).charts[0]) for count in (1, 16))
    assert alone["stage 1"] == pytest.approx(alone["stage 2"])
    saved = many["stage 1"] - many["stage 2"]
    assert 0.9 * 2 * P8 * 7 / 8 < saved <= 2 * P8 * 7 / 8


def test_offload_moves_bytes_to_the_host_and_parameters_only_at_stage_3():
    answer = runs.ZERO.answer(offload="optimizer, parameters on disk")
    held = amounts(answer.charts[0])
    assert "optimizer" not in held["stage 3"] and "parameters" in held["stage 2"]
    assert "On disk: 14.1 GB for each GPU, 112 GB for all." in answer.said
    refused = runs.ZERO.answer(zero_stage=2, offload="optimizer, parameters on disk")
    assert not refused.possible and "choose zero_stage 3" in refused.said


def test_tp_begins_alone_and_heads_that_do_not_divide_are_answered_with_sizes_that_do():
    answer = runs.TENSOR.answer()
    assert list(answer.charts[0].rows) == ["tp 1", "tp 4", "tp 8", "tp 16"]
    assert not any("SP" in label for label in answer.charts[0].rows) and "sequence_parallel" not in runs.TENSOR.controls
    assert "choose tp from 1, 2, 4, 8, 16, 32" in runs.TENSOR.answer(tp=64).said
    held = sums(runs.TENSOR_SEQUENCE.answer().charts[0])
    assert [held[mode] for mode in runs.MODES] == sorted(held.values(), reverse=True)
    assert held["TP"] > gpu("h100").usable_bytes > held["gathered again"]


def test_context_compares_methods_and_leaves_out_ulysses_without_heads():
    assert list(runs.CONTEXT.answer().charts[0].rows) == ["cp 1", "cp 4, ring", "cp 4, all_gather"]
    assert list(runs.CONTEXT.answer(tp=2).charts[0].rows)[-1] == "cp 4, ulysses"
    assert not runs.CONTEXT.answer(cp_method="ulysses").possible
    even, uneven = (
        sums(runs.CONTEXT.answer(cp_sharding=name).charts[1])["cp 4, ring"] for name in ("zigzag", "contiguous")
    )
    assert uneven > 1.3 * even


def test_a_layout_says_where_its_groups_lie_and_shows_bytes_by_axis():
    answer = runs.LAYOUT.answer()
    assert "32 ranks on 4 nodes. In a node: tp. Over the network: pp, dp." in answer.said
    expected = sent(Run(LLAMA_8B, FIVE_D, 8192))
    assert amounts(answer.charts[1])["sent"] == {axis: size for axis, size in expected.items() if axis != "world"}
    assert "nearest: ep=1" in runs.LAYOUT.answer(ep=2).said


def test_known_layouts_are_shown_with_what_is_published_of_them():
    for name, (values, note) in runs.KNOWN.items():
        answer = runs.LAYOUT.answer(**values)
        assert answer.possible and answer.said.endswith(note), name
    llama = runs.LAYOUT.answer(**runs.KNOWN["Llama 3 405B, 16,384 GPUs"][0])
    causal = float(re.search(r"\(([\d.]+)% if half of attention counts", llama.said)[1])
    assert "16,384 ranks" in llama.said and "one layer less at both ends" in llama.said
    assert causal == pytest.approx(41, rel=0.15)
    deepseek = runs.KNOWN["DeepSeek-V3, 2,048 GPUs"][0]
    held = [sums(runs.LAYOUT.answer(**deepseek | change).charts[0])["layout"] for change in ({}, {"schedule": "1f1b"})]
    assert held[1] < gpu("h100").usable_bytes < held[0]


def test_a_layout_by_hand_and_the_search_are_the_planners_own():
    job = job_of(PLAN.start)
    by_hand, found = PLAN.answer(tp=2, micro_batch=2), search(job)
    assert f"{found.best.layout}: {found.best.why}" in by_hand.said  # it happens to be the best
    charts, said = PLAN.slow["Search"](**PLAN.start)
    assert f"The planner takes {found.best.layout}" in said and len(charts[0].rows) >= 4
    assert "does not divide" in PLAN.answer(micro_batch=16, sequences=64, tp=1).said


# ---------------------------------------------------------------- a ring, a game


def test_the_ring_ends_with_the_sums_and_marks_what_a_wrong_program_holds():
    words = lambda **values: [[box.words for box in row] for row in RING.answer(**values).charts[0].rows.values()]  # noqa: E731
    parts = lambda **values: {box.part for row in RING.answer(**values).charts[0].rows.values() for box in row}  # noqa: E731
    assert words(step=0)[1] == ["10", "20", "30", "40"]
    assert words(step=STEPS) == [["1111", "2222", "3333", "4444"]] * 4
    for _, program in PROGRAMS:
        wrong = [step for step in range(STEPS + 1) if "wrong" in parts(step=step, program=program)]
        assert wrong == ([] if program == "right" else list(range(1, STEPS + 1))), program
    assert words(step=STEPS, program="left")[0] == ["3131", "4242", "1313", "2424"]  # digits of other pieces
    assert "rank 0 has 3000 as piece 2, not 3003" in RING.answer(step=1, program="stores").said


def test_every_day_has_a_job_with_a_layout_that_fits():
    days = [date.fromordinal(730_000 + day) for day in range(len(JOBS))]
    assert sorted(map(job_of_day, days)) == sorted(JOBS) and len(JOBS) > 20
    sizes = {"cp": 2, "pp": 1, "ep": 1, "zero_stage": 3, "micro_batch": 1, "v": 1, "recompute": "full"}
    for name, job in JOBS.items():
        assert any(work_out(job, layout_for(job, sizes | {"tp": tp})).fits for tp in (1, 2)), name


def test_the_game_shows_the_estimate_and_ranks_a_layout_in_the_list_of_the_search():
    name = next(one for one in JOBS if "8b, 16 x A100" in one)
    job, found = JOBS[name], listed(name)
    values = GAME.start | {"job": name, "tp": 1}
    yours = work_out(job, Layout(dp=16, zero_stage=3, micro_batches=8))
    answer = GAME.answer(**values)
    assert sums(answer.charts[1])["yours"] == pytest.approx(yours.step_s)
    assert f"trains {yours.tokens_per_s:,.0f} tokens per second" in answer.said and "It waits" in answer.said
    _, said = GAME.slow["Rank"](**values)
    faster = sorted(one.step_s for one in found.ranked).index(pytest.approx(yours.step_s))
    assert said.startswith(f"Rank {faster + 1} of the {len(found.ranked)} fastest that fit")
    assert f"takes {yours.step_s / found.fastest.step_s - 1:.1%} longer than the best" in said
    _, said = GAME.slow["Rank"](**values | {"tp": 8, "cp": 2, "recompute": "full"})
    assert said.startswith(f"All {len(found.ranked)} layouts of the list are faster")
    assert "does not fit" in GAME.slow["Rank"](**values | {"zero_stage": 0})[1]
    assert "choose smaller sizes" in GAME.answer(**values | {"tp": 8, "pp": 4}).said
    assert "choose a smaller micro-batch" in GAME.answer(tp=1, micro_batch=8).said


# ---------------------------------------------------------------- experts


def test_experts_are_limited_and_dropped_as_the_router_does_it():
    layout, limit = ExpertLayout(16, 4, 1), 2
    score = torch.rand(50, 16, generator=torch.Generator().manual_seed(1))
    kept = limit_groups(score, 4, limit, 4).topk(4, dim=1).indices
    for row, chosen in zip(score.tolist(), kept.tolist(), strict=True):
        assert {expert // 4 for expert in chosen} <= best_groups(row, 4, limit, 4)
    routing = synthetic_routing(layout, 32, 4, 1.0, limit)
    for expert_Tk in routing:
        assert all(len(set(row)) == 4 and len({e // 4 for e in row}) <= limit for row in expert_Tk)
        room = capacity_of(32, 4, 16, 1.0)
        fits = keep(torch.tensor(expert_Tk), 16, room)
        assert keep_fitting(expert_Tk, room) == torch.where(fits, torch.tensor(expert_Tk), -1).tolist()


@pytest.mark.parametrize("method", ["plain", "once_per_rank", "once_per_node", "padded"])
def test_bytes_of_experts_are_those_of_the_routing(method):
    capacity = 1.0 if method == "padded" else 0.0
    answer = EXPERTS.answer(method=method, capacity=capacity, ep=8, experts=32)
    layout, tokens = ExpertLayout(32, 8, 4), tokens_of(32, 8)
    routing = synthetic_routing(layout, tokens, 4, 0.5)
    room = capacity_of(tokens, 4, 32, capacity) if capacity else None
    traffic = moe_traffic([keep_fitting(e, room) for e in routing], layout, 4096, method, capacity=room)
    load, columns = map(amounts, answer.charts)
    assert [(one.get("within the node", 0), one.get("between nodes", 0)) for one in columns.values()] == [
        (s.within_bytes, s.between_bytes) for s in map(traffic.forward, range(8))
    ]
    counts = [sum(column) for column in zip(*plain_rows(routing, ExpertLayout(32, 32)), strict=True)]
    assert [sum(one.values()) for one in load.values()] == counts and sum(counts) == 8 * tokens * 4
    assert ("dropped" in answer.said) == bool(capacity)


def test_one_rank_sends_nothing_and_what_does_not_divide_is_said():
    alone = EXPERTS.answer(ep=1, nodes=1)
    assert len(alone.charts) == 1 and "One rank alone sends nothing." in alone.said
    assert "choose fewer nodes" in EXPERTS.answer(nodes=16, ep=8).said
    assert "choose 1 to 4" in EXPERTS.answer(experts=4, top_k=6, ep=4).said
