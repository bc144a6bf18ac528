"""The search lists what working out every layout finds; the choice; why others lost."""

import random
import sys
from dataclasses import replace

import pytest
from harness import sampled
from random_layouts import LLAMA, MODELS

from course_lib.config import MlaConfig, preset
from course_lib.engines import ENGINES
from course_lib.estimate import estimate, predict_rows
from course_lib.estimate.table import run_of
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan import Job, explain, search, work_out
from course_lib.plan.search import (
    TOLD_APART,
    advised,
    differences,
    front,
    least_bytes,
    least_s,
    one_of_each_kind,
    ranked_s,
)
from course_lib.plan.space import leaner, shapes, sharded

H100 = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
SMALL_GPU = replace(gpu("h100"), usable_bytes=2 * 2**30)  # of which 1.1 to 1.9 GiB are no tensors
LEAN_GPU = replace(SMALL_GPU, usable_bytes=1.3 * 2**30)
WIDE = replace(
    LLAMA, d_model=1024, num_heads=8, d_ff=2048, head_dim=128, vocab_size=8192, num_layers=8, max_seq_len=8192
)
EXPERTS = replace(WIDE, name="experts", moe=MODELS["experts"].moe)
LATENT = replace(
    EXPERTS, name="latent experts", num_layers=4, num_kv_heads=8, head_dim=96, mla=MlaConfig(256, 128, 64, 32, 64)
)
TIED = replace(WIDE, name="tied", tied=True, num_layers=6, d_model=512, head_dim=64, max_seq_len=8192)
TIGHT = Job(WIDE, replace(H100, gpu=SMALL_GPU, gpus_per_node=4), 8, 512, 32 * 512)
ROOMY = Job(replace(LLAMA, d_model=512, num_heads=8, d_ff=2048, head_dim=64), H100, 16, 512, 32 * 512)
JOBS = [
    TIGHT,
    replace(TIGHT, num_gpus=4),
    replace(TIGHT, config=EXPERTS, batch_tokens=16 * 512),
    replace(TIGHT, config=TIED, num_gpus=16, seq_len=8192, batch_tokens=16 * 8192),
    replace(TIGHT, config=LATENT, cluster=replace(TIGHT.cluster, gpu=LEAN_GPU), batch_tokens=8 * 512),
    replace(TIGHT, engine="megatron"),
    replace(TIGHT, engine="megatron", config=EXPERTS, num_gpus=4),
    replace(TIGHT, engine="torchtitan", num_gpus=16),
    replace(TIGHT, engine="torchtitan", config=EXPERTS),
    replace(TIGHT, engine="deepspeed", config=TIED, num_gpus=32),
]


def every_layout(job: Job) -> list[Layout]:
    """All shapes under all ZeRO stages, lean and leaner."""
    found = []
    for shape in shapes(job):
        todo = [shape]
        while todo:
            one = todo.pop()
            found += sharded(job, one)
            todo += leaner(job, one)
    assert len(set(found)) == len(found)
    return found


@pytest.fixture(scope="module")
def tight():
    return search(TIGHT)


def test_shapes_divide_gpus_and_batch():
    found = list(shapes(ROOMY))
    assert len(found) == len(set(found)) > 50
    for layout in found:
        layout.check_model(ROOMY.config, ROOMY.seq_len)
        assert layout.world_size == 16 and layout.sequences_per_step == 32 and layout.tp <= 8
    assert {layout.schedule for layout in found} == {"1f1b", "interleaved", "zb_h1"}
    assert {layout.ep for layout in shapes(replace(ROOMY, config=MODELS["experts"]))} == {1, 2, 4, 8}
    assert {layout.cp for layout in shapes(replace(ROOMY, seq_len=4096, batch_tokens=32 * 4096))} == {1, 2}


def test_zero_has_all_stages_and_hsdp_inside_a_node_and_of_128_ranks():
    found = sharded(ROOMY, Layout(dp=16, micro_batches=2))
    assert [(one.zero_stage, one.dp_replicate) for one in found] == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)]
    split = sharded(ROOMY, Layout(dp=8, pp=2, schedule="zb_h1", micro_batches=4))
    assert [one.zero_stage for one in split] == [0, 1]
    large = sharded(replace(ROOMY, num_gpus=512), Layout(dp=512))
    assert [one.dp_replicate for one in large if one.zero_stage == 3] == [1, 4, 64]


@pytest.mark.parametrize("engine", ["fsdp2", "torchtitan", "megatron", "deepspeed", "nanotron"])
def test_layouts_are_those_that_the_engine_s_file_can_say(engine):
    job, file = replace(TIGHT, engine=engine, seq_len=8192, batch_tokens=32 * 8192), ENGINES[engine].file
    found = every_layout(job)
    sizes = {axis: {getattr(one, axis) for one in found} for axis in ("tp", "pp", "cp")}
    assert all((len(sizes[axis]) > 1) == (axis in file.axes) for axis in sizes)
    assert {one.zero_stage for one in found if one.pp == 1 and one.data_size > 1} <= set(file.zero_stages)
    assert {one.zero_stage for one in found if one.pp > 1 and one.data_size > 1} <= set(file.pipeline_zero)
    assert {one.recompute for one in found} == set(file.recomputes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", sampled(JOBS, 8, seed=5), ids=lambda job: f"{job.engine}-{job.config.name}-{job.num_gpus}"
)
def test_nothing_faster_that_fits_is_missing_from_the_list(job):
    worked = [work_out(job, layout) for layout in every_layout(job)]
    fitting = sorted((option for option in worked if option.fits), key=ranked_s)
    for enough in (1, 5):
        found = search(job, enough)
        listed = {option.layout for option in found.ranked}
        slowest_s = ranked_s(found.ranked[-1])
        assert {option.layout for option in fitting if ranked_s(option) < slowest_s} <= listed
        assert listed <= {option.layout for option in fitting}
        assert len(listed) >= min(enough, len(fitting)) and all(option.fits for option in found.ranked)
        assert found.fastest.step_s == min(option.step_s for option in fitting)
        assert found.best in found.ranked and found.best == work_out(job, found.best.layout)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.engine}-{job.config.name}-{job.num_gpus}")
def test_no_step_takes_less_than_the_bound_and_no_rank_holds_less(job):
    layouts = every_layout(job)
    for layout in random.Random(1).sample(layouts, min(150, len(layouts))):
        option = work_out(job, layout)
        assert least_s(job, layout) <= option.step_s * (1 + 1e-9), layout
        assert max(least_bytes(job, layout, rank) for rank in range(layout.pp)) <= option.memory_bytes * (1 + 1e-9)
        for fewer in leaner(job, layout):
            assert option.step_s <= work_out(job, fewer).step_s * (1 + 1e-9), fewer
            held = work_out(job, fewer).memory_bytes  # a layer computed again may be a little more than its parts
            assert option.memory_bytes >= held * (1 - 1e-3), fewer


def test_bounds_are_near_where_models_are_large():
    """Else a search of thousands of layouts would work out each one."""
    job = Job(preset("llama-3.1-70b"), H100, 512, 8192, 512 * 8192)
    for text in ("dp=64,tp=4,pp=2,zero_stage=1,sequence_parallel=true,micro_batches=8", "dp=512,zero_stage=3"):
        option = work_out(job, Layout.parse(text))
        assert 0.8 < least_s(job, option.layout) / option.step_s < 1
        assert 0.8 < least_bytes(job, option.layout, 0) / option.memory_bytes < 1


@pytest.mark.slow
def test_a_bound_that_is_too_high_loses_the_best(tight, monkeypatch):
    """Planted: of the layouts that the first is one of, a bound a thousand times as high."""
    first, real = tight.ranked[0].layout, least_s

    def wrong_s(job, one, *given):
        alike = (one.tp, one.pp, one.cp) == (first.tp, first.pp, first.cp)
        return real(job, one, *given) * (1000 if alike else 1)

    monkeypatch.setattr(sys.modules["course_lib.plan.search"], "least_s", wrong_s)
    assert search(TIGHT, 5).ranked[0].tokens_per_s < tight.ranked[0].tokens_per_s


@pytest.mark.parametrize("engine", ["course", "megatron"])
def test_a_plan_and_an_estimate_say_the_same_of_each_layout(engine):
    job = Job(preset("llama-3.1-8b"), H100, 16, 4096, 256 * 4096, engine=engine)
    found = search(job, 5)
    for option in (found.best, *found.ranked, *found.front):
        alone = estimate(job.run(option.layout), H100, engine)
        assert alone.bytes_by_kind == option.bytes_by_kind and alone.seconds_by_part == option.seconds_by_part
        assert alone.room == option.room != "does not fit"


def as_row(job, layout) -> dict[str, str]:
    """The line of a table for `course predict` that asks for the layout."""
    names = {"mbs": "micro_batch", "grad_acc": "micro_batches", "zero": "zero_stage"}
    same = ("dp", "pp", "tp", "cp", "ep", "expert_tp", "schedule", "v", "dp_replicate", "recompute")
    row = {column: getattr(layout, names.get(column, column)) for column in (*names, *same)}
    nodes = -(-layout.world_size // job.cluster.gpus_per_node)
    row |= {"model": job.config.name, "gpus": layout.world_size, "nodes": nodes, "states": job.recipe}
    row |= {"regather": "yes" if layout.regather else "no"}
    return {column: str(value) for column, value in row.items() if value is not None}


@pytest.mark.parametrize("job", [*JOBS, replace(TIGHT, engine="nanotron")], ids=lambda job: job.engine)
def test_a_plan_and_a_table_say_the_same_of_each_layout(job):
    layouts = every_layout(job)
    layouts = random.Random(1).sample(layouts, min(12, len(layouts)))
    models, rows = {job.config.name: job.config}, [as_row(job, layout) for layout in layouts]
    found = predict_rows(rows, models, job.cluster, job.seq_len, job.engine)
    for layout, one in zip(layouts, found, strict=True):
        own = work_out(job, layout)
        assert one.layout == layout
        assert (one.bytes_by_kind, one.seconds_by_part) == (own.bytes_by_kind, own.seconds_by_part)


def test_what_an_engine_always_does_is_in_its_layouts_and_what_it_cannot_is_in_no_row():
    """nanotron and Megatron gather inputs again, torchtitan keeps them."""
    for engine, gathers in (("nanotron", True), ("megatron", True), ("torchtitan", False)):
        layouts = [layout for layout in every_layout(replace(TIGHT, engine=engine)) if layout.tp > 1]
        assert layouts and all(layout.regather == gathers for layout in layouts)
        row = as_row(TIGHT, layouts[0])
        del row["regather"]
        assert run_of(row, {TIGHT.config.name: TIGHT.config}, 512, engine).layout.regather == gathers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=8,micro_batches=4", "pp x dp x cp x tp is 8; it must be 16, the job's GPUs"),
        ("dp=32", "pp x dp x cp x tp is 32; it must be 16, the job's GPUs"),
        ("dp=16", "dp x micro_batch x micro_batches is 16; it must be 32, the sequences of the job's global batch"),
    ],
)
@pytest.mark.parametrize("engine", ["course", "nanotron"])
def test_a_layout_of_other_gpus_or_another_batch_is_refused(text, message, engine):
    with pytest.raises(ValueError, match=message):
        work_out(replace(ROOMY, engine=engine), Layout.parse(text))


def test_ranked_front_and_rejected_are_what_they_say(tight):
    seconds = [ranked_s(option) for option in tight.ranked]
    assert seconds == sorted(seconds)
    for option in tight.front:
        assert not any(other.memory_bytes < option.memory_bytes and other.mfu > option.mfu for other in tight.ranked)
    assert front(tight.ranked[:1]) == tight.ranked[:1]
    assert len(tight.rejected) == 2
    for layout, reason in tight.rejected:
        option = work_out(TIGHT, layout)
        assert layout != tight.best.layout and differences(layout, tight.best.layout) < 4
        assert reason.startswith("does not fit") == (not option.fits)
        assert option.fits or option.memory_in_words in reason


def test_a_tight_layout_ranks_below_those_of_nearly_its_speed():
    found = search(Job(preset("llama-3.1-70b"), H100, 64, 4096, 256 * 4096), 16)
    tight = [option for option in found.ranked if option.room == "tight"]
    assert tight and len(tight) < len(found.ranked)
    for option in tight:
        assert ranked_s(option) == option.step_s / (1 - TOLD_APART)
    near = [one for one in found.ranked if ranked_s(one) <= ranked_s(found.ranked[0]) / (1 - TOLD_APART)]
    assert found.best.room == "fits" or all(option.room == "tight" for option in near)


def test_of_layouts_that_cannot_be_told_apart_the_simplest_is_advised():
    job = replace(ROOMY, batch_tokens=64 * 512)
    texts = (
        "dp=16,zero_stage=1,micro_batch=2,micro_batches=2",
        "dp=8,tp=2,sequence_parallel=true,micro_batch=2,micro_batches=4",
        "dp=16,micro_batch=2,micro_batches=2",
        "dp=16,micro_batches=4",
    )
    options = [work_out(job, Layout.parse(text)) for text in texts]
    alike = [replace(one, seconds_by_part={"compute": 1.0}) for one in options]
    assert advised(alike) is alike[2]  # the largest micro-batch, fewest axes, least ZeRO
    faster = [replace(alike[3], seconds_by_part={"compute": 0.96}), *alike]
    assert advised(faster) is faster[0]  # the only one within 3 % of itself
    tight = replace(alike[2], usable_bytes=alike[2].memory_bytes)
    assert tight.room == "tight" and advised([alike[0], tight]) is alike[0]
    again = replace(tight, run=job.run(replace(tight.layout, recompute="selective")))
    kinds = {kind: 0.999 * size for kind, size in again.bytes_by_kind.items()}
    assert advised([tight, replace(again, bytes_by_kind=kinds)]) is tight  # a thousandth less memory is none
    kinds = {kind: 0.985 * size for kind, size in again.bytes_by_kind.items()}
    assert advised([tight, lean := replace(again, bytes_by_kind=kinds)]) is lean and lean.room == "tight"


def test_where_the_choice_is_not_the_fastest_it_is_told():
    found = search(Job(preset("llama-3.1-8b"), H100, 64, 4096, 256 * 4096), 5)
    told = [line for line in explain(found) if "The fastest is predicted" in line]
    assert (found.best.step_s > found.fastest.step_s * 1.0005) == bool(told)


def test_what_cannot_be_is_told():
    job = ROOMY
    with pytest.raises(ValueError, match="choose 16384 or 20480"):
        replace(job, seq_len=4096, batch_tokens=17_000)
    with pytest.raises(ValueError, match="num_gpus .12. must fill nodes of 8; choose 8 or 16"):
        replace(job, num_gpus=12)
    with pytest.raises(ValueError, match="divides 16 GPUs and 1 sequences"):
        search(replace(job, batch_tokens=512, config=replace(job.config, num_heads=1, num_kv_heads=1, num_layers=1)))


def test_experts_are_shared_where_there_are_ranks_to_share_them():
    many = replace(preset("deepseek-v3"), num_layers=4)
    layouts = list(shapes(Job(many, H100, 64, 4096, 64 * 4096)))
    assert {one.ep for one in layouts if one.data_size >= 8} == {8, 16, 32, 64}
    assert all(one.data_size >= 8 for one in layouts if not one.folded)
    assert {(2, 8), (2, 16), (4, 8)} <= {(one.data_size, one.ep) for one in layouts if one.folded}
    alone = {(one.data_size, one.ep) for one in shapes(Job(many, replace(H100, gpus_per_node=1), 4, 4096, 64 * 4096))}
    assert alone == {(1, 1), (2, 2), (4, 4)}


def test_whole_experts_go_over_tps_ranks_where_the_engine_has_them_so():
    job = Job(MODELS["experts"], replace(H100, gpus_per_node=4), 16, 512, 64 * 512)
    for engine, all_of_tp in (("course", False), ("megatron", False), ("torchtitan", True)):
        folded = [one for one in shapes(replace(job, engine=engine)) if one.folded and one.tp > 1]
        assert folded and all(one.expert_tp == 1 and one.sequence_parallel for one in folded)
        assert all(one.ep % (one.cp * one.tp) == 0 for one in folded) is all_of_tp
        assert any(one.ep > one.data_size for one in folded)
    assert {one.ep for one in shapes(replace(job, engine="fsdp2"))} == {1}


def test_a_table_has_one_of_each_kind():
    job = replace(ROOMY, num_gpus=16)
    texts = ("dp=8,tp=2,sequence_parallel=true,zero_stage=3,micro_batches=4", "dp=16,zero_stage=3,micro_batches=2")
    first, second = (work_out(job, Layout.parse(text)) for text in texts)
    twins = [work_out(job, replace(first.layout, **change)) for change in ({"regather": True}, {"dp_replicate": 2})]
    assert one_of_each_kind([twins[0], first, second, twins[1]]) == [twins[0], second]


def test_where_the_batch_is_no_multiple_of_the_gpus_it_is_told():
    job = replace(ROOMY, cluster=replace(H100, gpus_per_node=6), num_gpus=6)
    assert any("dp 6 alone is not possible: 32 sequences are no" in line for line in explain(search(job, 1)))
    assert not any("alone is not possible" in line for line in explain(search(ROOMY, 1)))
