"""The search finds what working out every layout finds, and says truly why others lost."""

import random
import sys
from dataclasses import replace

import pytest
from random_layouts import LLAMA, MODELS

from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.budget import budgets, fullest_budget
from course_lib.plan import Job, explain, search, work_out
from course_lib.plan.search import _nearest_to_fit, advised, differences, front, least_s
from course_lib.plan.space import leaner, shapes, sharded
from course_lib.predict import predicted_bytes
from course_lib.predict.frameworks import FRAMEWORKS, least_memory_of

H100 = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
SMALL_GPU = replace(gpu("h100"), usable_bytes=2 * 2**30)  # of which 1.1 to 1.9 GiB are no tensors
JOB = Job(replace(LLAMA, d_model=512, num_heads=8, d_ff=2048, head_dim=64), H100, 16, 512, 32 * 512)
TIGHT = replace(
    JOB,
    cluster=replace(H100, gpu=SMALL_GPU, gpus_per_node=4),
    config=replace(JOB.config, d_model=1024, head_dim=128, vocab_size=8192, num_layers=16),
)


def every_layout(job: Job) -> list[Layout]:
    """All shapes under all ZeRO stages, lean and leaner."""
    found = dict.fromkeys(one for shape in shapes(job) for one in sharded(job, shape))
    todo = list(found)
    while todo:
        for fewer in leaner(todo.pop()):
            if fewer not in found:
                found[fewer] = None
                todo.append(fewer)
    return list(found)


@pytest.fixture(scope="module")
def tight():
    return search(TIGHT)


def test_shapes_divide_gpus_and_batch():
    found = list(shapes(JOB))
    assert len(found) == len(set(found)) > 50
    for layout in found:
        layout.check_model(JOB.config, JOB.seq_len)
        assert layout.world_size == 16 and layout.sequences_per_step == 32 and layout.tp <= 8
    assert {layout.schedule for layout in found} == {"1f1b", "interleaved", "zb_h1"}
    experts = {layout.ep for layout in shapes(replace(JOB, config=MODELS["experts"]))}
    assert experts == {1, 2, 4, 8}


def test_zero_has_all_stages_and_hsdp_inside_a_node():
    found = sharded(JOB, Layout(dp=16, micro_batches=2))
    assert [(one.zero_stage, one.dp_replicate) for one in found] == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)]
    split = sharded(JOB, Layout(dp=8, pp=2, schedule="zb_h1", micro_batches=4))
    assert [one.zero_stage for one in split] == [0, 1]


@pytest.mark.slow
def test_the_best_is_the_best_of_all(tight):
    worked = [work_out(TIGHT, layout) for layout in random.Random(0).sample(every_layout(TIGHT), 50)]
    fitting = [option for option in worked if option.fits]
    assert fitting and len(fitting) < len(worked)
    assert tight.best.tokens_per_s >= max(option.tokens_per_s for option in fitting)
    assert tight.best.fits and work_out(TIGHT, tight.best.layout) == tight.best


@pytest.mark.exhaustive
def test_the_best_is_the_best_of_each_and_every_one(tight):
    worked = [work_out(TIGHT, layout) for layout in every_layout(TIGHT)]
    assert tight.best.tokens_per_s == max(option.tokens_per_s for option in worked if option.fits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=8,micro_batches=4", "pp x dp x cp x tp is 8; it must be 16, the job's GPUs"),
        ("dp=32", "pp x dp x cp x tp is 32; it must be 16, the job's GPUs"),
        ("dp=16", "dp x micro_batch x micro_batches is 16; it must be 32, the sequences of the job's global batch"),
    ],
)
@pytest.mark.parametrize("framework", [None, "nanotron"])
def test_a_layout_of_other_gpus_or_another_batch_is_refused(text, message, framework):
    with pytest.raises(ValueError, match=message):
        work_out(replace(JOB, framework=framework), Layout.parse(text))


@pytest.mark.slow
def test_no_step_takes_less_than_the_bound():
    for layout in random.Random(1).sample(every_layout(TIGHT), 30):
        option = work_out(TIGHT, layout)
        assert least_s(TIGHT, layout) <= option.step_s * (1 + 1e-9), layout
        for fewer in leaner(layout):
            assert least_s(TIGHT, layout) <= least_s(TIGHT, fewer) * (1 + 1e-9), fewer


@pytest.mark.slow
def test_a_bound_that_is_too_high_loses_the_best(tight, monkeypatch):
    """Planted: of the layouts that the best is one of, a bound ten times as high."""
    best = tight.best.layout

    def wrong_s(job, one):
        return least_s(job, one) * (10 if (one.tp, one.pp, one.cp) == (best.tp, best.pp, best.cp) else 1)

    monkeypatch.setattr(sys.modules["course_lib.plan.search"], "least_s", wrong_s)
    assert search(TIGHT, 5).best.tokens_per_s < tight.best.tokens_per_s


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,zero_stage=2",
        "dp=2,zero_stage=3",
        "pp=4",
        "pp=4,schedule=interleaved,v=2,recompute=full",
        "pp=4,schedule=zb_h1,tp=2,sequence_parallel=true",
    ],
)
def test_few_micro_batches_and_three_ranks_say_how_much_memory(text):
    layout = replace(Layout.parse(f"{text},micro_batches=8"), micro_batches=32)
    run = TIGHT.run(layout)
    whole = max(budgets(run), key=lambda budget: budget.total_bytes)
    found = fullest_budget(run)
    assert found.total_bytes == whole.total_bytes
    assert found.at_peak == whole.at_peak


def test_ranked_front_and_rejected_are_what_they_say(tight):
    speeds = [option.tokens_per_s for option in tight.ranked]
    assert speeds == sorted(speeds, reverse=True) and tight.ranked[0] is tight.best
    for option in tight.front:
        assert not any(other.memory_bytes < option.memory_bytes and other.mfu > option.mfu for other in tight.ranked)
    assert front(tight.ranked[:1]) == tight.ranked[:1]
    assert len(tight.rejected) == 2
    for rejected in tight.rejected:
        option = work_out(TIGHT, rejected.layout)
        assert rejected.reason.startswith("does not fit") == (not option.fits)
        assert option.fits or option.memory_in_words in rejected.reason


def test_of_layouts_that_differ_as_little_those_that_need_least_memory_are_told(tight):
    best = tight.best.layout
    others = [replace(best, tp=tp, dp=best.dp * best.tp // tp) for tp in (1, 2)] + [replace(best, micro_batch=4)]
    ranked = _nearest_to_fit(TIGHT, best, others)
    few = [one for one in others if differences(best, one) == min(differences(best, other) for other in others)]
    assert ranked[0] == min(few, key=lambda one: fullest_budget(TIGHT.run(one)).total_bytes)
    assert [differences(best, one) for one in ranked] == sorted(differences(best, one) for one in others)[:2]
    assert _nearest_to_fit(TIGHT, best, others[:1]) == others[:1] and _nearest_to_fit(TIGHT, best, []) == []


def test_where_all_fit_the_rejected_are_slower():
    found = search(JOB, 10)
    assert all(" slower: " in rejected.reason for rejected in found.rejected)


def test_a_framework_s_own_rates_rank_its_runs():
    found = search(Job(preset("llama-3.1-8b"), H100, 16, 4096, 256 * 4096, framework="nanotron"))
    assert found.best.layout.cp == 1 and found.best.layout.schedule == "1f1b"
    assert "launches and tp" in found.best.seconds_by_part


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["nanotron", "torchtitan"])
def test_by_the_rates_of_a_framework_all_that_fit_are_ranked(framework):
    job = replace(TIGHT, framework=framework)
    todo = [layout for shape in shapes(job) for layout in sharded(job, shape)]
    worked = []
    for layout in todo:
        worked.append(work_out(job, layout))
        steps = {"none": "selective", "selective": "full"} if framework == "torchtitan" else {}
        if not worked[-1].fits and layout.recompute in steps:
            todo.append(replace(layout, recompute=steps[layout.recompute]))
    fitting = {option.layout: option for option in worked if option.fits}
    found = search(job)
    assert {option.layout: option for option in found.ranked} == fitting
    assert found.num_tried == len(worked) > len(fitting)
    assert {layout.recompute for layout in todo} == ({"none"} if framework == "nanotron" else {"none", *steps, "full"})


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_what_a_framework_holds_at_least_is_no_more_than_it_is_predicted_to_hold(framework):
    job = replace(TIGHT, framework=framework)
    layouts = [layout for layout in every_layout(job) if not layout.regather]
    for layout in random.Random(3).sample(layouts, 40):
        held = sum(predicted_bytes(job.run(layout), job.cluster, framework).values())
        assert least_memory_of(job.run(layout), FRAMEWORKS[framework]) <= held, layout


def test_of_layouts_that_fitted_rates_cannot_tell_apart_the_one_of_least_memory_is_advised():
    found = search(Job(preset("llama-3.1-8b"), H100, 64, 4096, 256 * 4096, framework="nanotron"))
    fastest = found.ranked[0]
    near = [one for one in found.ranked if one.tokens_per_s >= 0.96 * fastest.tokens_per_s]
    assert found.best is not fastest and len(near) < len(found.ranked)
    assert found.best.memory_bytes == min(one.memory_bytes for one in near)
    assert any("needs the least memory" in line for line in explain(found))
    assert advised(found.ranked[:1]) is fastest
    modelled = search(JOB, 10)
    assert modelled.best is modelled.ranked[0]
    assert not any("needs the least memory" in line for line in explain(modelled))


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match="choose 16384 or 20480"):
        replace(JOB, seq_len=4096, batch_tokens=17_000)
    with pytest.raises(ValueError, match="num_gpus .12. must fill nodes of 8; choose 8 or 16"):
        replace(JOB, num_gpus=12)
    with pytest.raises(ValueError, match="divides 16 GPUs and 1 sequences"):
        search(replace(JOB, batch_tokens=512, config=replace(JOB.config, num_heads=1, num_kv_heads=1, num_layers=1)))
    with pytest.raises(ValueError, match="choose more GPUs"):
        search(Job(preset("llama-3.1-405b"), H100, 8, 8192, 8 * 8192))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "seq_len", "batch"), [("llama-3.1-405b", 8192, 512), ("deepseek-v3", 4096, 4096)])
def test_of_512_gpus_few_layouts_are_walked_moment_by_moment(model, seq_len, batch, monkeypatch):
    """What makes a search long: ledgers of whole stages, and clocks of pipelines."""
    module, walked = sys.modules["course_lib.plan.search"], []

    def noting(name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: walked.append(name) or real(*given))

    for name in ("fullest_budget", "option_of"):
        noting(name)
    found = search(Job(preset(model), H100, 512, seq_len, batch * seq_len))
    assert found.best.fits and found.num_tried > 500
    assert walked.count("option_of") == len(found.ranked) < 30 and walked.count("fullest_budget") < 50


def test_experts_are_shared_where_there_are_ranks_to_share_them():
    many = replace(preset("deepseek-v3"), num_layers=4)
    found = {(one.data_size, one.ep) for one in shapes(Job(many, H100, 64, 4096, 64 * 4096))}
    assert {ep for data_size, ep in found if data_size >= 8} == {8, 16, 32, 64}
    assert {one for one in found if one[0] < 8} == {(2, 2), (4, 4)}


@pytest.mark.slow
def test_with_64_experts_on_a_rank_deepseek_v3_would_be_0_8_per_cent_faster():
    """What space.py says that it leaves out."""
    job = Job(preset("deepseek-v3"), H100, 512, 4096, 4096 * 4096)
    few, many = (
        work_out(job, Layout.parse(f"dp=512,ep={ep},zero_stage=3,micro_batch=4,micro_batches=2,recompute=full"))
        for ep in (8, 4)
    )
    assert few.fits and many.fits and few.step_s / many.step_s == pytest.approx(1.008, abs=0.0005)
