"""One rank of a cluster, simulated: equal to real ranks, equal without the tape, flat in the number of ranks."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import sampled

from course_lib.config import MOE_PRESETS, PRESETS, ModelConfig, MoeConfig, preset
from course_lib.flops import step_flops
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.measure.storages import replaced
from course_lib.memory.budget import budgets
from course_lib.model import moe
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.run import Run
from course_lib.simulate import simulate_rank, simulate_ranks
from course_lib.simulate.cluster import STATES, plan_assignments, planned_assignment
from course_lib.tensors import LoRA
from course_lib.training.precision import engine_dtypes

SEQ_LEN = 64
TINY = ModelConfig("tiny", 2, 32, num_heads=4, num_kv_heads=2, d_ff=96, vocab_size=64, max_seq_len=64)
DEEP = replace(TINY, num_layers=4)
WIDE = replace(TINY, num_kv_heads=4)
TIED = replace(TINY, tied=True)
GPT = ModelConfig("gpt", 2, 32, 4, 4, d_ff=64, vocab_size=64, max_seq_len=64, family="gpt", dropout=0.1, tied=True)
EXPERTS = replace(TINY, moe=MoeConfig(4, 2, d_expert=48, balancing="aux_loss"))
BIASED = replace(TINY, moe=MoeConfig(4, 2, 48, num_shared_experts=1, score="sigmoid", balancing="bias"))

ON_2 = [
    (TINY, "dp=2,zero_stage=2,micro_batches=2", "bf16-master-fp32-grads"),
    (TIED, "pp=2,micro_batches=4", "bf16-master"),
    (GPT, "tp=2,sequence_parallel=true,recompute=full", "fp32"),
    (TINY, "tp=2,sequence_parallel=true,regather=true,micro_batches=2", "bf16-master"),
]
ON_4 = [
    (TINY, "dp=2,tp=2,zero_stage=1,micro_batches=3", "bf16-master"),
    (WIDE, "cp=2,tp=2,cp_method=ulysses,sequence_parallel=true", "bf16-master"),
    (DEEP, "pp=4,micro_batches=6", "fp32"),
    (DEEP, "pp=2,dp=2,schedule=interleaved,v=2,micro_batches=4,zero_stage=1", "bf16-master"),
    (DEEP, "pp=2,cp=2,schedule=zbv,micro_batches=5", "fp32"),
    (BIASED, "dp=2,ep=2,pp=2,micro_batches=4,expert_method=once_per_rank", "fp32"),
    (EXPERTS, "dp=2,ep=2,tp=2,sequence_parallel=true,regather=true,zero_stage=3", "bf16-master"),
]


# --- the same as real ranks


def measured(cases: list, steps: int) -> list[dict]:
    """What a real rank holds and sends under each layout; experts are chosen as in a simulation.

    gloo's threads may let go of a message a moment after its wait has returned: here each wait gives them that moment,
    and the peak is the smallest of several steps.
    """
    with replaced(dist.Work, "wait", patient):
        return [measured_under(*case, steps) for case in cases]


def patient(wait):
    def wait_a_moment_longer(work, *options):
        done = wait(work, *options)
        time.sleep(0.001)
        return done

    return wait_a_moment_longer


def attention_of(config: ModelConfig) -> str:
    """With dropout a CPU has no flash kernel, and simulated is that of a GPU."""
    return "standard" if config.dropout else "fused"


def measured_under(config: ModelConfig, text: str, precision: str, steps: int) -> dict:
    layout, (dtype, grad_dtype) = Layout.parse(text), engine_dtypes(precision)
    with replaced(moe, "choose", plan_assignments):
        engine = five_d.build(config, layout, dtype=dtype, grad_dtype=grad_dtype, attention=attention_of(config))
        optimizer = engines.make_optimizer(engine)
        tokens_BS = torch.zeros(layout.micro_batch, SEQ_LEN, dtype=torch.int64)
        micro_batches, timelines = [(tokens_BS, tokens_BS)] * layout.micro_batches, []
        engines.step(engine, micro_batches, optimizer, 1.0)  # makes the optimizer's states
        for _ in range(steps):
            with MemoryTracker(engine, optimizer) as tracker, ByteMeter(axes=engine.axes) as meter:
                engines.step(engine, micro_batches, optimizer, 1.0)
            timelines.append(tracker.timeline)
    return {
        "peak": min(timeline.peak_bytes for timeline in timelines),
        "states": {kind: max(timelines[-1].bytes_by_kind[kind]) for kind in STATES},
        "sent": {axis: sent for axis, sent in meter.by_axis.items() if sent},
    }


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ON_2, id="2 ranks", marks=pytest.mark.exhaustive),
        pytest.param(ON_4[-1:], id="4 ranks"),
        pytest.param(ON_4[:-1], id="4 ranks, the others", marks=pytest.mark.exhaustive),
    ],
)
def test_simulated_ranks_equal_real_ones(cases):
    results = launch(measured, Layout.parse(cases[0][1]).world_size, cases, 3)
    for index, (config, text, precision) in enumerate(cases):
        real_peaks: dict[int, list[int]] = {}  # of the ranks that are alike in the simulation
        for rank, of_rank in enumerate(results):
            run = Run(config, Layout.parse(text), SEQ_LEN, precision, attention_of(config))
            real, found = of_rank[index], simulate_rank(run, rank)
            assert found.states == real["states"], (text, rank)
            assert found.sent_by_axis == real["sent"], (text, rank)
            real_peaks.setdefault(found.peak_bytes, []).append(real["peak"])
        for simulated, peaks in real_peaks.items():
            assert min(peaks) == pytest.approx(simulated, rel=0.01), (text, simulated, peaks)


# --- attention of a GPU


SIMULATED = [name for name, config in (PRESETS | MOE_PRESETS).items() if config.family != "xlmr"]
MARKS = {"deepseek-v3": pytest.mark.exhaustive}  # its 256 experts take ten times as long


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SIMULATED])
def test_every_preset_holds_on_a_gpu_what_the_formulas_say(name):
    config = preset(name)
    few = replace(config, num_layers=2 if config.moe is None else config.moe.first_dense_layers + 1)
    run = Run(few, Layout(micro_batch=16), min(2048, config.max_seq_len), optimizer_implementation="for-loop")
    (simulated,), (formula,) = simulate_ranks(run), budgets(run)
    assert simulated.peak_bytes == pytest.approx(formula.peak_bytes, rel=0.01)
    if formula.moment.endswith("log-softmax"):  # when all activations are there
        assert simulated.peak_by_kind["activations"] == pytest.approx(formula.by_kind["activations"], rel=0.01)


@pytest.mark.slow
def test_gpt2_saves_34_bytes_per_number_of_the_hidden_states_and_no_scores():
    """34 s b h L of Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1; then what both ends save."""
    B, S, D, V, L = 4, 1024, 768, 50_257, 12
    run = Run(preset("gpt2"), Layout(micro_batch=B), S, optimizer_implementation="for-loop")
    ends = 5 * B * S * D + 4 * B * S * V  # mask of the embedding, inputs of norm and head, FP32 log-softmax
    assert simulate_ranks(run)[0].peak_by_kind["activations"] == pytest.approx(34 * S * B * D * L + ends, rel=0.01)


# --- the tape


TAPED = [
    (DEEP, "pp=4,micro_batches=7"),
    (DEEP, "pp=2,tp=2,schedule=interleaved,v=2,micro_batches=4,sequence_parallel=true"),
    (TINY, "pp=2,dp=2,zero_stage=3,micro_batches=5,recompute=full"),
    (TINY, "pp=2,schedule=zb_h1,micro_batches=5"),
    (BIASED, "pp=2,dp=2,ep=2,zero_stage=1,micro_batches=5"),
]


@pytest.mark.parametrize("config, text", sampled(TAPED, 1), ids=[text for _, text in TAPED])
def test_a_tape_changes_nothing_but_what_runs(config, text):
    layout = Layout.parse(text)
    for rank in (0, layout.world_size - 1):
        taped, whole = (simulate_rank(Run(config, layout, SEQ_LEN), rank, replay=replay) for replay in (True, False))
        assert taped.replayed > 0 == whole.replayed
        assert (taped.peak_bytes, taped.states) == (whole.peak_bytes, whole.states)
        assert (taped.sent_by_axis, taped.flops) == (whole.sent_by_axis, whole.flops)


def test_the_last_backward_of_a_stage_is_the_last_on_tape_too():
    """ZeRO-1 sends gradients from it on."""
    last = []

    def noted(before_backward):
        def note(work, stage, is_last):
            last.append((stage, is_last))
            before_backward(work, stage, is_last)

        return note

    with replaced(five_d.CutStageRunner, "before_backward", noted):
        assert simulate_rank(Run(TINY, Layout(dp=2, pp=2, zero_stage=1, micro_batches=8), SEQ_LEN), 0).replayed > 0
    assert last == [(0, False), (0, False), (0, True)]


def test_many_micro_batches_cost_what_few_do():
    few, many = (simulate_rank(Run(TINY, Layout(pp=2, micro_batches=count), SEQ_LEN), 0) for count in (4, 100))
    assert many.peak_bytes == few.peak_bytes and many.flops == 25 * few.flops
    assert many.replayed - few.replayed == 2 * 96


# --- FLOPs, stages, cost


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flops_of_all_ranks_are_those_of_the_formula(recompute):
    layout = Layout(dp=2, tp=2, pp=2, micro_batches=4, recompute=recompute)
    found = simulate_ranks(Run(DEEP, layout, SEQ_LEN))
    tokens = layout.sequences_per_step * SEQ_LEN
    formula = step_flops(DEEP, tokens, SEQ_LEN, recompute)
    if recompute == "full":  # a block's recomputation ends before its last product, which backward does not need
        formula -= 2 * tokens * DEEP.num_layers * DEEP.d_ff * DEEP.d_model
    assert sum(rank.flops for rank in found) * layout.dp * layout.tp == formula


def test_a_stage_is_simulated_on_the_rank_that_holds_it():
    layout = Layout(pp=2, schedule="zbv", micro_batches=4)
    run = Run(DEEP, layout, SEQ_LEN)
    for stages, found in ((None, [(0, 3), (1, 2)]), ([3, 0], [(0, 3)]), ([2], [(1, 2)])):
        assert [rank.stages for rank in simulate_ranks(run, stages)] == found
    with pytest.raises(ValueError, match=r"stages \[4\] do not exist.*0\.\.3"):
        simulate_ranks(run, stages=[4])


@pytest.mark.exhaustive
def test_cost_does_not_grow_with_ranks():
    """64 and 16,384 ranks with the same stage: the best times of several rounds, until noise is out of them."""
    best = {16: float("inf"), 4096: float("inf")}
    for count in range(15):
        for dp in best:
            start_s = time.process_time()
            simulate_rank(Run(TINY, Layout(dp=dp, tp=2, pp=2, zero_stage=1), SEQ_LEN), 0)
            if count > 0:  # the first fills caches
                best[dp] = min(best[dp], time.process_time() - start_s)
        if count > 2 and best[4096] < 1.2 * best[16]:
            return
    pytest.fail(f"best seconds by dp: {best}")


@pytest.mark.exhaustive
def test_deepseek_v3_on_2048_ranks_builds_its_own_experts_alone():
    layout = Layout.parse("dp=128,pp=16,ep=64,zero_stage=1,recompute=full")
    found = simulate_rank(Run(preset("deepseek-v3"), layout, 4096), layout.mesh.rank(pp=15, dp=3, cp=0, tp=0))
    assert found.layers == 3 and found.stages == (15,)
    experts = 3 * 4 * 3 * 2048 * 7168  # layers, of 256 / 64 each, matrices
    others = 3 * (7168 * 2048 * 3 + 7168 * 256)  # shared expert, router; then attention and head
    assert 2 * (experts + others) < found.states["parameters"] < 2 * (experts + others) + 3.1e9
    assert found.sent_by_axis["ep"] > found.sent_by_axis["expert_dp"] > 0


# --- routing by plan


def test_planned_routing_gives_every_expert_its_share_within_the_groups():
    config = preset("deepseek-v3").moe
    expert_Tk = planned_assignment(1024, config)
    assert set(expert_Tk.flatten().bincount(minlength=256).tolist()) == {1024 * 8 // 256}
    assert all(len(set(row)) == 8 for row in expert_Tk.tolist())
    assert {len({expert // 32 for expert in row}) for row in expert_Tk.tolist()} == {4}  # of 8 groups


@pytest.mark.parametrize(
    "num_experts, top_k, groups, reached", [(4, 2, 1, 1), (8, 4, 2, 1), (8, 8, 4, 4), (12, 5, 4, 3)]
)
def test_planned_experts_of_a_token_differ(num_experts, top_k, groups, reached):
    config = MoeConfig(num_experts, top_k, d_expert=8, num_groups=groups, max_groups=reached)
    expert_Tk = planned_assignment(5 * num_experts, config)
    assert all(len(set(row)) == top_k for row in expert_Tk.tolist())
    assert expert_Tk.flatten().bincount(minlength=num_experts).unique().tolist() == [5 * top_k]


@pytest.mark.exhaustive
def test_a_skewed_routing_costs_the_rank_with_the_first_expert_memory():
    run = Run(EXPERTS, Layout(dp=4, ep=4), SEQ_LEN)
    even, skewed = (simulate_rank(run, 0, skew=skew) for skew in (0.0, 1.0))
    elsewhere = simulate_rank(run, 2, skew=1.0)
    assert skewed.peak_bytes > 1.05 * even.peak_bytes > elsewhere.peak_bytes
    rows = planned_assignment(SEQ_LEN, EXPERTS.moe, skew=1.0)
    assert (rows == 0).sum() == SEQ_LEN and all(len(set(row)) == 2 for row in rows.tolist())


def test_what_an_engine_cannot_take_is_refused_before_anything_is_built():
    for options in ({"recipe": "autocast"}, {"lora": LoRA(4)}, {"optimizer": "sgd"}):
        with pytest.raises(ValueError, match="choose|ask course plan"):
            simulate_ranks(Run(TINY, Layout(), SEQ_LEN, **options))
    with pytest.raises(ValueError, match="rank .9. must be one of"):
        simulate_rank(Run(TINY, Layout(dp=2), SEQ_LEN), 9)
    assert not dist.is_initialized()
