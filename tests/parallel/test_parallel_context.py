"""Context parallelism from scratch: gradients against one process; bytes: test_parallel_five_d.py."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import distance, one_process

from course_lib import model
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.parallel import context
from course_lib.parallel import engine as engines

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
    loss = engines.accumulate_gradients(engine, batches)
    return {
        "apart": distance(engines.full_gradients(engine), loss, *one_process(reference, batches)),
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
        "heads": "num_kv_heads (1) must be divisible by cp (2)",
        "family": "family is 'xlmr'",
        "twice": "replaced already",
        "length": "seq_len (18) must be a multiple of 2 x cp (4)",
        "labels": "both must be B x S",
        "none": "there are no micro-batches",
        "positions": "has 40 tokens; max_seq_len is 32",
    }
    for rank in launch(refusals, 2):
        assert rank.keys() == expected.keys()
        for name, (words, sent_bytes) in rank.items():
            assert expected[name] in words and sent_bytes == 0, (name, words)
