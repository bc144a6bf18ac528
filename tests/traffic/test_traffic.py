"""Bytes that a step sends, by formula: hand values, papers, claims by their ids."""

import pytest
import torch
import torch.distributed as dist

from course_lib.config import ModelConfig, preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.memory.budget import budgets
from course_lib.memory.ranks import boundary_bytes, kv_block_bytes
from course_lib.memory.zero import zero_units
from course_lib.model import build
from course_lib.run import Run
from course_lib.traffic import (
    all_to_all_bytes,
    attention_calls,
    by_collective,
    call_counts,
    calls,
    ring_all_reduce_bytes,
    sent_bytes,
)
from course_lib.traffic.data import flat_calls

TOY, LLAMA_70B, TIED = preset("toy"), preset("llama-3.1-70b"), preset("llama-3.2-1b")


# ---- ZeRO


def zero_calls(numel, zero_stage, dp=4, recipe="bf16-master", micro_batches=1):
    """Collectives of one step for a flat parameter of so many elements."""
    return flat_calls(
        Run(TOY, Layout(dp=dp, zero_stage=zero_stage, micro_batches=micro_batches), 64, recipe), numel, dp
    )


def _in_parameters(zero_stage, dp=4, numel=4000, **how):
    """Bytes sent, in units of P (N - 1) / N elements of 2 bytes."""
    return sent_bytes(zero_calls(numel, zero_stage, dp, **how)) / (2 * numel * (dp - 1) / dp)


def by_place(calls):
    return {place: sent_bytes(call for call in calls if call.place == place) for place in {c.place for c in calls}}


def test_C057_C067_C069_C071_C131_stages_send_2_2_2_and_3_times_the_parameters():
    assert [_in_parameters(stage) for stage in (0, 1, 2, 3)] == [2, 2, 2, 3]
    assert _in_parameters(3) / _in_parameters(0) == 1.5  # C131: not 3 times


def test_C129_stage_1_with_an_all_reduce_of_gradients_would_send_3():
    all_reduce, all_gather = by_place(zero_calls(4000, 0))["gradients"], by_place(zero_calls(4000, 1))["parameters"]
    assert all_reduce + all_gather == 3 * 2 * 4000 * 3 // 4


def test_accumulation_costs_stages_2_and_3_more():
    sent = {stage: [_in_parameters(stage, micro_batches=m) for m in (1, 2, 4)] for stage in (0, 1, 2, 3)}
    assert sent == {0: [2, 2, 2], 1: [2, 2, 2], 2: [2, 3, 5], 3: [3, 6, 12]}


def test_C058_C064_C068_C133_which_collective_carries_what():
    def kinds(stage):
        return {(call.place, call.collective): call.count for call in zero_calls(8, stage)}

    assert kinds(0) == {("gradients", "all_reduce"): 1}
    assert kinds(1) == kinds(2) == {("gradients", "reduce_scatter"): 1, ("parameters", "all_gather"): 1}
    assert kinds(3) == {("gradients", "reduce_scatter"): 1, ("parameters", "all_gather"): 2}  # C133: forward as well
    halves = by_collective(zero_calls(4000, 2))
    assert 2 * halves["reduce_scatter"] == by_collective(zero_calls(4000, 0))["all_reduce"]  # C064: 2x, in bytes


def test_padding_is_sent_and_fp32_gradients_cost_twice():
    units = zero_units(TOY, 3, 4)
    padded = sum(-(-unit // 3) * 3 for unit in units)
    assert sum(units) < padded
    sharded, replicated = (
        calls(Run(TOY, Layout(dp=3, zero_stage=zero_stage), 64, "fp32"), 1)["data"] for zero_stage in (3, 0)
    )
    assert sent_bytes(sharded) == 3 * padded * 4 * 2 // 3
    assert sent_bytes(replicated, rank=1) == ring_all_reduce_bytes(4 * sum(units), 3, 1)
    kept_in_fp32 = by_place(zero_calls(4000, 1, recipe="bf16-master-fp32-grads"))
    assert kept_in_fp32["gradients"] == 2 * kept_in_fp32["parameters"]


# ---- tensor and sequence parallelism


def tp_calls(config, seq_len, tp, rank=0, recipe="bf16-master", **layout):
    return calls(Run(config, Layout(tp=tp, **layout), seq_len, recipe), rank)["tp"]


def test_C075_C076_C136_a_layer_has_two_all_reduces_forward_and_two_backward():
    listed = tp_calls(LLAMA_70B, 4096, 8)
    counts = {call.place: call.count for call in listed}
    layers = LLAMA_70B.num_layers
    assert counts["layers forward"] == counts["layers backward"] == 2 * layers
    b, s, h, t = 1, 4096, LLAMA_70B.d_model, 8
    per_layer = 4 * ring_all_reduce_bytes(b * s * h * 2, t, itemsize=2)
    assert per_layer == 2 * 8 * b * s * h * (t - 1) // t  # C136: 8 b s h (t - 1) / t numbers (Narayanan et al. 2021)
    whole = by_place(listed)
    assert whole["layers forward"] + whole["layers backward"] == layers * per_layer
    assert whole["embedding"] == whole["head"] == per_layer // 4
    assert whole["loss"] < 0.001 * whole["head"]
    assert set(call_counts(listed)) == {"all_reduce"}  # C075: nothing is gathered, nothing broadcast
    assert tp_calls(LLAMA_70B, 4096, 1) == []


def test_C084_C179_sequence_parallelism_sends_the_same_bytes_in_twice_the_calls():
    both = [tp_calls(TOY, 64, 4, micro_batch=2, sequence_parallel=sp) for sp in (False, True)]
    tp, tp_sp = ({k: v for k, v in by_place(calls).items() if k != "gradients of whole parameters"} for calls in both)
    assert tp == tp_sp
    counts = [
        call_counts([c for c in calls if c.place not in ("loss", "gradients of whole parameters")]) for calls in both
    ]
    assert sum(counts[1].values()) == 2 * sum(counts[0].values()) == 2 * (4 * 4 + 2)
    assert counts[1]["all_gather"] == counts[1]["reduce_scatter"]
    norms = by_place(both[1])["gradients of whole parameters"]
    assert norms == ring_all_reduce_bytes(2 * (2 * 4 + 1) * 64, 4, itemsize=2)


def test_gathering_again_adds_one_all_gather_for_each_column_parallel_input():
    plain, again = (
        tp_calls(TOY, 64, 4, micro_batch=2, sequence_parallel=True, regather=regather) for regather in (False, True)
    )
    assert call_counts(again)["all_gather"] - call_counts(plain)["all_gather"] == 2 * TOY.num_layers + 1
    assert call_counts(again)["reduce_scatter"] == call_counts(plain)["reduce_scatter"]


def test_full_recomputation_repeats_a_layer_s_sums_up_to_the_last_tensor_that_backward_needs():
    gpt = ModelConfig("gpt", 2, 64, 4, 4, 256, 256, 64, family="gpt", dropout=0.1)
    for config, sums in ((TOY, 1), (gpt, 2)):  # dropout's mask comes after the MLP's sum
        again = [call for call in tp_calls(config, 64, 4, recompute="full") if call.place == "recomputation"]
        assert call_counts(again) == {"all_reduce": sums * config.num_layers}


def test_more_ranks_than_key_value_heads_sum_the_gradients_of_their_copies():
    config = ModelConfig("few", 2, 32, 8, 2, 64, 256, 64)
    assert "key/value gradients" not in by_place(tp_calls(config, 64, 2))
    sums = [call for call in tp_calls(config, 64, 8) if call.place == "key/value gradients"]
    assert [(c.group_size, c.count, c.payload_bytes) for c in sums] == [(4, 1, 2 * 2 * 2 * 4 * 32)]


def test_an_uneven_sequence_is_padded_in_the_message():
    even, uneven = (tp_calls(TOY, s, 4, sequence_parallel=True) for s in (64, 61))
    assert by_place(even)["layers forward"] == by_place(uneven)["layers forward"]


# ---- along the sequence, before chapter 07 takes it up


def test_C148_C149_a_ring_hands_keys_and_values_on_one_time_less_than_it_has_ranks():
    ranks = 4
    held = list(range(ranks))  # rank r computes with the keys of rank held[r]
    met = [{k} for k in held]
    exchanges = 0
    while any(len(seen) < ranks for seen in met):
        held = [held[(r + 1) % ranks] for r in range(ranks)]  # received from r + 1
        exchanges += 1
        met = [seen | {k} for seen, k in zip(met, held, strict=True)]
        if exchanges == 1:
            assert held == [(r + 1) % ranks for r in range(ranks)]  # C149: so K[(r + 1) % P], not K[(r - 1) % P]
    assert exchanges == ranks - 1  # C148


def test_C150_ulysses_sends_4_n_h_over_p_a_layer():
    tokens, h, p = 4096, 1024, 8
    three, one = (all_to_all_bytes(k * tokens * h // p, p, itemsize=1) for k in (3, 1))  # q, k, v there; o back
    assert three + one == 4 * tokens * h // p * (p - 1) // p


# ---- beside real ranks


def _train(config, recompute, sequence_parallel, regather, how):
    """One step under the tracker, one under the meter: bytes held by kind, bytes sent, calls."""
    from course_lib.parallel import sequence, tensor

    engine = build(config, recompute=recompute, attention="standard")
    if sequence_parallel:
        engine, module = sequence.build(engine, dist.group.WORLD, regather=regather), sequence
    else:
        engine, module = tensor.build(engine, dist.group.WORLD), tensor
    optimizer = module.make_optimizer(engine)

    def step():
        x_BS, y_BS = torch.randint(0, config.vocab_size, (2, 2, how["seq_len"])).clone().unbind()
        module.step(engine, [(x_BS, y_BS)] * how["micro_batches"], optimizer)

    with MemoryTracker(engine, optimizer) as tracker:
        step()
    with ByteMeter() as meter:
        step()
    held = {kind: max(column) for kind, column in tracker.timeline.bytes_by_kind.items()}
    return held, meter.by_collective, meter.calls


def _train_all(cases, how):
    return [_train(*case, how) for case in cases]


@pytest.mark.exhaustive
def test_real_ranks_hold_and_send_what_the_formulas_say():
    """Uneven d_ff, vocabulary and sequence; fewer key/value heads than ranks; tied, dropout, biases; accumulation."""
    odd = ModelConfig("odd", 2, 32, num_heads=8, num_kv_heads=2, d_ff=50, vocab_size=101, max_seq_len=64)
    gpt = ModelConfig("gpt", 2, 32, 4, 4, 100, 101, 64, tied=True, family="gpt", dropout=0.1)
    tp, sp, regather = (False, False), (True, False), (True, True)
    cases = [(odd, "none", *tp), (odd, "none", *regather), (gpt, "none", *sp), (odd, "full", *sp), (gpt, "full", *tp)]
    size, how = 4, {"seq_len": 31, "micro_batches": 2}
    ranks = launch(_train_all, size, cases, how, quiet=True)
    for rank in (0, size - 1):
        for (config, recompute, split, again), (held, sent, counts) in zip(cases, ranks[rank], strict=True):
            how = {"sequence_parallel": split, "regather": again, "recompute": recompute}
            expected = tp_calls(config, 31, size, rank, "fp32", micro_batch=2, micro_batches=2, **how)
            assert (by_collective(expected, rank), call_counts(expected)) == (sent, counts)
            layout = Layout(tp=size, micro_batch=2, micro_batches=2, **how)
            plan = budgets(Run(config, layout, 31, "fp32", "standard", "cpu"), tp_rank=rank)[0].by_kind
            states = ("parameters", "gradients", "optimizer")
            assert [plan[kind] for kind in states] == [held[kind] for kind in states]
            if recompute == "none":  # with "full", gloo's threads may still hold messages of the block run again
                assert held["activations"] == pytest.approx(plan["activations"], rel=0.015)


# ---- context parallelism

EXCHANGED = {"ring": 4, "all_gather": 8, "ulysses": 3}  # blocks of keys and values that backward has at once
WAYS = (  # (method, ranks of a ring around it, recomputation)
    ("ring", 1, "none"), ("all_gather", 1, "none"), ("ulysses", 1, "none"), ("ulysses", 2, "none"), ("ring", 1, "full"),
)  # fmt: skip


def cp_run(config, seq_len, cp, method="ring", **layout):
    return Run(config, Layout(cp=cp, cp_method=method, **layout), seq_len)


def test_C150_ulysses_sends_4_n_h_over_p_and_grouped_queries_less():
    mha = preset("playbook-3b")  # as many key heads as query heads
    tokens, p = 4096, 8
    forward = sum(
        by_collective(c for c in attention_calls(cp_run(mha, tokens, p, "ulysses")) if "forward" in c.place).values()
    )
    assert forward == 4 * tokens * mha.d_model // p * (p - 1) // p * 2  # C150, times what stays
    grouped = attention_calls(cp_run(LLAMA_70B, tokens, p, "ulysses"))
    assert sent_bytes(grouped) == 2 * (2 * 64 + 2 * 8) * 128 * tokens // p * (p - 1) // p * 2
    rings = [sent_bytes(attention_calls(cp_run(LLAMA_70B, tokens, p, "ring"))) for p in (2, 8)]
    heads = [sent_bytes(attention_calls(cp_run(LLAMA_70B, tokens, p, "ulysses"))) for p in (2, 8)]
    assert rings[1] / rings[0] == 7 / 4 and heads[1] / heads[0] == 7 / 16  # a ring's grow with p, Ulysses' fall


def test_recomputation_sends_the_keys_of_forward_once_more():
    plain, again = (cp_run(LLAMA_70B, 4096, 8, recompute=recompute) for recompute in ("none", "full"))
    assert sent_bytes(attention_calls(again)) == sent_bytes(attention_calls(plain)) * 5 // 4
    assert attention_calls(cp_run(LLAMA_70B, 4096, 1)) == []
    with pytest.raises(ValueError, match=r"num_kv_heads \(8\).*a ring over 2 outside"):
        cp_run(LLAMA_70B, 4096, 16, "ulysses")


# ---- pipelines


def pp_calls(config, seq_len, layout, rank, recipe="bf16-master"):
    return calls(Run(config, Layout.parse(layout), seq_len, recipe), rank)["pp"]


def test_C112_a_pipeline_sends_the_stream_and_v_times_as_often_with_v_stages_a_rank():
    payload = 4096 * 8192 * 2
    plain, looped, folded = (
        [sent_bytes(pp_calls(LLAMA_70B, 4096, f"pp=4,micro_batches=8,{schedule}", rank)) for rank in range(4)]
        for schedule in ("schedule=1f1b", "schedule=interleaved,v=2", "schedule=zbv")
    )
    assert plain == [8 * payload * n for n in (1, 2, 2, 1)]
    assert looped == [8 * payload * n for n in (3, 4, 4, 3)]
    assert folded == [8 * payload * n for n in (2, 4, 4, 2)]  # the turn stays on a rank
    tied = pp_calls(TIED, 64, "pp=4,micro_batches=4", 0)
    assert by_place(tied)["tied weight"] == TIED.vocab_size * TIED.d_model * 2
    assert "tied weight" not in by_place(pp_calls(TIED, 64, "pp=4,micro_batches=4,schedule=zbv", 0))
    assert pp_calls(TOY, 64, "micro_batches=4", 0) == []


# ---- beside real ranks


def _observe(module, engine, config, num_micro_batches):
    """One step under the tracker, one under the meter: bytes held by kind, bytes sent, calls; receives left out."""
    optimizer = module.make_optimizer(engine)

    def step():
        x_BS, y_BS = torch.randint(0, config.vocab_size, (2, 2, 32)).clone().unbind()
        module.step(engine, [(x_BS, y_BS)] * num_micro_batches, optimizer)

    with MemoryTracker(engine, optimizer) as tracker:
        step()
    with ByteMeter() as meter:
        step()
    held = {kind: max(column) for kind, column in tracker.timeline.bytes_by_kind.items()}
    without_receives = [{k: v for k, v in what.items() if k != "recv"} for what in (meter.by_collective, meter.calls)]
    return held, *without_receives


def _context_and_pipeline(config, schedules):
    from course_lib.parallel import context, pipeline

    group = dist.group.WORLD
    seen = []
    for method, outer, recompute in WAYS:
        engine = context.build(build(config, recompute=recompute), group, method, "zigzag", outer)
        seen.append(_observe(context, engine, config, 2))
    for name in schedules:
        engine = pipeline.build(build(config), group, name)
        seen.append(_observe(pipeline, engine, config, 5))
    return seen


def context_calls(config, method, outer, recompute, rank):
    """Two micro-batches of 2 x 32 tokens on 4 ranks: attention, and once the gradients and the loss.

    Ulysses inside a ring: the ring's ranks have half of the heads, as after tp 2; Ulysses' ranks half of the sequence.
    """
    how = {"cp_method": method, "recompute": recompute, "micro_batches": 2, "micro_batch": 2}
    every = calls(Run(config, Layout(cp=4, **how), 32, "fp32"), rank)
    attention = every["cp"]
    if outer > 1:
        attention = calls(Run(config, Layout(cp=2, **how), 16, "fp32"))["cp"]
        attention += calls(Run(config, Layout(cp=2, tp=2, **(how | {"cp_method": "ring"})), 32, "fp32"))["cp"]
    return [*attention, *every["data"], *(call for call in every["world"] if call.place == "loss")]


@pytest.mark.exhaustive
def test_real_ranks_of_context_and_pipeline_hold_and_send_what_the_formulas_say():
    config = ModelConfig("odd", 4, 32, num_heads=8, num_kv_heads=4, d_ff=50, vocab_size=101, max_seq_len=64, tied=True)
    schedules, states = ("naive", "1f1b"), ("parameters", "gradients", "optimizer")
    ranks = launch(_context_and_pipeline, 4, config, schedules, quiet=True)
    for rank, seen in enumerate(ranks):
        for (method, outer, recompute), (held, sent, counts) in zip(WAYS, seen, strict=False):  # the rest are pipelines
            expected = context_calls(config, method, outer, recompute, rank)
            assert (by_collective(expected, rank), call_counts(expected)) == (sent, counts), (method, outer)
            layout = Layout(cp=4, cp_method=method, micro_batch=2, micro_batches=2, recompute=recompute)
            plan = budgets(Run(config, layout, 32, "fp32", device="cpu"))[0].by_kind
            assert [plan[kind] for kind in states] == [held[kind] for kind in states]
            if recompute == "none":
                # when the last layer's is freed may vary
                exchanged = EXCHANGED[method] * kv_block_bytes(config, 2, 32, 4, 4)
                assert 0.99 * plan["activations"] < held["activations"] < plan["activations"] + exchanged, (
                    method,
                    outer,
                )
        for name, (held, sent, counts) in zip(schedules, seen[len(WAYS) :], strict=True):
            text = f"pp=4,schedule={name},micro_batches=5,micro_batch=2"
            expected = pp_calls(config, 32, text, rank, "fp32")
            for of_step, of_pp in ((sent, by_collective(expected, rank // 3)), (counts, call_counts(expected))):
                assert {kind: of_step[kind] for kind in of_step if kind != "broadcast"} == of_pp, name  # of the loss
            plan = budgets(Run(config, Layout.parse(text), 32, "fp32", device="cpu"))[rank]
            assert [plan.by_kind[kind] for kind in states] == [held[kind] for kind in states]
            kept, messages = plan.by_kind["activations"], 4 * boundary_bytes(config, 2, 32, 4)  # sent, and still there
            assert 0.97 * kept < held["activations"] < 1.01 * kept + messages, (name, rank)
