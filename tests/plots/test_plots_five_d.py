"""Pictures of layouts: the numbers that they draw, and that no text lies on another."""

from fractions import Fraction
from types import SimpleNamespace

import matplotlib
import pytest
from harness import sampled

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from pictures import look

from course_lib.config import preset
from course_lib.hardware import gpu
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.memory.states import count_parameters, parameter_shapes
from course_lib.memory.zero import five_d_states
from course_lib.plots import five_d_costs
from course_lib.plots import holdings as who_holds
from course_lib.plots.memory import kinds_of
from course_lib.run import Run

TOY, MOE, LLAMA = preset("toy"), preset("toy-moe"), preset("llama-3.1-8b")

# ---------------------------------------------------------------- who holds what

LAYOUTS = [
    (TOY, "dp=2,tp=2,pp=2,micro_batches=2,zero_stage=1"),
    (TOY, "dp=2,cp=2,tp=4,zero_stage=3"),
    (TOY, "pp=2,tp=2,schedule=interleaved,v=2,micro_batches=2"),
    (MOE, "dp=4,tp=2,pp=2,ep=2,micro_batches=2,zero_stage=3"),
    (MOE, "dp=4,ep=4,zero_stage=2"),
    (LLAMA, "pp=4,schedule=interleaved,v=8,micro_batches=4,tp=2"),
]


def numel_of(part, config, layout):
    """Of a part of a toy its matrices, and of an MLP with experts the router."""
    whole = {name: copies * shape[0] * shape[-1] for name, (shape, copies) in parameter_shapes(config).items()}
    names = {"embed": "embed", "head": "head", "attn": "attention.", "MLP": "mlp.", "MoE": "moe."}
    total = sum(size for name, size in whole.items() if name.startswith(names[part.name]) and "norm" not in name)
    return total if part.name in ("embed", "head") else total // config.num_layers


@pytest.mark.parametrize(("config", "text"), LAYOUTS, ids=[text for _, text in LAYOUTS])
def test_all_ranks_together_hold_each_part_once_or_a_copy_on_each(config, text):
    layout = Layout.parse(text)
    picture = who_holds.holdings(config, layout)
    for index, part in enumerate(picture.parts):
        mine = [share for share in picture.shares if share.part == index]
        copies = layout.expert_dp if part.has_experts else layout.data_size
        assert sum(share.of_parameters for share in mine) == (1 if layout.zero_stage == 3 else copies)
        assert sum(share.of_states for share in mine) == (1 if layout.zero_stage else copies)
        if layout.zero_stage:  # no two boxes lie on each other
            boxes = {(share.left, share.states[0]) for share in mine}
            assert len(boxes) == len(mine) and len({share.of_states for share in mine}) == 1
        holders = {layout.mesh.coordinates(share.rank)["pp"] for share in mine}
        assert len(holders) == 1  # one stage of the pipeline


@pytest.mark.parametrize(("config", "text"), LAYOUTS[:5], ids=[text for _, text in LAYOUTS[:5]])
def test_what_is_drawn_is_what_a_rank_has(config, text):
    """Boxes, weighted with the parts' parameters, beside the formula to the byte: norms and key/value copies differ."""
    layout = Layout.parse(text)
    picture = who_holds.holdings(config, layout)
    total = count_parameters(config)
    for rank, (parameters, states) in zip(picture.ranks, picture.of_model, strict=True):
        mine = [share for share in picture.shares if share.rank == rank]
        sizes = {share.part: numel_of(picture.parts[share.part], config, layout) for share in mine}
        drawn = sum(share.of_parameters * sizes[share.part] for share in mine) / total
        assert float(drawn) == pytest.approx(parameters, rel=0.02)
        assert float(sum(share.of_states * sizes[share.part] for share in mine) / total) == pytest.approx(
            states, rel=0.02
        )
        here = layout.mesh.coordinates(rank)
        held = five_d_states(config, layout, here["pp"], here["tp"], "bf16-master")
        assert (held.parameters / 2, held.optimizer / 12) == pytest.approx((parameters * total, states * total))


def test_of_many_ranks_one_for_each_place_along_pp_is_shown():
    layout = Layout(dp=128, tp=8, pp=16, micro_batches=16, zero_stage=1, schedule="interleaved", v=4)
    picture = who_holds.holdings(preset("llama-3.1-405b"), layout)
    assert [layout.mesh.coordinates(rank)["pp"] for rank in picture.ranks] == list(range(16))
    assert len(picture.parts) == 64 + 2 and {part.name for part in picture.parts[1:-1]} == {"MLP"}
    assert picture.shares[0].of_parameters == Fraction(1, 8) and picture.shares[0].of_states == Fraction(1, 8 * 128)
    assert who_holds.holdings_title(picture).startswith("A rank holds at most 0.85 % of the parameters")
    v3 = who_holds.parts_of(preset("deepseek-v3"), Layout(dp=64, pp=16, ep=64, micro_batches=16))
    assert [part.name for part in v3[1:5]] == ["attn", "MoE", "attn", "MoE"]  # with its first four layers three dense
    with pytest.raises(ValueError, match="room for 16"):
        who_holds.show_holdings(TOY, Layout(dp=32), range(32))
    with pytest.raises(ValueError, match="nearest: tp="):
        who_holds.holdings(TOY, Layout(tp=3))


def test_the_legend_says_which_share_of_the_pale_is_strong():
    said = [who_holds.strong_in_pale(who_holds.holdings(c, Layout.parse(text))) for c, text in LAYOUTS[:5]]
    assert said == ["1/2", "1", "1", "1", "1 of experts, 1/4 of the rest"]
    moe = who_holds.holdings(MOE, Layout.parse("dp=4,tp=2,pp=2,ep=2,micro_batches=2,zero_stage=1"))
    assert who_holds.strong_in_pale(moe) == "1/2 of experts, 1/4 of the rest"


# ---------------------------------------------------------------- costs


def test_a_column_is_a_ranks_budget_or_what_was_simulated():
    layout, limits = Layout(pp=4, micro_batches=8), {"a GPU": 10**11, "a small one": 10**10}
    of_ranks = budgets(Run(LLAMA, layout, 4096))
    bars = five_d_costs.pipeline_bars(of_ranks, limits)
    assert [bar.bytes_by_kind for bar in bars] == [kinds_of(rank) for rank in of_ranks]
    assert [bar.total_bytes for bar in bars] == [rank.total_bytes for rank in of_ranks]
    assert bars[0].label == "pp 0" and bars[0].fits == ("a GPU",)
    assert five_d_costs.pipeline_title(bars, limits).startswith("pp 0 is the most loaded with")
    assert five_d_costs.pipeline_title(bars, {"a small one": 10**10}).endswith("too much for one a small one")
    ranks = [SimpleNamespace(coordinates={"pp": place}, peak_by_kind={"parameters": 5, "free": 7}) for place in (0, 3)]
    simulated = five_d_costs.pipeline_bars(SimpleNamespace(ranks=ranks))
    assert [(bar.label, bar.bytes_by_kind) for bar in simulated] == [
        ("pp 0", {"parameters": 5}),
        ("pp 3", {"parameters": 5}),
    ]


def test_bytes_and_seconds_are_drawn_in_order_and_nothing_that_is_zero():
    sent = {"world": 4, "data": 6_000, "tp": 2_000, "pp": 0}
    assert list(five_d_costs.sent_rows(sent).items()) == [("tp", 2_000), ("data", 6_000), ("world", 4)]
    assert five_d_costs.sent_title(sent) == "8.00 KB sent in a step, 75 % over data"
    assert five_d_costs.sent_title({}) == "Nothing is sent"
    assert five_d_costs.time_rows({"compute": 3.0, "tp": 0.0, "bubble": 1.0}) == {"compute": 3.0, "bubble": 1.0}
    assert five_d_costs.time_title({"compute": 3.0, "bubble": 1.0}) == "4.00 s modelled, 75 % computing"
    with pytest.raises(ValueError, match=r"axes \['dp'\] are unknown"):
        five_d_costs.sent_rows({"dp": 3})


def test_bytes_far_apart_are_drawn_on_a_log_axis_that_says_so():
    for rows, log in (({"tp": 50, "pp": 1}, False), ({"tp": 51, "pp": 1}, True), ({}, False)):
        assert five_d_costs.sent_on_log_axis(rows) is log
    figure, axes = plt.subplots()
    five_d_costs.draw_sent_by_axis(axes, {"tp": 3 * 10**11, "pp": 10**9})
    assert axes.get_xscale() == "log" and axes.get_xlabel().endswith("log axis")
    assert [text.get_text() for text in axes.texts] == [" 300 GB", " 1.00 GB"]
    plt.close(figure)


def test_only_kinds_that_are_seen_are_in_the_legend():
    bars = five_d_costs.pipeline_bars([{"parameters": 900, "logits": 9}, {"parameters": 500, "optimizer": 10}])
    assert five_d_costs.visible_kinds(bars) == ["parameters", "optimizer"]  # 1 % of 909 are 9.09


# ---------------------------------------------------------------- every picture can be drawn, and read

SENT = {"tp": 3 * 10**11, "pp": 10**9, "data": 10**10, "expert_dp": 10**9, "ep": 10**10, "cp": 7, "world": 8}
SECONDS = {"compute": 4.8, "tp": 0.4, "cp": 0.1, "ep": 0.2, "bubble": 1.1, "transfer": 0.08, "data": 0.09}
PICTURES = {
    "holdings of 16": lambda: who_holds.show_holdings(MOE, Layout.parse(LAYOUTS[3][1])),
    "holdings by stage": lambda: who_holds.show_holdings(LLAMA, Layout.parse(LAYOUTS[5][1])),
    "memory of 2": lambda: five_d_costs.show_pipeline_memory(
        budgets(Run(LLAMA, Layout(pp=2, micro_batches=2), 4096)), [gpu("h100"), gpu("a100-80"), gpu("a100-40")]
    ),
    "memory of 16": lambda: five_d_costs.show_pipeline_memory([{"parameters": 10**10, "logits": p} for p in range(16)]),
    "costs": lambda: five_d_costs.show_costs(SENT, SECONDS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*PICTURES], 3))
def test_a_picture_is_shown_once_with_no_text_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, 60_000)
