"""Pipeline parallelism from scratch: any schedule equals one process, and runs, sends and keeps what it says."""

import dataclasses
import functools
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import distance, one_process
from kept_bytes import kept_bytes
from torch import nn

from course_lib import model, schedules, training
from course_lib.checks.ch08.nccl_order import recorded_calls, replay
from course_lib.comm import make_groups
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.layout import Mesh
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.parallel import channels, executor, pipeline, stages, weight_gradients
from course_lib.parallel import engine as engines
from course_lib.schedules import Costs, simulate
from course_lib.schedules.messages import plan as plan_of
from course_lib.training import MasterAdamW

LLAMA = ModelConfig("llama", 5, d_model=8, num_heads=2, num_kv_heads=1, d_ff=13, vocab_size=19, max_seq_len=16)
GPT = dataclasses.replace(LLAMA, name="gpt", family="gpt", num_kv_heads=2)
TIED = dataclasses.replace(LLAMA, tied=True)
DEEP = dataclasses.replace(TIED, num_layers=9)  # for two stages on each of 4 ranks
NAMES = list(schedules.SCHEDULES)
SHAPES = [(2, 7), (1, 7), (3, 5), (2, 4)]  # of micro-batches, in turns
D, V = 8, 19


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    m: int
    config: ModelConfig = LLAMA
    recompute: str = "none"
    frozen: tuple[str, ...] = ()
    layers_of_stage: tuple[int, ...] | None = None
    ahead: int = 1

    @property
    def v(self):
        return 2 if self.name == "interleaved" else 1

    def schedule(self, pp):
        return schedules.make(self.name, pp, self.m, self.v)


def possible(name, pp, m):
    return not (name == "interleaved" and m % pp) and not (name == "dualpipe_v" and m < 2 * pp)


def cases(pp):
    """Every schedule with every m from 1 to 8; models, recomputation and layers take turns.

    5 layers on 2 ranks, 9 on 4: two stages a rank are uneven by themselves.
    """
    made, num_layers = [], 2 * pp + 1
    for turn, name in enumerate(NAMES):
        for m in range(1, 9):
            if possible(name, pp, m):
                config = (TIED, LLAMA, GPT, dataclasses.replace(GPT, tied=True))[m % 4]
                config = dataclasses.replace(config, num_layers=num_layers)
                case = Case(name, m, config, recompute=("none", "full", "selective")[(turn + m) % 3], ahead=m % 3)
                num_stages = case.schedule(pp).num_stages
                uneven = (*[1] * (num_stages - 1), num_layers - num_stages + 1)
                made.append(dataclasses.replace(case, layers_of_stage=uneven if m % 2 else None))
    frozen = Case(
        "zb_h1",
        4,
        dataclasses.replace(GPT, num_layers=num_layers),
        frozen=("embed.weight", "positions.weight", "attention.q.weight", "mlp.up.bias"),
    )
    return [*made, frozen]


def built(case):
    """The same on every rank: weights, biases that are not zero, frozen parameters."""
    whole = model.build(case.config, 1, torch.float64, recompute=case.recompute)
    generator = torch.Generator().manual_seed(2)
    for name, param in whole.named_parameters():
        if name.endswith("bias"):
            param.data.normal_(generator=generator)
        param.requires_grad_(not (case.frozen and name.endswith(case.frozen)))
    return whole


@functools.cache
def names_of(config):
    return [name for name, _ in model.build(config, device="meta").named_parameters()]


def micro_batches(m, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (2, *shapes[i % len(shapes)]), generator=generator).unbind(0) for i in range(m)]


def distance_here(engine, loss, expected_loss, expected):
    """The same, of what this rank has."""
    mine = {name: p.grad for name, p in pipeline.named_parameters(engine).items() if p.grad is not None}
    apart = {name: (mine[name] - expected[name]).abs().max().item() for name in mine}
    return apart | {"loss": abs(loss - expected_loss).item()}


class Shared:
    """What many cases in one launch need only once: channels between all ranks, models, one process's gradients."""

    def __init__(self):
        size = dist.get_world_size()
        self.group = dist.group.WORLD
        self.channels = channels.connect(self.group, [(a, b) for a in range(size) for b in range(size) if a != b])
        self.models, self.references = {}, {}

    def model(self, case):
        key = case.config, case.recompute, case.frozen
        if key not in self.models:
            self.models[key] = built(case)
        self.models[key].zero_grad()
        return self.models[key]

    def build(self, case, trace=None):
        choices = dict(layers_of_stage=case.layers_of_stage, ahead=case.ahead, num_micro_batches=case.m)
        engine = pipeline.build(self.model(case), self.group, case.name, case.v, channels=self.channels, **choices)
        engine.trace = trace
        return engine

    def reference(self, case):
        key = (case.config, case.m, case.frozen)
        if key not in self.references:
            self.references[key] = one_process(built(case), micro_batches(case.m))
        return self.references[key]


def measure(case, shared):
    trace = []
    engine = shared.build(case, trace)
    batches = micro_batches(case.m)
    meter = ByteMeter()
    if case.m in (1, 4) or (case.name, case.m) == ("dualpipe_v", 8):  # the meter sees every operator: it takes time
        with meter:
            loss = engines.accumulate_gradients(engine, batches)
    else:
        loss = engines.accumulate_gradients(engine, batches)
    return {
        "apart": max(distance_here(engine, loss, *shared.reference(case)).values()),
        "names": {name for name, p in pipeline.named_parameters(engine).items() if p.grad is not None},
        "executed": [span.name for span in trace],
        "in turn": all(a.stop_s <= b.start_s for a, b in pairwise(trace)),
        "records": Counter((r.collective, r.payload_bytes, r.group_size) for r in meter.records),
        "peaks": (engine.peak_live, engine.peak_waiting),
        "layers": [len(stage.blocks) for stage in engine.stages.values()],
    }


def measure_all(given):
    shared = Shared()
    return [measure(case, shared) for case in given]


@pytest.fixture(scope="module", params=[2, 4])
def measured(request):
    given = cases(request.param)
    return given, launch(measure_all, request.param, given)


@pytest.mark.exhaustive
def test_every_schedule_equals_one_process_for_one_to_eight_micro_batches(measured):
    given, ranks = measured
    assert len(given) == {2: 6 * 8 + 4 + 5, 4: 6 * 8 + 2 + 1}[len(ranks)] + 1
    for rank in ranks:
        for case, of_case in zip(given, rank, strict=True):
            assert of_case["apart"] < 1e-12, (case, of_case["apart"])
    for case, *of_ranks in zip(given, *ranks, strict=True):
        together = set().union(*(of_rank["names"] for of_rank in of_ranks))
        assert together == {name for name in names_of(case.config) if not (case.frozen and name.endswith(case.frozen))}


@pytest.mark.exhaustive
def test_what_is_executed_is_the_schedule_instruction_by_instruction(measured):
    given, ranks = measured
    for r, rank in enumerate(ranks):
        for case, of_case in zip(given, rank, strict=True):
            assert of_case["executed"] == [str(one) for one in case.schedule(len(ranks)).instructions[r]], case
            assert of_case["in turn"]


@pytest.mark.exhaustive
def test_as_many_micro_batches_are_kept_as_the_simulator_says(measured):
    given, ranks = measured
    for case, *of_ranks in zip(given, *ranks, strict=True):
        simulation = simulate(case.schedule(len(ranks)), Costs())
        waiting = [max((count for _, count in row), default=0) for row in simulation.waiting]
        assert [of_rank["peaks"] for of_rank in of_ranks] == list(zip(simulation.peak_live, waiting, strict=True)), case


@pytest.mark.exhaustive
def test_each_rank_has_the_layers_that_were_given_or_an_even_share(measured):
    given, ranks = measured
    for case, *of_ranks in zip(given, *ranks, strict=True):
        made = case.schedule(len(ranks))
        quotient, remainder = divmod(case.config.num_layers, made.num_stages)
        layers = case.layers_of_stage or [quotient + (stage < remainder) for stage in range(made.num_stages)]
        assert [of_rank["layers"] for of_rank in of_ranks] == [
            [layers[stage] for stage in made.stages_of_rank(rank)] for rank in range(len(ranks))
        ]


def expected_records(case, pp, rank):
    owners, sizes = case.schedule(pp).rank_of_stage, [x.numel() * D * 8 for x, _ in micro_batches(case.m)]
    expected = Counter({("broadcast", 8, pp): 1})
    for lower, upper in pairwise(owners):
        if lower != upper and rank in (lower, upper):
            for size in sizes:  # activations up, gradients down
                expected["send", size, 2] += 1
                expected["recv", size, 2] += 1
    if case.config.tied and owners[0] != owners[-1] and rank in (owners[0], owners[-1]):
        expected["all_reduce", V * D * 8, 2] += 1
    return expected


@pytest.mark.exhaustive
def test_on_the_wire_are_activations_gradients_the_loss_the_tied_gradient_and_nothing_else(measured):
    given, ranks = measured
    for r, rank in enumerate(ranks):
        for case, of_case in zip(given, rank, strict=True):
            if of_case["records"]:
                assert of_case["records"] == expected_records(case, len(ranks), r), case
    counted = {case.name for case, of_case in zip(given, ranks[0], strict=True) if of_case["records"]}
    assert counted == set(NAMES)


# --- wrong engines: each must be found out


@contextmanager
def loses_a_message():
    """Neither sent nor received: what comes instead are zeros."""

    class Done:
        def wait(self):
            pass

    def unless_third(do):
        seen = Counter()

        def wrong(x, channel):
            seen[channel] += 1
            return (x.zero_() if do is channels.receive else x, Done())[1] if seen[channel] == 3 else do(x, channel)

        return wrong

    with (
        patch.object(executor, "send", unless_third(channels.send)),
        patch.object(executor, "receive", unless_third(channels.receive)),
    ):
        yield


@contextmanager
def drops_weight_gradients():
    with patch.object(weight_gradients.WeightGradientStore, "run", lambda queue: None):
        yield


@contextmanager
def sums_no_tied_gradient():
    with patch.object(pipeline, "sum_tied", lambda engine: None):
        yield


@contextmanager
def takes_micro_batches_as_equal():
    share_of_loss = executor.StageRunner.share_of_loss

    def wrong(work, logits, y_BS):
        return share_of_loss(work, logits, y_BS) * (9.0 / y_BS.numel())

    with patch.object(executor.StageRunner, "share_of_loss", wrong):
        yield


@contextmanager
def keeps_activations():
    class Keeping(dict):
        def pop(self, key):
            return self[key]

    init = executor.Executor.__init__

    def wrong(run, *inputs):
        init(run, *inputs)
        run.kept = Keeping()

    with patch.object(executor.Executor, "__init__", wrong):
        yield


BUGS = [
    loses_a_message,
    drops_weight_gradients,
    sums_no_tied_gradient,
    takes_micro_batches_as_equal,
    keeps_activations,
]
PLANTED = [Case("1f1b", 4, TIED), Case("zbv", 4, TIED), Case("zb_h1", 4, TIED)]


def planted():
    shared, found = Shared(), {}
    for bug in BUGS:
        for case in PLANTED:
            with bug():
                engine = shared.build(case)
                loss = engines.accumulate_gradients(engine, micro_batches(case.m))
            apart = distance(engines.full_gradients(engine), loss, *shared.reference(case))
            found[bug.__name__, case.name] = {name for name, far in apart.items() if far > 1e-6}, engine.peak_live
    return found


@pytest.mark.exhaustive
def test_planted_bugs_are_found_where_they_are():
    for rank, found in enumerate(launch(planted, 2)):
        for case in PLANTED:
            lost, _ = found["loses_a_message", case.name]
            assert "loss" in lost and "embed.weight" in lost
            assert "loss" in found["takes_micro_batches_as_equal", case.name][0]
            kept, live = found["keeps_activations", case.name]
            assert not kept and live > simulate(case.schedule(2), Costs()).peak_live[rank]
        assert found["sums_no_tied_gradient", "1f1b"][0] == {"embed.weight"}
        assert not found["sums_no_tied_gradient", "zbv"][0]  # one rank has both ends: one tensor, no bug
        assert found["drops_weight_gradients", "zbv"][0] == found["drops_weight_gradients", "zb_h1"][0] == {"names"}
        assert not found["drops_weight_gradients", "1f1b"][0]  # nothing waits there


# --- memory


def bytes_of_stage(engine, stage, batch):
    """What a stage keeps of a micro-batch until B, for autograd; until W: the inputs of its linears."""
    module, (tokens_BS, y_BS) = engine.stages[str(stage)], batch
    is_first, is_last = stage == 0, stage == engine.num_stages - 1
    x = tokens_BS if is_first else torch.zeros(*tokens_BS.shape, D, dtype=engine.dtype, requires_grad=True)
    forward = (lambda: training.loss_of(module, x, y_BS)) if is_last else lambda: module(x)
    inputs = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args: inputs.update({args[0].data_ptr(): args[0]}))
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]
    brought = tokens_BS.untyped_storage().nbytes() if is_first or is_last else 0  # tokens and targets, there before
    kept = kept_bytes(module, forward) - brought
    for handle in handles:
        handle.remove()
    return kept, sum(x.nbytes for x in inputs.values())


def expected_peak(engine, made, rank, batch):
    """The largest sum of what waits for B, for W, and of a gradient that has just come."""
    until_b, until_w = {}, {}
    for stage in made.stages_of_rank(rank):
        until_b[stage], until_w[stage] = bytes_of_stage(engine, stage, batch)
    message = batch[0].numel() * D * 8
    now = peak = 0
    for one in made.instructions[rank]:
        came = message if one.op != "F" and one.stage < made.num_stages - 1 else 0
        now += until_b[one.stage] if one.op == "F" else 0
        peak = max(peak, now + (came if one.op in "BI" else 0))
        if one.op in "BI":
            now -= until_b[one.stage]
        now += {"I": 1, "W": -1}.get(one.op, 0) * (until_w[one.stage] + came)  # it is the last linear's gradient
    assert now == 0
    return peak, until_b[made.stages_of_rank(rank)[0]]


@contextmanager
def sent_is_temporary(tracker):
    """What is on its way to others is no activation, whenever it arrives."""

    def send(x, channel):
        tracker.claim(x, "temporary")
        return channels.send(x, channel)

    with patch.object(executor, "send", send):
        yield


def memory():
    shared, seen = Shared(), {}
    for name in ("naive", "afab", "1f1b", "interleaved", "zb_h1"):
        for ahead in (0, 1):
            case = Case(name, 8, dataclasses.replace(LLAMA, num_layers=8), ahead=ahead)
            engine, batches = shared.build(case), micro_batches(8, SHAPES[:1])
            rank, made = dist.get_rank(), case.schedule(4)
            expected = expected_peak(engine, made, rank, batches[0])
            engines.accumulate_gradients(engine, batches)  # so that gradients exist
            with MemoryTracker(engine) as tracker, sent_is_temporary(tracker):
                engines.accumulate_gradients(engine, batches)
                left = tracker.current("activations")
            seen[name, ahead] = max(tracker.timeline.bytes_by_kind["activations"]), *expected, engine.peak_live, left
    return seen


@pytest.mark.exhaustive
def test_bytes_of_activations_are_live_micro_batches_times_what_a_stage_keeps():
    for rank, seen in enumerate(launch(memory, 4)):
        message = 2 * 7 * D * 8
        for (name, ahead), (measured_peak, expected, of_one, live, left) in seen.items():
            scalars = 8 * (8 + 3)
            assert 0 <= measured_peak - expected <= ahead * message + scalars, (rank, name, ahead)
            assert left <= scalars
            if name in ("naive", "afab", "1f1b"):
                assert 0 <= measured_peak - live * of_one <= (1 + ahead) * message + scalars
                assert live == {"naive": 1, "afab": 8, "1f1b": 4 - rank}[name]


# --- steps, meshes, other ways to build


def trained(case, shared, clip_norm):
    """Distance from one process after three steps; the norms of a fourth."""
    shared.models.clear()  # weights will change
    engine, reference = shared.build(case), built(case)
    optimizer = engines.make_optimizer(engine, lr=0.01)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for seed in range(3):
        batches = micro_batches(case.m, seed=seed)
        loss = engines.step(engine, batches, optimizer, clip_norm)
        expected_loss, _ = one_process(reference, batches)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        expected.step()
        expected.zero_grad()
    after = engines.full_parameters(engine)
    apart = max((after[name] - p).abs().max().item() for name, p in reference.named_parameters())
    ends = [stage.embed.weight if stage.is_first else stage.head.weight for stage in engine.stages.values()
            if stage.is_first or stage.is_last]  # fmt: skip
    engines.accumulate_gradients(engine, batches)
    one_process(reference, batches)
    norms = engines.clip_gradients(engine, clip_norm), nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
    left = abs(norms[0] - norms[1]).item()
    return (
        apart,
        left,
        abs(loss - expected_loss).item(),
        norm.item(),
        [end.detach().clone() for end in ends],
    )


def in_bfloat16(shared):
    engine = pipeline.build(model.build(DEEP, dtype=torch.bfloat16), shared.group, "zb_h1", channels=shared.channels)
    optimizer = engines.make_optimizer(engine, lr=0.02)
    losses = [engines.step(engine, micro_batches(4), optimizer, 1.0).item() for _ in range(10)]
    return isinstance(optimizer, MasterAdamW), losses[0] - losses[-1]


def under_autocast(shared):
    """Weight gradients that wait are those that do not, when forward multiplies in bfloat16."""
    gradients = []
    for name in ("1f1b", "zb_h1"):
        engine = pipeline.build(model.build(LLAMA), shared.group, name, channels=shared.channels)
        with torch.autocast("cpu", torch.bfloat16):
            engines.accumulate_gradients(engine, micro_batches(4))
        gradients.append(engines.full_gradients(engine))
    whole, split = gradients
    return max((whole[name] - split[name]).abs().max().item() for name in whole), {x.dtype for x in split.values()}


def in_columns_of_a_mesh():
    group = make_groups(Mesh(pp=2, dp=2))["pp"]
    case = Case("interleaved", 4, DEEP)
    engine = pipeline.build(built(case), group, "interleaved", 2)
    loss = engines.accumulate_gradients(engine, micro_batches(4))
    return max(distance(engines.full_gradients(engine), loss, *one_process(built(case), micro_batches(4))).values())


def from_meta(shared):
    """Shapes first; numbers only for the stages of this rank."""
    case = Case("zbv", 4, DEEP)
    engine = pipeline.build(
        model.build(DEEP, dtype=torch.float64, device="meta"), shared.group, "zbv", channels=shared.channels
    )
    were_meta = all(param.is_meta for param in engine.parameters())
    engine.to_empty(device="cpu")
    engine.tie()
    whole = dict(built(case).named_parameters())
    with torch.no_grad():
        for name, param in pipeline.named_parameters(engine).items():
            param.copy_(whole[name])
    loss = engines.accumulate_gradients(engine, micro_batches(4))
    return (
        were_meta,
        sorted(pipeline.named_parameters(engine)),
        max(distance(engines.full_gradients(engine), loss, *shared.reference(case)).values()),
    )


def everything_at_once(m):
    """A learner's own: rank r runs r + 1 forwards at most ahead of its backwards, here for four ranks."""
    rows = []
    for rank in range(4):
        ahead = min(m, 4 - rank + 1)
        row = [f"F{i}" for i in range(ahead)]
        for i in range(m):
            row += [f"B{i}", *([f"F{i + ahead}"] if i + ahead < m else [])]
        rows.append(row)
    return schedules.from_lists(rows, name="mine")


def learners_own(shared):
    case = Case("1f1b", 6)
    engine = pipeline.build(built(case), shared.group, everything_at_once, channels=shared.channels)
    loss = engines.accumulate_gradients(engine, micro_batches(6))
    whole = pipeline.build(built(case), shared.group, everything_at_once(6), channels=shared.channels)
    same = engines.accumulate_gradients(whole, micro_batches(6))
    apart = max(distance(engines.full_gradients(engine), loss, *shared.reference(case)).values())
    return apart, abs(loss - same).item(), engine.peak_live


def the_rest():
    shared = Shared()
    return {
        "trained": [trained(Case(name, 4, DEEP), shared, 0.5) for name in ("1f1b", "zbv")],
        "bfloat16": in_bfloat16(shared),
        "autocast": under_autocast(shared),
        "mesh": in_columns_of_a_mesh(),
        "meta": from_meta(shared),
        "learner's": learners_own(shared),
    }


@pytest.fixture(scope="module")
def rest():
    return launch(the_rest, 4)


@pytest.mark.exhaustive
def test_three_clipped_steps_equal_one_process_and_copies_of_the_tied_weight_stay_equal(rest):
    for index in range(2):
        ends = [end for rank in rest for end in rank["trained"][index][4]]
        assert len(ends) == 2 and torch.equal(*ends)
        for apart, norms, loss, norm, _ in (rank["trained"][index] for rank in rest):
            assert norm > 0.5, "nothing was clipped"
            assert norms < 1e-12 and loss < 1e-9 and apart < 1e-8


@pytest.mark.exhaustive
def test_bfloat16_trains_with_masters_and_autocast_does_not_care_when_weight_gradients_come(rest):
    for has_masters, gain in (rank["bfloat16"] for rank in rest):
        assert has_masters and gain > 0.1
    for apart, dtypes in (rank["autocast"] for rank in rest):
        assert apart == 0.0 and dtypes == {torch.float32}


@pytest.mark.exhaustive
def test_pipelines_of_a_mesh_run_side_by_side(rest):
    assert max(rank["mesh"] for rank in rest) < 1e-12


@pytest.mark.exhaustive
def test_a_model_without_numbers_is_cut_then_filled(rest):
    for r, (were_meta, names, apart) in enumerate(rank["meta"] for rank in rest):
        assert were_meta and apart < 1e-12
        assert ("embed.weight" in names) == ("norm.weight" in names) == (r == 0)
        layers = {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
        assert layers == {0: {0, 1, 8}, 1: {2, 7}, 2: {3, 6}, 3: {4, 5}}[r]


@pytest.mark.exhaustive
def test_a_schedule_that_a_learner_wrote_runs(rest):
    for r, (apart, other, live) in enumerate(rank["learner's"] for rank in rest):
        assert apart < 1e-12 and other == 0.0 and live == 5 - r


# --- errors


def backwards_too_early(m):
    return schedules.from_lists([["F0", "B0"], ["B0", "F0"]])


def three_ranks(m):
    return schedules.naive(3, m)


def moves_its_stages(m):
    made = schedules.one_f_one_b(2, m)
    return made if m == 4 else schedules.from_lists([["F0@1", "B0@1"], ["F0@0", "B0@0"]], rank_of_stage=(1, 0))


def two_layers(**changes):
    return model.build(dataclasses.replace(LLAMA, num_layers=2, **changes))


REFUSED = [
    (dict(schedule="interleaved", v=2), 4, "num_stages (4) must not exceed num_layers (2)"),
    (dict(schedule="dualpipe_v"), 4, "num_stages (4) must not exceed num_layers (2)"),
    (dict(layers_of_stage=[2]), 4, "layers_of_stage is [2]; it must be one number of at least 1 for each of 2 stages"),
    (dict(layers_of_stage=[2, 0]), 4, "layers_of_stage is [2, 0]"),
    (dict(layers_of_stage=[2, 1]), 4, "layers_of_stage is [2, 1]"),
    (dict(schedule="2f2b"), 4, "name is '2f2b'"),
    (dict(schedule=backwards_too_early, num_micro_batches=1), 1, "schedule 'handmade' cannot be run"),
    (dict(schedule=three_ranks), 4, "schedule 'naive' is for 3 ranks and 4 micro-batches, but there are 2 and 4"),
    (dict(schedule=lambda m: [["F0"]]), 4, "schedule gave a list"),
    (dict(schedule=moves_its_stages), 1, "the schedule of 1 micro-batches puts stages on ranks (1, 0)"),
    (dict(channels={}), 4, "channels lack the pairs [(0, 1), (1, 0)]"),
    (dict(ahead=-1), 4, "ahead is -1"),
    (dict(), 0, "there are no micro-batches"),
    (dict(group=None), 4, "build got None as its group"),
]


def refusals():
    messages, many = [], model.build(LLAMA)
    with ByteMeter() as meter, patch.object(dist, "new_group", lambda *_, **__: pytest.fail("a group was made")):
        for choices, m, _ in REFUSED:
            ready = {"group": dist.group.WORLD, "channels": {(0, 1): None, (1, 0): None}} | choices
            with pytest.raises(ValueError) as error:
                engines.accumulate_gradients(pipeline.build(two_layers(), **ready), micro_batches(m))
            messages.append(str(error.value))
        for name, m in (("dualpipe_v", 3), ("interleaved", 3)):
            engine = pipeline.build(many, dist.group.WORLD, name, 2, channels={(0, 1): None, (1, 0): None})
            with pytest.raises(ValueError, match="micro"):
                engines.accumulate_gradients(engine, micro_batches(m))
    return messages, meter.calls


def test_what_cannot_be_is_refused_before_anything_is_sent():
    for messages, calls in launch(refusals, 2):
        for message, (_, _, start) in zip(messages, REFUSED, strict=True):
            assert message.startswith(start), message
        assert calls == {}
    with pytest.raises(ValueError, match="family is 'xlmr'"):
        stages.check_stages(dataclasses.replace(LLAMA, family="xlmr", num_kv_heads=2), 2)


# --- the calls of the engine, in NCCL's order


def recorded_steps(given):
    """The calls that start messages on this rank, with a channel for each direction and with one for both."""
    shared, recorded = Shared(), []
    of_both = {pair: shared.group for pair in shared.channels}
    for case in given:
        engine = shared.build(case)
        with recorded_calls() as separate:
            engine.run(micro_batches(case.m))
        engine.channels = of_both
        with recorded_calls() as together, to_a_group_of_all():
            engine.run(micro_batches(case.m))
        recorded.append((separate, together))
    return recorded


@contextmanager
def to_a_group_of_all():
    """Both ends of a pair find each other in a group of two ranks, whatever their direction."""
    other = 1 - dist.get_rank()
    start = {"send": dist.isend, "receive": dist.irecv}
    with (
        patch.object(executor, "send", lambda x, group: start["send"](x, other, group)),
        patch.object(executor, "receive", lambda x, group: start["receive"](x, other, group)),
    ):
        yield


def test_no_schedule_waits_for_ever_in_the_order_of_nccl_and_one_channel_for_both_directions_would():
    given = [Case(name, 4, dataclasses.replace(LLAMA, num_layers=4)) for name in NAMES]
    hung = set()
    for case, *of_ranks in zip(given, *launch(recorded_steps, 2, given), strict=True):
        separate, together = zip(*of_ranks, strict=True)
        rounds, stuck = replay(separate)
        assert rounds > 1 and not stuck, (case.name, stuck)
        if replay(together)[1]:
            hung.add(case.name)
    assert "1f1b" in hung


# --- the plan of messages, without ranks


def deliver_as_late_as_possible(made, ahead):
    """Runs all plans; a message arrives only when somebody waits for it. Returns who still waits at the end."""
    plans = [plan_of(made, rank, ahead) for rank in range(made.pp)]
    place = [0] * made.pp
    sent, posted, delivered = {}, {}, set()
    progress = True
    while progress:
        progress = False
        for rank in reversed(range(made.pp)):
            while place[rank] < len(plans[rank]):
                step = plans[rank][place[rank]]
                for message, src in step.post:
                    if message not in posted.setdefault((src, rank), []):
                        posted[src, rank].append(message)
                src = None if step.needs is None else made.rank_of_stage[
                    step.instruction.stage + (-1 if step.instruction.op == "F" else 1)
                ]  # fmt: skip
                if src not in (None, rank):
                    queue = sent.get((src, rank), [])
                    if step.needs not in queue:
                        break
                    number = queue.index(step.needs)
                    assert posted[src, rank][: number + 1] == queue[: number + 1]  # first in, first out
                    delivered.update(queue[: number + 1])
                assert set(step.arrived) <= delivered  # waiting for these sends is no waiting
                if step.dst is not None:
                    sent.setdefault((rank, step.dst), []).append(step.gives)
                place[rank] += 1
                progress = True
    return [rank for rank in range(made.pp) if place[rank] < len(plans[rank])]


def test_nobody_waits_for_ever_however_late_messages_come():
    for pp in (2, 3, 4):
        for name in NAMES:
            for m in range(1, 9):
                if possible(name, pp, m):
                    for ahead in (0, 1, 3):
                        made = Case(name, m).schedule(pp)
                        assert deliver_as_late_as_possible(made, ahead) == [], (name, pp, m)


def test_receives_are_posted_one_instruction_early_and_sends_are_forgotten_soon():
    for name in NAMES:
        made = Case(name, 8).schedule(4)
        for rank in range(4):
            plan = plan_of(made, rank)
            posted_at = {message: place for place, step in enumerate(plan) for message, _ in step.post}
            in_hand = most = 0
            for place, step in enumerate(plan):
                if step.needs in posted_at:
                    assert posted_at[step.needs] < max(place, 1)
                in_hand += (step.dst is not None) - len(step.arrived)
                most = max(most, in_hand)
            live = simulate(made, Costs()).peak_live[rank]
            assert most <= live + 4, (name, rank, most, live)


def test_rounds_of_pairs_meet_each_rank_once():
    pairs = [(a, b) for a in range(5) for b in range(5) if a != b]
    made = channels.rounds(pairs)
    assert sorted(pair for members in made for pair in members) == sorted(pairs)
    assert all(len({r for pair in members for r in pair}) == 2 * len(members) for members in made)
