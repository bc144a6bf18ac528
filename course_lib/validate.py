"""Refuse nonsense where it enters: a size, a number, a word or a record that cannot be meant, each in one sentence.

    whole("num_gpus", 0)                                  # ValueError: num_gpus is 0; give a whole number of at least 1
    one_of("recompute", "ful", ("none", "full"))          # ValueError: recompute is 'ful'; did you mean 'full'? ...

    @checked                                              # the same, from the annotations of a function ...
    def mfu(model_flops: Positive, seconds: Positive, num_gpus: Size) -> float: ...

    @dataclass(frozen=True)                               # ... and of a record
    class Link(Checked):
        bytes_per_s: Positive
        kind: Literal["nvlink", "network"]

A wrong type is a TypeError, a wrong value a ValueError. Annotations that say more than their type carry a function of
(name, value) in `Annotated`; the ones that the package needs most are below.
"""

import collections.abc
import difflib
import functools
import inspect
import json
import math
import numbers
import tempfile
import tomllib
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

LARGEST_SIZE = 2**24  # of what is looped over or allocated: ranks, layers, tokens of a sequence
_LARGEST = 10**18  # of what is only multiplied: bytes, parameters, tokens of a whole training

PACKAGE_ALONE = (  # said where notebooks or weights are asked for and were not installed
    "the package is installed alone. `make wheel` in a clone makes the whole wheel, and this installs it: "
    "pip install --force-reinstall --no-deps build/wheel/course_lib-*.whl"
)

Check = Callable[[str, Any], None]
Limit = float | None


def whole(name: str, value: object, least: int = 1, most: int = _LARGEST) -> None:
    """Raise unless the value is a whole number from `least` to `most`; True is none, and neither is 2.0."""
    if type(value) is int and least <= value <= most:
        return  # the usual case, soon answered
    limits = f"from {least} to {most}" if abs(least) < _LARGEST and most < _LARGEST else ""
    if not limits and least > -_LARGEST:
        limits = f"of at least {least}" if not _is_whole(value) or value < least else f"of at most {most:g}"
    required = f"give a whole number {limits}".strip()
    if not _is_whole(value):
        raise TypeError(f"{name} is {show(value)}; {required}")
    if not least <= value <= most:
        raise ValueError(f"{name} is {show(value)}; {required}")


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def number(
    name: str, value: object, least: Limit = None, most: Limit = None, above: Limit = None, below: Limit = None
) -> None:
    """Raise unless the value is a finite number within the limits; `above` and `below` are not reached themselves."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if (
        is_number
        and math.isfinite(value)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (above is None or value > above)
        and (below is None or value < below)
    ):
        return  # before the text of an error that is seldom needed
    limits = {"at least": least, "above": above, "at most": most, "below": below}
    limited = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
    required = f"give a finite number{' ' if limited else ''}{limited}"
    raise (ValueError if is_number else TypeError)(f"{name} is {show(value)}; {required}")


def truth(name: str, value: object) -> None:
    """Raise unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {show(value)}; give True or False")


def one_of(name: str, value: object, known: Sequence) -> None:
    """Raise unless the value is one of the known ones, with the nearest of them."""
    if (type(value) is str and value in known) or any(
        value is choice or (type(value) is type(choice) and value == choice) for choice in known
    ):
        return
    near = (
        difflib.get_close_matches(value, [word for word in known if isinstance(word, str)], n=1)
        if isinstance(value, str)
        else []
    )
    advice = f"did you mean {near[0]!r}? " if near else ""
    wrong = ValueError if any(isinstance(value, type(choice)) for choice in known) else TypeError
    raise wrong(f"{name} is {show(value)}; {advice}choose from {', '.join(map(str, known))}")


def instance(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless the value is of that class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {show(value)}; give {_article(kind.__name__)}")


def show(value: object) -> str:
    """Name a value in an error: numbers and short texts as they are, all else by its class."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _article(type(value).__name__)


def _article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


Size = Annotated[int, partial(whole, least=1, most=LARGEST_SIZE)]  # looped over or allocated
Count = Annotated[int, partial(whole, least=0, most=LARGEST_SIZE)]  # the same, 0 included
Index = Annotated[int, partial(whole, least=0)]  # a rank, a stage, a step
Bytes = Index  # or elements: only multiplied
Seed = Annotated[int, partial(whole, least=0, most=2**32 - 1)]
Amount = Annotated[float, partial(number, least=0)]  # bytes, FLOPs, seconds, tokens
Positive = Annotated[float, partial(number, above=0)]  # the same, where one divides by it
Share = Annotated[float, partial(number, least=0, most=1)]


def writable(name: str, folder: Path) -> None:
    """Make a folder where there is none, and raise ValueError unless a file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b" ")
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        why = getattr(error, "strerror", error)
        raise ValueError(f"{name} is {str(folder)!r}, and cannot be written: {why}; give another") from None


def writable_file(name: str, path: Path) -> None:
    """Raise ValueError unless that file can be written, before the work for it; one that is there stays as it is."""
    try:
        if path.is_fifo():  # its reader would take the end of this look for the end of all
            return
        is_new = not path.exists()
        with path.open("ab", buffering=0) as file:
            file.write(b" " * is_new)  # a full device says so even where nothing is written
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        why = getattr(error, "strerror", error)
        raise ValueError(f"{name} is {str(path)!r}, and cannot be written: {why}; give another") from None


def read_json(path: str | Path) -> object:
    """Return what a file of JSON holds; raises ValueError if it is none, nested without end, or has a name twice."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_constant)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give another") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


def read_toml(path: Path) -> dict:
    """Return what a table of the package's own holds, its lists as tuples: the fields of frozen records."""

    def as_fields(value: object) -> object:
        if isinstance(value, dict):
            return {name: as_fields(entry) for name, entry in value.items()}
        return tuple(map(as_fields, value)) if isinstance(value, list) else value

    return as_fields(tomllib.loads(path.read_text(encoding="utf-8")))


def json_lines(text: str) -> list[dict]:
    """Return the objects of JSON lines, in order. What is none is left out: a writer that was killed leaves such."""
    found = []
    for line in text.split("\n"):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            found.append(fields)
    return found


def _once_each(pairs: list[tuple[str, object]]) -> dict:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands twice in one object; give it once")
        found[name] = value
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number; give a finite one")


def checked(function: Callable | None = None, /, **hints: object) -> Callable:
    """Check a function's arguments by its annotations at each call; what is left out and None by default is not.

    hints    annotations beside the function's own, for code that a lesson shows with plain ones: @checked(top_k=Size)
    """
    if function is None:
        return partial(checked, **hints)
    checks: list = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not checks:  # at the first call, when all names that annotations use exist
            checks.extend(_checks_of(function, hints))
        in_order, by_name = checks
        for (name, check), value in zip(in_order, args, strict=False):  # fewer where defaults are left out
            check(name, value)
        for name, value in kwargs.items():
            if name in by_name:
                by_name[name](name, value)
        return function(*args, **kwargs)

    return call


def check_fields(record: object) -> None:
    """Check a dataclass's fields by their annotations; call it first in `__post_init__`."""
    for name, check in _checks_of_fields(type(record)):
        check(name, getattr(record, name))


class Checked:
    """A dataclass whose fields are checked by their annotations, and by nothing else."""

    def __post_init__(self) -> None:
        check_fields(self)


def _checks_of(function: Callable, hints: dict) -> tuple[list[tuple[str, Check]], dict[str, Check]]:
    """Of a function: the checks of what can be passed by position, and of all parameters by name."""
    hints = typing.get_type_hints(function, include_extras=True) | hints
    checks = {}
    positional = []
    for parameter in inspect.signature(function).parameters.values():
        check = _check_of(hints.get(parameter.name, Any))
        if parameter.default is None:
            check = _or_none(check)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append((parameter.name, check))
        checks[parameter.name] = check
    return positional, checks


@functools.cache
def _checks_of_fields(kind: type) -> list[tuple[str, Check]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(name, _check_of(hints[name])) for name in kind.__dataclass_fields__]


def _check_of(hint: object) -> Check:
    """The function of (name, value) that an annotation stands for."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((extra for extra in hint.__metadata__ if callable(extra)), _check_of(inner[0]))
    if origin in (typing.Union, types.UnionType):
        return _any_of([_check_of(arm) for arm in inner if arm is not types.NoneType], types.NoneType in inner)
    if origin is Literal:
        return partial(one_of, known=inner)
    if hint in (int, float, bool):
        return {int: partial(whole, least=-_LARGEST), float: number, bool: truth}[hint]
    kind = origin or hint
    if kind in (Any, object):
        return _anything
    if kind is collections.abc.Callable:
        return _callable
    if kind is collections.abc.Iterable:
        return _iterable
    if isinstance(kind, type) and issubclass(kind, collections.abc.Mapping):
        return partial(_mapping, of=_check_of(inner[1]) if inner else _anything)
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return partial(_row, of=[_check_of(arm) for arm in inner])
    if isinstance(kind, type) and issubclass(kind, collections.abc.Sequence) and kind not in (str, bytes):
        return partial(_sequence, of=_check_of(inner[0]) if inner else _anything)
    if isinstance(kind, type) and not getattr(kind, "_is_protocol", False):
        return partial(instance, kind=kind)
    return _anything


def _anything(name: str, value: object) -> None:
    pass


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _any_of(arms: Sequence[Check], none: bool) -> Check:
    def check(name: str, value: object) -> None:
        if none and value is None:
            return
        said = []  # kinds and texts: an error that were kept would keep its frames, and every tensor in them
        for arm in arms:
            try:
                return arm(name, value)
            except (TypeError, ValueError) as error:
                said.append((type(error), str(error)))
        best = next((entry for entry in said if issubclass(entry[0], ValueError)), said[0])
        others = [text.partition("; ")[2] for kind, text in said if (kind, text) != best]
        raise best[0]("; or ".join([best[1], *others]) + (", or None" if none else "")) from None

    return check


def _callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} is {show(value)}; give a function")


def _iterable(name: str, value: object) -> None:
    if not hasattr(value, "__iter__") or isinstance(value, str):
        raise TypeError(f"{name} is {show(value)}; give a list")


def _is_row(value: object) -> bool:
    """Whether it can be indexed and is no text: a list, a tuple, an array."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | bytes | dict)


def _sequence(name: str, value: object, of: Check) -> None:
    if not _is_row(value):
        raise TypeError(f"{name} is {show(value)}; give a list")
    of_kind = of.keywords.get("kind") if isinstance(of, partial) else None
    if of is _anything or (of_kind and all(isinstance(item, of_kind) for item in value)):
        return  # the usual case of many records, soon answered
    for index, item in enumerate(value):
        of(f"{name}[{index}]", item)


def _row(name: str, value: object, of: Sequence[Check]) -> None:
    if not _is_row(value) or len(value) != len(of):
        raise TypeError(f"{name} is {show(value)}; give {len(of)} values")
    for index, (check, item) in enumerate(zip(of, value, strict=True)):
        check(f"{name}[{index}]", item)


def _mapping(name: str, value: object, of: Check) -> None:
    if not isinstance(value, collections.abc.Mapping):
        raise TypeError(f"{name} is {show(value)}; give a dictionary")
    for key, item in value.items():
        of(f"{name}[{key!r}]", item)
