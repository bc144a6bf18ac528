"""The smallest tensor parallelism: what does not divide is refused."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from course_lib.compare.trials import CONFIG
from course_lib.launch import launch
from course_lib.minimal import tensor as minimal
from course_lib.model import build

pytestmark = pytest.mark.launches


def test_heads_that_do_not_divide_and_a_tied_head_are_refused_in_a_sentence():
    def refuse(config):
        try:
            minimal.tensor_parallel(build(config), dist.group.WORLD)
        except ValueError as error:
            return str(error)

    assert "4 key/value heads do not divide by tp; change tp" in launch(refuse, 3, CONFIG)[0]
    assert "tied=False" in launch(refuse, 2, replace(CONFIG, tied=True))[0]
    assert "255 does not divide by 2 ranks" in launch(refuse, 2, replace(CONFIG, vocab_size=255))[0]
