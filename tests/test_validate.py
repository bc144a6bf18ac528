"""Sizes, numbers, words and records that cannot be meant are refused in one sentence."""

import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pytest

from course_lib.validate import (
    Amount,
    Positive,
    Share,
    Size,
    check_fields,
    checked,
    instance,
    number,
    one_of,
    truth,
    whole,
    writable,
)  # fmt: skip


def refusal(function, *args, **kwargs):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value)


def test_a_whole_number_has_limits_and_is_neither_true_nor_2_0():
    whole("tp", 1)
    whole("tp", np.int64(3))
    assert refusal(whole, "tp", 0) == ("ValueError", "tp is 0; give a whole number of at least 1")
    assert refusal(whole, "tp", 2.0) == ("TypeError", "tp is 2.0; give a whole number of at least 1")
    assert refusal(whole, "tp", True)[0] == "TypeError"
    assert refusal(whole, "tp", "2") == ("TypeError", "tp is '2'; give a whole number of at least 1")
    assert refusal(whole, "tp", 10**15, 1, 64) == (
        "ValueError", "tp is 1000000000000000; give a whole number from 1 to 64",
    )  # fmt: skip
    assert refusal(whole, "tp", 10**19)[1].endswith("give a whole number of at most 1e+18")


def test_a_number_is_finite_and_within_its_limits():
    number("seconds", 0.5, above=0)
    number("seconds", 3)
    for wrong in (math.nan, math.inf, -math.inf):
        assert refusal(number, "seconds", wrong) == ("ValueError", f"seconds is {wrong}; give a finite number")
    assert refusal(number, "share", 1.5, 0, 1)[1] == "share is 1.5; give a finite number at least 0 and at most 1"
    assert refusal(number, "rate", 0, above=0)[1] == "rate is 0; give a finite number above 0"
    assert refusal(number, "dropout", 1.0, least=0, below=1)[0] == "ValueError"
    assert refusal(number, "rate", "fast")[0] == "TypeError"
    assert refusal(number, "rate", None)[0] == "TypeError"


def test_a_word_is_one_of_a_list_and_the_nearest_is_named():
    one_of("recompute", "full", ("none", "full"))
    assert refusal(one_of, "recompute", "ful", ("none", "full")) == (
        "ValueError", "recompute is 'ful'; did you mean 'full'? choose from none, full",
    )  # fmt: skip
    assert refusal(one_of, "recompute", 3, ("none", "full"))[0] == "TypeError"
    assert refusal(one_of, "zero", True, (0, 1, 2, 3))[0] == "ValueError"


def test_records_and_truth_values():
    truth("causal", False)
    assert refusal(truth, "causal", 1) == ("TypeError", "causal is 1; give True or False")
    assert refusal(instance, "link", "efa", Mapping) == ("TypeError", "link is 'efa'; give a Mapping")
    assert "\n" not in refusal(instance, "link", "a\n" * 100, Mapping)[1]
    assert len(refusal(instance, "link", "a" * 500, Mapping)[1]) < 120


@dataclass(frozen=True)
class Machine:
    gpus: Size
    link: Literal["nvlink", "network"] = "network"
    share: Share = 1.0
    peak: Positive | None = None

    def __post_init__(self):
        check_fields(self)


def test_a_record_checks_itself_by_its_annotations():
    Machine(8, "nvlink", 0.5, None)
    assert refusal(Machine, 0)[1] == "gpus is 0; give a whole number from 1 to 16777216"
    assert refusal(Machine, 8, "nvlnk")[1].startswith("link is 'nvlnk'; did you mean 'nvlink'?")
    assert refusal(Machine, 8, peak=0)[1] == "peak is 0; give a finite number above 0, or None"
    assert refusal(Machine, 8, share=math.nan)[0] == "ValueError"


@checked
def cost(
    machine: Machine,
    moved_bytes: Amount,
    times_s: Sequence[Positive] = (1.0,),
    pair: tuple[int, float] = (1, 1.0),
    table: Mapping[str, Size] | None = None,
    show: Callable = print,
    *,
    label: str | int = "",
    itemsize: Annotated[int, lambda name, value: one_of(name, value, (2, 4))] = 4,
) -> float:
    """Give a number."""
    return moved_bytes * sum(times_s)


def test_a_function_checks_its_arguments_by_its_annotations():
    machine = Machine(1)
    assert cost(machine, 2.0) == 2.0
    assert cost(machine, moved_bytes=2, times_s=np.ones(3), label=3) == 6.0
    assert cost.__doc__ == "Give a number."
    wrong = {
        "machine": ("h100", "machine is 'h100'; give a Machine"),
        "moved_bytes": (-1, "moved_bytes is -1; give a finite number at least 0"),
        "times_s": ([1.0, 0.0], "times_s[1] is 0.0; give a finite number above 0"),
        "pair": ((1,), "pair is a tuple; give 2 values"),
        "table": ({"a": 0}, "table['a'] is 0; give a whole number from 1 to 16777216, or None"),
        "show": (3, "show is 3; give a function"),
        "label": (2.5, "label is 2.5; give a str; or give a whole number"),
        "itemsize": (3, "itemsize is 3; choose from 2, 4"),
    }
    for name, (value, message) in wrong.items():
        values = {"machine": machine, "moved_bytes": 1} | {name: value}
        assert refusal(cost, **values)[1] == message
    assert refusal(cost, "h100", 1)[1] == "machine is 'h100'; give a Machine"
    assert refusal(cost, machine, 1, "text")[1] == "times_s is 'text'; give a list"


def test_it_loads_without_torch():
    code = "import sys, course_lib.validate; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_check_keeps_nothing_of_what_it_was_given():
    """A failed arm of a union must not keep its error, whose frames hold the caller's tensors."""

    class Thing:
        pass

    @checked
    def take(x: float | Thing) -> None:
        pass

    gc.disable()
    try:
        thing = Thing()
        gone = weakref.ref(thing)
        take(thing)
        del thing
        assert gone() is None
    finally:
        gc.enable()


def test_a_folder_is_made_or_refused_in_one_sentence(tmp_path):
    writable("checkpoint", tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"checkpoint is '.*/file/below', and cannot be written: Not a directory; give"
    ):
        writable("checkpoint", tmp_path / "file" / "below")
