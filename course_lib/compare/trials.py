"""The kinds of programs that lessons run on ranks: what each is given, and what one process does with the same.

as_sum            all_reduce(x_P, group) of ring.py
as_trainer        trainer(model, make_optimizer, group) of data.py, zero.py, tensor.py, sequence.py, experts.py
as_counted_trainer, as_traced_trainer, as_learner, as_block
                  the same: bytes alone, when it sends, what it learns, what one block saves
as_two_mlps       two MLPs whose matrices are cut, with functions before and behind
as_attention      attend(q_BNsH, k_BKsH, v_BKsH, where, group) of ring_attention.py;  as_context_step: a whole step
as_pipeline       rank_class(model, micro_batches) of one_f_one_b.py, with lists of words
as_experts        layer(router, experts, k, group) of experts.py
as_rule_of_sums   axes_of(kind, layout) of axes.py

All compute in float64 with the same numbers and texts; what a trainer sends and holds is counted with parameters and
gradients in bfloat16, and FP32 master weights.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from course_lib import comm
from course_lib.compare.record import Record
from course_lib.config import ModelConfig, preset
from course_lib.devices import rank_device
from course_lib.layout import Layout
from course_lib.measure import MemoryTracker
from course_lib.minimal.memory import saved_bytes
from course_lib.minimal.moe import MOE_CONFIG, MoE, layer_parts, random_numbers, tokens_of_rank
from course_lib.minimal.ring_attention import contiguous, zigzag
from course_lib.model import build, fused_attention
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d, pipeline, sums
from course_lib.schedules import from_lists
from course_lib.span import Span
from course_lib.training import MasterAdamW, loss_of
from course_lib.training.data import batch, micro_batches, tokens
from course_lib.validate import checked

CONFIG = preset("toy")
SEQUENCES, SEQ_LEN = 12, 32  # the global batch of a step
Batches = Sequence[tuple[Tensor, Tensor]]  # micro-batches: token ids and targets
sgd = partial(torch.optim.SGD, lr=0.1)
adamw = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
master_adamw = partial(MasterAdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)


# --- all-reduces
def as_sum(record: Record, all_reduce: Callable, num_elements: int = 10) -> None:
    """Compare with the sum that one process computes, and that the input stayed; count bytes of float32."""
    group, size = dist.group.WORLD, dist.get_world_size()
    numbers = [(1000 * random_numbers(rank, num_elements)).round() for rank in range(size)]
    x_P = numbers[dist.get_rank()].clone()
    record.match("the sum", all_reduce(x_P, group), sum(numbers))
    if not torch.equal(x_P, numbers[dist.get_rank()]):
        raise ValueError("the input is another one than before the call; add to a copy, x_P.clone()")
    with record.metered("all-reduce"):
        all_reduce(x_P.float(), group)


# --- trainers of a whole model
def as_trainer(record: Record, trainer: type, num_micro_batches: int = 1) -> None:
    """Compare the loss, each gradient, and the parameters after two steps of AdamW; count what a step sends.

    A gradient is what a step of SGD took away, which shows a wrong factor that AdamW's first step hides. Each rank
    brings its own sequences; a class with `same_tokens = True` all of them. A class with a `config` trains that model.

    Raises   ValueError if full_parameters() lacks or adds a parameter
    """
    parts = partial(micro_batches_of_rank, num_micro_batches=num_micro_batches, trainer=trainer)
    before, config = dict(build(config_of(trainer), dtype=torch.float64).named_parameters()), config_of(trainer)
    for make_optimizer, steps in ((sgd, 1), (adamw, 2)):
        right_loss, model = _rank_0_alone(config, global_batches(steps), make_optimizer)
        loss, full = trained(trainer, make_optimizer, steps, parts)
        right = dict(model.named_parameters())
        if full.keys() != right.keys():
            raise ValueError(f"full_parameters() lacks or adds {sorted(full.keys() ^ right.keys())}; return all")
        if steps == 1:
            if loss is not None:
                record.match("loss", loss, right_loss)
            for name, param in right.items():
                record.match(name, before[name] - full[name], before[name] - param)
    record.match("after AdamW", _flat(full), _flat(right))
    count_bytes(record, trainer, parts(0))


def as_counted_trainer(record: Record, trainer: type, num_micro_batches: int = 1, sequences: int = SEQUENCES) -> None:
    """Count what is sent in a step and held over the next one, and compare nothing."""
    parts = [micro_batches_of_rank(step, num_micro_batches, trainer, sequences) for step in range(2)]
    count_bytes(record, trainer, *parts)


def count_bytes(record: Record, trainer: type, *steps: Batches) -> None:
    """Count what a trainer sends in its first step, and what it holds in its second, if there is one."""
    made = trainer(build(config_of(trainer), dtype=torch.bfloat16), master_adamw, dist.group.WORLD)
    with record.metered("a step"):
        made.backward(steps[0])
        made.update()
    if len(steps) == 1:
        return
    mine = [param for group in made.optimizer.param_groups for param in group["params"]]
    with MemoryTracker(nn.ModuleList([made.model, nn.ParameterList(mine)]), made.optimizer) as tracker:
        made.backward(steps[1])
        record.held = tracker.current_by_kind()
        made.update()
    record.timeline = tracker.timeline


def micro_batches_of_rank(
    step: int, num_micro_batches: int, trainer: object = None, sequences: int = SEQUENCES, seq_len: int = SEQ_LEN
) -> Batches:
    """Return this rank's sequences of the global batch of a step: all of them where the trainer has `same_tokens`."""
    rank, size = (0, 1) if getattr(trainer, "same_tokens", False) else (dist.get_rank(), dist.get_world_size())
    mine = batch(tokens(100_000), step, sequences, seq_len, dp_rank=rank, dp_size=size)
    return micro_batches(*mine, num_micro_batches)


def global_batches(steps: int) -> list[Batches]:
    """Return the global batch of each step, as one micro-batch."""
    return [[batch(tokens(100_000), step, SEQUENCES, SEQ_LEN)] for step in range(steps)]


def config_of(trainer: type) -> ModelConfig:
    """Return the model that a trainer trains: its own, or the toy."""
    return getattr(trainer, "config", CONFIG)


def trained(trainer: type, make_optimizer: Callable, steps: int, parts_of_step: Callable) -> tuple[Tensor | None, dict]:
    """Train in float64; return the first loss, of a trainer that has one, and all parameters at the end."""
    made = trainer(build(config_of(trainer), dtype=torch.float64), make_optimizer, dist.group.WORLD)
    loss, parts = None, parts_of_step(0)
    if hasattr(made, "loss"):
        with torch.no_grad():
            loss = sum(made.loss(*part) for part in parts) / len(parts)
    for step in range(steps):
        made.backward(parts_of_step(step))
        made.update()
    return loss, made.full_parameters()


Trained = tuple[Tensor, nn.Module]  # the first loss, and the model with the mean gradients of the last step


def one_process(config: ModelConfig, steps: Sequence[Batches], make_optimizer: Callable = sgd) -> Trained:
    """Train on equally large micro-batches of each step without ranks, in float64."""
    model, losses = build(config, dtype=torch.float64), []
    optimizer = make_optimizer(model.parameters())
    for parts in steps:
        optimizer.zero_grad()
        losses.append(torch.zeros((), dtype=torch.float64, device=rank_device()))
        for x_BS, y_BS in parts:
            loss = loss_of(model, x_BS, y_BS) / len(parts)
            loss.backward()
            losses[-1] += loss.detach()
        optimizer.step()
    return losses[0], model


def _rank_0_alone(config: ModelConfig, steps: Sequence[Batches], make_optimizer: Callable = sgd) -> Trained:
    """Return what one_process returns, computed once: rank 0 trains, and every rank receives its numbers."""
    if dist.get_rank() == 0:
        loss, model = one_process(config, steps, make_optimizer)
    else:
        loss, model = torch.zeros((), dtype=torch.float64, device=rank_device()), build(config, dtype=torch.float64)
        for param in model.parameters():
            param.grad = torch.empty_like(param)
    tensors = [loss, *model.parameters(), *(param.grad for param in model.parameters())]
    flat = nn.utils.parameters_to_vector(tensors).detach()
    nn.utils.vector_to_parameters(comm.broadcast(flat, 0, dist.group.WORLD), tensors)
    return loss, model


def gradient_lengths(record: Record) -> dict[str, tuple[float, float]]:
    """Return of a run as_trainer the length of gradients over that of one process, and their cosine: (1, 1) is right.

    Of experts, router, and the rest.
    """
    kinds: dict[str, list] = {"the rest": [], "router": [], "experts": []}
    for name, match in record.matches.items():
        if "." in name:  # neither the loss nor all parameters at the end
            kinds[next((kind for kind in ("experts", "router") if kind in name), "the rest")].append(match)
    found = {}
    for kind, matches in kinds.items():
        got, right = (sum(getattr(match, side) ** 2 for match in matches) for side in ("norm", "right_norm"))
        cosine = sum(match.product for match in matches) / math.sqrt(got * right) if got else math.nan
        found[kind] = math.sqrt(got / right), cosine
    return found


def _flat(params: dict[str, Tensor]) -> Tensor:
    return torch.cat([params[name].detach().flatten() for name in sorted(params)])


def as_learner(record: Record, trainer: type, steps: int = 20) -> None:
    """Train with AdamW; the result is the loss of this rank at each step, and the model that it would save."""
    made, losses = trainer(build(config_of(trainer)), adamw, dist.group.WORLD), []
    loss = getattr(made, "loss", partial(loss_of, made.model))
    for step in range(steps):
        parts = micro_batches_of_rank(step, 1, trainer)
        with torch.no_grad():
            losses.append(loss(*parts[0]).item())
        made.backward(parts)
        made.update()
    record.result = losses, {name: param.detach().clone() for name, param in made.full_parameters().items()}


def as_block(record: Record, trainer: type) -> None:
    """Keep the bytes per token and feature that one block saves for backward, in bfloat16: two blocks less one."""
    sizes, ((x_BS, _),) = [], micro_batches_of_rank(0, 1, trainer)
    for num_layers in (1, 2):
        made = trainer(build(replace(CONFIG, num_layers=num_layers), dtype=torch.bfloat16), sgd, dist.group.WORLD)
        sizes.append(saved_bytes(made.model, x_BS))
    record.kept = (sizes[1] - sizes[0]) / (x_BS.numel() * CONFIG.d_model)


_EVENTS = (
    "trainer.backward", "autograd::engine::evaluate_function", "Optimizer.step", "c10d::allreduce_", "gloo:all_reduce",
)  # fmt: skip


def as_traced_trainer(record: Record, trainer: type) -> None:
    """Keep spans of the last of three steps, as torch.profiler saw it: computation, and a lane per all-reduce.

    For ranks on the CPU, where all lanes share the cores: the order is that of GPUs, the seconds are not.
    """
    made = trainer(build(config_of(trainer)), adamw, dist.group.WORLD)
    for step in range(3):  # in the first, threads and buffers are made
        parts = micro_batches_of_rank(step, 1, trainer, seq_len=4 * SEQ_LEN)
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with record_function("trainer.backward"):
                made.backward(parts)
            made.update()
    record.spans = _spans(profiler.events())


def _spans(events) -> list[Span]:
    """Forward, backward, the optimizer and each all-reduce of a profile, from the moment when forward begins.

    Backward is over when its last node begins, which only stores the last gradient and calls its hooks.
    """
    named = {name: [e.time_range for e in events if e.name.startswith(name)] for name in _EVENTS}
    start_us = named["trainer.backward"][0].start
    backward = named["autograd::engine::evaluate_function"]
    backward_us = min(e.start for e in backward), max(e.start for e in backward)
    update = named["Optimizer.step"][0]
    bars = [("compute", "forward", start_us, backward_us[0]), ("compute", "backward", *backward_us)]
    bars += [("compute", "optimizer", update.start, update.end)]
    calls, sends = (sorted(named[name], key=lambda e: e.start) for name in ("c10d::allreduce_", "gloo:all_reduce"))
    pairs = enumerate(zip(calls, sends, strict=True))  # from the call until gloo's thread has done it
    bars += [(f"all-reduce {index}", f"all-reduce {index}", call.start, send.end) for index, (call, send) in pairs]
    return [Span(0, lane, name, (a - start_us) * 1e-6, (b - start_us) * 1e-6) for lane, name, a, b in bars]


@checked
def started_in_backward(spans: Sequence[Span]) -> tuple[int, int]:
    """Return how many all-reduces of a trace start while its backward computes, and how many there are."""
    stop_s = next(span.stop_s for span in spans if span.name == "backward")
    starts = [span.start_s for span in spans if span.lane != "compute"]
    return sum(start_s < stop_s for start_s in starts), len(starts)


# --- parts of a model whose matrices are cut

TOKENS, D_MODEL, D_FF = 32, 64, 256


def _my_piece(x: Tensor, dim: int) -> Tensor:
    return comm.my_piece(x, dist.get_rank(), dist.get_world_size(), dim).contiguous()


def as_two_mlps(record: Record, program: Callable, enter: Callable, leave: Callable) -> None:
    """Compare the loss and gradients of two MLPs with residuals with the same program on whole matrices.

    program(x_TD, weights, enter, leave, group) gets [(a_Df, b_fD), (a_Df, b_fD)], cut by columns and by rows, and
    returns z_TD; the loss is its mean square.
    """
    dims = {"x": None, "A1": 1, "B1": 0, "A2": 1, "B2": 0}  # x is not cut, a by columns, b by rows
    shapes = ((D_MODEL, D_FF), (D_FF, D_MODEL)) * 2
    full = [random_numbers(9, TOKENS, D_MODEL), *(random_numbers(n, *shape) / 8 for n, shape in enumerate(shapes))]
    parts = [x if dim is None else _my_piece(x, dim) for x, dim in zip(full, dims.values(), strict=True)]
    full, parts = ([x.clone().requires_grad_() for x in tensors] for tensors in (full, parts))
    losses = []
    for (x_TD, *matrices), functions in ((full, (_same, _same)), (parts, (enter, leave))):
        pairs = list(zip(matrices[::2], matrices[1::2], strict=True))
        losses.append(program(x_TD, pairs, *functions, dist.group.WORLD).square().mean())
        losses[-1].backward()
    record.match("loss", losses[1], losses[0])
    for (name, dim), part, whole in zip(dims.items(), parts, full, strict=True):
        record.match_gradient(name, part.grad, whole.grad if dim is None else _my_piece(whole.grad, dim))


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


# --- sequences that are cut

HEADS, HEAD_DIM = (8, 4, 4), 8  # of queries, keys, values
_READINGS = 8  # of bytes: gloo lets go of a sent buffer a moment after the message is done, so the least counts


def as_attention(record: Record, attend: Callable, my_tokens: int = 64, cut: Callable = contiguous) -> None:
    """Compare out, dq, dk and dv with attention over the full sequence.

    sent    forward and backward, in bytes of this rank's keys and values
    kept    bytes that a rank keeps for backward, per position: one token of each of the 2 sequences; in float32
    """
    seq_len = my_tokens * dist.get_world_size()
    where, group = cut(seq_len, dist.get_world_size()), dist.group.WORLD
    mine_s = where[dist.get_rank()]
    full = [random_numbers(seed, 2, heads, seq_len, HEAD_DIM) for seed, heads in enumerate(HEADS)]
    weight = random_numbers(3, *full[0].shape)
    shards = [x[:, :, mine_s].clone().requires_grad_() for x in full]
    block_bytes = shards[1].nbytes + shards[2].nbytes
    with record.metered("forward", block_bytes):
        out = attend(*shards, where, group)
    with record.metered("backward", block_bytes):
        (out * weight[:, :, mine_s]).sum().backward()
    right = fused_attention(*(x.requires_grad_() for x in full))
    (right * weight).sum().backward()
    record.match("out", out, right[:, :, mine_s])
    for name, shard, whole in zip(("dq", "dk", "dv"), shards, full, strict=True):
        record.match_gradient(name, shard.grad, whole.grad[:, :, mine_s])
    readings = []
    for _ in range(_READINGS):
        halves = [x.detach().float().requires_grad_() for x in shards]
        with MemoryTracker(nn.Linear(1, 1)) as tracker:
            out = attend(*halves, where, group)
            time.sleep(0.002)
            readings.append(tracker.current("activations"))
        del out
    record.kept = min(readings) / my_tokens


def as_context_step(record: Record, step: Callable, seq_len: int = 64, cut: Callable = zigzag) -> None:
    """Compare the loss and each gradient that step(model, x_BS, y_BS, where, group) leaves."""
    (x_BS, y_BS), group = batch(tokens(100_000), 0, 2, seq_len), dist.group.WORLD
    whole = build(CONFIG, dtype=torch.float64)
    for block in whole.blocks:  # attention that looks at few tokens, as a trained model's does
        for layer in (block.attention.q, block.attention.k):
            layer.weight.data *= 8
    model = copy.deepcopy(whole)
    loss, right_loss = step(model, x_BS, y_BS, cut(seq_len, group.size()), group), loss_of(whole, x_BS, y_BS)
    right_loss.backward()
    record.match("loss", loss, right_loss)
    for (name, param), right in zip(model.named_parameters(), whole.parameters(), strict=True):
        record.match_gradient(name, param.grad, right.grad)


# --- pipelines

PIPELINE_CONFIG = replace(CONFIG, num_layers=8)
PIPELINE_SEQUENCES, PIPELINE_SEQ_LEN = 2, 64  # of a micro-batch


def as_pipeline(record: Record, rank_class: Callable, lists: Sequence[Sequence[str]]) -> None:
    """Compare this stage's gradients; count bytes with hidden states in bfloat16.

    kept   the most activations at once, in whole micro-batches

    Launch it with backend="gloo": the lesson's class makes its buffers on the CPU, and starts a send and a receive in
    one call, which NCCL does one after the other.
    Raises   ValueError if the lists are no schedule of so many ranks, or a parameter has no gradient on any rank
    """
    words, parts = lists[dist.get_rank()], pipeline_micro_batches(from_lists(lists).num_micro_batches)
    if len(lists) != dist.get_world_size():
        raise ValueError(f"there are {len(lists)} lists for {dist.get_world_size()} ranks; give one for each")
    right = {name: param.grad for name, param in _rank_0_alone(PIPELINE_CONFIG, [parts])[1].named_parameters()}
    worker = rank_class(build(PIPELINE_CONFIG, dtype=torch.float64), parts)
    worker.run(words)
    grads = {name: param.grad for name, param in worker.stage.named_parameters() if param.grad is not None}
    names = comm.all_gather_json(list(grads), dist.group.WORLD)
    if missing := sorted(right.keys() - {name for of_rank in names for name in of_rank}):
        raise ValueError(f"{len(missing)} parameters have no gradient, first {missing[0]}; run B, or I and W, of each")
    for name, grad in grads.items():
        record.match(name, grad, right[name])
    worker = rank_class(build(PIPELINE_CONFIG, dtype=torch.bfloat16), parts)
    with record.metered("a step"):
        worker.run(words)
    model, peaks = build(PIPELINE_CONFIG), []
    alone = [word for word in words if word[1:] == "0"]
    for words_of_run in (alone, alone, words):  # first so that the gradients exist
        worker = rank_class(model, parts)
        with MemoryTracker(worker.stage) as tracker:
            worker.run(words_of_run)
        peaks.append(max(tracker.timeline.bytes_by_kind["activations"]))
    record.kept = round(peaks[2] / peaks[1])


def pipeline_micro_batches(count: int) -> Batches:
    """Return the micro-batches of a step, which all ranks have."""
    return [batch(tokens(100_000), index, PIPELINE_SEQUENCES, PIPELINE_SEQ_LEN) for index in range(count)]


def as_traced_pipeline(record: Record, rank_class: Callable, lists: Sequence[Sequence[str]], runs: int = 9) -> None:
    """Keep a span of each instruction, waiting left out, of the shortest of several runs: the least disturbed.

    The result is the share of the time in which ranks compute, all together. On the CPU all ranks share the cores:
    seconds of ranks that compute at the same time say nothing about GPUs.
    """
    model, parts, traces = build(PIPELINE_CONFIG), pipeline_micro_batches(from_lists(lists).num_micro_batches), []
    rank, words = dist.get_rank(), lists[dist.get_rank()]
    for _ in range(runs + 1):  # in the first, threads and buffers are made
        worker = rank_class(model, parts)
        clocks = _timed(worker)
        dist.barrier()
        worker.run(words)
        traces.append([Span(rank, "compute", f"{word}@{rank}", *at) for word, at in zip(words, clocks, strict=True)])
    ends = [[spans[0].start_s, spans[-1].stop_s, sum(span.seconds for span in spans)] for spans in traces[1:]]
    start_RN, stop_RN, busy_RN = comm.all_gather(torch.tensor([ends], dtype=torch.float64), dist.group.WORLD).unbind(-1)
    length_N = stop_RN.amax(0) - start_RN.amin(0)
    shortest = int(length_N.argmin())
    record.spans = traces[1 + shortest]
    record.result = (busy_RN.sum(0) / (len(lists) * length_N))[shortest].item()


def _timed(worker) -> list[tuple[float, float]]:
    """Make a worker note when each instruction computes: from its last receive to its end."""
    clocks, starts = [], []

    def instruction(function, i):
        starts.append(time.perf_counter())
        function(i)
        clocks.append((starts[-1], time.perf_counter()))

    def receive(function, src):
        x_BSD = function(src)
        starts.append(time.perf_counter())
        return x_BSD

    for op in "FBIW":
        if hasattr(worker, op):
            setattr(worker, op, partial(instruction, getattr(worker, op)))
    worker.receive = partial(receive, worker.receive)
    return clocks


# --- experts
def as_experts(record: Record, layer: Callable, favourites: Sequence[int] = (), backward: bool = True) -> None:
    """Compare outputs, and gradients of the sum of squares of all ranks' outputs.

    favourites   numbers of experts that every token prefers
    backward     False for a layer that has none
    sent         "rows": forward, rows of D elements per token of this rank;  "both": bytes, forward and backward
    result       whom this rank's tokens chose: expert_Tk

    The router's gradients are summed over ranks here. An error is 1 where no gradient came.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    whole, mine = MoE(*_pulled(favourites)), layer(*_pulled(favourites), group=group)
    x_TD = tokens_of_rank(rank)
    with torch.no_grad(), record.metered("rows", x_TD.nbytes):
        y_TD = mine(x_TD)
    x_all = torch.cat([tokens_of_rank(other) for other in range(group.size())]).requires_grad_()
    y_all = whole(x_all)
    record.match("y_TD", y_TD, y_all.chunk(group.size())[rank])
    record.result = whole.expert_Tk.chunk(group.size())[rank]
    if not backward:
        return
    x_TD = x_TD.requires_grad_()
    with record.metered("both"):
        mine(x_TD).square().sum().backward()
    y_all.square().sum().backward()
    router, right = mine.router.weight.grad, dict(whole.experts.named_parameters())
    router = None if router is None else comm.all_reduce(router, group)
    record.match_gradient("tokens", x_TD.grad, x_all.grad.chunk(group.size())[rank])
    record.match_gradient("router", router, whole.router.weight.grad)
    pairs = [(param.grad, right[name].grad) for name, param in mine.experts.named_parameters()]
    got, wanted = zip(*((torch.zeros_like(b) if a is None else a, b) for a, b in pairs), strict=True)
    record.match("experts", *(torch.cat([x.flatten() for x in tensors]) for tensors in (got, wanted)))


def _pulled(favourites: Sequence[int]) -> tuple[nn.Linear, nn.ModuleList, int]:
    """The parts of a layer, whose router adds much to the logits of some experts: by a bias."""
    router, experts, k = layer_parts()
    bias_E = torch.zeros_like(router.weight[:, 0])
    bias_E[list(favourites)] = 100.0
    router.bias = nn.Parameter(bias_E, requires_grad=False)
    return router, experts, k


def rows_between(run: Sequence[Record]) -> list[list[int]]:
    """Return of a run as_experts rows[i][j]: assignments of rank i's tokens to experts of rank j."""
    each = MOE_CONFIG.moe.num_experts // len(run)
    return [(record.result // each).flatten().bincount(minlength=len(run)).tolist() for record in run]


# --- several axes at once

_MOE = preset("toy-moe")
_SIZES = {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
AXES_CONFIG = replace(_MOE, name="small-moe", moe=replace(_MOE.moe, d_expert=16), **_SIZES)
_AXES_SEQ_LEN = 32


def as_rule_of_sums(record: Record, axes_of: Callable, layout: str, steps: int = 0) -> None:
    """Cut a model as parallel/five_d.py does, let the rule do all sums of gradients, and compare each gradient.

    The rule returns names of groups ("data", "tp", "expert_dp", "world"). Names compared begin with the parameter's
    kind: matrices, norms or experts. The result is the mean loss of each of `steps` steps of AdamW.

    Raises   ValueError for a layout that ZeRO shards: the rule sums full gradients
    """
    parsed = Layout.parse(layout)
    if parsed.zero_stage:
        raise ValueError(f"zero_stage is {parsed.zero_stage} in {layout!r}; the rule sums full gradients: leave it out")
    engine = five_d.build(AXES_CONFIG, parsed, dtype=torch.float64)
    _step(engine, axes_of, 0)
    of_ranks = zip(*(_rows_of(parsed, dp_rank, 0) for dp_rank in range(parsed.dp)), strict=True)
    parts = [tuple(map(torch.cat, zip(*pairs, strict=True))) for pairs in of_ranks]
    right, got = dict(_rank_0_alone(AXES_CONFIG, [parts])[1].named_parameters()), engines.full_gradients(engine)
    for name, grad in got.items():
        record.match(f"{_kind(name, parsed)} {name}", grad, right[name].grad)
    engine.zero_grad()
    optimizer, record.result = torch.optim.AdamW(engine.pipeline.parameters(), lr=3e-3), []
    for step in range(steps):
        record.result.append(_step(engine, axes_of, step).item())
        optimizer.step()
        optimizer.zero_grad()


def _rows_of(layout: Layout, dp_rank: int, step: int) -> Batches:
    """This dp rank's micro-batches of one sequence; the global batch is the same for every layout of as many."""
    x_BS, y_BS = batch(tokens(100_000), step, layout.sequences_per_step, _AXES_SEQ_LEN)
    rows = [layout.dp * index + dp_rank for index in range(layout.micro_batches)]
    return [(x_BS[row : row + 1], y_BS[row : row + 1]) for row in rows]


class _Unsummed(five_d.CutStageRunner):
    """A backward that leaves each rank its own gradients: the rule does all sums."""

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Start no sum."""


def _step(engine: five_d.FiveD, axes_of: Callable, step: int) -> Tensor:
    """Forward, backward, and the sums of the rule; return the mean loss."""
    layout, kind_of = engine.layout, sums.kind_function(engine)
    parts = _rows_of(layout, engine.groups.coordinates["dp"], step)
    runner = _Unsummed(engine, layout.dp * sum(y_BS.numel() for _, y_BS in parts))
    share = pipeline.execute(engine.pipeline, parts, runner)
    groups = {"world": dist.group.WORLD} | engine.groups.by_axis
    for param in engine.pipeline.parameters():
        for axis in axes_of(kind_of(param), layout):
            if axis not in groups:
                raise ValueError(f"axes_of names {axis!r}; choose from {', '.join(sorted(groups))}")
            comm.all_reduce_(param.grad, groups[axis])
    return engine.mean_loss(share)


def _kind(name: str, layout: Layout) -> str:
    if ".experts." in name:
        return "experts"
    return "norms" if layout.tp > 1 and ("norm" in name or "router" in name) else "matrices"
