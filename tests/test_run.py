"""The record of a run refuses what does not fit together, in one sentence, when it is made."""

import pytest

from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.run import Offload, Run
from course_lib.tensors import LoRA

TOY = preset("toy")


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ("dp=2,zero_stage=1", {"optimizer": "adafactor"}, "choose zero_stage 0"),
        ("cp=2", {"attention": "standard"}, "cp is 2"),
        ("cp=3", {}, "seq_len"),
        ("tp=3", {}, "num_heads (8)"),
        ("tp=2", {"lora": LoRA(4)}, "choose tp 1"),
        ("dp=2,zero_stage=1", {"lora": LoRA(4)}, "choose zero_stage 0"),
        ("dp=1", {"lora": LoRA(4, ("x",))}, "name no matrix"),
        ("dp=1", {"lora": LoRA(4, ("embed",))}, "name no matrix"),
        ("dp=2,zero_stage=2", {"offload": Offload(parameters="host")}, "choose zero_stage 3"),
        ("tp=2", {"config": preset("xlm-r-base")}, "choose tp 1"),
        ("dp=1", {"config": preset("xlm-r-base"), "seq_len": 1024}, "at most 512"),
    ],
)
def test_a_run_that_cannot_be_is_refused(layout, options, said):
    with pytest.raises(ValueError, match=".") as error:
        Run(**{"config": TOY, "layout": Layout.parse(layout), "seq_len": 64} | options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_can_be_a_key():
    assert {Run(TOY, Layout(), 64): 1}[Run(TOY, Layout(), 64)] == 1
