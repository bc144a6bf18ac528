"""Bytes of a whole layout, by formula: against the formulas of single techniques, and against real ranks by axis."""

from dataclasses import replace

import pytest
import torch

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.meter import ByteMeter
from course_lib.moe import MoE, with_moe
from course_lib.parallel import five_d
from course_lib.traffic import context_calls, pipeline_calls, sent_bytes, tensor_parallel_calls, zero_calls
from course_lib.traffic_5d import five_d_calls, five_d_sent

TOY, MOE = preset("toy"), preset("toy-moe")
UNEVEN = replace(TOY, name="uneven", num_heads=8, num_kv_heads=1, head_dim=8, d_ff=190, vocab_size=255)
TIED = replace(TOY, name="tied", tied=True)
SHARED = with_moe(MOE, num_shared_experts=1, balancing="bias")

LAYOUTS = [
    (TOY, "dp=2,tp=2,zero=1", 32),
    (TOY, "pp=2,tp=2,sequence_parallel=true,accumulation=3", 32),
    (TOY, "dp=2,cp=2,zero=3,accumulation=2", 32),
    (TOY, "pp=2,dp=2,schedule=interleaved,v=2,accumulation=2,zero=2", 32),
    (TOY, "tp=2,cp=2,cp_method=ulysses,recompute=full", 32),
    (TIED, "pp=2,dp=2,accumulation=2,zero=3", 32),
    (TIED, "pp=2,cp=2,accumulation=2,cp_method=all_gather", 32),
    (UNEVEN, "dp=2,tp=2,zero=2,accumulation=2,sequence_parallel=true", 33),
    (UNEVEN, "pp=2,tp=2,recompute=full,accumulation=2", 33),
    (UNEVEN, "tp=4,sequence_parallel=true", 33),
    (MOE, "dp=4,ep=2,zero=1,accumulation=2", 32),
    (MOE, "pp=2,dp=2,ep=2,accumulation=2", 32),
    (MOE, "dp=2,tp=2,ep=2,sequence_parallel=true,expert_method=once_per_rank,zero=3", 32),
    (SHARED, "dp=2,tp=2,ep=2,recompute=full", 32),
    (SHARED, "dp=2,cp=2,ep=4,recompute=full,zero=2", 32),
]


def count_bytes(rank_count):
    """On one rank: of each layout the bytes of one step by axis, and whom its tokens chose, layer by layer."""
    found = []
    for config, text, seq_len in LAYOUTS:
        layout = Layout.parse(text)
        engine = five_d.build(config, layout)
        optimizer = five_d.make_optimizer(engine)
        torch.manual_seed(engine.groups.dp.rank())
        tokens = [torch.randint(config.vocab_size, (layout.micro_batch, seq_len)) for _ in range(layout.accumulation)]
        choices = []
        for moe in (module for module in engine.modules() if isinstance(module, MoE)):
            moe.router.register_forward_hook(lambda module, args, routing: choices.append(routing))
        with ByteMeter(axes=engine.axes) as meter:
            five_d.step(engine, [(x_BS, x_BS) for x_BS in tokens], optimizer, clip_norm=1.0)
        calls = len(choices) // 2 if layout.recompute == "full" else len(choices)
        kept = [torch.where(one.kept_Tk, one.expert_Tk, -1) for one in choices[:calls]]
        found.append((meter.by_axis, kept))
    return found


def test_each_axis_sends_on_real_ranks_what_the_formula_says():
    results = launch(count_bytes, 4, 4)
    for index, (config, text, seq_len) in enumerate(LAYOUTS):
        layout = Layout.parse(text)
        for rank in range(4):
            routings = None
            if config.moe:
                members = layout.mesh.members(rank, layout.ep)["ep"]
                routings = list(zip(*(results[member][index][1] for member in members)))
            predicted = five_d_sent(config, layout, seq_len, rank, clip=True, routings=routings)
            measured = {axis: size for axis, size in results[rank][index][0].items() if size}
            assert {axis: size for axis, size in predicted.items() if size} == measured, (text, rank)
