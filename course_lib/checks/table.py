"""An exercise as a table: a reference, inputs, and wrong answers with what they are told.

    check_share = Exercise(share, draw, {"a bf16 has 2 bytes": in_fp32})

`check_share(my_share)` runs the answer beside the reference. Where they differ it runs the wrong answers on the same
inputs, and tells the message of the first that did what the answer did. So a misconception is code once: the program
that somebody who believes it would write. tests/checks/test_tables.py is the test of all tables.

What is compared is what `watch` saw of a call (watch.py): {what: value}, the most telling first.
"""

import inspect
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from course_lib.checks import core
from course_lib.checks.core import CheckFailed, NotWritten, but, observed, own_lines, raised_in, run_ranks
from course_lib.checks.watch import Cost, Each, agree, call, copied, difference, shown
from course_lib.launch.limits import slowness

Seen = list[list[dict]]  # of one answer: seen[case][rank] is {what: value}; without ranks there is one
_Spot = tuple[str, int, int]  # what, case, rank
_SAME_CALLS = "Does every rank of a group make the same calls in the same order?"
SAYS = {
    "arguments changed": "work on a copy (`x.clone()`): the caller still needs it",
    "other calls than send and recv": "only send and recv are allowed here",
}  # what tables say alike
ERRORS = {
    "Received data size doesn't match": (
        "a message is longer than the tensor it was received into: its two ends disagree on its length"
    )
}


@dataclass(frozen=True)
class Stops:
    """A wrong answer that raises or hangs, or that `says` tells; its key is a part of its message.

    A learner's answer is not compared with it: it is for the test alone.
    """

    answer: Callable | dict


def _wrong_answer(reference: Callable, of):
    """Most wrong answers are the reference with other arguments, or a class with other attributes: a dict of them."""
    if isinstance(of, list):
        return [_wrong_answer(reference, one) for one in of]
    if isinstance(of, Stops):
        return Stops(_wrong_answer(reference, of.answer))
    make = but if isinstance(reference, type) else _with
    return make(reference, **of) if isinstance(of, dict) else of


def _with(reference: Callable, /, **changed) -> Callable:
    """The reference with other arguments, also in place of those that it is given."""
    names = list(inspect.signature(reference).parameters)
    return lambda *given: reference(**dict(zip(names, given, strict=False)) | changed)


@dataclass(frozen=True, eq=False)
class Exercise:
    """A grader as data; called with an answer, it grades it.

    inputs   rng -> cases, the smallest first: arguments of the answer; on ranks each begins with the number of ranks
    wrong    what it is told -> what is changed in the reference {name: argument}, another wrong answer, a list of them,
             or one that `Stops`; in the order in which they are tried
    watch    (answer, *arguments) -> what was seen; on ranks called on each
    says     what -> why, where an answer is off as no wrong one is; the reason may be a function of the case
    errors   a part of the error of a rank -> why; backend: of the ranks, as `launch` has it
    ranks    whether the answer runs on real ranks, or what ranks that wait for ever have probably done
    seconds  of an idle machine, after which ranks are stopped
    right    an unusual right answer, where it is seen otherwise than the reference; for the test alone
    known    seed and case of a failed try -> what the wrong answers did there
    """

    reference: Callable
    inputs: Callable[[random.Random], Iterable[tuple]]
    wrong: dict[str, Callable | dict | list | Stops]
    watch: Callable[..., dict] = call
    says: dict[str, str | Callable[..., str]] = field(default_factory=dict)
    ranks: bool | str = False
    seconds: float = 8.0
    right: Callable | None = None
    errors: dict[str, str] = field(default_factory=dict)
    backend: str = "auto"
    known: dict[tuple, list[Seen]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = {said: _wrong_answer(self.reference, of) for said, of in self.wrong.items()}
        object.__setattr__(self, "wrong", wrong)

    @property
    def __name__(self) -> str:
        """The name under which a chapter has it."""
        chapters = [module for name, module in list(sys.modules.items()) if name.startswith("course_lib.checks.ch")]
        names = (name for module in chapters for name, value in vars(module).items() if value is self)
        return next(names, "a check")

    def __call__(self, answer, seed: int | None = None) -> None:
        """Print one line if the answer does what the reference does; else raise CheckFailed with the likely reason.

        After a failure the same numbers come first, so that what the wrong answers do is known; then fresh ones.
        """
        if answer is None or answer is ...:
            raise NotWritten(f"{self.__name__}: your code goes here")
        fresh = random.SystemRandom().randrange(2**31)
        before = [] if core.apart else [seed for seed, _ in self.known]
        for used in [*before, fresh] if seed is None else [seed]:
            try:
                _grade(self, answer, used)
            except NotImplementedError as missing:
                raise NotWritten(f"{self.__name__}: {str(missing) or 'your code goes here'}") from None
            except CheckFailed as failure:
                raise CheckFailed(f"{self.__name__}: {failure}\n(to repeat this very run: seed={used})") from None
        self.known.clear()
        print(f"{self.__name__}: passed")


class _Raised(CheckFailed):
    """A rank of the answer raised: what the others did, and what this one did in other cases, is not known."""


def _grade(ex: Exercise, answer, seed: int) -> None:
    cases = list(ex.inputs(random.Random(seed)))
    try:
        _compare(ex, answer, cases, (seed, None))
    except _Raised:  # a smaller case may show why
        for place, case in enumerate(cases[:-1]):
            _compare(ex, answer, [case], (seed, place))
        raise


def _compare(ex: Exercise, answer, cases: list[tuple], key: tuple) -> None:
    want, got = _beside_the_reference(ex, answer, cases)
    if told := message_for(ex, cases, want, got, lambda: _of_wrong(ex, cases, key)):
        raise CheckFailed(told)


def _beside_the_reference(ex: Exercise, answer, cases: list[tuple]) -> list[Seen]:
    """In one launch; while a class is graded in two, of which the answer's runs apart."""
    try:
        if core.apart is None:
            return observe(ex, [ex.reference, answer], cases)
        with core.in_this_process():
            want = observe(ex, [ex.reference], cases)
        return want + observe(ex, [answer], cases)
    except CheckFailed as failure:  # the reference neither raises nor hangs
        text = str(failure)
        if "time limit: after " in text:
            places = "\n".join(re.findall(r"^rank \d.*(?:\n    .*)*", text, re.MULTILINE))
            hang = ex.ranks if isinstance(ex.ranks, str) else _SAME_CALLS
            raise CheckFailed(
                f"your ranks wait for each other for ever, until they are stopped. {hang}\n{places}"
            ) from None
        why = next((f"{why}\n" for sign, why in (ex.errors | ERRORS).items() if sign in text), "")
        raise _Raised(f"{why}{text}") from None


def _of_wrong(ex: Exercise, cases: list[tuple], key: tuple) -> list[Seen]:
    if key not in ex.known:
        ex.known.clear()
        with core.in_this_process():
            ex.known[key] = observe(ex, [answer for _, answer in pairs(ex.wrong)], cases)
    return ex.known[key]


def pairs(wrong: dict, stop: bool = False) -> list[tuple[str, Callable]]:
    """Return (message, wrong answer) for each of a table that is compared with, or for each that stops."""
    if stop:
        return [(said, of.answer) for said, of in wrong.items() if isinstance(of, Stops)]
    every = [(said, one) for said, of in wrong.items() for one in (of if isinstance(of, list) else [of])]
    return [(said, one) for said, one in every if not isinstance(one, Stops)]


# What answers do ------------------------------------------------------------------------------------------------------


def observe(ex: Exercise, answers: list, cases: list[tuple]) -> list[Seen]:
    """seen[answer][case][rank]; one launch for each number of ranks runs all answers on all cases."""
    if not ex.ranks:
        return [[[observed(_in_this_process, answer, ex.watch, case)] for case in cases] for answer in answers]
    seen: list[Seen] = [[[] for _ in cases] for _ in answers]
    seconds = ex.seconds * slowness() * max(1, len(answers) // 2)
    for size in sorted({case[0] for case in cases}):
        places = [place for place, case in enumerate(cases) if case[0] == size]
        mine = [cases[place][1:] for place in places]
        for of_rank in run_ranks(_on_this_rank, size, ex.watch, answers, mine, timeout=seconds, backend=ex.backend):
            for a, of_answer in enumerate(of_rank):
                for place, one in zip(places, of_answer, strict=True):
                    seen[a][place].append(one)
    return seen


def _in_this_process(answer: Callable, watch: Callable, case: tuple) -> dict:
    """What was seen, or the kind of error that the answer raised and, in the lines below, the answer's own place."""
    try:
        return watch(answer, *copied(case))
    except NotImplementedError:
        raise
    except Exception as raised:  # an answer may raise anything
        if not raised_in(answer, raised):
            raise
        return {"error": f"{type(raised).__name__}\n{own_lines(answer, raised)}"}


def _on_this_rank(watch: Callable, answers: list, cases: list[tuple]) -> list[list[dict]]:
    seen = []
    for answer in answers:
        seen.append([watch(answer, *copied(case)) for case in cases])
        dist.barrier()
    return copied(seen, as_results=True)


# What an answer is told -----------------------------------------------------------------------------------------------


def message_for(
    ex: Exercise, cases: list[tuple], want: Seen, got: Seen, of_wrong: Callable[[], list[Seen]]
) -> str | None:
    """Return what the answer is told, or None if it is right.

    Told is the first wrong answer that did the same everywhere, or else the first that did the same in what is off
    first, or else the difference in the smallest case.
    """
    off = _first_off(got, want, _spots(want))
    if off is None:
        return None
    what, case, rank = off
    rank_of = [f"rank {rank} of {len(want[case])}"] * bool(ex.ranks)
    where = "".join(f"{part}: " for part in [", ".join(filter(None, [_where(ex, cases[case]), *rank_of]))] if part)
    everywhere = list(_spots(want))
    there = [spot for spot in everywhere if spot[0] == what]
    # equal costs are no sign of the same mistake if something before them was off
    until = everywhere if isinstance(_at(want, off), Cost) else there
    seen_of_wrong = of_wrong()
    for compared in (everywhere, there):
        for (message, _), seen in zip(pairs(ex.wrong), seen_of_wrong, strict=True):
            first = _first_off(seen, want, until)
            if first and first[0] == what and all(_agree_at(got, seen, spot) for spot in compared):
                return f"{message}\n({where}{what}: {difference(_at(got, off), _at(want, off))})"
    if what == "error" and _at(got, off):
        return f"{where}{got[case][rank]['error'].partition(chr(10))[2]}"
    why = (SAYS | ex.says).get(what, "")
    told = f"{where}{what}: {difference(_at(got, off), _at(want, off))}"
    return f"{told}: {why(*cases[case]) if callable(why) else why}" if why else told


def _first_off(seen: Seen, want: Seen, spots: Iterable[_Spot]) -> _Spot | None:
    return next((spot for spot in spots if not _agree_at(seen, want, spot, within=True)), None)


def _spots(want: Seen) -> Iterator[_Spot]:
    """Every place of an observation; errors first, then in the order of the reference's."""
    names = dict.fromkeys(["error", *(what for case in want for seen in case for what in seen)])
    return ((what, c, r) for what in names for c, case in enumerate(want) for r in range(len(case)))


def _at(seen: Seen, spot: _Spot):
    value = seen[spot[1]][spot[2]].get(spot[0])
    return value.partition("\n")[0] if spot[0] == "error" and value else value


def _agree_at(got: Seen, want: Seen, spot: _Spot, within: bool = False) -> bool:
    return agree(_at(got, spot), _at(want, spot), within)


def _where(ex: Exercise, case: tuple) -> str:
    """The case's arguments by name, as far as they are short."""
    names = [list(inspect.signature(of).parameters.values()) for of in (ex.watch, ex.reference)]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in names[0])
    named = names[1] if takes_all else names[0][1:]
    short = [
        f"{parameter.name}={shown(value)}"
        for parameter, value in zip(named, case[bool(ex.ranks) :], strict=False)
        if "seed" not in parameter.name and not isinstance(value, Each) and len(shown(value)) <= 60
    ]
    return ", ".join([f"{case[0]} ranks"] * bool(ex.ranks) + short)
