"""Modelled times: hand values, limits, and the published scaling that the model is put beside."""

from itertools import pairwise

import pytest

from course_lib import timing
from course_lib.config import preset
from course_lib.hardware import (
    GPUS,
    LINKS,
    PUBLISHED_TP_SP_THROUGHPUT,
    PUBLISHED_TP_THROUGHPUT,
    Cluster,
)
from course_lib.layout import Layout
from course_lib.memory.flats import layer_units
from course_lib.memory.states import offload_link_bytes, zero_state_bytes
from course_lib.run import Offload, Run
from course_lib.timing import (
    Utilisation,
    crossing_s,
    step_time,
    tensor_parallel_layer_spans,
    waiting_s,
    zero3_spans,
)

H100 = GPUS["h100"]
EFA = Cluster(H100, LINKS["nvlink4"], LINKS["efa"])
LLAMA_8B, LLAMA_70B = preset("llama-3.1-8b"), preset("llama-3.1-70b")
PLAYBOOK_3B = preset("playbook-3b")
PLAYBOOK_TP = {False: PUBLISHED_TP_THROUGHPUT, True: PUBLISHED_TP_SP_THROUGHPUT}


# ---- tensor parallelism


UTILISATION = Utilisation(matmul=0.45)


@pytest.mark.parametrize("sp", [False, True])
def test_C079_the_clock_falls_with_the_published_scaling(sp):
    """A model that is in no fit. Micro-batches are as published; how many a step has is not told: four are taken."""
    published = PLAYBOOK_TP[sp]

    def speed(tp):
        layout = Layout(tp=tp, sequence_parallel=sp, regather=sp, micro_batch=published[tp][1], micro_batches=4)
        return step_time(Run(PLAYBOOK_3B, layout, 4096), EFA, "nanotron").tokens_per_s_per_gpu

    errors = {tp: speed(tp) / told - 1 for tp, (told, _) in published.items()}
    assert max(abs(errors[tp]) for tp in (2, 4, 8)) < 0.11
    if not sp:
        assert max(map(abs, errors.values())) < 0.11
        assert speed(16) / speed(8) - 1 == pytest.approx(-0.42, abs=0.02)  # published: -42.7 %
    else:  # 40 and 100 sequences at once hide what they send between nodes, and the clock hides nothing
        assert -0.5 < errors[32] < errors[16] < -0.2


def _layer_spans(overlap=True, **how):
    return tensor_parallel_layer_spans(Run(LLAMA_70B, Layout(tp=8, **how), 4096), EFA, UTILISATION, overlap)


def test_the_layer_s_timeline_hides_only_backward_sums():
    plain, hidden = (_layer_spans(overlap) for overlap in (False, True))
    sum_s = timing.collective_s("all_reduce", 4096 * 8192 * 2, 8, EFA)
    assert waiting_s(plain) == pytest.approx(4 * sum_s)
    assert 2 * sum_s < waiting_s(hidden) < 2.5 * sum_s
    for each in (plain, hidden):
        _check_order(each)


def test_sequence_parallelism_has_twice_the_calls_and_regather_hides_its_own():
    def sent(spans):
        return [span for span in spans if span.lane == "communication"]

    tp = _layer_spans()
    sp, again = (_layer_spans(sequence_parallel=True, regather=r) for r in (False, True))
    assert [len(sent(spans)) for spans in (tp, sp, again)] == [4, 8, 10]
    seconds = [sum(span.seconds for span in sent(spans)) for spans in (tp, sp, again)]
    assert seconds[1] / seconds[0] == pytest.approx(1.41, abs=0.01)  # the switch sums an all-reduce, not its phases
    assert seconds[2] / seconds[1] == pytest.approx(1.25)
    half_s = timing.collective_s("all_gather", 4096 * 8192 * 2, 8, EFA)
    column_s = next(span.seconds for span in sp if span.name == "attention's weight gradients")
    assert half_s < column_s and waiting_s(sp) == pytest.approx(6 * half_s)  # those that stand before a computation
    assert waiting_s(again) == pytest.approx(waiting_s(sp))
    assert waiting_s(tp) < 5 * half_s < waiting_s(sp)  # its backward sums start behind weight gradients whole
    late = _layer_spans(overlap=False, sequence_parallel=True, regather=True)
    assert waiting_s(late) - waiting_s(again) == pytest.approx(4 * half_s)
    for each in (sp, again, late):
        _check_order(each)


def _check_order(spans):
    """In each lane one thing at a time."""
    for lane in ("compute", "communication"):
        mine = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start_s)
        assert all(a.stop_s <= b.start_s + 1e-12 for a, b in pairwise(mine))


def test_prefetch_hides_all_but_the_first_gather_and_the_last_reduction():
    spans = zero3_spans((2, 4), 1, 1, 3)
    assert waiting_s(spans) == 2 and spans[-1].stop_s == 1 + 3 * 2 + 3 * 4 + 1
    late = zero3_spans((2, 4), 1, 1, 3, prefetch=False)
    assert waiting_s(late) == 6 + 1  # every gather of both passes, and the last reduction
    for each in (spans, late):
        _check_order(each)
        assert sum(s.name.startswith("gather") for s in each) == 6
        for index in range(3):  # computed after its own gather, reduced after its own backward
            at = {s.name: s for s in each if s.name.endswith(str(index))}
            assert at[f"reduce {index}"].start_s >= at[f"backward {index}"].stop_s
            first = next(s for s in each if s.name == f"gather {index}")
            assert at[f"forward {index}"].start_s >= first.stop_s


def test_offload_takes_as_long_as_its_links():
    states = zero_state_bytes(layer_units(LLAMA_8B), 3, 4)
    host, disk = (offload_link_bytes(states, Offload(place)) for place in ("host", "disk"))
    assert crossing_s(host)["device to host"] == pytest.approx(4.015e9 / 31.5e9, rel=1e-3)
    assert crossing_s(host)["disk to host"] == 0
    assert crossing_s(host)["host to device"] == pytest.approx(4.015e9 / 31.5e9, rel=1e-3)
    read_s = 24.09e9 / 7e9
    assert crossing_s(disk)["disk to host"] == crossing_s(disk)["host to disk"] == pytest.approx(read_s, rel=1e-3)
    assert crossing_s(disk, ranks_per_drive=4)["disk to host"] == pytest.approx(4 * read_s, rel=1e-3)
    with pytest.raises(ValueError, match="ranks_per_drive is 0; give a whole number from 1"):
        crossing_s(host, ranks_per_drive=0)
