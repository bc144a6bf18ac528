"""Nonsense is refused where it enters: every parameter of every checked function, every field of every record.

What `checked` and `check_fields` do with an annotation stands in test_validate.py. Here each annotation of the package
is asked whether it refuses what cannot be meant: another type, a text for a number, a number for a text, nan, infinity,
a negative number, and zero where one divides by it. BY_THE_BODY has those that leave it to their function.
"""

import inspect
import math
import pkgutil
import re
from fnmatch import fnmatch
from importlib import import_module

import pytest

import course_lib
from course_lib.layout import Layout
from course_lib.validate import _checks_of, _checks_of_fields, checked

# Sizes that a function's own sentence refuses, or that lesson code shows with plain annotations; numbers of either
# sign; what any object can be, for which torch or the next function has a sentence.
BY_THE_BODY = {
    "layout.record.Layout.*", "launch.rendezvous.Place.*", "engines.EngineFacts.*", "estimate.estimate.Estimate.*",
    "schedules.builders.one_f_one_b.*", "checkpoint.manifest._check_options.*", "checks.table.Exercise.seconds",
    "train.options.layout_for.batch_size", "memory.budget.saved_for_backward.stage", "panels.record.Control.start",
    "plots.data_parallel.show_replicas.mean", "compare.record.on_ranks.options",
    "plan.sheet.sheet.choice", "plots.memory.show_memory_timeline.timeline", "widgets.host.play.start",
    "training.chunked_loss.chunked_loss_of.model", "training.loop.train_step.scaler",
}  # fmt: skip
NEVER_ZERO = re.compile(
    r"dp|cp|tp|pp|v|d_\w+|num_(?!shared|tokens)\w+|\w+_size|\w*seq_len|top_k|micro_batch(?:es)?|itemsize|ranks_per_node|every|keep"
)
OF_CHECKED = checked(len).__code__


class Nonsense:
    """Of a type that nothing takes."""


def all_checks() -> dict:
    """module.function.parameter -> its check, of all that checks its arguments."""
    found = {}
    for module in (import_module(one.name) for one in pkgutil.walk_packages(course_lib.__path__, "course_lib.")
                   if "__" not in one.name):  # fmt: skip
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isclass(value) and {"__dataclass_fields__", "__post_init__"} <= {*dir(value)}:
                checks = _checks_of_fields(value)
            elif getattr(value, "__code__", None) is OF_CHECKED:
                checks = _checks_of(value.__wrapped__, inspect.getclosurevars(value).nonlocals["hints"])[1].items()
            else:
                continue
            found |= {f"{module.__name__}.{name}.{each}".removeprefix("course_lib."): check for each, check in checks}
    return found


def accepts(check, value: object) -> bool:
    """Whether a check lets a value pass; a refusal is one sentence."""
    try:
        check("it", value)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("it is ") and "\n" not in str(error)
        return False
    return True


def let_pass(name: str, check) -> list:
    """What cannot be meant, and is accepted all the same."""
    wrong = [Nonsense(), -1, math.nan, math.inf]
    if accepts(check, 3):  # a number, of which no text is one
        wrong += ["text", True] + [0] * bool(NEVER_ZERO.fullmatch(name.rpartition(".")[2]))
    return [value for value in wrong if accepts(check, value)]


def test_every_annotation_refuses_what_cannot_be_meant():
    checks = all_checks()
    excused = {name for name in checks if any(fnmatch(name, each) for each in BY_THE_BODY)}
    found = {name: let_pass(name, check) for name, check in checks.items() if name not in excused}
    assert len(checks) > 900 and {name: what for name, what in found.items() if what} == {}
    needless = [each for each in BY_THE_BODY if not any(let_pass(x, checks[x]) for x in checks if fnmatch(x, each))]
    assert needless == []


@pytest.mark.parametrize("field", [name for name in vars(Layout()) if name != "layers_of_stage"])
def test_a_layout_refuses_it_in_its_own_sentences(field):
    value = getattr(Layout(), field)
    wrong = ["text", Nonsense()] + [-1, 0, 2.5, math.nan, math.inf] * (type(value) is int and field != "zero_stage")
    for each in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            Layout(**{field: each})
        assert field in str(caught.value) and "\n" not in str(caught.value)


def test_every_picture_that_a_notebook_names_checks_its_arguments():
    shown = {
        f"{module.name}.{name}": value
        for module in pkgutil.walk_packages(course_lib.__path__, "course_lib.")
        if module.name.startswith("course_lib.plots.")
        for name, value in vars(import_module(module.name)).items()
        if inspect.isfunction(value) and value.__module__ == module.name and name.startswith("show_")
    }
    signatures = {name: inspect.signature(value) for name, value in shown.items()}
    drawing = [name for name, of in signatures.items() if of.parameters and of.return_annotation is None]
    assert len(drawing) > 40 and [name for name in drawing if not hasattr(shown[name], "__wrapped__")] == []
