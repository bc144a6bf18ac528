"""Bytes of every axis of a run, by formula: against real ranks, against simulated ones, and by hand."""

from dataclasses import replace

import pytest
import torch
from harness import EXHAUSTIVE

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import ByteMeter
from course_lib.memory.budget import states_of
from course_lib.model import MoE, with_moe
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.run import Run
from course_lib.simulate import simulate_ranks
from course_lib.traffic import sent

TOY, MOE = preset("toy"), preset("toy-moe")
UNEVEN = replace(TOY, name="uneven", num_heads=8, num_kv_heads=1, head_dim=8, d_ff=190, vocab_size=255)
TIED = replace(TOY, name="tied", tied=True)
SHARED = with_moe(MOE, num_shared_experts=1, balancing="bias")

LAYOUTS = [
    (TOY, "dp=2,cp=2,zero_stage=3,micro_batches=2", 32),
    (TIED, "pp=2,dp=2,micro_batches=2,zero_stage=3", 32),
    (UNEVEN, "dp=2,tp=2,zero_stage=2,micro_batches=2,sequence_parallel=true", 33),
    (UNEVEN, "pp=2,tp=2,recompute=full,micro_batches=2", 33),
    (UNEVEN, "tp=4,sequence_parallel=true", 33),
    (MOE, "dp=4,ep=2,zero_stage=1,micro_batches=2", 32),
    (MOE, "dp=2,tp=2,ep=4,sequence_parallel=true,zero_stage=3,regather=true,micro_batches=2", 32),
    (SHARED, "dp=2,cp=2,ep=4,recompute=full,zero_stage=2", 32),
]


def held_bytes(engine, optimizer):
    """Parameters and optimizer states of one rank, as they lie in memory."""
    flats = (
        [flat for sharded in engine.data_engines.values() for flat in sharded.flats] if engine.layout.zero_stage else []
    )
    if engine.layout.zero_stage in (1, 2):
        parameters = sum(flat.whole_P.nbytes for flat in flats)
    elif engine.layout.zero_stage == 3:
        parameters = sum(flat.shard_p.nbytes for flat in flats)
    else:
        parameters = sum(param.nbytes for param in engine.parameters())
    states = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x))
    return parameters, states


def count_bytes(layouts):
    """On one rank: of each layout the bytes of one step by axis, whom its tokens chose, and what it holds."""
    found = []
    for config, text, seq_len in layouts:
        layout = Layout.parse(text)
        engine = five_d.build(config, layout)
        optimizer = engines.make_optimizer(engine)
        torch.manual_seed(engine.groups.dp.rank())
        tokens = [torch.randint(config.vocab_size, (layout.micro_batch, seq_len)) for _ in range(layout.micro_batches)]
        choices = []
        for moe in (module for module in engine.modules() if isinstance(module, MoE)):
            moe.router.register_forward_hook(lambda *call, choices=choices: choices.append(call[-1]))
        with ByteMeter(axes=engine.axes) as meter:
            engines.step(engine, [(x_BS, x_BS) for x_BS in tokens], optimizer, clip_norm=1.0)
        calls = len(choices) // 2 if layout.recompute == "full" else len(choices)
        kept = [torch.where(one.kept_Tk, one.expert_Tk, -1) for one in choices[:calls]]
        found.append((meter.by_axis, kept, held_bytes(engine, optimizer)))
    return found


def test_real_ranks_send_along_each_axis_and_hold_what_the_formulas_say():
    results = launch(count_bytes, 4, LAYOUTS)
    for index, (config, text, seq_len) in enumerate(LAYOUTS):
        layout = Layout.parse(text)
        for rank in range(4):
            routings = None
            if config.moe:
                members = layout.members(rank)["ep"]
                routings = list(zip(*(results[member][index][1] for member in members), strict=True))
            predicted = sent(Run(config, layout, seq_len, "fp32"), rank, clip=True, routings=routings)
            measured = {axis: size for axis, size in results[rank][index][0].items() if size}
            assert {axis: size for axis, size in predicted.items() if size} == measured, (text, rank)
            here = layout.mesh.coordinates(rank)
            states = states_of(Run(config, layout, seq_len, "fp32", device="cpu"), here["pp"], here["tp"])
            assert (states.parameters, states.optimizer) == results[rank][index][2], (text, rank)


@pytest.mark.parametrize(
    "config, text",
    [
        (TOY, "dp=16,tp=4,pp=4,zero_stage=1,sequence_parallel=true,regather=true,micro_batches=8"),
        pytest.param(
            UNEVEN, "dp=4,cp=2,tp=8,pp=2,zero_stage=2,schedule=interleaved,v=2,micro_batches=4", marks=EXHAUSTIVE
        ),
        pytest.param(MOE, "dp=32,pp=4,ep=8,zero_stage=3,micro_batches=4", marks=EXHAUSTIVE),
        (SHARED, "dp=16,tp=4,pp=2,ep=8,expert_tp=1,sequence_parallel=true,zero_stage=1,micro_batches=2"),
    ],
)
def test_a_rank_of_hundreds_sends_and_holds_what_the_formulas_say(config, text):
    layout = Layout.parse(text)
    for rank in simulate_ranks(Run(config, layout, 64, "fp32"), stages=[0, layout.pp - 1]):
        predicted = sent(Run(config, layout, 64, "fp32"), rank.rank, clip=True)
        assert predicted == {axis: size for axis, size in rank.sent_by_axis.items() if size}
        states = states_of(Run(config, layout, 64, "fp32"), rank.coordinates["pp"])
        assert (states.parameters, states.gradients) == (rank.states["parameters"], rank.states["gradients"])


# ---- by hand


def test_expected_rows_of_experts_by_hand():
    """toy-moe: 64 tokens choose 2 of 8 experts each, on 4 ranks: 3 of 4 rows leave, each way forward and backward."""
    layout = Layout(dp=4, ep=4, micro_batches=2)
    plain = sent(Run(MOE, layout, 64, "fp32"))["ep"]
    rows, counts = 4 * (64 * 2 * 3 // 4) * 64 * 4, 8 * 8 * 3 // 4
    assert plain == MOE.num_layers * 2 * (rows + counts)
    once = sent(Run(MOE, replace(layout, expert_method="once_per_rank"), 64, "fp32"))["ep"]
    assert once < 1.1 * plain  # fewer rows, but choices and weights travel with them


def test_a_middle_stage_of_llama_405b_by_hand():
    """tp 8, pp 16, dp 128: per micro-batch 8 layers x 4 all-reduces' worth of B S D over tp, 2 pieces of it over pp."""
    layout = Layout(
        dp=128, tp=8, pp=16, zero_stage=1, sequence_parallel=True, micro_batches=16, layers_of_stage=(7, *[8] * 14, 7)
    )
    rank = layout.mesh.rank(pp=5, dp=3, tp=2, cp=0)
    by_axis = sent(Run(preset("llama-3.1-405b"), layout, 8192, "bf16-master-fp32-grads"), rank)
    residual = 8192 * 16_384 * 2
    assert by_axis["pp"] == 16 * 2 * residual // 8
    norms = 2 * 8 * 16_384 * 4 // 128  # the shard of them that ZeRO leaves, in FP32
    assert by_axis["tp"] == 16 * 8 * 4 * 2 * 7 * residual // 8 + 2 * 7 * norms // 8
    matrices = (2 * 16_384**2 + 2 * 1024 * 16_384 + 3 * 16_384 * 53_248) // 8
    assert by_axis["data"] == (8 * matrices + 8 * 2 * 16_384) * 127 // 128 * (4 + 2)
    assert "cp" not in by_axis and "ep" not in by_axis
