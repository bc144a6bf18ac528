"""Graders of chapter 08, exercises 1, 2 and 4: both shares of a bubble, layers kept, layers for each stage."""

from itertools import combinations

from course_lib.checks import Cost, Exercise, Stops, agree, pairs, several


# ------------------------------------------------------------------------------------ 1. the bubble
def bubble(p, m, v, waits=lambda p, v: p - 1):
    """Waiting over working, and over both, in short stages of which a micro-batch has v a rank."""
    return waits(p, v) / (v * m), waits(p, v) / (v * m + waits(p, v))


def pipelines(rng):
    return [(p, p * rng.choice([2, 3, 4]), v) for v in (1, rng.choice([2, 3, 4])) for p in rng.choices([3, 5, 8, 12])]


_WRONG_BUBBLE = {
    "the two are in the wrong order; waiting over working comes first": lambda p, m, v: bubble(p, m, v)[::-1],
    "v is missing: stages are 1 / v as long": {"v": 1},
    "p ranks have p - 1 cuts; the first micro-batch is at the last rank after p - 1 stages": {"waits": lambda p, v: p},
    "of total time: v divides the waiting, and that stands in the denominator too": lambda p, m, v: (
        bubble(p, m, v)[0],
        bubble(p, m, 1)[1] / v,
    ),
    "total time is working and waiting together, so m + p - 1, not m": lambda p, m, v: bubble(p, m, v)[:1] * 2,
    "v stages a rank are not v times as many waits: a rank waits for p - 1 short stages": {
        "waits": lambda p, v: p * v - 1
    },
    "the total too has v m short stages, and p - 1 that a rank waits": lambda p, m, v: (
        bubble(p, m, v)[0],
        bubble(p, m, 1)[1],
    ),
    "these are per cent; return shares": lambda p, m, v: [100 * share for share in bubble(p, m, v)],
}
_shares = several("return two numbers, of ideal time and of total time", "of ideal time", "of total time")
check_bubble = Exercise(bubble, pipelines, _WRONG_BUBBLE, _shares)


# ------------------------------------------------------------------------------------ 2. layers kept
def _in_flight(name, p, m, i):
    return {"naive": 1, "afab": m, "1f1b": min(m, p - i)}[name]


def layers_kept(name, L, p, m, i, in_flight=_in_flight):
    return in_flight(name, p, m, i) * (L // p)


def _ranks_of_schedules(rng):
    for name in ("naive", "afab", "1f1b"):
        for few in (False, True):
            p = rng.choice([4, 6, 8])
            m = rng.randrange(2, p) if few else p + rng.randrange(2, 9)
            L = p * rng.randrange(2, 6)
            yield from [(name, L, p, m, i) for i in (*[0] * (name != "naive"), rng.randrange(1, p - 1), p - 1)]


WRONG_KEPT = {
    "one micro-batch at a time is in flight": {
        "in_flight": lambda name, p, m, i: _in_flight(name.replace("naive", "1f1b"), p, m, i)
    },
    "that is the other way round: the first rank runs furthest ahead": {
        "in_flight": lambda name, p, m, i: _in_flight(name, p, m, p - 1 - i)
    },
    "the micro-batch that a rank works on is kept too": {
        "in_flight": lambda name, p, m, i: min(m, p - 1 - i) if name == "1f1b" else _in_flight(name, p, m, i)
    },
    "these are micro-batches; each is of L / p layers": lambda name, L, p, m, i: _in_flight(name, p, m, i),
    "a rank has L / p layers, not all of them": lambda name, L, p, m, i: _in_flight(name, p, m, i) * L,
    "that is AFAB, which does no backward before the last forward": {
        "in_flight": lambda name, p, m, i: 1 if name == "naive" else m
    },
    "that is rank 0; i runs p - 1 - i forwards ahead": {"in_flight": lambda name, p, m, i: _in_flight(name, p, m, 0)},
    "there are only m micro-batches": {
        "in_flight": lambda name, p, m, i: p - i if name == "1f1b" else _in_flight(name, p, m, i)
    },
    "that is one micro-batch; several are in flight at once, so activations are not divided by p": {
        "in_flight": lambda name, p, m, i: 1
    },
}
check_layers_kept = Exercise(layers_kept, _ranks_of_schedules, WRONG_KEPT)


# ------------------------------------------------------------------------------------ 4. layers for each stage
def _to_the_shortest(L, p, layer, embed, head):
    """One layer after the other to the stage that is shortest so far."""
    layers, costs = [1] * p, [embed + layer, *[layer] * (p - 2), head + layer]
    for _ in range(L - p):
        shortest = costs.index(min(costs))
        layers[shortest] += 1
        costs[shortest] += layer
    return layers


def _layers_by_search(L, p, layer, embed, head):
    """The smallest longest stage that is enough, then filled from the front."""
    ends = [embed, *[0] * (p - 2), head]
    longest = layer + max(ends)
    while sum((longest - end) // layer for end in ends) < L:
        longest += 1
    layers = [1] * p
    for stage, end in enumerate(ends):
        layers[stage] += min((longest - end) // layer - 1, L - sum(layers))
    return tuple(layers)


def _rounded(L, p, layer, embed, head):
    """Each stage its share of all time, rounded; the second stage takes what that is too many or too few."""
    share = (L * layer + embed + head) / p
    layers = [round((share - extra) / layer) for extra in (embed, *[0] * (p - 2), head)]
    layers[1] += L - sum(layers)
    return layers


def _even(L, p, layer, embed, head):
    return [L // p + (stage < L % p) for stage in range(p)]


def _less_at_the_ends(L, p, layer, embed, head):
    inner = _even(L + 2, p, layer, embed, head)[::-1]
    return [inner[0] - 1, *inner[1:-1], inner[-1] - 1]


_WRONG_LAYERS = {
    "even numbers of layers are not even stages; embedding and head cost too": _even,
    "the embedding costs too": {"embed": 0},
    "embedding and head cost as much as so many layers only if a layer costs 1": {"layer": 1},
    "embedding and head are at the wrong ends: the embedding is on the first stage, the head on the last": (
        lambda L, p, layer, embed, head: _to_the_shortest(L, p, layer, head, embed)
    ),
    "a share of all time for each, rounded, can be too long; whole layers go where there is room": _rounded,
    "one layer less at both ends fits some models, not this one": _less_at_the_ends,
    "a stage without a layer": Stops(lambda L, p, layer, embed, head: [L - p + 2, *[1] * (p - 2), 0]),
    "layers together": Stops(lambda L, p, layer, embed, head: _even(L - 1, p, layer, embed, head)),
    "one for each stage": Stops(lambda L, p, layer, embed, head: L // p),
}


def models(rng):
    """(L, p, layer, embed, head); in all together no two answers have stages that are equally long."""
    answers = [_to_the_shortest, *(answer for _, answer in pairs(check_layers.wrong))]
    while True:
        costs = [(1, 0, rng.choice([2, 3])), (2, rng.choice([4, 6]), 5), (3, 1, 0)]
        costs += [(rng.choice([2, 3]), rng.randrange(1, 8), rng.randrange(1, 8)) for _ in range(5)]
        cases = []
        for cost in costs:
            p = rng.choice([3, 4, 5])
            cases.append((p * rng.choice([3, 4]) + rng.randrange(p), p, *cost))
        seen = [[_watch_layers(answer, *case) for case in cases] for answer in answers]
        errors = any("error" in of_case for of_answer in seen for of_case in of_answer)
        if not errors and not any(agree(*pair) for pair in combinations(seen, 2)):
            return cases


def _watch_layers(answer, L, p, layer, embed, head):
    layers = answer(L, p, layer, embed, head)
    if not isinstance(layers, list | tuple) or len(layers) != p:
        return {"error": f"no list\nreturn {p} numbers, one for each stage; got {layers!r}"}
    if min(layers) < 1:
        return {"error": f"an empty stage\n{list(layers)} has a stage without a layer"}
    if sum(layers) != L:
        return {"error": f"another sum\n{list(layers)} has {sum(layers)} layers together, and the model has {L}"}
    costs = [layer * count for count in layers]
    costs[0] += embed
    costs[-1] += head
    return {"the longest stage": Cost(max(costs))}


check_layers = Exercise(_to_the_shortest, models, _WRONG_LAYERS, _watch_layers, right=_layers_by_search)
