"""The smallest expert parallelism: what does not divide is refused, lost gradients are found."""

import sys

import cloudpickle
import pytest

from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_experts
from course_lib.launch import RankError
from course_lib.minimal.experts import ExpertParallelMoE, NaiveExpertParallelMoE

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(RankError, match="8 experts do not divide by 3 ranks; change ep"):
        on_ranks(ExpertParallelMoE, as_experts, 3)


def test_a_plain_all_to_all_loses_the_gradients_of_experts_without_an_error():
    errors = on_ranks(NaiveExpertParallelMoE, as_experts).errors
    assert errors["y_TD"] < 1e-12 and errors["experts"] == 1 and errors["tokens"] > 0.1 and errors["router"] < 1e-12
