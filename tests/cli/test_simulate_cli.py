"""`course simulate`: its answer as a table and as JSON, and one line for what cannot be."""

import json
from dataclasses import replace

import pytest

from course_lib import cli
from course_lib.cli.simulate import advice, layout_of, report, what_fits
from course_lib.config import preset
from course_lib.hardware import gpu
from course_lib.layout import Layout
from course_lib.run import Run
from course_lib.simulate.cluster import SimulatedRank

LLAMA_405B = ["--model", "llama-3-405b", "--gpu", "h100-80g", "--seq", "8192"]
TOY = ["--model", "toy", "--gpu", "t4", "--seq", "64", "--recipe", "fp32"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_llama_405b_on_16384_gpus_as_json(capsys):
    layout = "dp=128,tp=8,pp=16,recompute=full,sequence_parallel=true,zero_stage=1"
    assert cli.main(["simulate", *LLAMA_405B, "--layout", layout, "--stage", "14", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["world_size"], found["layout"]["micro_batches"]) == ("llama-3.1-405b", 16_384, 16)
    (rank,) = found["ranks"]
    assert rank["stages"] == [14] and rank["layers"] == 7 and rank["fits"] and found["fits"]
    assert rank["peak_bytes"] == sum(rank["peak_by_kind"].values()) == found["peak_bytes"]
    assert set(rank["sent_by_axis"]) == {"pp", "tp", "data", "world"} and rank["flops"] > 1e15
    assert found["host_peak_bytes"] < 2 << 30


@pytest.mark.slow
def test_a_table_for_all_stages(capsys):
    layout = ["--layout", "dp=2,pp=2,tp=2,micro_batch=2,micro_batches=5"]
    assert cli.main(["simulate", *TOY, *layout]) == 0
    text = capsys.readouterr().out
    assert "toy on 8 x T4, fp32" in text and "micro_batch=2,micro_batches=5" in text and "fits: stage" in text
    assert text.count("yes") == 2 and "simulated 2 of 2 ranks along pp" in text and "tape" in text


def test_accumulation_fills_the_pipeline_unless_it_is_said():
    assert layout_of("pp=4").micro_batches == 4 and layout_of("pp=4,schedule=dualpipe_v").micro_batches == 8
    assert layout_of("pp=4,micro_batches=3").micro_batches == 3
    assert layout_of("dp=2").micro_batches == 1


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"--optimizer": "adamw-8bit"}, "the course's engines, which have no optimizer adamw-8bit"),
        ({"--offload": "optimizer"}, "which have no offload"),
        ({"--offload": "weights"}, "offload is 'weights'; choose from none, optimizer, parameters, activations"),
        ({"--finetune": "lora"}, "which have no adapters (finetune)"),
        ({"--layout": "pp=2", "--stage": "2"}, "0..1"),
        ({"--layout": "micro_batches=16777216"}, "33,554,432 forward and backward passes on 1 stage, of which at most"),
        ({"--layout": "pp=4,micro_batches=9999"}, "79,992 forward and backward passes on 4 stages"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(changed, said, capsys):
    options = {"--model": "toy", "--gpu": "t4", "--seq": "64", "--layout": "dp=2"} | changed
    assert cli.main(["simulate", *(word for pair in options.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("course simulate: ") and said in error and error.count("\n") == 1


def test_advice_names_what_is_not_yet_done():
    def said(text: str, activations: int = 2) -> str:
        return advice(Layout.parse(text).to_dict(), {"activations": activations, "optimizer": 1})

    assert said("dp=2") == "activations are largest: try recompute=full or more cp"
    assert said("tp=2,recompute=full").endswith("try sequence_parallel=true or more cp")
    assert said("tp=2,sequence_parallel=true,recompute=full").endswith("try regather=true or more cp")
    assert said("tp=2,sequence_parallel=true,regather=true,recompute=full").endswith("try more cp")
    assert said("dp=2", 0) == "states are largest: try zero_stage=1 or more pp or more tp"


@pytest.mark.parametrize(("usable", "room"), [(100, "does not fit"), (101, "tight"), (2_000_000_000, "fits")])
def test_it_says_fits_tight_or_does_not_fit(usable, room):
    """Tensors alone may be too many; where they are not, there is also what is no tensor, and the error bar."""
    run = Run(preset("toy"), Layout(), 64)
    rank = SimulatedRank(0, {}, (0,), 2, 101, {"activations": 100, "optimizer": 1}, {}, {}, 0, 0, 0.0)
    found = report(run, [rank], replace(gpu("h100"), usable_bytes=usable))
    assert (found["room"], found["fits"]) == (room, room != "does not fit")
    assert what_fits(found).startswith(f"{room}: stage 0 needs ")
