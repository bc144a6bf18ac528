"""Numbers in pictures of bars and areas: memory, ladders, costs, experts' load, what ranks hold, a run's logs."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import run_logs

from course_lib.config import preset
from course_lib.engines import ENGINES
from course_lib.hardware import CLUSTERS
from course_lib.layout import Layout
from course_lib.layout.experts import ExpertLayout
from course_lib.measure.tracker import KINDS, Timeline
from course_lib.memory.budget import budget, budgets, states_of
from course_lib.panels.synthetic_routing import synthetic_routing
from course_lib.plots import comparison, experts, five_d_costs, holdings, memory
from course_lib.plots.run_log import run_rows, show_run
from course_lib.run import Run
from course_lib.tensors import count_parameters, parameter_shapes
from course_lib.timing import RATES
from course_lib.timing.layer import Case, layer_times
from course_lib.traffic import sent
from course_lib.traffic.routing import moe_traffic, plain_rows
from course_lib.train.watch import read_run
from course_lib.units import UNITS, show_bytes

TOY, MOE = preset("toy"), preset("toy-moe")

# ---------------------------------------------------------------- memory


def made_up_timeline(steps: int = 3) -> Timeline:
    """Activations rise to 30 and fall, gradients grow to 10; the optimizer's 20 come with the first step's end."""
    times, columns, marks = [], {kind: [] for kind in KINDS}, []
    for step in range(steps):
        for phase, rows in (("forward", [10, 20, 30]), ("backward", [20, 10, 0]), ("optimizer", [0, 0])):
            marks.append((float(len(times)), phase))
            for i, activations in enumerate(rows):
                now = {
                    "parameters": 10,
                    "activations": activations,
                    "optimizer": 20 if step or phase == "optimizer" else 0,
                }
                now["gradients"] = {"forward": 0, "backward": 3 * (i + 1), "optimizer": 10}[phase]
                times.append(float(len(times)))
                for kind in columns:
                    columns[kind].append(now.get(kind, 0))
    return Timeline(times, columns, marks)


def test_a_timeline_keeps_its_peak_and_its_phases():
    picture = memory.timeline_picture(made_up_timeline())
    assert picture.peak_bytes == 60 and picture.xs[10] == 10  # second step, end of forward
    at_peak = {kind: values[10] for kind, values in picture.bytes_by_kind.items()}
    assert at_peak == {"parameters": 10, "gradients": 0, "optimizer": 20, "activations": 30}
    assert list(picture.bytes_by_kind) == ["parameters", "gradients", "optimizer", "activations"]  # no empty kinds
    assert [name for name, _, _ in picture.phases] == ["forward", "backward", "optimizer"] * 3
    assert picture.phases[1] == ("backward", 3, 6)
    with pytest.raises(ValueError, match="at least one training step"):
        memory.timeline_picture(Timeline([], {"activations": []}, []))


def test_a_long_timeline_is_thinned_without_losing_its_peak():
    values = [1] * 50_000
    values[31_415] = 99
    picture = memory.timeline_picture(Timeline([i / 1e3 for i in range(50_000)], {"activations": values}, []))
    assert len(picture.xs) <= 1502 and picture.peak_bytes == 99
    assert picture.bytes_by_kind["activations"][picture.xs.index(31_415)] == 99


def test_a_budget_bar_adds_up_to_the_budget():
    needed = budget(preset("llama-3.2-1b"), 1, 2048)
    kinds = memory.kinds_of(needed)
    assert sum(kinds.values()) == needed.total_bytes and kinds["overhead"] == sum(needed.overheads.values())
    with pytest.raises(ValueError, match="have no colour"):
        memory.kinds_of({"weights": 3})


def test_a_budget_equal_to_the_limit_fits_and_one_byte_more_does_not():
    assert [memory.room_text(total, [100]) for total in (100, 101)] == [", fits", ", out of memory"]
    assert memory.room_text(101, [100, 101, 200]) == ", fits 2 of 3" and memory.room_text(5, []) == ""
    assert memory.room_text(9, [1, 2]) == ", out of memory on all"


def test_a_comparison_leaves_out_what_is_empty_and_words_its_error(shown):
    row = SimpleNamespace
    rows = [row(kind="gathered", predicted_bytes=0, measured_bytes=0, error_percent=0.0),
            row(kind="peak", predicted_bytes=99, measured_bytes=100, error_percent=-1.0)]  # fmt: skip
    comparison.show_comparison(rows, "t")
    assert [text.get_text() for text in shown[0].axes[0].texts] == [" 99.0 / 100 B: −1.00 %"]
    assert [comparison.error_text(e) for e in (0.0, 0.001, 2.5)] == ["exact", "under 0.005 % off", "+2.50 %"]


def test_bars_say_what_they_add_up_to_and_what_fits(capsys):
    memory.show_budgets({"a": {"parameters": 5}, "b": {"gathered": 4, "logits": 5}}, {"GPU": 7}, "Two")
    assert capsys.readouterr().out == "Picture: Two. a 5.00 B, fits; b 9.00 B, out of memory.\n"
    five_d_costs.show_costs({"data": 6_000, "tp": 2_000}, {"compute": 3.0, "bubble": 1.0})
    said = " ".join(capsys.readouterr().out.split())
    assert "8.00 KB sent by one rank in a step, 75% over data: sent 8.00 KB." in said
    assert "4.00 s modelled, 75% computing: step 4.00 s." in said
    of_ranks = budgets(Run(preset("llama-3.1-8b"), Layout(pp=2, micro_batches=2), 4096))
    five_d_costs.show_pipeline_memory(of_ranks, [], "Two ranks")
    assert f"pp 1 {show_bytes(of_ranks[1].total_bytes, 'GB')}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no bar to draw"):
        memory.show_budgets({}, title="None")


BLOCK = replace(preset("mixtral-8x7b"), num_layers=3)  # one on each of three stages


def test_a_block_has_all_that_its_rank_sends_along_each_axis():
    """But for sums of norms' gradients and of the experts' load, and rows that are counted: less than a thousandth."""
    run = Run(BLOCK, Layout.parse("dp=4,cp=2,tp=4,pp=3,ep=4,zero_stage=3,sequence_parallel=true"), 8192)
    rank, drawn = run.layout.mesh.rank(pp=1, dp=0, cp=0, tp=0), {}
    for chart in five_d_costs.block_charts(run, rank):
        for label, note in chart.notes.items():
            size, unit = note.split()
            drawn.setdefault(label.split()[0], []).append(len(chart.rows[label]) * float(size) * UNITS[unit])
        in_layer = {label: len(chart.rows[label]) for label in chart.rows if label.startswith(("tp", "ep"))}
        assert in_layer == {"tp all-gather": 2, "tp reduce-scatter": 2, "ep all-to-all": 2}
    wanted = {axis: size for axis, size in sent(run, rank).items() if axis != "world"}
    assert {axis: sum(sizes) for axis, sizes in drawn.items()} == pytest.approx(wanted, rel=0.004)


def test_a_step_in_time_has_the_clocks_seconds_in_each_lane_and_waits_for_tp_and_ep():
    run = Run(BLOCK, Layout.parse("dp=8,tp=4,pp=3,ep=4,zero_stage=3,sequence_parallel=true"), 8192)
    cluster = next(iter(CLUSTERS.values()))
    rank, engine = run.layout.mesh.rank(pp=1, dp=0, cp=0, tp=0), replace(ENGINES["course"], hides_behind_weights=False)
    spans = five_d_costs.step_spans(run, rank, cluster, blocks=2, micro_batches=3)
    times = layer_times(Case(run, cluster, engine, RATES), True)
    of_lane = {lane: [span for span in spans if span.lane == lane] for lane in ("compute", "tp", "ep", "data")}
    seconds = {lane: sum(span.seconds for span in each) / 6 for lane, each in of_lane.items()}
    assert (seconds["tp"], seconds["ep"]) == pytest.approx(
        (times.tp_s, times.ep_s), rel=0.01
    )  # without the counts of rows
    assert seconds["compute"] == pytest.approx(times.compute_s + times.launches_s)
    waited = [span for lane in ("compute", "tp", "ep") for span in of_lane[lane]]
    waited.sort(key=lambda span: span.start_s)
    assert all(one.stop_s <= next_.start_s + 1e-12 for one, next_ in pairwise(waited))
    gathers = [span for span in of_lane["data"] if span.name == "gather"]
    assert len(gathers) == 2 * 2 * 2 * 3 and gathers[2].start_s < of_lane["compute"][0].stop_s


# ---------------------------------------------------------------- experts


def test_a_load_is_what_is_computed_and_what_is_dropped(capsys):
    experts.show_load([10, 30, 20, 0], 20)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Picture: The most loaded of 4 experts computes 1.33 times the mean load.")
    with pytest.raises(ValueError, match="is empty"):
        experts.show_load([0, 0])


def test_balance_is_load_over_mean_and_judged_at_the_end():
    picture = experts.balance_picture([[3, 1], [2, 2], [1, 3], [4, 0]])
    assert picture.relative == [[1.5, 1.0, 0.5, 2.0], [0.5, 1.0, 1.5, 0.0]]
    assert (picture.largest_at_end, picture.last_steps) == (2.0, 1)  # the last quarter
    with pytest.raises(ValueError, match="some load in each"):
        experts.balance_picture([[1, 2], [0, 0]])


def test_the_matrix_has_the_bytes_that_the_traffic_counts():
    layout = ExpertLayout(8, 4, 2)
    routing = synthetic_routing(layout, 64, 2, skew=0.5)
    sent = experts.bytes_sent(plain_rows(routing, layout), 2 * 256)
    dispatch = moe_traffic(routing, layout, 256).dispatch
    assert [sum(row) for row in sent] == [one.within_bytes + one.between_bytes for one in dispatch]
    assert all(sent[rank][rank] == 0 for rank in range(4))
    with pytest.raises(ValueError, match="square table"):
        experts.bytes_sent([[1, 2]], 2)


# ---------------------------------------------------------------- who holds what

LAYOUTS = [
    (TOY, "dp=2,tp=2,pp=2,micro_batches=2,zero_stage=1"),
    (TOY, "dp=2,cp=2,tp=4,zero_stage=3"),
    (TOY, "pp=2,tp=2,schedule=interleaved,v=2,micro_batches=2"),
    (MOE, "dp=4,tp=2,pp=2,ep=2,micro_batches=2,zero_stage=3"),
    (MOE, "dp=4,ep=4,zero_stage=2"),
]


def held(config, layout):
    parts = holdings.parts_of(config, layout)
    return parts, [share for rank in range(layout.world_size) for share in holdings.shares_of(layout, parts, rank)]


def numel_of(part, config):
    """Of a part of a toy its matrices, and of an MLP with experts the router."""
    whole = {name: copies * shape[0] * shape[-1] for name, (shape, copies) in parameter_shapes(config).items()}
    names = {"embed": "embed", "head": "head", "attn": "attention.", "MLP": "mlp.", "MoE": "moe."}
    total = sum(size for name, size in whole.items() if name.startswith(names[part.name]) and "norm" not in name)
    return total if part.name in ("embed", "head") else total // config.num_layers


@pytest.mark.parametrize(("config", "text"), LAYOUTS, ids=[text for _, text in LAYOUTS])
def test_what_is_drawn_is_what_a_rank_has(config, text):
    """Boxes, weighted with the parts' parameters, beside the formula to the byte: norms and key/value copies differ."""
    layout, total = Layout.parse(text), count_parameters(config)
    for rank in range(layout.world_size):
        parameters, states = holdings.of_model(config, layout, rank)
        mine = [share for share in held(config, layout)[1] if share.rank == rank]
        drawn = [
            sum(share * numel_of(part, config) for part, share in of) / total
            for of in ([(s.part, s.of_parameters) for s in mine], [(s.part, s.of_states) for s in mine])
        ]
        assert [float(share) for share in drawn] == pytest.approx([parameters, states], rel=0.02)
        here = layout.mesh.coordinates(rank)
        exact = states_of(Run(config, layout, config.max_seq_len), here["pp"], here["tp"])
        assert (exact.parameters / 2, exact.optimizer / 12) == pytest.approx((parameters * total, states * total))


def test_the_legend_says_which_share_of_the_pale_is_strong():
    said = [holdings.strong_in_pale(held(config, Layout.parse(text))[1]) for config, text in LAYOUTS]
    assert said == ["1/2", "1", "1", "1", "1 of experts, 1/4 of the rest"]
    with pytest.raises(ValueError, match="room for 16"):
        holdings.show_holdings(TOY, Layout(dp=32))
    with pytest.raises(ValueError, match="nearest: tp="):
        holdings.show_holdings(TOY, Layout(tp=3))


# ---------------------------------------------------------------- a run's logs


def test_the_parts_of_a_step_add_up_and_what_is_not_split_is_the_rest(tmp_path):
    for rank in range(2):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 5 - rank, own_s=0.3 if rank else 0.1))
    steps, seconds = run_rows(read_run(tmp_path))
    assert list(steps) == [0, 1] and [len(lines) for lines in steps.values()] == [5, 4]
    assert seconds["forward"] == pytest.approx([0.025, 0.075])
    assert seconds["waits for others"] == pytest.approx([0.3, 0.1])
    assert [sum(column) for column in zip(*seconds.values(), strict=True)] == pytest.approx([0.5, 0.5])
    parts = dict.fromkeys(("forward_s", "backward_s", "optimizer_s", "data_s", "communication_s"))
    run_logs.write(tmp_path / "gpu", 0, [run_logs.line(0, 0, **parts)])
    _, seconds = run_rows(read_run(tmp_path / "gpu"))
    assert seconds["rest"] == [0.5] and sum(map(sum, seconds.values())) == 0.5


def test_the_picture_has_four_panels_with_these_numbers(tmp_path, shown):
    for rank in range(4):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 5, own_s=0.3 if rank == 2 else 0.1))
    run = show_run(tmp_path)
    loss, speed, panel, seconds = shown[0].axes
    assert shown[0].get_suptitle() == run.finding and "rank 2 is slow" in run.finding
    assert list(loss.lines[0].get_ydata()) == [5.0, 4.9, 4.8, 4.7, 4.6]
    assert [line.get_label() for line in speed.lines] == [f"rank {rank}" for rank in range(4)]
    assert [bar.get_height() for bar in panel.patches] == pytest.approx([200] * 4, rel=1e-6)
    widths = [bar.get_width() for bar in seconds.patches]
    assert widths[:4] == pytest.approx([0.025, 0.025, 0.075, 0.025]) and sum(widths) == pytest.approx(4 * 0.5)
