"""The functions behind the widgets, and their wiring: values set and buttons pressed in a plain Python process."""

import subprocess
import sys

import ipywidgets
import matplotlib.pyplot as plt
import pytest
from widget_tree import all_of, control, shown, texts

from course_lib.compare.profile import profile_step
from course_lib.config import preset
from course_lib.hardware import LINKS
from course_lib.memory.budget import budget, fits
from course_lib.timing import collective_s
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.widgets import collective_explorer, dp_explorer, memory, memory_explorer, parts, precision_explorer
from course_lib.widgets.collectives import describe_collective, explore_collective
from course_lib.widgets.data_parallel import DPChoice, describe_dp, explore_dp
from course_lib.widgets.memory import MemoryChoice, describe_measurement, explore_memory, measure_memory
from course_lib.widgets.precision import explore_precision, precision_table

# ---------------------------------------------------------------- the functions


def test_the_memory_view_is_the_budget_against_the_gpus():
    view = explore_memory(MemoryChoice(), ["t4", "h100", "b200"])
    needed = budget(preset("llama-3.1-8b"), 1, 4096)
    assert view.budget == needed and view.bar.total_bytes == needed.total_bytes
    assert set(view.bar.fits) == {"B200 (HGX) 180 GB"} and fits(needed, "b200") and not fits(needed, "h100")
    assert f"{needed.total_bytes / 1e9:.1f} GB = {needed.total_bytes / 2**30:.1f} GiB" in view.text
    assert "128.5 GB (119.7 GiB) for 8,030,261,248 parameters" in view.text
    assert "Out of memory: T4, H100 SXM 80 GB" in view.text
    assert "fit in 1 of 3 GPUs" in view.title


def test_a_memory_choice_changes_the_kind_that_it_should():
    plain = explore_memory(MemoryChoice(), []).budget
    assert explore_memory(MemoryChoice(batch_size=2), []).budget.activations > 1.9 * plain.activations
    assert explore_memory(MemoryChoice(recompute="full"), []).budget.activations < plain.activations / 4
    assert explore_memory(MemoryChoice(optimizer="sgd"), []).budget.optimizer < plain.optimizer
    assert explore_memory(MemoryChoice(attention="standard"), []).budget.activations > plain.activations
    assert explore_memory(MemoryChoice(recipe="fp32"), []).budget.parameters == 2 * plain.parameters
    with pytest.raises(ValueError, match="choose at most 1024"):
        explore_memory(MemoryChoice(model="gpt2", seq_len=2048), [])


def test_a_collective_view_adds_up_and_names_the_regime():
    view = explore_collective("all_reduce", 10**6, 8, "nvlink4")
    assert view.total_s == pytest.approx(collective_s("all_reduce", 10**6, 8, LINKS["nvlink4"]))
    assert view.sent_bytes == ring_all_reduce_bytes(10**6, 8)
    assert view.way == "ring, LL" and view.regime == "latency"
    assert explore_collective("all_reduce", 10**9, 8, "nvlink4").way == "nvls, Simple"
    assert explore_collective("all_reduce", 10**9, 8, "nvlink4").regime == "bandwidth"
    assert "1.75 MB a rank" in describe_collective(view)


def test_precision_says_what_is_swallowed_and_what_underflows():
    assert [row.verdict for row in explore_precision(1.0, 1e-3)] == ["kept", "the update is swallowed", "kept"]
    assert explore_precision(1.0, 1e-8)[2].verdict == "the update underflows to zero"
    assert explore_precision(1e5, 1.0)[2].verdict == "overflows"
    assert explore_precision(1e-8, 1.0)[2].verdict == "the weight underflows to zero"
    assert "of the update arrive" in explore_precision(1.0, 1e-2)[1].verdict
    assert precision_table(explore_precision(1.0, 1e-3)).count("<tr>") == 4


def test_data_parallel_view_counts_tokens_and_exposes_what_is_not_hidden():
    late = explore_dp(DPChoice(overlap=False))
    early = explore_dp(DPChoice())
    assert early.global_batch_tokens == 8 * 2 * 4096
    assert late.exposed_s == pytest.approx(late.comm_s) and late.step_s == pytest.approx(late.compute_s + late.comm_s)
    assert early.exposed_s < late.exposed_s and early.step_s == pytest.approx(early.compute_s + early.exposed_s)
    accumulated = explore_dp(DPChoice(micro_batches=4))
    assert accumulated.global_batch_tokens == 4 * early.global_batch_tokens
    assert accumulated.exposed_s == pytest.approx(early.exposed_s)  # gradients travel once a step
    assert accumulated.efficiency_percent > early.efficiency_percent
    alone = explore_dp(DPChoice(dp_size=1))
    assert alone.comm_s == 0 and alone.efficiency_percent == pytest.approx(100)
    assert "Global batch 65,536 tokens" in describe_dp(early)


def test_a_measurement_trains_for_real_and_lays_states_on_the_formula_to_the_byte():
    result = measure_memory(MemoryChoice(seq_len=128, recipe="fp32"), d_model=32, num_layers=1)
    assert result.config.d_model == 32 and len(result.timeline.times_s) > 50
    for kind in ("parameters", "gradients", "optimizer"):
        assert result.row(kind).error_percent == 0
    assert abs(result.row("activations").error_percent) < 2
    assert "llama-3.1-8b, scaled down (1 layers of 32, 1 x 128 tokens)" in describe_measurement(result)


# ---------------------------------------------------------------- the wiring


@pytest.mark.parametrize(
    ("explorer", "description", "value", "said"),
    [
        (memory_explorer, "micro-batch", 8, "GiB at the largest moment of a step"),
        (collective_explorer, "message", 10**9, "Bandwidth rules"),
        (precision_explorer, "update", 1e-12, "underflows"),
        (dp_explorer, "micro-batches", 4, "Global batch 262,144 tokens"),
    ],
)
def test_moving_a_slider_replaces_the_picture_and_the_text(explorer, description, value, said):
    box = explorer()
    images, before, text = len(all_of(box, ipywidgets.Image)), shown(box), texts(box)
    control(box, description).value = value
    after = shown(box)
    assert len(before) == len(after) == 1 and len(all_of(box, ipywidgets.Image)) == images  # replaced, not appended
    assert before[0][:8] == after[0][:8] == b"\x89PNG\r\n\x1a\n" and before[0] != after[0]
    assert texts(box) != text and said in texts(box)
    assert plt.get_fignums() == []


def test_an_impossible_choice_is_told_in_the_widget_and_the_next_one_works():
    box = memory_explorer(MemoryChoice(model="gpt2", seq_len=1024))
    control(box, "sequence").value = 2048
    assert "Not possible" in texts(box) and "choose at most 1024" in texts(box) and shown(box) == []
    control(box, "sequence").value = 512
    assert "Not possible" not in texts(box) and len(shown(box)) == 1


def test_choosing_no_gpu_still_shows_the_budget():
    box = memory_explorer()
    control(box, "GPUs").value = ()
    assert len(shown(box)) == 1 and "Out of memory" not in texts(box)


def test_measure_lays_measured_on_predicted_and_a_new_choice_takes_it_away(monkeypatch):
    small = lambda chosen: profile_step(preset("toy"), 1, 32, chosen.recipe)  # noqa: E731
    monkeypatch.setattr(memory, "measure_memory", small)
    box = memory_explorer()
    control(box, "Measure").click()
    assert len(shown(box)) == 2 and "Measured in" in texts(box) and not control(box, "Measure").disabled
    control(box, "precision").value = "fp32"
    assert len(shown(box)) == 1 and "Measured in" not in texts(box)


def test_a_measurement_that_fails_is_told_and_leaves_the_button_usable(monkeypatch):
    box = memory_explorer(MemoryChoice(optimizer="adamw-8bit"))
    control(box, "Measure").click()  # has a formula, but cannot be run here
    assert "cannot be measured here" in texts(box) and not control(box, "Measure").disabled

    def broken(chosen):
        raise RuntimeError("<no memory left>")

    monkeypatch.setattr(memory, "measure_memory", broken)
    control(box, "Measure").click()
    assert "RuntimeError: &lt;no memory left&gt;" in texts(box) and not control(box, "Measure").disabled


# ---------------------------------------------------------------- without ipywidgets

WITHOUT_IPYWIDGETS = """
import importlib, pathlib, sys
for name in ("ipywidgets", "jupyterlab", "IPython", "ipykernel"):
    sys.modules[name] = None                      # importing it now raises ImportError
root = pathlib.Path(sys.argv[1])
names = sorted(".".join(p.relative_to(root.parent).with_suffix("").parts) for p in root.rglob("*.py"))
for name in names:
    if "widgets" not in name and not name.endswith("__main__"):
        importlib.import_module(name.removesuffix(".__init__"))
try:
    import course_lib.widgets
except ImportError as error:
    print(len(names), error)
"""


@pytest.mark.long
def test_only_the_widgets_need_ipywidgets_and_they_say_what_to_install():
    import course_lib

    (root,) = course_lib.__path__
    done = subprocess.run([sys.executable, "-c", WITHOUT_IPYWIDGETS, root], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "pip install 'ipywidgets>=7.7.1,<9'" in done.stdout


def test_what_cannot_be_is_said_in_place_of_the_last_picture():
    size = parts.slider("size", [1, 2, 3], 1)

    def predict():
        if size.value == 2:
            raise ValueError("2 < 3")
        return b"png", f"<i>{size.value}</i>"

    _, text, image = parts.picture_panel([size], predict).children
    assert "<i>1</i>" in text.value and (image.value, image.layout.display) == (b"png", None)
    size.value = 2
    assert "Not possible" in text.value and "2 &lt; 3" in text.value and image.layout.display == "none"
    size.value = 3
    assert "<i>3</i>" in text.value and "Not possible" not in text.value and image.layout.display is None


def test_a_stored_notebook_keeps_the_first_picture_of_a_widget():
    data, metadata = precision_explorer()._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"}
    assert metadata["image/png"]["alt"].endswith(".") and metadata["image/png"]["width"] == 680
