"""Context parallelism from scratch: what is refused; gradients and bytes: test_ring.py, test_parallel_five_d.py."""

import dataclasses

import torch
import torch.distributed as dist

from course_lib import model
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.parallel import context
from course_lib.parallel import engine as engines

LLAMA = ModelConfig("llama", 2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=29, max_seq_len=32)
GPT = dataclasses.replace(LLAMA, name="gpt", family="gpt", num_kv_heads=4)


def config_of(config, **changes):
    return dataclasses.replace(config, **changes)


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
