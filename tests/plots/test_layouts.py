"""Pictures of experts, pipelines and layouts: what they draw adds up, and is what the lessons compute."""

from dataclasses import replace

import pytest

from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.layout.experts import ExpertLayout
from course_lib.minimal.choose import ladder
from course_lib.minimal.planner import cuts, plan
from course_lib.palette import AXIS_COLORS
from course_lib.plan import Job, work_out
from course_lib.plan.measured import measured_job
from course_lib.plots import choosing, expert_concepts, five_d
from course_lib.plots import pipeline_concepts as pipelines
from course_lib.schedules import make, simulate
from course_lib.simulate.two_hosts import MEASURED
from course_lib.timing.failures import Failures, best_interval_s, goodput

CHOSEN = [[[0, 2], [1, 3]], [[0, 1], [2, 0]]]

# ---------------------------------------------------------------- experts


@pytest.mark.parametrize(("parts", "num_shared"), [(1, 0), (4, 0), (4, 1), (2, 4)])
def test_finer_and_shared_experts_store_and_use_the_same_width(parts, num_shared):
    coarse = expert_concepts.ExpertKind(16, 2, 0, 1.0)
    kind = expert_concepts.finer(coarse, parts, num_shared)
    assert (kind.stored, kind.used) == (coarse.stored, coarse.used)
    used = [color for color in kind.colors if color != expert_concepts.IDLE_COLOR]
    assert len(used) * kind.width == kind.used and len(kind.colors) * kind.width == kind.stored
    with pytest.raises(ValueError, match="choose 0 to 8"):
        expert_concepts.finer(coarse, 4, 9)


def test_rows_are_sorted_by_expert_in_the_order_of_tokens():
    rows = expert_concepts.sorted_rows([[0, 1], [1, 3], [0, 2]], 4)
    assert rows == [(0, 0), (0, 2), (1, 0), (1, 1), (2, 2), (3, 1)]
    with pytest.raises(ValueError, match="each to an expert 0 to 2"):
        expert_concepts.sorted_rows([[0, 3]], 3)


def test_the_share_of_peak_is_that_of_memory_until_the_ridge():
    h100 = gpu("h100")
    few, many = (expert_concepts.grouped_share_of_peak(rows, 7168, 2048, h100) for rows in (1, 4096))
    assert few == pytest.approx(h100.memory_bytes_per_s / h100.bf16_flops, rel=0.01) and many == 1


def test_rows_go_to_their_experts_and_return_to_their_tokens(shown):
    layout = ExpertLayout(4, 2)
    tokens, rows, arrived, by_expert, returned, summed = expert_concepts.stages_of_rows(CHOSEN, layout)
    assert tokens == summed == [[("a", 0), ("b", 0)], [("c", 1), ("d", 1)]] and rows == returned
    assert [text for text, _ in arrived[0]] == ["a0", "b1", "c0", "d0", "c1"]
    assert [text for text, _ in by_expert[0]] == ["a0", "c0", "d0", "b1", "c1"]
    with pytest.raises(ValueError, match="each of 4 ranks"):
        expert_concepts.travelling_rows(CHOSEN, ExpertLayout(4, 4))
    expert_concepts.show_travelling_rows(CHOSEN, layout)
    assert shown[0].axes[0].get_title("left") == "5 of 8 rows leave their rank, and come back"


# ---------------------------------------------------------------- pipelines


def test_each_layer_stands_in_one_stage_and_the_ends_have_more():
    assert pipelines.stage_texts(4, 2) == ["embedding\nlayer 0\nlayer 1", "layer 2\nlayer 3\nnorm, head"]


def test_each_cut_has_one_message_a_micro_batch_each_way_and_none_comes_before_it_is_sent():
    arrows = pipelines.message_arrows(simulate(make("1f1b", 3, 4)))
    assert sum(arrow.op == "F" and arrow.dst == arrow.src + 1 for arrow in arrows) == 2 * 4
    assert sum(arrow.op == "B" and arrow.dst == arrow.src - 1 for arrow in arrows) == 2 * 4
    assert len(arrows) == 16 and all(arrow.sent_s <= arrow.used_s for arrow in arrows)


def test_what_ranks_did_is_drawn_in_its_order_whatever_its_seconds():
    rows = simulate(make("naive", 2, 1)).rows
    slow = [[replace(span, start_s=span.start_s**3, stop_s=span.stop_s**3) for span in row] for row in rows]
    placed = sorted((span.start_s, span.stop_s) for row in pipelines.in_order(slow) for span in row)
    assert placed == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_dualpipe_holds_two_different_stages_and_each_stage_twice():
    of_ranks = pipelines.placements(4)
    assert of_ranks["DualPipe (two directions)"] == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert of_ranks["V (ZBV, DualPipeV)"] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_stages_cover_the_model_once_with_both_ends(shown):
    pipelines.show_stages_of_model([3, 4, 4, 3], [0, 1, 1, 0])
    texts = [text.get_text() for text in shown[0].axes[0].texts]
    assert sorted(int(text) for text in texts if text.isdigit()) == list(range(14))
    assert (texts.count("embed"), texts.count("head")) == (1, 1)
    assert shown[0].get_suptitle() == "14 layers in 4 stages on 2 ranks: rank 0 has both ends of the model"


def test_points_are_bubbles_and_peaks_in_both_countings(shown):
    names = ("afab", "1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
    pipelines.show_tradeoff([simulate(make(name, 4, 8)) for name in names])
    points = [(line.get_xdata()[0], round(line.get_ydata()[0], 4)) for line in shown[0].axes[0].lines]
    assert {(4, 0.375), (7, 0.125), (7, 0.0), (4, 0.0625), (4, 0.0), (4.5, 0.0625)} <= set(points)
    assert len(points) == len(names) + 2  # ZB-H2 and ZBV have an open one
    left = [text.get_text() for text in shown[0].axes[0].texts if text.get_ha() == "right"]
    assert left == ["ZBV"]


# ---------------------------------------------------------------- ranks on nodes


def test_a_rank_has_the_colour_of_its_group_along_the_axis():
    full = Layout(dp=2, tp=4, pp=2, micro_batches=4)
    for axis in ("pp", "dp", "tp"):
        picture = five_d.rank_map(full, axis, 8)
        assert sorted(rank for group in picture.groups for rank in group) == list(range(16))
        assert all(group == full.mesh.members(group[0], 1)[axis] for group in picture.groups)
    assert five_d.rank_map(full, "pp", 8).on_nodes([0, 8]) == {0: [0], 1: [8]}


def test_the_order_of_the_axes_decides_which_links_a_group_uses():
    inner = Layout(dp=2, tp=8)
    assert five_d.links_text(five_d.rank_map(inner, "tp", 8)) == "tp 8: inside a node"
    outer = five_d.rank_map(replace(inner, order=("tp", "pp", "cp", "dp")), "tp", 8)
    assert five_d.links_text(outer) == "tp 8: over 2 nodes, 4 ranks in each"
    assert five_d.links_text(five_d.rank_map(inner, "dp", 8)) == "dp 2: over 2 nodes, one rank in each"
    assert five_d.links_text(five_d.rank_map(inner, "pp", 8)) == "pp 1: nobody to talk to"


def test_groups_side_by_side_have_lines_of_their_own_below_the_boxes(axes):
    eight = Layout(dp=2, tp=2, pp=2, micro_batches=2)
    five_d.draw_rank_map(axes, five_d.rank_map(eight, "pp", 4), ["pp"])
    heights = {line.get_ydata()[0] for line in axes.lines if line.get_ydata()[0] == line.get_ydata()[1]}
    assert len(heights) == 4 and min(heights) > five_d.BOX / 2  # ranks 0-4, 1-5, 2-6, 3-7 on as many levels


# ---------------------------------------------------------------- choosing


def test_cuts_are_grey_where_tp_leaves_its_node(shown):
    choosing.show_cuts(cuts(64))
    grey = [box for box in shown[0].axes[0].patches if box.get_facecolor()[0] == box.get_facecolor()[2]]
    assert len(shown[0].axes[0].patches) == 28 and len(grey) == sum(tp > 8 for _, tp, _ in cuts(64))


def test_bars_add_up_to_the_memory():
    for option in plan(measured_job("8B", 64))[:20]:
        assert sum(choosing.shown_kinds(option).values()) * 1e9 == pytest.approx(option.memory_bytes)
    assert choosing.cut_name(Layout.parse("dp=32,tp=2,zero_stage=1,micro_batch=2")) == "dp32 tp2 z1 mb2"


def test_every_step_of_the_ladder_has_a_box_and_every_box_a_step():
    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
    job = Job(preset("llama-3.1-8b"), cluster, 16, 4096, 2**20)

    def box_of(step, recomputed):
        if recomputed:
            return "recompute"
        return "nodes" if "nodes" in step else "dp" if "on 1 GPU" in step else "node"

    boxes = {box_of(step, choices["recompute"] == "full") for step, choices in ladder(job)}
    assert boxes == set(choosing.RUNGS)
    with pytest.raises(ValueError, match="choose from dp, node, nodes, recompute"):
        choosing.show_flow_chart("roof")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_a_bar_is_as_long_as_its_step(name, shown):
    """Launches and updates are work; nothing that a step is spent on is left out."""
    measured = Cluster(gpu("h100"), link("nvlink4"), link("efa-measured"))
    job = Job(preset(name), measured, 256, 4096, 2**20)
    layouts = ("dp=64,tp=4,sequence_parallel=true,zero_stage=1,micro_batches=4", "dp=64,pp=4,micro_batches=4")
    options = {text: work_out(job, Layout.parse(text)) for text in layouts}
    choosing.show_waiting(options, "A step")
    widths = [bar.get_width() for bar in shown[0].axes[0].patches]
    each = len(widths) // 2
    for option, bars in zip(options.values(), (widths[:each], widths[each:]), strict=True):
        assert sum(bars) == pytest.approx(option.step_s, rel=1e-9)


def test_the_lines_across_two_hosts_are_as_wide_as_the_bytes(shown):
    choosing.show_two_hosts(MEASURED)
    for panel, row in zip(shown[0].axes, MEASURED, strict=True):
        above, below, *inside = panel.lines
        assert {line.get_color() for line in (above, below)} == {AXIS_COLORS[row.across]}
        assert {line.get_color() for line in inside} == {AXIS_COLORS[row.inside]}
        most = max(one.link_bytes for one in MEASURED)
        assert above.get_linewidth() == pytest.approx(choosing.WIDEST_POINTS * row.link_bytes / most)
        texts = [text.get_text() for text in panel.texts]
        assert f"{row.link_bytes / 1e6:.1f} MB on the link\n{row.step_s:.1f} s for a step" in texts


def test_areas_are_the_shares_and_the_line_stands_at_the_best_interval(shown):
    failures = Failures(mtbf_s=10_000.0, save_s=60.0, restart_s=300.0)
    intervals_s, rows = choosing.share_rows(failures)
    assert rows["training"] == [goodput(failures, interval_s) for interval_s in intervals_s]
    assert all(sum(column) == pytest.approx(1) for column in zip(*rows.values(), strict=True))
    highest_s = intervals_s[rows["training"].index(max(rows["training"]))]
    assert highest_s == pytest.approx(best_interval_s(failures), rel=0.1)
    choosing.show_checkpoint_interval(failures, "t")
    assert shown[0].axes[0].lines[0].get_xdata()[0] == best_interval_s(failures)
