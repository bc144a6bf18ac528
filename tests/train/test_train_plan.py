"""What a run is asked to do: schedules by the step, texts of a command line, refusals before any rank waits for one."""

import json

import pytest
import torch

from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.train import TrainPlan
from course_lib.train.plan import check_ranks, check_settings, learning_rate_of, seed_step, settings_of


def test_the_learning_rate_goes_up_in_a_line_and_down_by_a_cosine_to_a_tenth():
    plan = TrainPlan(steps=14, learning_rate=1.0, warmup=4, decay="cosine")
    rates = [learning_rate_of(plan, step) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    constant = TrainPlan(steps=14, learning_rate=1.0, warmup=2)
    assert [learning_rate_of(constant, step) for step in (0, 1, 2, 13)] == [0.5, 1.0, 1.0, 1.0]


def test_random_numbers_depend_on_seed_step_and_place_but_tp_shares_them():
    def drawn(seed=0, step=3, **place) -> float:
        seed_step(TrainPlan(seed=seed), step, {"pp": 0, "dp": 0, "cp": 0, "tp": 0} | place)
        return torch.rand(()).item()

    with torch.random.fork_rng():
        first = drawn()
        assert drawn() == first == drawn(tp=1)
        others = [drawn(seed=1), drawn(step=4), drawn(pp=1), drawn(dp=1), drawn(cp=1), drawn(dp=4), drawn(step=2**33)]
        assert len({first, *others}) == 8


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"warmup": 30}, r"warmup \(30\) must not exceed steps \(20\)"),
        ({"decay": "line"}, "choose from none, cosine"),
        ({"precision": "bf16"}, "choose from fp32, bf16-master"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changes, text):
    with pytest.raises((TypeError, ValueError), match=text):
        TrainPlan(**changes)


def test_a_checkpoint_may_change_hands_between_layouts_but_not_between_runs():
    config, plan = preset("toy"), TrainPlan()
    saved = json.loads(json.dumps(settings_of(config, Layout(dp=2, tp=2), plan)))
    check_settings(saved, settings_of(config, Layout(pp=2, micro_batches=2), plan), "runs/a")
    check_settings(saved, settings_of(config, Layout(dp=2), TrainPlan(steps=40)), "runs/a")
    cosine = TrainPlan(decay="cosine")
    for before, after, text in [
        (saved, settings_of(config, Layout(dp=4), plan), r"batch_size 2 \(now 4\)"),
        (saved, settings_of(config, Layout(dp=2), TrainPlan(seed=1)), r"seed 0 \(now 1\)"),
        (saved, settings_of(preset("mini"), Layout(dp=2), plan), r"model.d_model 64 \(now 256\)"),
        (saved | {"text": {"bytes": 9, "sha256": "0" * 64}}, saved, "text.bytes 9 .*'000000.* use the same Python"),
        (saved | {"versions": {}}, saved, r"versions.course_lib None \(now '.*versions.torch None"),
        (settings_of(config, Layout(), cosine), settings_of(config, Layout(), TrainPlan(40, decay="cosine")), "steps"),
    ]:
        with pytest.raises(ValueError, match=f"runs/a was made with .*{text}"):
            check_settings(before, after, "runs/a")
    with pytest.raises(ValueError, match="runs/a does not say how it was trained"):  # checkpoint.save without `about`
        check_settings({}, settings_of(config, Layout(), plan), "runs/a")


def test_a_rank_with_another_text_layout_or_version_is_named():
    of_rank = settings_of(preset("toy"), Layout(dp=2), TrainPlan())
    check_ranks([of_rank] * 3)
    other_text = {"text": of_rank["text"] | {"sha256": "f" * 64}}
    for change, said in [
        (other_text, r"rank 0 has text.sha256 '.*\(rank 2 'f+\.\.\.'\).*the same Python"),
        ({"versions": of_rank["versions"] | {"torch": "1.0"}}, r"versions.torch '.*' \(rank 2 '1.0'\); all ranks must"),
        ({"learning_rate": 1.0}, r"learning_rate 0.003 \(rank 2 1.0\)"),
    ]:
        with pytest.raises(ValueError, match=said):
            check_ranks([of_rank, of_rank, of_rank | change])
