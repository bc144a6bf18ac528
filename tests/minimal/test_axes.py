"""Several axes at once: wrong rules of sums are seen in their kinds."""

import pytest

from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_rule_of_sums
from course_lib.launch import RankError
from course_lib.layout import Layout
from course_lib.minimal.axes import axes_of

TWO = "dp=2,tp=2,sequence_parallel=true,micro_batches=2"


def over_data(kind, layout):
    return ["expert_dp" if kind == "experts" else "data"]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("rule", "layout", "wrong"),
    [(over_data, TWO, {"norms"}), (lambda kind, layout: ["data"], "dp=2,cp=2,ep=2", {"experts"})],
)
def test_a_wrong_rule_is_seen_in_its_kinds_alone(rule, layout, wrong):
    run = on_ranks(rule, as_rule_of_sums, Layout.parse(layout).world_size, layout=layout)
    assert {name.split()[0] for name, error in run.errors.items() if error > 1e-9} == wrong


@pytest.mark.launches
def test_what_the_comparison_cannot_do_is_refused():
    with pytest.raises(RankError, match="zero_stage is 1"):
        on_ranks(axes_of, as_rule_of_sums, 2, layout="dp=2,zero_stage=1")
