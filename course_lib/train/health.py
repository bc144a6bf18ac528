"""Whether ranks still hold the same numbers, and which of them is slow.

A GPU that computes wrongly, or a program that does, rarely says so: losses drift apart and nobody sees it. What several
ranks hold, they must hold bit for bit: the loss of the step and its gradient norm, weights that no parallelism has cut,
the seed that ranks of tp share, and the tokens of ranks that differ in tp, pp or cp alone. `compare_ranks` tells each
other a checksum of each and names who differs from the most. Ranks that differ in dp must have other tokens: it names
those that have the same.

A slow rank keeps all others waiting, so the seconds of whole steps are alike on all of them. `slowest_rank` wants the
seconds of what a rank does alone, such as its forward where nothing is sent in it.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.validate import Amount, Index, Positive, checked

SHOWN = 3  # names in an error
TOKENS = "the tokens of dp="


class RanksDisagree(RuntimeError):
    """Ranks hold different numbers where they must hold the same; every rank raises the same."""


def compare_ranks(
    engine: five_d.FiveD, step: int, numbers: engines.StepNumbers, micro_batches: five_d.MicroBatches
) -> None:
    """Let all ranks tell each other what they hold after a step.
    numbers, micro_batches   of that step, as this rank saw them
    Bytes    an all-gather of some 50 bytes for each parameter of a rank
    Raises   RanksDisagree on every rank if one holds other numbers, or two dp ranks trained on the same tokens
    """
    tokens = checksum(torch.cat([part.flatten() for micro_batch in micro_batches for part in micro_batch]))
    held = numbers_of(engine, numbers) | {f"{TOKENS}{engine.groups.coordinates['dp']}": tokens}
    of_ranks = comm.all_gather_json(held, dist.group.WORLD)
    if told := "; ".join(filter(None, [differences(of_ranks), same_data(of_ranks)])):
        raise RanksDisagree(
            f"after step {step} ranks hold different numbers: {told}; go on from a checkpoint that is older, and look "
            "at the memory and the device of that rank"
        )


def numbers_of(engine: five_d.FiveD, numbers: engines.StepNumbers) -> dict[str, str]:
    """What this rank holds and others too: a name that says who must hold the same -> a text of the numbers.

    Of ZeRO-3 nothing but what it leaves whole: a shard is nobody else's.
    """
    here, cuts = engine.groups.coordinates, five_d.cuts_of(engine)
    place = " ".join(f"{axis}={index}" for axis, index in sorted(here.items()) if axis != "tp")
    found = {"the loss": numbers.loss.item().hex(), "the gradient norm": numbers.norm.item().hex()}
    found |= {f"the seed of ranks with {place}": str(torch.initial_seed())}
    for name, param in five_d.named_parameters(engine).items():
        if param.untyped_storage().nbytes():  # freed between uses by ZeRO-3
            of_piece = f" (piece {here['tp'] // cuts[name].copies} of tp)" if name in cuts else ""
            found[f"{name}{of_piece}"] = checksum(param)
    return found


def checksum(x: Tensor) -> str:
    raw = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


@checked
def differences(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Who holds other numbers than most of those that must hold the same, in words; empty if nobody does.

    Where there is no majority all that differ are named.
    """
    wrong: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for numbers in of_ranks for name in numbers):
        held = {rank: numbers[name] for rank, numbers in enumerate(of_ranks) if name in numbers}
        ranked = Counter(held.values()).most_common()
        if len(ranked) > 1:
            no_majority = ranked[0][1] == ranked[1][1]
            culprits = tuple(rank for rank, text in held.items() if no_majority or text != ranked[0][0])
            wrong.setdefault(culprits, []).append(name)
    told = []
    for culprits, names in wrong.items():
        ranks = ", ".join(map(str, culprits))
        who = f"rank {ranks} differs in" if len(culprits) == 1 else f"ranks {ranks} differ in"
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        told.append(f"{who} {', '.join(names[:SHOWN])}{more}")
    return "; ".join(told)


def same_data(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Which dp indices trained on the same tokens, in words; empty if each had its own."""
    who: dict[str, dict[int, str]] = {}  # tokens -> rank -> its dp index
    for rank, numbers in enumerate(of_ranks):
        for name in (name for name in numbers if name.startswith(TOKENS)):
            who.setdefault(numbers[name], {})[rank] = name.removeprefix(TOKENS)
    return "; ".join(
        f"ranks {', '.join(map(str, index_of))} trained on the same tokens, though they are dp ranks "
        f"{' and '.join(sorted(set(index_of.values())))}"
        for index_of in who.values()
        if len(set(index_of.values())) > 1
    )


def not_finite_on(numbers: engines.StepNumbers) -> str:
    """Return in words which ranks' own part of the loss is no finite number; all ranks must call it.

    Ranks of one tp or cp group compute one loss together, and all of them are named. With a pipeline it is the last
    stage's ranks that see the loss. A gradient that only the backward pass made infinite names nobody.
    """
    of_ranks = comm.all_gather_json(bool(torch.isfinite(numbers.share)), dist.group.WORLD)
    ranks = [str(rank) for rank, is_finite in enumerate(of_ranks) if not is_finite]
    if not ranks:
        return ""
    return f" (not finite on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"


@checked
def slowest_rank(seconds: Sequence[Sequence[Amount]], factor: Positive = 1.2) -> int | None:
    """The rank whose median is more than `factor` times the median of all other ranks' medians; None if none is.
    seconds   of each rank a row with the seconds of its own work, step by step. The median forgets single slow steps.
    Raises    ValueError for fewer than two ranks, or a rank without seconds
    """
    if len(seconds) < 2 or not all(len(row) for row in seconds):
        raise ValueError(
            f"seconds has {len(seconds)} ranks with {[len(row) for row in seconds]} steps; give at least two ranks, "
            "each with at least one step"
        )
    medians = [median(row) for row in seconds]
    slowest: Index = max(range(len(medians)), key=medians.__getitem__)
    others = median(medians[:slowest] + medians[slowest + 1 :])
    return slowest if medians[slowest] > factor * others else None
