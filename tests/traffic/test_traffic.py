"""Bytes that a step sends, by formula: hand values, papers, claims by their ids."""

import pytest

from course_lib.config import ModelConfig, preset
from course_lib.layout import Layout
from course_lib.memory.flats import layer_units
from course_lib.run import Run
from course_lib.traffic import attention_calls, by_collective, call_counts, calls, ring_all_reduce_bytes, sent_bytes
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
    units = layer_units(TOY)
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


# ---- context parallelism


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


def test_C091_a_ring_sends_as_much_as_an_all_gather():
    """(P - 1) / P of all keys and values either way: what differs is memory, overlap and the number of calls."""
    ring, gathered = (calls(cp_run(LLAMA_70B, 65_536, 8, method))["cp"] for method in ("ring", "all_gather"))
    assert sent_bytes(ring) == sent_bytes(gathered)
    all_keys = 2 * 65_536 * 8 * 128 * 2
    forward = sum(by_collective(c for c in ring if c.place == "attention forward").values())
    assert forward == LLAMA_70B.num_layers * all_keys * 7 // 8
    backward = sum(by_collective(c for c in ring if c.place == "attention backward").values())
    assert backward == 3 * forward  # keys again, and gradients in FP32
    layers = LLAMA_70B.num_layers
    assert call_counts(ring) == {"all_to_all": 3 * 7 * layers}  # C148, C258: 7 each: forward, backward, gradients
    assert call_counts(gathered) == {"all_gather": 2 * layers, "reduce_scatter": layers}
