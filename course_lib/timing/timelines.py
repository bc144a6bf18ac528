"""Timelines of one rank: spans on a lane that computes and one that communicates or copies, and what hides what."""

from collections.abc import Mapping, Sequence

from course_lib.hardware import Cluster, Link
from course_lib.run import Run
from course_lib.span import COMPUTE, Lanes, Span
from course_lib.timing.collectives import collective_s
from course_lib.timing.rates import Utilisation
from course_lib.timing.tensor import layer_parts, sum_and_gather_s
from course_lib.validate import Amount, Positive, Size, checked

_COMMUNICATION = "communication"
_EXPERT_PARTS = {"attention": COMPUTE, "dispatch": _COMMUNICATION, "experts": COMPUTE, "combine": _COMMUNICATION}


@checked
def dp_spans(
    forward_s: Amount, backward_s: Amount, bucket_comm_s: Sequence[Amount], overlap: bool = True
) -> list[Span]:
    """One data-parallel step: forward and backward in one lane, an all-reduce for each bucket in another.

    Bucket i of n is ready when the share (i + 1) / n of backward is done; all-reduces run one after the other. Without
    overlap they wait for the end of the backward.
    """
    lanes = Lanes()
    lanes.add(COMPUTE, "forward", forward_s)
    lanes.add(COMPUTE, "backward", backward_s)
    for index, comm_s in enumerate(bucket_comm_s):
        done = (index + 1) / len(bucket_comm_s) if overlap else 1.0
        lanes.add(_COMMUNICATION, f"all-reduce {index}", comm_s, forward_s + done * backward_s)
    return lanes.spans


@checked
def zero3_spans(
    passes_s: tuple[Amount, Amount], gather_s: Amount, reduce_s: Amount, num_layers: Size, prefetch: bool = True
) -> list[Span]:
    """Equal blocks under ZeRO-3, forward then backward (passes_s of one block).

    With prefetch a block's gather starts when the block before it starts computing, without when that has ended. In
    backward a reduce-scatter follows its block, behind the gather of the next.
    """
    lanes, before, reduced = Lanes(), None, None
    passes = (("forward", range(num_layers)), ("backward", range(num_layers)[::-1]))
    for (name, indices), seconds in zip(passes, passes_s, strict=True):
        for index in indices:
            allowed_s = 0.0 if before is None else before.start_s if prefetch else before.stop_s
            gathered = lanes.add(_COMMUNICATION, f"gather {index}", gather_s, allowed_s)
            if reduced:
                lanes.add(_COMMUNICATION, *reduced)
            before = lanes.add(COMPUTE, f"{name} {index}", seconds, gathered.stop_s)
            reduced = (f"reduce {index}", reduce_s, before.stop_s) if name == "backward" else None
    lanes.add(_COMMUNICATION, *reduced)
    return lanes.spans


@checked
def zero3_backward_spans(units: Sequence[str], prefetch: bool = False) -> list[Span]:
    """The order of a backward of ZeRO-3: each unit, from the last on, is gathered, computes, reduce-scatters, is freed.

    Seconds stand for the order alone. Without prefetch a unit is gathered when the one behind it is freed, with it when
    that one starts to compute.
    """
    lanes, allowed_s = Lanes(), 0.0
    for unit in reversed(units):
        gathered = lanes.add("gather", unit, 1.0, allowed_s)
        computed = lanes.add(COMPUTE, unit, 2.0, gathered.stop_s)
        reduced = lanes.add("reduce-scatter", unit, 1.0, computed.stop_s)
        freed = lanes.add("free", unit, 0.5, reduced.stop_s)
        allowed_s = computed.start_s if prefetch else freed.stop_s
    return lanes.spans


@checked
def tensor_parallel_layer_spans(
    run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation(), overlap: bool = True
) -> list[Span]:
    """Model one layer of tensor parallelism, forward then backward.

    Backward of a part: gradients of its row-parallel matrix and of its input; then the sum of the input's gradient over
    the ranks, and beside it (overlap) or after it the weight gradients of the column-parallel matrices. With sequence
    parallelism a sum is a reduce-scatter, and what the next part reads is gathered first.
    """
    gathers, parts = run.layout.sequence_parallel, layer_parts(run, cluster, utilisation)
    (sum_s, gather_s), lanes = sum_and_gather_s(run, cluster), Lanes()
    for part in parts:
        if gathers:
            lanes.then(_COMMUNICATION, f"gather {part.name}'s input", gather_s)
        lanes.then(COMPUTE, f"forward {part.name}", part.forward_s)
        lanes.then(_COMMUNICATION, f"sum {part.name}'s output", sum_s)
    for part in reversed(parts):
        if gathers:
            lanes.then(_COMMUNICATION, f"gather {part.name}'s output gradient", gather_s)
        rows = lanes.then(COMPUTE, f"backward of {part.name}'s rows", part.backward_s - 2 * part.column_s)
        if run.layout.regather:
            lanes.add(_COMMUNICATION, f"gather {part.name}'s input again", gather_s, rows.stop_s)
        read_s = lanes.free_s()
        into = lanes.add(COMPUTE, f"{part.name}'s input gradient", part.column_s, 0.0 if overlap else read_s)
        summed = lanes.add(_COMMUNICATION, f"sum {part.name}'s input gradient", sum_s, into.stop_s)
        lanes.add(COMPUTE, f"{part.name}'s weight gradients", part.column_s, read_s if overlap else summed.stop_s)
    return lanes.spans


@checked
def ring_spans(
    forward_s: Sequence[Amount], backward_s: Sequence[Amount], kv_bytes: Amount, grad_bytes: Amount, link: Link
) -> list[Span]:
    """One layer's ring of context parallelism, forward then backward.

    While a step computes, the next keys and values arrive; backward also the gradients of the block before. All ranks
    are taken to be as far as this one, with the seconds of the busiest at each step. Messages leave one after the
    other, so the gradients that a step adds to have come before the keys that the next one needs. kv1 is the first ring
    step of keys and values, dkv1 that of their gradients.
    """
    hop_s, grad_hop_s = (collective_s("send", size, 2, link) for size in (kv_bytes, grad_bytes))
    lanes, last, arrived_s = Lanes(), len(forward_s) - 1, 0.0
    for name, passes in (("forward", forward_s), ("backward", backward_s)):
        for step, seconds in enumerate(passes):
            now_s = max(lanes.free_s(COMPUTE), arrived_s)
            if step < last:
                arrived_s = lanes.add(_COMMUNICATION, f"kv{step + 1}", hop_s, now_s).stop_s
            done_s = lanes.add(COMPUTE, f"{name} {step}", seconds, now_s).stop_s
            if step and name == "backward":  # this step's share is added, and all goes on
                lanes.add(_COMMUNICATION, f"dkv{step}", grad_hop_s, done_s)
    return lanes.spans


@checked
def expert_layer_spans(seconds: Mapping[str, float], micro_batches: Size = 2, overlap: bool = True) -> list[Span]:
    """A layer of experts for several micro-batches: attention, dispatch, experts, combine of each.

    With `overlap` each lane does one part of all micro-batches before the next part; rows travel beside computation.
    """
    if set(seconds) != set(_EXPERT_PARTS) or not all(value > 0 for value in seconds.values()):
        raise ValueError(f"seconds has {sorted(seconds)}; give more than 0 for each of {', '.join(_EXPERT_PARTS)}")
    order = [(part, index) for part in _EXPERT_PARTS for index in range(micro_batches)]
    if not overlap:
        order.sort(key=lambda entry: entry[1])
    lanes, ready_s = Lanes(), [0.0] * micro_batches
    for part, index in order:
        free_s = ready_s[index] if overlap else lanes.free_s()
        ready_s[index] = lanes.add(_EXPERT_PARTS[part], f"{part} {index}", seconds[part], free_s).stop_s
    return lanes.spans


@checked
def copy_spans(layer_s: Positive, copy_s: Amount, num_layers: Size, side_stream: bool = True) -> list[Span]:
    """A forward pass whose layers copy what they saved to the host, in the same stream or in one beside it.

    In the same stream the next layer waits for the copy. Beside it a copy waits for its layer and for the copy before.
    """
    lanes = Lanes()
    for layer in range(num_layers):
        computed = lanes.add(COMPUTE, f"forward {layer}", layer_s, 0.0 if side_stream else lanes.free_s())
        lanes.add("copy", f"out {layer}", copy_s, computed.stop_s)
    return lanes.spans
