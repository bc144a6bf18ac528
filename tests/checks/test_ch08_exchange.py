"""A receive that nobody waited for may hold a part of the message: the grader says so, whatever part had arrived."""

import cloudpickle
import pytest
from wrong import ch08

from course_lib.checks.ch08.pipeline_ranks import check_exchange
from course_lib.checks.core import CheckFailed

pytestmark = pytest.mark.launches


@pytest.mark.parametrize("arrived", [0.0, 0.01, 0.5, 0.99])
def test_a_part_of_a_message_is_named_as_a_receive_that_was_not_waited_for(arrived):
    cloudpickle.register_pickle_by_value(ch08)

    def partly(down, up):
        return tuple(
            None if x is None else x.clone().index_fill_(0, ch08.torch.arange(int(arrived * len(x)), len(x)), 0.0)
            for x in ch08._started(down, up)
        )

    with pytest.raises(CheckFailed, match="wait for the receive"):
        check_exchange(partly)
