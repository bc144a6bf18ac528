"""When a layer of experts computes, and when its rows travel: one micro-batch after the other, or several at once."""

from collections.abc import Mapping

from course_lib.span import Span
from course_lib.validate import Size, checked

PARTS = ("attention", "dispatch", "experts", "combine")
LANES = {"dispatch": "communication", "combine": "communication"}


@checked
def expert_layer_spans(seconds: Mapping[str, float], micro_batches: Size = 2, overlap: bool = True) -> list[Span]:
    """Return the spans of one layer for several micro-batches: attention, dispatch, experts, combine of each.

    With `overlap` each lane does one part of all micro-batches before the next part; rows travel beside computation.
    Raises   ValueError unless each part has its seconds, more than 0
    """
    if set(seconds) != set(PARTS) or not all(value > 0 for value in seconds.values()):
        raise ValueError(f"seconds has {sorted(seconds)}; give more than 0 for each of {', '.join(PARTS)}")
    order = [(part, index) for part in PARTS for index in range(micro_batches)]
    if not overlap:
        order = [(part, index) for index in range(micro_batches) for part in PARTS]
    spans, ready, free = [], [0.0] * micro_batches, {"compute": 0.0, "communication": 0.0}
    for part, index in order:
        lane = LANES.get(part, "compute")
        start_s = max(ready[index], free[lane]) if overlap else max(*free.values(), ready[index])
        ready[index] = free[lane] = start_s + seconds[part]
        spans.append(Span(0, lane, f"{part} {index}", start_s, ready[index]))
    return spans
