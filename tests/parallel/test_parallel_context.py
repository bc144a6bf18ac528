"""Context parallelism from scratch: gradients against one process, bytes, wrong engines that must be found out."""

import copy
import dataclasses
from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import distance, one_process
from kept_bytes import kept_bytes
from torch import nn

from course_lib import model, training
from course_lib.comm import make_groups
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.layout import Layout, Mesh
from course_lib.measure import ByteMeter
from course_lib.memory.states import FP64
from course_lib.model import llama
from course_lib.parallel import context, gathered, ring, sequence, tensor, tiles
from course_lib.parallel import engine as engines
from course_lib.parallel.vocabulary import vocab_cross_entropy
from course_lib.run import Run
from course_lib.traffic import all_gather_bytes, by_collective, calls, reduce_scatter_bytes, ring_all_reduce_bytes

LLAMA = ModelConfig("llama", 2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=29, max_seq_len=32)
GPT = dataclasses.replace(LLAMA, name="gpt", family="gpt", num_kv_heads=4)
ROWS, LENGTHS = (2, 1), (16, 8)  # two micro-batches, one of them shorter


@dataclasses.dataclass(frozen=True)
class Case:
    method: str = "ring"
    sequence_sharding: str = "zigzag"
    config: ModelConfig = LLAMA
    recompute: str = "none"
    attention: str = "fused"
    causal: bool = True
    outer: int = 1
    frozen: tuple[str, ...] = ()


def config_of(config, **changes):
    return dataclasses.replace(config, **changes)


CASES = {
    **{
        f"{method}, {sequence_sharding}": Case(method, sequence_sharding)
        for method in ("ring", "all_gather")
        for sequence_sharding in ("contiguous", "zigzag", "striped")
    },
    "tied, 4 key/value heads, full": Case("ring", config=config_of(LLAMA, tied=True, num_kv_heads=4), recompute="full"),
    "1 key/value head, selective": Case("ring", "striped", config_of(LLAMA, num_kv_heads=1), recompute="selective"),
    "gathered, full": Case("all_gather", "zigzag", recompute="full"),
    "standard, frozen": Case("ring", attention="standard", frozen=("embed.weight", "attention.k.weight")),
    "tied gpt": Case("ring", config=config_of(GPT, tied=True)),
    "gpt in both directions": Case("ring", "striped", GPT, causal=False),
    "gpt in both directions, gathered": Case("all_gather", "contiguous", GPT, causal=False),
    "ulysses": Case("ulysses", config=config_of(LLAMA, num_kv_heads=4)),
    "both": Case("ulysses", outer=2),
}


def built(case):
    """The same on every rank: weights, biases that are not zero, frozen parameters."""
    whole = model.build(case.config, 1, torch.float64, attention=case.attention, recompute=case.recompute)
    generator = torch.Generator().manual_seed(2)
    for name, param in whole.named_parameters():
        if name.endswith("bias"):
            param.data.normal_(generator=generator)
        param.requires_grad_(not name.endswith(case.frozen) if case.frozen else True)
    for block in whole.blocks:
        block.attention.causal = case.causal
    return whole


def micro_batches(vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocab_size, (B, S + 1), generator=generator) for B, S in zip(ROWS, LENGTHS, strict=True)]
    return [(tokens_BS[:, :-1], tokens_BS[:, 1:]) for tokens_BS in rows]


def measure(case):
    whole = built(case)
    reference = copy.deepcopy(whole)
    engine = context.build(whole, dist.group.WORLD, case.method, case.sequence_sharding, case.outer)
    batches = micro_batches(case.config.vocab_size)
    with ByteMeter() as meter:
        loss = engines.accumulate_gradients(engine, batches)
    return {
        "apart": distance(engines.full_gradients(engine), loss, *one_process(reference, batches)),
        "sent": meter.by_collective,
        "calls": meter.calls,
        "hops": Counter(record.payload_bytes for record in meter.records if record.collective == "all_to_all"),
        "gradient bytes": sum(p.grad.nbytes for p in engine.parameters() if p.requires_grad),
        "tied": engine.module.head.weight is engine.module.embed.weight,
    }


def measure_all(cases):
    size = dist.get_world_size()
    return {name: measure(case) for name, case in cases.items() if size % case.outer == 0 and size > case.outer}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.exhaustive), 4])
def measured(request):
    return launch(measure_all, request.param, CASES)


def test_loss_and_gradients_equal_one_process(measured):
    assert len(measured[0]) == len(CASES) - (len(measured) == 2)  # both methods together need 4 ranks
    for rank in measured:
        for name, of_case in rank.items():
            assert max(of_case["apart"].values()) < 1e-12, (name, of_case["apart"])
            assert of_case["tied"] == CASES[name].config.tied


def block_bytes(case, cp):
    """Keys and values of one rank, in each micro-batch: 2 B K s H numbers of 8 bytes."""
    return [2 * B * case.config.num_kv_heads * (S // cp) * 4 * 8 for B, S in zip(ROWS, LENGTHS, strict=True)]


def test_a_ring_sends_keys_values_and_their_gradients_around_and_nothing_else(measured):
    cp = len(measured)
    for r, rank in enumerate(measured):
        for name, case in CASES.items():
            if case.method != "ring":
                continue
            trips = 2 * (3 if case.recompute == "none" else 4)  # 2 layers: k v forward, k v and dk dv backward
            blocks = block_bytes(case, cp)
            assert rank[name]["hops"] == {block: trips * (cp - 1) for block in blocks}
            assert rank[name]["sent"]["all_to_all"] == trips * (cp - 1) * sum(blocks)
            gradients = rank[name]["gradient bytes"]
            summed = ring_all_reduce_bytes(gradients, cp, r, 8) + ring_all_reduce_bytes(8, cp, r, 8)
            assert rank[name]["sent"]["all_reduce"] == summed and rank[name]["calls"]["all_reduce"] == 2
            assert set(rank[name]["sent"]) == {"all_to_all", "all_reduce"}


def test_the_ring_in_numbers():
    """Zigzag on 4 ranks: micro-batches of 2 x 16 and 1 x 8 tokens, 2 key/value heads of 4 numbers, 2 layers."""
    rank = launch(measure_all, 4, {"ring": Case()})[2]["ring"]
    blocks = 2 * 2 * 2 * 4 * 4 * 8 + 2 * 1 * 2 * 2 * 4 * 8  # k and v, rows, heads, tokens, numbers, bytes
    assert rank["sent"]["all_to_all"] == 2 * 3 * 3 * blocks == 2 * 3 * 3 * 1280  # layers, trips, hops


def test_gathering_sends_as_many_bytes_in_three_calls_a_layer(measured):
    cp = len(measured)
    for r, rank in enumerate(measured):
        for name, case in CASES.items():
            if case.method != "all_gather":
                continue
            gathers = 2 if case.recompute == "none" else 3
            calls, sent = rank[name]["calls"], rank[name]["sent"]
            assert calls == {"all_gather": 2 * 2 * gathers, "reduce_scatter": 2 * 2, "all_reduce": 2}
            wholes = [cp * block for block in block_bytes(case, cp)]
            assert sent["all_gather"] == 2 * gathers * sum(all_gather_bytes(whole, cp, r, 8) for whole in wholes)
            assert sent["reduce_scatter"] == 2 * sum(reduce_scatter_bytes(whole, cp, r, 8) for whole in wholes)
        ring_sent = rank["ring, zigzag"]["sent"]["all_to_all"]
        both = rank["all_gather, zigzag"]["sent"]
        assert both["all_gather"] + both["reduce_scatter"] == ring_sent


def calls_of(case, cp, rows, seq_len, rank):
    """Collectives by axis; Ulysses inside a ring: the ring's ranks have heads / inner, as after tp = inner."""
    how = {"cp_method": case.method, "recompute": case.recompute, "micro_batch": rows}
    inner = cp // case.outer
    if case.outer == 1 or cp == 1:
        return calls(Run(case.config, Layout(cp=cp, **how), seq_len, FP64), rank)
    every = calls(Run(case.config, Layout(cp=cp, **(how | {"cp_method": "ring"})), seq_len, FP64), rank)
    inside = calls(Run(case.config, Layout(cp=inner, **how), seq_len // case.outer, FP64))["cp"]
    around = calls(Run(case.config, Layout(cp=case.outer, tp=inner, **(how | {"cp_method": "ring"})), seq_len, FP64))
    return every | {"cp": inside + around["cp"]}


def test_traffic_knows_the_same_bytes_before_anything_runs(measured):
    cp = len(measured)
    for r, rank in enumerate(measured):
        for name, of_case in rank.items():
            case, expected = CASES[name], Counter()
            if case.frozen:
                continue
            for index, (B, S) in enumerate(zip(ROWS, LENGTHS, strict=True)):
                listed = calls_of(case, cp, B, S, r)
                once = [*listed["data"], *(call for call in listed["world"] if call.place == "loss")]
                expected.update(by_collective([*listed["cp"], *(once if index == 0 else [])], r))
            assert Counter({key: value for key, value in of_case["sent"].items() if value}) == expected, name


# --- wrong engines: each must be found out


@contextmanager
def counts_positions_from_zero():
    """Each rank as if its tokens began the sequence: RoPE's angles are wrong."""
    rope = llama.rope_tables
    with patch.object(llama, "rope_tables", lambda c, p, d: rope(c, torch.arange(len(p)), d)):
        yield


@contextmanager
def shifts_labels_after_the_cut():
    def loss_of(engine, x_BS, y_BS):
        where_s = engine.context.positions(x_BS.shape[1])
        y_Bs = torch.cat([x_BS[:, where_s][:, 1:], y_BS[:, where_s][:, -1:]], dim=1)
        return context.cross_entropy(engine(x_BS[:, where_s], where_s), y_Bs).sum() / y_BS.numel()

    with patch.object(context, "loss_of", loss_of):
        yield


@contextmanager
def merges_without_shrinking():
    right = tiles.merge

    def wrong(out, lse, part, part_lse):
        return (out + part) / 2, right(out, lse, part, part_lse)[1]

    with patch.object(tiles, "merge", wrong):
        yield


@contextmanager
def leaves_gradients_on_the_way():
    """What other ranks added to dk and dv of my keys never comes home."""
    with patch.object(ring.DKVRotation, "total", lambda home: (home.ring_step.wait(), home.own_BKsU)[1]):
        yield


@contextmanager
def forgets_what_arrives_on_the_way():
    """Each rank passes on its own share alone: home gets the last rank's."""

    def add(home, key_rank, dkv_BKsU):
        if home.own_BKsU is None:
            home.own_BKsU = dkv_BKsU
            return
        if home.ring_step is not None:
            home.ring_step.wait()
        home.ring_step = ring.start_ring_step(dkv_BKsU, home.group)

    with patch.object(ring.DKVRotation, "add", add):
        yield


@contextmanager
def masks_as_if_contiguous():
    with patch.object(tiles, "tile", lambda sequence_sharding, *rest: right("contiguous", *rest)):
        right = context_tile
        yield


context_tile = tiles.tile


@contextmanager
def averages_gradients():
    right = context.sum_gradients

    def wrong(parameters, group):
        parameters = list(parameters)
        right(parameters, group)
        for param in parameters:
            param.grad /= group.size()

    with patch.object(context, "sum_gradients", wrong):
        yield


@contextmanager
def sums_no_gradients():
    with patch.object(context, "sum_gradients", lambda parameters, group: None):
        yield


@contextmanager
def gathers_in_the_wrong_order():
    add = gathered.SumAtOnce.add
    with patch.object(
        gathered.SumAtOnce, "add", lambda home, rank, dkv: add(home, (rank + 1) % home.group.size(), dkv)
    ):
        yield


BUGS = [
    counts_positions_from_zero,
    shifts_labels_after_the_cut,
    merges_without_shrinking,
    leaves_gradients_on_the_way,
    forgets_what_arrives_on_the_way,
    masks_as_if_contiguous,
    averages_gradients,
    sums_no_gradients,
    gathers_in_the_wrong_order,
]


def planted():
    found = {}
    for bug in BUGS:
        whole = built(Case())
        reference, batches = copy.deepcopy(whole), micro_batches(29)
        with bug():
            engine = context.build(
                whole, dist.group.WORLD, "all_gather" if bug is gathers_in_the_wrong_order else "ring"
            )
            loss = engines.accumulate_gradients(engine, batches)
        found[bug.__name__] = distance(engines.full_gradients(engine), loss, *one_process(reference, batches))
    return found


@pytest.mark.exhaustive
def test_planted_bugs_are_found_where_they_are():
    bugs = launch(planted, 4)[0]
    wrong = {bug: {name for name, value in apart.items() if value > 1e-6} for bug, apart in bugs.items()}
    for bug in (
        "counts_positions_from_zero",
        "shifts_labels_after_the_cut",
        "merges_without_shrinking",
        "masks_as_if_contiguous",
    ):
        assert {"loss", "head.weight"} <= wrong[bug], bug
    for bug in ("leaves_gradients_on_the_way", "forgets_what_arrives_on_the_way", "gathers_in_the_wrong_order"):
        last = {"blocks.1.attention.k.weight", "blocks.1.attention.v.weight", "blocks.0.mlp.down.weight"}
        assert last <= wrong[bug] and not wrong[bug] & {"loss", "blocks.1.attention.q.weight", "head.weight"}, bug
    for bug in ("averages_gradients", "sums_no_gradients"):
        assert wrong[bug] == set(bugs[bug]) - {"loss"}, bug


# --- with tensor and sequence parallelism, from outside


def with_tensor(technique):
    """Distance from one process on a mesh of cp 2 x tp 2, and what crosses along each axis."""
    groups = make_groups(Mesh(cp=2, tp=2))
    whole = built(Case(config=config_of(LLAMA, num_kv_heads=1, tied=True)))  # one head on two ranks of tp
    reference, batches = copy.deepcopy(whole), micro_batches(29)
    cut = technique.build(whole, groups["tp"])
    losses = partial(vocab_cross_entropy, first=cut.module.embed.first, group=groups["tp"])
    engine = context.build(cut.module, groups["cp"], token_losses=losses)
    with ByteMeter(groups) as meter:
        loss = engines.accumulate_gradients(engine, batches)
    tensor.sum_replicas(cut)
    if technique is sequence:
        tensor.sum_gradients(sequence.of_my_tokens(cut), groups["tp"])
    apart = distance(engines.full_gradients(cut), loss, *one_process(reference, batches))
    hops = [r.payload_bytes for r in meter.records if r.collective == "all_to_all"]
    return max(apart.values()), hops, {r.axis for r in meter.records if r.collective == "all_to_all"}


def composed():
    return [with_tensor(technique) for technique in (tensor, sequence)]


def test_a_model_cut_by_tensor_parallelism_takes_the_ring_from_outside():
    for rank in launch(composed, 4):
        for apart, hops, axes in rank:
            assert apart < 1e-12
            assert axes == {"cp"}  # 1 key/value head of 4 numbers, over 2 ranks of cp
            assert Counter(hops) == {2 * B * 1 * (S // 2) * 4 * 8: 2 * 3 for B, S in zip(ROWS, LENGTHS, strict=True)}


# --- steps, memory


def trained():
    """Distance from one process after three clipped steps."""
    whole = built(Case(config=config_of(LLAMA, tied=True)))
    reference = copy.deepcopy(whole)
    engine = context.build(whole, dist.group.WORLD)
    optimizer = engines.make_optimizer(engine, lr=0.01)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for seed in range(3):
        batches = micro_batches(29, seed)
        engines.step(engine, batches, optimizer, clip_norm=0.1)
        one_process(reference, batches)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        expected.step()
        expected.zero_grad()
    after = engines.full_parameters(engine)
    return max((after[name] - p).abs().max().item() for name, p in reference.named_parameters())


def in_bfloat16():
    engine = context.build(model.build(LLAMA, dtype=torch.bfloat16), dist.group.WORLD)
    optimizer = engines.make_optimizer(engine, lr=0.01)
    with ByteMeter() as meter:
        losses = [engines.step(engine, micro_batches(29), optimizer, 1.0).item() for _ in range(6)]
    hops = Counter(record.payload_bytes for record in meter.records if record.collective == "all_to_all")
    return losses[0] - losses[-1], hops, engine.module.embed.weight.dtype


def kept_of(method):
    engine = context.build(model.build(LLAMA, dtype=torch.float64), dist.group.WORLD, method)
    x_BS, y_BS = micro_batches(29)[0]
    return kept_bytes(engine, lambda: context.loss_of(engine, x_BS, y_BS))


def other_runs():
    alone = model.build(LLAMA, dtype=torch.float64)
    x_BS, y_BS = micro_batches(29)[0]
    half = kept_bytes(alone, lambda: training.loss_of(alone, x_BS[:, :8], y_BS[:, :8]))
    return trained(), in_bfloat16(), half, [kept_of(method) for method in ("ring", "all_gather")]


@pytest.fixture(scope="module")
def other():
    return launch(other_runs, 2)


def test_parameters_after_clipped_steps_equal_one_process(other):
    assert all(rank[0] < 1e-10 for rank in other)


def test_in_bfloat16_the_loss_falls_and_gradients_travel_in_float32(other):
    for fell, hops, dtype in (rank[1] for rank in other):
        assert fell > 0.1 and dtype == torch.bfloat16
        numbers = [2 * B * 2 * (S // 2) * 4 for B, S in zip(ROWS, LENGTHS, strict=True)]
        kv, gradients = (
            Counter({size * count: 6 * 2 * trips for count in numbers}) for size, trips in ((2, 2), (4, 1))
        )
        assert hops == kv + gradients


def test_backward_keeps_what_one_process_keeps_for_that_many_tokens(other):
    places = 2 * 8 * 8  # my positions, and the copy of my tokens that the embedding keeps, counted for the slack
    for _, _, half, kept in other:
        assert all(abs(nbytes - half) <= 2 * places for nbytes in kept), (half, kept)


# --- refused, before anything is sent


def refusals():
    group, found = dist.group.WORLD, {}

    def attempt(name, act):
        with ByteMeter() as meter:
            try:
                act()
            except ValueError as error:
                found[name] = str(error), meter.sent_bytes

    whole = model.build(LLAMA)
    attempt("group", lambda: context.build(whole, None))
    attempt("method", lambda: context.build(whole, group, "tree"))
    attempt("sequence_sharding", lambda: context.build(whole, group, sequence_sharding="spiral"))
    attempt("outer", lambda: context.build(whole, group, outer=2))
    attempt("divisor", lambda: context.build(whole, group, "ulysses", outer=3))
    attempt("merge", lambda: context.build(whole, group, "ulysses", merge_dtype=torch.float32))
    attempt("heads", lambda: context.build(model.build(config_of(LLAMA, num_kv_heads=1)), group, "ulysses"))
    attempt("family", lambda: context.build(model.build(config_of(GPT, family="xlmr")), group))
    engine = context.build(whole, group)
    attempt("twice", lambda: context.build(engine.module, group))
    tokens_BS = torch.zeros(1, 40, dtype=torch.int64)
    good = tokens_BS[:, :16], tokens_BS[:, :16]
    attempt("length", lambda: engines.accumulate_gradients(engine, [good, (tokens_BS[:, :18], tokens_BS[:, :18])]))
    attempt("labels", lambda: engines.accumulate_gradients(engine, [(tokens_BS[:, :16], tokens_BS[:, :12])]))
    attempt("none", lambda: engines.accumulate_gradients(engine, []))
    gpt = context.build(model.build(GPT), group)
    attempt("positions", lambda: engines.accumulate_gradients(gpt, [(tokens_BS, tokens_BS)]))
    return found


def test_what_cannot_be_cut_is_refused_before_anything_is_sent():
    expected = {
        "group": "needs a process group",
        "method": "method is 'tree'; choose from ring, all_gather, ulysses",
        "sequence_sharding": "sequence_sharding is 'spiral'; choose from",
        "outer": 'choose method="ulysses"',
        "divisor": "outer (3) must be a divisor of cp (2)",
        "merge": "merge_dtype is torch.float32, but Ulysses without a ring merges nothing",
        "heads": "num_kv_heads (1) must be divisible by cp (2)",
        "family": "family is 'xlmr'",
        "twice": "replaced already",
        "length": "seq_len (18) must be a multiple of 2 x cp (4)",
        "labels": "both must be (B, S)",
        "none": "give at least one",
        "positions": "seq_len (40) exceeds the learned positions (32)",
    }
    for rank in launch(refusals, 2):
        assert rank.keys() == expected.keys()
        for name, (words, sent_bytes) in rank.items():
            assert expected[name] in words and sent_bytes == 0, (name, words)
