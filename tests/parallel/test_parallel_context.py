"""Context parallelism from scratch: what is refused; gradients and bytes: test_ring.py, test_parallel_five_d.py."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course_lib import model
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.parallel import context
from course_lib.parallel import engine as engines

LLAMA = ModelConfig("llama", 2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=29, max_seq_len=32)
GPT = replace(LLAMA, name="gpt", family="gpt", num_kv_heads=4)


# --- refused, before anything is sent


def refusals():
    """Of each refusal what it must say, what it said, and the bytes sent by then."""
    group, found = dist.group.WORLD, []

    def attempt(expected, act, *args, **options):
        with ByteMeter() as meter, pytest.raises(ValueError) as error:
            act(*args, **options)
        found.append((expected, str(error.value), meter.sent_bytes))

    whole = model.build(LLAMA)
    attempt("needs a process group", context.build, whole, None)
    attempt("method is 'tree'; choose from ring, all_gather, ulysses", context.build, whole, group, "tree")
    spiral = {"sequence_sharding": "spiral"}
    attempt("sequence_sharding is 'spiral'; choose from", context.build, whole, group, **spiral)
    attempt('choose method="ulysses"', context.build, whole, group, outer=2)
    attempt("outer (3) must be a divisor of cp (2)", context.build, whole, group, "ulysses", outer=3)
    one_head, other_family = (model.build(one) for one in (replace(LLAMA, num_kv_heads=1), replace(GPT, family="xlmr")))
    attempt("num_kv_heads (1) must be divisible by cp (2)", context.build, one_head, group, "ulysses")
    attempt("family is 'xlmr'", context.build, other_family, group)
    engine = context.build(whole, group)
    attempt("replaced already", context.build, engine.module, group)
    tokens_BS = torch.zeros(1, 40, dtype=torch.int64)
    step, good, long = engines.accumulate_gradients, tokens_BS[:, :16], tokens_BS[:, :18]
    attempt("seq_len (18) must be a multiple of 2 x cp (4)", step, engine, [(good, good), (long, long)])
    attempt("both must be B x S", step, engine, [(good, tokens_BS[:, :12])])
    attempt("there are no micro-batches", step, engine, [])
    gpt = context.build(model.build(GPT), group)
    attempt("has 40 tokens; max_seq_len is 32", step, gpt, [(tokens_BS, tokens_BS)])
    return found


def test_what_cannot_be_cut_is_refused_before_anything_is_sent():
    for rank in launch(refusals, 2):
        for expected, said, sent_bytes in rank:
            assert expected in said and sent_bytes == 0, (expected, said)
