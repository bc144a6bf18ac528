"""Graders of chapter 08, exercises 1, 2 and 4: both shares of a bubble, layers kept, layers for each stage."""

from collections.abc import Callable

from course_lib.checks.core import expect_equal, fail, grader
from course_lib.memory.stages import live_layers
from course_lib.schedules import make
from course_lib.schedules.bubbles import bubble


# ------------------------------------------------------------------------------------ 1. the bubble
@grader
def check_bubble(answer, rng):
    """Of ideal and of total time, with and without interleaving."""
    for v in (1, rng.choice([2, 3, 4])):
        p = rng.choice([3, 5, 8, 12])
        m = p * rng.choice([2, 3, 4])
        where = f"p = {p}, m = {m}, v = {v}"
        got = answer(p, m, v)
        if not isinstance(got, tuple) or len(got) != 2:
            fail(f"{where}: return two numbers, of ideal time and of total time; got {got!r}")
        form = bubble("interleaved", p, m, v)
        want, plain, waits = (form.of_ideal, form.of_total), (p - 1) / (m + p - 1), p * v - 1
        wrong = {
            "the two are in the wrong order; waiting over working comes first": want[::-1],
            "v is missing: stages are 1 / v as long": ((p - 1) / m, plain),
            "p ranks have p - 1 cuts; the first micro-batch is at the last rank after p - 1 stages": (
                _shares(p, v * m)
            ),
            "of total time: v divides the waiting, and that stands in the denominator too": (want[0], plain / v),
            "total time is working and waiting together, so m + p - 1, not m": (want[0], want[0]),
            "v stages a rank are not v times as many waits: a rank waits for p - 1 short stages": (
                _shares(waits, v * m)
            ),
            "the total too has v m short stages, and p - 1 that a rank waits": (want[0], plain),
            "these are per cent; return shares": (100 * want[0], 100 * want[1]),
        }
        told = next((why for why, value in wrong.items() if _near(got, value)), None)
        if not _near(got, want):
            shown = f"{where}: got {tuple(round(share, 4) for share in got)}, right is "
            fail(f"{shown}{tuple(round(share, 4) for share in want)}" + (f": {told}" if told else ""))


def _shares(waits: int, works: int) -> tuple[float, float]:
    return waits / works, waits / (works + waits)


def _near(got: tuple, want: tuple) -> bool:
    return all(abs(a - b) < 1e-9 for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------ 2. layers kept
@grader
def check_layers_kept(answer, rng):
    """Counted from the schedules themselves, rank by rank."""
    for name in ("naive", "afab", "1f1b"):
        for few in (False, True):
            p = rng.choice([4, 6, 8])
            m = rng.randrange(2, p) if few else p + rng.randrange(2, 9)
            each = rng.randrange(2, 6)
            L = p * each
            want = live_layers(make(name, p, m), [each] * p)
            for i in (*[0] * (name != "naive"), rng.randrange(1, p - 1), p - 1):
                wrong = {
                    "these are micro-batches; each is of L / p layers": want[i] // each,
                    "a rank has L / p layers, not all of them": want[i] * p,
                    "that is AFAB, which does no backward before the last forward": m * each,
                    "that is rank 0; rank i runs p - 1 - i forwards ahead": min(m, p) * each,
                    "there are only m micro-batches": (p - i) * each,
                    "that is one micro-batch; several are in flight at once, so activations are not divided by p": each,
                }
                if name == "1f1b":
                    wrong = {
                        "that is the other way round: the first rank runs furthest ahead": min(m, i + 1) * each,
                        "the micro-batch that a rank works on is kept too": min(m, p - 1 - i) * each,
                    } | wrong
                if name == "naive":
                    wrong = {"one micro-batch at a time is in flight": min(m, p - i) * each} | wrong
                got = answer(name, L, p, m, i)
                expect_equal(got, want[i], f"{name}, L = {L}, p = {p}, m = {m}, rank {i}", wrong)


# ------------------------------------------------------------------------------------ 4. layers for each stage
@grader
def check_layers(answer, rng):
    """The longest stage is as short as with the best of all choices."""
    for L, p, layer, embed, head in _models_that_tell(rng):
        got = answer(L, p, layer, embed, head)
        where = f"L = {L}, p = {p}, layer = {layer}, embed = {embed}, head = {head}"
        if not isinstance(got, list | tuple) or len(got) != p:
            fail(f"{where}: return {p} numbers, one for each stage; got {got!r}")
        if min(got) < 1:
            fail(f"{where}: {list(got)} has a stage without a layer")
        if sum(got) != L:
            fail(f"{where}: {list(got)} has {sum(got)} layers together, and the model has {L}")
        longest, best = _longest(got, layer, embed, head), _best(L, p, layer, embed, head)
        if longest > best:
            mistakes = _mistaken(L, p, layer, embed, head).items()
            told = [f": {why}" for why, layers in mistakes if layers == list(got)]
            why = told[0] if told else _hint(got, L, p, embed, head)
            fail(f"{where}: {list(got)} has a stage of {longest}, and {best} is possible{why}")


def _models_that_tell(rng) -> list[tuple[int, int, int, int, int]]:
    """(L, p, layer, embed, head): three kinds of models, then one for each mistake, which makes a stage too long."""
    drawn = [lambda: (1, 0, rng.choice([2, 3])), lambda: (2, rng.choice([4, 6]), 5), lambda: (3, 1, 0)]
    models = [_drawn_until(rng, costs, lambda wrong: True) for costs in drawn]
    for said in MISTAKES_IN_LAYERS:
        costs = lambda: (rng.choice([2, 3]), rng.randrange(1, 8), rng.randrange(1, 8))  # noqa: E731
        models.append(_drawn_until(rng, costs, lambda wrong, said=said: said in wrong))
    return models


def _drawn_until(rng, costs: Callable, tells: Callable) -> tuple[int, int, int, int, int]:
    """A model on which no two mistakes give the same layers and none leaves a stage empty; and it `tells`."""
    while True:
        model = (*_drawn_size(rng), *costs())
        wrong = _mistaken(*model)
        different = len({tuple(layers) for layers in wrong.values()}) == len(wrong)
        if tells(wrong) and different and all(min(layers) > 0 for layers in wrong.values()):
            return model


def _mistaken(L: int, p: int, layer: int, embed: int, head: int) -> dict[str, list[int]]:
    """What each mistake gives on this model, where that is worse than the best or leaves a stage empty."""
    given = {said: mistake(L, p, layer, embed, head) for said, mistake in MISTAKES_IN_LAYERS.items()}
    best = _best(L, p, layer, embed, head)
    return {
        said: layers for said, layers in given.items() if min(layers) < 1 or _longest(layers, layer, embed, head) > best
    }


def _drawn_size(rng) -> tuple[int, int]:
    p = rng.choice([3, 4, 5])
    return p * rng.choice([3, 4]) + rng.randrange(p), p


def _to_the_shortest(L: int, p: int, layer: int, embed: int, head: int) -> list[int]:
    """One layer after the other to the stage that is shortest so far."""
    layers, costs = [1] * p, [embed + layer, *[layer] * (p - 2), head + layer]
    for _ in range(L - p):
        shortest = costs.index(min(costs))
        layers[shortest] += 1
        costs[shortest] += layer
    return layers


def _rounded(L: int, p: int, layer: int, embed: int, head: int) -> list[int]:
    """Each stage its share of all time, rounded; the second stage takes what that is too many or too few."""
    share = (L * layer + embed + head) / p
    layers = [round((share - extra) / layer) for extra in (embed, *[0] * (p - 2), head)]
    layers[1] += L - sum(layers)
    return layers


MISTAKES_IN_LAYERS = {
    "even numbers of layers are not even stages; embedding and head cost too": lambda L, p, layer, embed, head: [
        L // p + (stage < L % p) for stage in range(p)
    ],
    "the embedding costs too": lambda L, p, layer, embed, head: _to_the_shortest(L, p, layer, 0, head),
    "embedding and head cost as much as so many layers only if a layer costs 1": lambda L, p, layer, embed, head: (
        _to_the_shortest(L, p, 1, embed, head)
    ),
    "embedding and head are at the wrong ends": lambda L, p, layer, embed, head: _to_the_shortest(
        L, p, layer, head, embed
    ),
    "a share of all time for each, rounded, can be too long; whole layers go where there is room": _rounded,
}


def _longest(layers, layer: float, embed: float, head: float) -> float:
    costs = [layer * count for count in layers]
    costs[0] += embed
    costs[-1] += head
    return max(costs)


def _best(L: int, p: int, layer: int, embed: int, head: int) -> int:
    """The shortest bound under which all layers find room, each stage having one or more."""
    bound = max(layer + embed, layer + head, layer)
    while True:
        room = (bound - embed) // layer + (bound - head) // layer + (p - 2) * (bound // layer)
        if room >= L:
            return bound
        bound += 1


def _hint(got, L: int, p: int, embed: int, head: int) -> str:
    if max(got) - min(got) <= 1:  # the longer ones elsewhere than first
        return ": even numbers of layers are not even stages; embedding and head cost too"
    if got[-1] <= min(got) and got[0] > got[-1] and embed > head:
        return ": the embedding is on the first stage, the head on the last"
    if got[0] == got[-1] == min(got):
        return ": one layer less at both ends fits some models, not this one"
    return ""
