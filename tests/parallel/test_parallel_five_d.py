"""The five-dimensional trainer against one process: gradients, losses, norms, parameters after two clipped steps."""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations
from unittest.mock import patch

import pytest
import torch
from five_d_cases import CONFIGS, SEQ_LEN, distances, micro_batches, on_ranks, one_process

from course_lib import model
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import MemoryTracker
from course_lib.parallel import engine as engines
from course_lib.parallel import executor, five_d, sums, tensor
from course_lib.run import FP64, Run
from course_lib.traffic import sent
from course_lib.training.precision import gradient_of

# (model, layout): every pair of techniques that can be combined is in one of them, see the next test
FOLDED = "sequence_parallel=true"  # whole experts on the ranks of tp too
TWO = [
    ("experts", f"tp=2,ep=2,{FOLDED},micro_batches=2"), ("llama", "dp=2,micro_batch=2"),
    ("tied", "dp=2,schedule=interleaved,v=2,micro_batches=2"),  # one weight in two stages of a rank
    ("tied", "dp=2,zero_stage=1,micro_batches=2,recompute=full"),
    ("tied", "dp=2,zero_stage=2,micro_batches=2,recompute=full"),
    ("tied", "dp=2,zero_stage=3,micro_batches=2,recompute=selective"),
    ("gpt", "tp=2,micro_batches=2,recompute=selective"),
    ("gpt", "tp=2,sequence_parallel=true,regather=true,micro_batches=2,recompute=full"),
    ("llama", "cp=2,micro_batches=2,recompute=full"), ("tied", "cp=2,zero_stage=3,cp_method=ulysses,recompute=full"),
    ("tied", "pp=2,micro_batches=3,micro_batch=2,recompute=full"),
    ("tied", "pp=2,schedule=interleaved,v=2,micro_batches=4,recompute=full"),
    ("tied experts", "pp=2,schedule=zbv,micro_batches=3,recompute=full"),
    ("experts", "dp=2,ep=2,micro_batches=2,recompute=full"), ("llama", "tp=2,schedule=interleaved,v=2,micro_batches=2"),
    ("gpt", "pp=2,zero_stage=1,schedule=zb_h1,micro_batches=3"),  # biases
    ("latent", "tp=2,micro_batches=2,recompute=full"), ("latent", "tp=2,sequence_parallel=true,micro_batches=2"),
    ("latent", "cp=2,micro_batches=2,recompute=selective"), ("latent", "cp=2,cp_method=ulysses"),
    ("tied", "dp=2,zero_stage=3,dp_replicate=2,micro_batches=2"),  # a replica on each rank
    ("head norms", "tp=2,micro_batches=2,recompute=full"),
    ("head norms", "cp=2,cp_method=ulysses,zero_stage=2,recompute=selective"),
]  # fmt: skip
FOUR = [
    ("tied", "dp=2,tp=2,zero_stage=1,micro_batches=2"),
    ("llama", "dp=2,tp=2,zero_stage=2,sequence_parallel=true,regather=true,micro_batches=2"),
    ("tied", "dp=2,tp=2,zero_stage=3,sequence_parallel=true,micro_batches=2,recompute=full"),
    ("llama", "tp=4,sequence_parallel=true"),  # two key/value heads on four ranks
    ("tied", "tp=4,zero_stage=3"), ("tied", "pp=2,dp=2,zero_stage=1,micro_batches=4"),
    ("tied", "pp=2,dp=2,schedule=zbv,micro_batches=3"),
    ("llama", "pp=2,dp=2,zero_stage=2,micro_batches=2,schedule=interleaved,v=2"),
    ("tied", "pp=2,dp=2,zero_stage=3,micro_batches=3,schedule=interleaved,v=1"),
    ("llama", "pp=2,dp=2,zero_stage=3,micro_batches=2,schedule=interleaved,v=2"),
    ("experts", "pp=2,dp=2,ep=2,zero_stage=1,schedule=dualpipe_v,micro_batches=4"),
    ("experts", "pp=2,cp=2,ep=2,zero_stage=1,schedule=zb_h1,micro_batches=3,cp_method=ulysses"),
    ("llama", "pp=4,schedule=zb_h2,micro_batches=4,layers_of_stage=1-1-1-1"),
    ("tied", "pp=2,tp=2,sequence_parallel=true,schedule=interleaved,v=2,micro_batches=4"),
    ("gpt", "pp=2,tp=2,sequence_parallel=true,micro_batches=2,layers_of_stage=1-3"),
    ("tied experts", "pp=2,tp=2,sequence_parallel=true,regather=true,schedule=zb_h1,micro_batches=3"),
    ("llama", "pp=2,tp=2,sequence_parallel=true,schedule=zb_h1,micro_batches=2"),
    ("gpt", "pp=2,tp=2,schedule=zb_h2,micro_batches=3,recompute=full"),
    ("llama", "cp=2,tp=2,sequence_parallel=true,regather=true,zero_stage=1,cp_method=all_gather"),
    ("gpt", "cp=2,tp=2,cp_method=ulysses,zero_stage=2,sequence_parallel=true"),
    ("gpt", "cp=2,tp=2,cp_method=ulysses,sequence_parallel=true,regather=true,recompute=selective"),
    ("llama", "cp=4,zero_stage=2,cp_sharding=striped"),
    ("llama", "dp=2,cp=2,zero_stage=1,cp_method=ulysses,order=tp-cp-dp-pp"),
    ("tied", "dp=2,cp=2,zero_stage=3,cp_sharding=contiguous"),
    ("gpt", "pp=2,cp=2,micro_batches=2,schedule=interleaved,v=2,cp_method=ulysses"),
    ("llama", "pp=2,cp=2,micro_batches=2,schedule=interleaved,v=2"),
    ("experts", "dp=2,tp=2,ep=2,zero_stage=2,micro_batches=2"),
    ("tied experts", "dp=2,tp=2,ep=2,zero_stage=3,sequence_parallel=true,micro_batches=2,recompute=selective"),
    ("biased experts", "dp=2,cp=2,ep=4,zero_stage=1,micro_batches=2,expert_method=once_per_rank"),
    ("experts", "dp=2,cp=2,ep=2,zero_stage=3,micro_batches=2"),
    ("biased experts", "pp=2,dp=2,ep=2,schedule=interleaved,v=2,micro_batches=2"),
    ("latent", "tp=4,sequence_parallel=true,regather=true,recompute=full"),
    ("llama", "dp=4,zero_stage=1,dp_replicate=2,micro_batches=2"), ("tied", "dp=4,zero_stage=2,dp_replicate=2"),
    ("tied", "dp=2,cp=2,zero_stage=3,dp_replicate=2,micro_batches=2,recompute=full"),
    ("experts", "dp=4,ep=2,zero_stage=2,dp_replicate=2,micro_batches=2"),
    ("gpt", "dp=2,tp=2,zero_stage=1,dp_replicate=2,sequence_parallel=true"),
    ("tied", "dp=2,pp=2,zero_stage=2,dp_replicate=2,micro_batches=2"),
    ("latent", "cp=2,tp=2,sequence_parallel=true,zero_stage=3,cp_method=all_gather,micro_batches=2"),
    ("latent", "cp=2,tp=2,cp_method=ulysses,zero_stage=1"),
    ("latent experts", "dp=2,tp=2,ep=2,zero_stage=2,micro_batches=2"),
    ("latent experts", "pp=2,tp=2,sequence_parallel=true,regather=true,schedule=zb_h1,micro_batches=2"),
    ("head norms", "tp=4"),  # norms over four ranks, key/value heads over two
    ("head norms", "dp=2,tp=2,zero_stage=1"),
    ("head norms", "dp=2,tp=2,zero_stage=3,sequence_parallel=true,micro_batches=2,recompute=full"),
    ("head norms", "cp=2,tp=2"), ("head norms", "dp=2,tp=2,zero_stage=2,dp_replicate=2"),
    ("tied head norms", "dp=2,tp=2,ep=2,zero_stage=2,micro_batches=2"),
    ("tied head norms", "pp=2,tp=2,schedule=zb_h1,micro_batches=3"),
    *[("tied experts", f"dp=2,tp=2,ep=4,zero_stage={stage},{FOLDED},micro_batches=2") for stage in range(4)],
    ("experts", f"tp=4,ep=4,{FOLDED},recompute=full"),  # no data parallelism
    ("biased experts", f"tp=4,ep=2,expert_tp=1,{FOLDED},micro_batches=2,expert_method=once_per_rank"),
    ("experts", f"dp=2,tp=2,expert_tp=1,{FOLDED},zero_stage=2,micro_batches=2"),  # all experts on every rank
    ("biased experts", f"cp=2,tp=2,ep=4,{FOLDED},regather=true,zero_stage=1,recompute=selective"),
    ("tied experts", f"pp=2,tp=2,ep=2,{FOLDED},schedule=zb_h1,micro_batches=3"),
    ("experts", f"dp=2,tp=2,ep=2,expert_tp=1,{FOLDED},zero_stage=3,dp_replicate=2,order=tp-pp-cp-dp"),
]  # fmt: skip
EIGHT = [
    ("experts", "pp=2,tp=2,cp=2,ep=2,zero_stage=1,sequence_parallel=true,micro_batches=3"),  # everything at once
    ("tied experts", "pp=2,tp=2,dp=2,ep=2,zero_stage=3,sequence_parallel=true,regather=true,micro_batches=2"),
    ("biased experts", "pp=2,dp=2,cp=2,ep=4,zero_stage=2,micro_batches=2,cp_method=all_gather,order=cp-dp-pp-tp"),
    (
        "tied",
        "pp=2,dp=2,tp=2,zero_stage=1,sequence_parallel=true,regather=true,schedule=interleaved,v=2,micro_batches=2",
    ),
    ("llama", "dp=2,cp=2,tp=2,zero_stage=3,sequence_parallel=true,micro_batches=2"),
    ("experts", "dp=2,cp=2,pp=2,ep=2,zero_stage=1,schedule=dualpipe_v,micro_batches=4"),
    ("tied head norms", "pp=2,tp=2,cp=2,ep=2,zero_stage=1,micro_batches=3"),
    ("tied experts", f"pp=2,dp=2,tp=2,ep=4,zero_stage=3,{FOLDED},micro_batches=2,recompute=full"),
    ("experts", f"dp=2,cp=2,tp=2,ep=8,zero_stage=2,{FOLDED},regather=true,micro_batches=2,recompute=full"),
    ("latent experts", f"pp=2,cp=2,tp=2,ep=2,expert_tp=1,{FOLDED},schedule=dualpipe_v,micro_batches=4"),
]
CASES = {2: TWO, 4: FOUR, 8: EIGHT}
ALL = [(ranks, *case) for ranks, cases in CASES.items() for case in cases]
# The others are exhaustive. The sample is drawn; a tied weight on two ranks and norms of heads are always in it.
ON_TWO_RANKS = ("tied", "pp=2,micro_batches=3,micro_batch=2,recompute=full")
ALWAYS = {2: random.Random(0).sample(TWO, 8), 4: random.Random(0).sample(FOUR, 8), 8: EIGHT[:1]}
ALWAYS[2] += [ON_TWO_RANKS] if ON_TWO_RANKS not in ALWAYS[2] else []
ALWAYS[4] += [case for case in FOUR if case[0] == "head norms" and case not in ALWAYS[4]][:3]


# --- every pair


def techniques(name, text):
    """What a case puts together."""
    layout = Layout.parse(text)
    found = {f"zero_stage {layout.zero_stage}"} if layout.zero_stage else set()
    found |= {axis for axis in ("dp", "tp", "pp", "ep") if getattr(layout, axis) > 1}
    if layout.sequence_parallel:
        found.add("gathered again" if layout.regather else "sequence parallel")
    if layout.cp > 1:
        found.add("ulysses" if layout.cp_method == "ulysses" else "cp")
    if layout.schedule != "1f1b":
        found.add("interleaved" if layout.schedule == "interleaved" else "split backward")
    if layout.recompute == "full":
        found.add("recomputation")
    if CONFIGS[name].tied:
        found.add("tied")
    return found


EXCLUSIVE = [
    {"zero_stage 1", "zero_stage 2"},
    {"zero_stage 1", "zero_stage 3"},
    {"zero_stage 2", "zero_stage 3"},
    {"cp", "ulysses"},
    {"interleaved", "split backward"},
    {"sequence parallel", "gathered again"},
]
IMPOSSIBLE = {  # pair -> a layout that would have both, and what it is told
    ("split backward", "zero_stage 2"): (
        "dp=2,pp=2,zero_stage=2,schedule=zb_h1",
        "this engine does not do so with .*, whose weight gradients come later",
    ),
    ("split backward", "zero_stage 3"): (
        "dp=2,pp=2,zero_stage=3,schedule=zbv",
        "this engine does not do so with .*, whose weight gradients come later",
    ),
}


def test_every_pair_of_techniques_that_can_be_combined_is_in_a_case():
    of_cases = [techniques(name, text) for _, name, text in ALL]
    names = sorted(set().union(*of_cases))
    assert len(ALL) >= 30 and len(names) == 15
    missing = [
        pair
        for pair in combinations(names, 2)
        if set(pair) not in EXCLUSIVE and pair not in IMPOSSIBLE and not any(set(pair) <= found for found in of_cases)
    ]
    assert missing == []


@pytest.mark.parametrize("pair", IMPOSSIBLE, ids=" with ".join)
def test_what_cannot_be_combined_says_so_and_why(pair):
    text, why = IMPOSSIBLE[pair]
    with pytest.raises(ValueError, match=why):
        Layout.parse(text)


# --- equal to one process


IN_CHUNKS = [
    ("tied", "dp=2,zero_stage=3,micro_batches=2,recompute=full"),
    ("llama", "cp=2,micro_batches=2"),
    ("gpt", "pp=2,zero_stage=1,schedule=zb_h1,micro_batches=3"),
    ("experts", "dp=2,ep=2,zero_stage=2,micro_batches=2"),
    ("llama", "tp=2,micro_batches=2"),
    ("tied", "tp=2,sequence_parallel=true,recompute=full"),
    ("gpt", "tp=2,sequence_parallel=true,regather=true,micro_batches=2"),
]


def in_chunks():
    return [on_ranks(*case, loss_chunks=3) for case in IN_CHUNKS]


def test_the_loss_in_chunks_equals_that_of_one_process():
    """Of 16 or 8 tokens: the last chunk is shorter."""
    for (name, text), results in zip(IN_CHUNKS, zip(*launch(in_chunks, 2, quiet=True), strict=True), strict=True):
        layout = Layout.parse(text)
        expected = one_process(name, layout.dp, layout.micro_batch, layout.micro_batches)
        for of_rank in results:
            far = distances(of_rank, expected)
            assert far["loss"] < 1e-10 and far["norm"] < 1e-10 and far.get("gradients", 0) < 1e-12, (name, text)


def run_cases(cases):
    torch.manual_seed(0)
    return [on_ranks(*case) for case in cases]


def in_one_launch(request):
    """(model, layout) of each case of this run that needs as many ranks as the one of `request`."""
    of_items = (
        item.callspec.params for item in request.session.items if item.originalname == request.node.originalname
    )
    ranks = request.node.callspec.params["ranks"]
    return tuple((params["name"], params["text"]) for params in of_items if params["ranks"] == ranks)


@cache
def found(ranks, cases):
    """(model, layout) -> what each rank saw."""
    of_ranks = launch(run_cases, ranks, cases, timeout=300, quiet=True)
    return dict(zip(cases, zip(*of_ranks, strict=True), strict=True))


def parameters():
    for ranks, *case in ALL:
        is_exhaustive = tuple(case) not in ALWAYS[ranks]
        marks = pytest.mark.exhaustive if is_exhaustive else ()
        yield pytest.param(ranks, *case, marks=marks, id="-".join([str(ranks), *case]))


@pytest.mark.parametrize(("ranks", "name", "text"), [*parameters()])
def test_a_layout_equals_one_process(ranks, name, text, request):
    layout = Layout.parse(text)
    assert layout.world_size == ranks
    expected = one_process(name, layout.dp, layout.micro_batch, layout.micro_batches)
    results = found(ranks, in_one_launch(request))[name, text]
    for rank, of_rank in enumerate(results):
        far = distances(of_rank, expected)
        assert far["loss"] < 1e-10 and far["norm"] < 1e-10 and of_rank.apart < 1e-10
        if rank == 0:
            assert far["gradients"] < 1e-12
            assert far["parameters"] < 1e-6  # AdamW divides a gradient near zero by its own length
    check_shapes(CONFIGS[name], layout, [of_rank.shapes for of_rank in results])
    check_sent(CONFIGS[name], layout, results)


def check_sent(config, layout, found):
    """Along each axis the bytes that the formulas say, of the rows that were really routed."""
    for rank, of_rank in enumerate(found):
        routings = None
        if config.moe is not None:
            members = layout.members(rank)["ep"]
            routings = list(zip(*(found[member].routings for member in members), strict=True))
        formula = sent(Run(config, layout, SEQ_LEN, FP64), rank, clip=True, routings=routings)
        assert {axis: size for axis, size in formula.items() if size} == {a: s for a, s in of_rank.sent.items() if s}


def check_shapes(config, layout, shapes):
    """Each rank has its layers, its part of each matrix and its experts, and nothing else."""
    layers = {name.split(".")[1] for name in shapes[0] if name.startswith("blocks.")}
    if layout.pp > 1:
        assert len(layers) < config.num_layers
    layer = min(layers)
    queries, values = (config.num_heads * width // layout.tp for width in (config.head_dim, config.value_dim))
    name, width = ("q_up", config.mla.q_rank) if config.mla else ("q", config.d_model)
    assert shapes[0][f"blocks.{layer}.attention.{name}.weight"] == (queries, width)
    assert shapes[0][f"blocks.{layer}.attention.o.weight"] == (config.d_model, values)
    if config.mla:
        assert shapes[0][f"blocks.{layer}.attention.q_down.weight"] == (config.mla.q_rank, config.d_model)
    if config.moe is not None:
        layer = max(layers)
        mine = [name for name in shapes[0] if name.startswith(f"blocks.{layer}.mlp.experts.") and "up" in name]
        assert len(mine) == config.moe.num_experts // layout.ep
        width = config.moe.d_expert // (1 if layout.folded else layout.tp)
        assert all(shapes[0][name] == (width, config.d_model) for name in mine)
    if layout.tp > 1:
        parts = [shapes[rank] for rank in layout.mesh.ranks_along("tp", 0)]
        assert sum(part["embed.weight"][0] for part in parts if "embed.weight" in part) in (0, config.vocab_size)


# --- planted bugs


KIND_FUNCTION, SHARING_OF, SUM_GRADIENTS = sums.kind_function, five_d.sharing_of, tensor.sum_gradients
TP = [""]


def sums_experts_over_data_alone(engine):
    """Where ep lies inside tp, other tp ranks have the same experts, and rows of other tokens."""
    sharing = SHARING_OF(engine)
    sharing.groups["experts"] = engine.groups.data
    return sharing


BUGS = {  # owner, name, wrong version
    # experts' gradients summed over data, where other ranks have other experts
    "averages experts like everything": (
        sums, "kind_function", lambda engine: lambda p: KIND_FUNCTION(engine)(p).replace("experts", "norms")
    ),
    "forgets norms over tp": (
        tensor,
        "sum_gradients",
        lambda params, group: None if group.group_name == TP[0] else SUM_GRADIENTS(params, group),
    ),
    "forgets where tokens stand": (
        five_d.FiveD, "positions", lambda engine, seq_len: torch.arange(seq_len // engine.layout.cp)
    ),
    "sums whole experts over data alone": (five_d, "sharing_of", sums_experts_over_data_alone),
    "drops balancing of inner stages": (executor.StageRunner, "share_of_balancing", lambda work, stage, y_BS: None),
    # shards of a replica get the gradients of its own ranks' tokens alone
    "forgets other replicas": (five_d, "sum_gradients", lambda engine: None),
}  # fmt: skip
PLANTED = [
    ("forgets other replicas", "llama", "dp=4,zero_stage=2,dp_replicate=2"),
    ("averages experts like everything", "experts", "dp=2,tp=2,ep=2,zero_stage=0,micro_batches=2"),
    ("forgets norms over tp", "llama", "dp=2,tp=2,sequence_parallel=true"),
    ("forgets norms over tp", "head norms", "dp=2,tp=2"),  # also where ranks have the same tokens
    ("forgets where tokens stand", "llama", "cp=2,tp=2"),
    ("averages experts like everything", "experts", f"dp=2,tp=2,ep=4,{FOLDED}"),
    ("sums whole experts over data alone", "experts", f"tp=4,ep=2,expert_tp=1,{FOLDED}"),
    ("drops balancing of inner stages", "experts", "pp=2,dp=2,ep=2"),
]


def planted():
    found = []
    for bug, name, text in PLANTED:
        layout = Layout.parse(text)
        with patch.object(*BUGS[bug]):
            engine = five_d.build(CONFIGS[name], layout, dtype=torch.float64)
            TP[0] = engine.groups.tp.group_name
            batches = micro_batches(layout, engine.groups.coordinates["dp"], CONFIGS[name])
            loss = engines.accumulate_gradients(engine, batches)
        found.append((loss.item(), engines.full_gradients(engine)))
    return found


@pytest.mark.exhaustive
def test_planted_bugs_are_found():
    for rank, of_rank in enumerate(launch(planted, 4, quiet=True)):
        for (bug, name, text), (_, gradients) in zip(PLANTED, of_rank, strict=True):
            layout = Layout.parse(text)
            _, _, expected, _ = one_process(name, layout.dp, layout.micro_batch, layout.micro_batches)
            far = max((gradients[key] - expected[key]).abs().max().item() for key in expected)
            assert far > 1e-6, f"{bug}: was not seen on rank {rank}"


# --- without ZeRO: buckets that are sent while backward runs

TWO_BUCKETS = replace(CONFIGS["llama"], d_model=256, head_dim=64, d_ff=512, vocab_size=9_000, num_layers=2)


def without_zero():
    """Of dp 2: spans of the second step, the most bytes of tensors in the third, and bytes of the parameters."""
    layout, trace = Layout.parse("dp=2,micro_batches=2"), []
    engine = five_d.build(TWO_BUCKETS, layout, dtype=torch.float64)
    engine.trace = trace
    optimizer = engines.make_optimizer(engine)
    batches = micro_batches(layout, engine.groups.coordinates["dp"], TWO_BUCKETS)
    engines.step(engine, batches, optimizer)
    trace.clear()
    engines.step(engine, batches, optimizer)
    spans = list(trace)
    with MemoryTracker(engine, optimizer) as tracker:
        engines.accumulate_gradients(engine, batches)
        peak_bytes = tracker.peak_bytes
    engines.update(engine, optimizer)
    freed = all(gradient_of(param) is None for param in engine.parameters())
    return spans, peak_bytes, sum(param.nbytes for param in engine.parameters()), freed


def test_gradients_leave_while_backward_runs_and_no_copy_of_all_is_made():
    for spans, peak_bytes, parameter_bytes, freed in launch(without_zero, 2, quiet=True):
        backwards = [span for span in spans if span.name.startswith("B")]
        sums = sorted((span for span in spans if span.lane == "communication"), key=lambda span: span.start_s)
        assert [span.name for span in sums] == ["bucket 0", "bucket 1"] and len(backwards) == 2
        assert backwards[0].stop_s < sums[0].start_s < backwards[1].stop_s  # in the last micro-batch, before its end
        # parameters, moments and gradients are 4, the embedding's gradient on its way 0.4; a copy of all is 1 more
        assert peak_bytes < 4.6 * parameter_bytes
        assert freed


# --- frozen parameters

FROZEN = ("embed", "blocks.0.", "norm", "attention.k")
PARTLY_FROZEN = (
    "dp=2,zero_stage=2,micro_batches=2",
    "dp=2,zero_stage=3",
    "tp=2,sequence_parallel=true,zero_stage=1",
    "pp=2,schedule=zb_h1,micro_batches=3",
    "pp=2,layers_of_stage=1-3,micro_batches=2",  # nothing of the first stage trains
)


def freeze(named):
    for name, param in named:
        param.requires_grad_(not any(part in name for part in FROZEN))


def fill_and_freeze(engine, seed):
    five_d.fill_from_seed(engine, seed)
    freeze(five_d.named_parameters(engine).items())


def partly_frozen():
    config, found = CONFIGS["llama"], []
    for text in PARTLY_FROZEN:
        layout = Layout.parse(text)
        engine = five_d.build(config, layout, dtype=torch.float64, fill=fill_and_freeze)
        engines.make_optimizer(engine)
        engines.accumulate_gradients(engine, micro_batches(layout, engine.groups.coordinates["dp"], config))
        found.append(
            (engines.full_gradients(engine), engines.clip_gradients(engine, 0.1), engines.full_parameters(engine))
        )
    return found


def test_frozen_parameters_stay_and_have_no_gradient():
    results = launch(partly_frozen, 2, quiet=True)
    for index, text in enumerate(PARTLY_FROZEN):
        layout = Layout.parse(text)
        _, _, every, _ = one_process("llama", layout.dp, 1, layout.micro_batches)
        reference = dict(model.build(CONFIGS["llama"], dtype=torch.float64).named_parameters())
        freeze(reference.items())
        for of_rank in results:
            gradients, norm, parameters = of_rank[index]
            assert gradients.keys() == {name for name, param in reference.items() if param.requires_grad}
            assert max((gradients[name] - every[name]).abs().max() for name in gradients) < 1e-10
            assert torch.stack([every[name].norm() for name in gradients]).norm() == pytest.approx(norm.item())
            assert all(torch.equal(parameters[name], param) for name, param in reference.items()), text


# --- invalid input, and 16-bit numbers


def refusals():
    config, layout = CONFIGS["llama"], Layout.parse("tp=2,sequence_parallel=true,micro_batches=2")
    engine = five_d.build(config, layout)
    fitting = micro_batches(layout, 0, config)
    said = []
    for batches in (
        fitting[:1],
        [(x.repeat(2, 1), y.repeat(2, 1)) for x, y in fitting],
        [fitting[0], tuple(t[:, :8] for t in fitting[1])],
    ):
        with pytest.raises(ValueError) as refused:
            engines.accumulate_gradients(engine, batches)
        said.append(str(refused.value))
    with pytest.raises(ValueError) as refused:
        five_d.build(config, Layout(tp=4))
    return [*said, str(refused.value)]


def of_two_lengths():
    config, layout = CONFIGS["llama"], Layout.parse("dp=2,micro_batches=2")
    engine = five_d.build(config, layout)
    first, second = micro_batches(layout, 0, config)
    if engine.groups.world.rank() == 1:
        second = tuple(t[:, :8] for t in second)
    with pytest.raises(ValueError) as refused:
        engines.accumulate_gradients(engine, [first, second])
    return str(refused.value)


def test_ranks_that_bring_other_lengths_are_named_on_every_rank():
    for said in launch(of_two_lengths, 2, quiet=True):
        assert "rank 1 brings micro-batches of [16, 8]" in said and "rank 0 of [16, 16]" in said


def low_precision():
    config, found = CONFIGS["llama"], {}
    for text in ("dp=2,micro_batches=2", "dp=2,zero_stage=1,micro_batches=2", "dp=2,zero_stage=3,micro_batches=2"):
        layout = Layout.parse(text)
        engine = five_d.build(config, layout, dtype=torch.bfloat16, grad_dtype=torch.float32)
        optimizer = engines.make_optimizer(engine, lr=0.01)
        for step in range(3):
            engines.step(engine, micro_batches(layout, engine.groups.coordinates["dp"], config, step), optimizer, 1.0)
        found[text] = engines.full_parameters(engine)
    return found


def test_what_does_not_fit_is_refused_on_every_rank():
    for one, two, three, four in launch(refusals, 2, quiet=True):
        assert "1 micro-batches" in one and "micro_batches=2" in one
        assert "2 sequences" in two and "micro_batch=1" in two
        assert "8 tokens" in three and "16" in three
        assert "2 ranks" in four and "launch that many" in four


def test_bf16_with_fp32_gradients_and_masters_is_the_same_under_every_stage_of_zero():
    whole_of, sharded, freed = launch(low_precision, 2, quiet=True)[0].values()
    for name, param in whole_of.items():
        assert param.dtype == torch.bfloat16
        torch.testing.assert_close(sharded[name], param, atol=2e-3, rtol=2e-2)
        # a step of BF16: shards end elsewhere, and with them the vectors of a CPU
        torch.testing.assert_close(freed[name], sharded[name], atol=1e-6, rtol=2**-7)
