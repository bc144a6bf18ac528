"""Layouts: what can be is accepted, what cannot is refused with its numbers, and the advice given leads somewhere."""

import json
import random
import re
from dataclasses import replace
from functools import cache

import pytest

from course_lib.config import ModelConfig, preset
from course_lib.layout import AXES, DEFAULTS, Layout
from course_lib.schedules import make as make_schedule

TOY = preset("toy")
TIED = replace(TOY, name="tied", num_layers=6, num_heads=12, head_dim=8, tied=True)
MODELS = [
    TOY,
    TIED,
    replace(TOY, name="narrow", d_ff=5),
    ModelConfig("gpt", 3, 32, 4, 4, 64, 256, 64, family="gpt", dropout=0.1),
    preset("toy-moe"),
    preset("deepseek-v3"),
    preset("xlm-r-base"),
]
SCHEDULES = ("naive", "afab", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
WORDS = {
    "schedule": SCHEDULES,
    "recompute": ("none", "selective", "full"),
    "cp_method": ("ring", "all_gather", "ulysses"),
    "cp_sharding": ("contiguous", "zigzag", "striped"),
    "expert_method": ("plain", "once_per_rank"),
}
SIZES = ("dp", "cp", "tp", "pp", "ep", "v", "micro_batch", "micro_batches")
SWITCHES = {"sequence_parallel": (False, True), "regather": (False,)}
NO_ADVICE = ("learned positions", "xlmr family")  # no layout fixes these


# --- an oracle of its own: what is wrong with these values, each fault with the words that a message about it must have


def faults_of(values: dict, config: ModelConfig | None = None, seq_len: int = 0) -> list[tuple]:
    given = DEFAULTS | values
    wrong = [(name, repr(given[name])) for name in SIZES if type(given[name]) is not int or given[name] < 1]
    wrong += [(name, repr(given[name])) for name, words in WORDS.items() if given[name] not in words]
    wrong += [("zero_stage", given["zero_stage"])] * (given["zero_stage"] not in range(4))
    whole = type(given["expert_tp"]) is int or given["expert_tp"] is None
    wrong += [("expert_tp", repr(given["expert_tp"]))] * (not whole or given["expert_tp"] == 0)
    wrong += [("order",)] * (set(given["order"]) != set(AXES) or len(given["order"]) != 4)
    if wrong:
        return wrong  # the rest cannot be asked
    faults = faults_of_layout(given) + (faults_of_model(given, config, seq_len) if config else [])
    return [fault for is_fault, fault in faults if is_fault]


def stages_of(given: dict) -> int:
    return {"interleaved": given["v"], "zbv": 2, "dualpipe_v": 2}.get(given["schedule"], 1)


def folds(given: dict) -> bool:
    over_data = given["expert_tp"] is None and given["ep"] <= given["dp"] * given["cp"]
    return given["tp"] > 1 and not over_data and given["expert_tp"] in (None, 1)


def faults_of_layout(given: dict) -> list[tuple]:
    dp, cp, tp, pp, ep, v, _, micro_batches = (given[name] for name in SIZES)
    zero_stage, schedule, layers = given["zero_stage"], given["schedule"], given["layers_of_stage"]
    split = schedule.startswith("z") or schedule == "dualpipe_v"
    experts_over, expert_tp = dp * cp * (tp if folds(given) else 1), given["expert_tp"]
    whole_loops = schedule != "interleaved" or v == 1 or micro_batches in range(pp, micro_batches + 1, pp)
    return [
        (expert_tp not in (None, 1, tp), ("expert_tp", expert_tp, tp)),
        (experts_over % ep, (ep, experts_over)),
        (folds(given) and not given["sequence_parallel"], ("sequence_parallel", tp)),
        (given["sequence_parallel"] and tp == 1, ("sequence_parallel", "tp", 1)),
        (given["regather"] and not (given["sequence_parallel"] and tp > 1), ("regather", "sequence_parallel", tp)),
        (v not in (1, stages_of(given)), (schedule, v)),
        (not whole_loops, (micro_batches, pp)),
        (schedule == "dualpipe_v" and micro_batches < 2 * pp, (micro_batches, 2 * pp)),
        (split and zero_stage > 1, (schedule, zero_stage)),
        (layers is not None and min(layers) < 1, ("layers_of_stage",)),
        (layers is not None and len(layers) != pp * stages_of(given), (len(layers or ()), pp * stages_of(given))),
    ]


def faults_of_model(given: dict, config: ModelConfig, seq_len: int) -> list[tuple]:
    cp, tp, pp, ep, each, layers = *(given[name] for name in SIZES[1:5]), stages_of(given), given["layers_of_stage"]
    heads, kv_heads = config.num_heads // tp, max(1, config.num_kv_heads // tp)
    ulysses = cp > 1 and given["cp_method"] == "ulysses" and (heads % cp or kv_heads % cp)
    chunks = cp if cp == 1 or given["cp_sharding"] != "zigzag" else 2 * cp
    widths = [config.d_ff, config.vocab_size, *([config.moe.d_expert] if config.moe and not folds(given) else [])]
    num_experts = config.moe.num_experts if config.moe else 1
    tied_twice = (
        config.tied and given["zero_stage"] > 0 and (given["schedule"] in ("zbv", "dualpipe_v") or pp == 1 < each)
    )
    return [
        (config.family == "xlmr", ("xlmr",)),
        (not heads_divide(config, tp), (tp, "tp")),
        (any(len(range(0, width, -(-width // tp))) < tp for width in widths), (tp, "none")),
        (ulysses, ("Ulysses", cp)),
        (config.moe is None and ep > 1, ("experts", ep)),
        (config.moe and num_experts % ep, (num_experts, ep)),
        (each > config.num_layers, (each, config.num_layers)),
        (pp * each > config.num_layers >= each, (pp * each, config.num_layers)),
        (layers is not None and sum(layers) != config.num_layers, ("layers", config.num_layers)),
        (tied_twice, (given["schedule"], given["zero_stage"])),
        (seq_len % chunks, (seq_len, chunks)),
        (config.moe and folds(given) and seq_len // cp % tp, (seq_len, cp, tp)),
        (config.family == "gpt" and seq_len > config.max_seq_len, (seq_len, config.max_seq_len)),
    ]


def heads_divide(config: ModelConfig, tp: int) -> bool:
    """By going through them: each rank whole query heads, and of keys as many as any other, its own or shared ones."""
    if config.num_heads % tp:
        return False
    each, served = config.num_heads // tp, config.num_heads // config.num_kv_heads
    keys = [{query // served for query in range(rank * each, (rank + 1) * each)} for rank in range(tp)]
    return all(len(one) == len(keys[0]) and (one == other or not one & other) for one in keys for other in keys)


# --- random layouts


def draw(rng: random.Random) -> tuple[dict, ModelConfig, int]:
    """Any values, few of which are possible."""
    values = {name: rng.choice([1, 1, 2, 2, 3, 4, 5, 6, 8, 16]) for name in SIZES if rng.random() < 0.6}
    values |= {name: rng.choice(words) for name, words in WORDS.items() if rng.random() < 0.4}
    values |= {"zero_stage": rng.randrange(4)} if rng.random() < 0.5 else {}
    values |= {"sequence_parallel": True} if rng.random() < 0.2 else {}
    values |= {"regather": True} if rng.random() < 0.1 else {}
    values |= {"expert_tp": rng.choice([None, 1, 2, 4])} if rng.random() < 0.2 else {}
    values |= {"order": tuple(rng.sample(AXES, 4))} if rng.random() < 0.2 else {}
    if rng.random() < 0.1:
        values["layers_of_stage"] = tuple(rng.choices([0, 1, 2, 3], k=rng.choice([1, 2, 4])))
    return values, rng.choice(MODELS), rng.choice([16, 32, 48, 60, 64, 65, 128])


def draw_possible(rng: random.Random) -> tuple[dict, ModelConfig, int]:
    while faults_of(*(drawn := draw(rng))):
        pass
    return drawn


def mutate(rng: random.Random, values: dict) -> dict:
    """One field of a possible layout, changed to anything."""
    name = rng.choice(
        [*SIZES, *SIZES, *WORDS, "zero_stage", "sequence_parallel", "regather", "expert_tp", "order", "layers_of_stage"]
    )
    if name in SIZES:
        value = rng.choice([0, -1, 2, 3, 4, 5, 7, 9, 12, 24, 100, 1000, 2.5, "2", None, True])
    elif name in WORDS:
        value = rng.choice([*WORDS[name], "", "fast", WORDS[name][0].upper()])
    elif name == "zero_stage":
        value = rng.choice([-1, 1, 2, 3, 4, 10])
    elif name in ("sequence_parallel", "regather"):
        value = True
    elif name == "expert_tp":
        value = rng.choice([None, 0, 1, 2, 3, 8, "1", True])
    elif name == "order":
        value = tuple(rng.choices([*AXES, "ep"], k=rng.choice([3, 4, 5])))
    else:
        value = tuple(rng.choices([-1, 0, 1, 2, 3], k=rng.choice([1, 2, 3, 4])))
    return values | {name: value}


@cache
def invalid_layouts(count: int) -> list[tuple[dict, ModelConfig, int, list[tuple]]]:
    rng, found = random.Random(5), []
    while len(found) < count:
        values, config, seq_len = draw_possible(rng) if len(found) % 2 else draw(rng)
        if len(found) % 2:
            values = mutate(rng, values)
        if faults := faults_of(values, config, seq_len):
            found.append((values, config, seq_len, faults))
    return found


def message_about(values: dict, config: ModelConfig, seq_len: int) -> str | None:
    """What is said against them, None if they are accepted."""
    try:
        Layout(**values).check_model(config, seq_len)
    except ValueError as error:
        return str(error)
    return None


def advice_in(message: str) -> list[tuple[str, object]]:
    """The changes that a message names as nearest: "nearest: ep=2 or ep=4"."""
    named = message.partition("; nearest: ")[2]
    return [
        (name, value_of(name, text))
        for name, _, text in (change.partition("=") for change in named.split(" or ") if named)
    ]


def value_of(name: str, text: str) -> object:
    if name in ("layers_of_stage", "order"):
        return None if text == "none" else tuple(int(part) if part.isdigit() else part for part in text.split("-"))
    return int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)


def has(message: str, word: object) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(str(word))}(?!\w)", message) is not None


@pytest.fixture
def nothing_starts(monkeypatch):
    """Any process and any process group fails the test: an AssertionError is no ValueError."""

    def start(*args, **kwargs):
        raise AssertionError("something was started")

    for target in (
        "course_lib.launch.launch", "os.fork", "os.posix_spawn", "subprocess.Popen.__init__",
        "multiprocessing.process.BaseProcess.start", "torch.distributed.init_process_group",
        "torch.distributed.new_group", "threading.Thread.start",
    ):  # fmt: skip
        monkeypatch.setattr(target, start, raising=False)


@pytest.mark.slow
def test_1000_random_invalid_layouts_are_refused_with_their_numbers_before_anything_starts(nothing_starts):
    for values, config, seq_len, faults in invalid_layouts(1000):
        message = message_about(values, config, seq_len)
        assert message is not None, (values, config.name, seq_len, faults)
        assert any(all(has(message, word) for word in fault) for fault in faults), (message, faults)


@pytest.mark.slow
def test_the_nearest_values_of_a_message_are_possible_and_no_nearer_ones_are():
    checked = 0
    for values, config, seq_len, _ in invalid_layouts(1000):
        asked = () if faults_of(values) else (config, seq_len)  # a layout that no model could have does not know mine
        if len(faults_of(values, *asked)) > 1:
            continue
        for name, value in advice_in(message_about(values, config, seq_len)):
            checked += 1
            if name in SIZES and type(old := (DEFAULTS | values)[name]) is int:
                between = range(min(value, old) + 1, max(value, old))
                assert all(faults_of(values | {name: other}, *asked) for other in between), (values, name, value)
            if faults_of(values | {name: value}, *asked):  # then no value of this field alone fixes it
                others = WORDS.get(name) or {"zero_stage": range(4), **SWITCHES}.get(name, range(1, 1001))
                assert all(faults_of(values | {name: other}, *asked) for other in others), (values, name, value)
    assert checked > 300


@pytest.mark.slow
def test_who_follows_the_advice_of_messages_ends_with_a_possible_layout():
    for values, config, seq_len, _ in invalid_layouts(1000):
        messages = []
        while (message := message_about(values, config, seq_len)) and not any(word in message for word in NO_ADVICE):
            messages.append(message)
            assert len(messages) < 16 and advice_in(message), messages
            name, value = advice_in(message)[0]
            values = values | {name: value}


def test_random_possible_layouts_are_accepted_and_survive_text_and_json():
    rng = random.Random(6)
    for _ in range(300):
        values, config, seq_len = draw_possible(rng)
        layout = Layout(**values)
        layout.check_model(config, seq_len)
        assert Layout.parse(str(layout)) == layout
        assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
        assert all(getattr(layout, name) == value for name, value in values.items())


def test_the_text_of_a_layout_has_only_what_differs_from_one_process():
    layout = Layout.parse(" dp=2, tp=4 ,zero_stage=1,sequence_parallel=Yes,layers_of_stage=1-2,pp=2,order=pp-cp-dp-tp")
    assert str(layout) == "dp=2,tp=4,pp=2,zero_stage=1,sequence_parallel=true,layers_of_stage=1-2,order=pp-cp-dp-tp"
    assert (str(Layout()), Layout.parse("dp=1")) == ("dp=1", Layout())


def test_sizes_follow_from_the_axes():
    layout = Layout(dp=4, cp=2, tp=2, pp=2, ep=4, schedule="interleaved", v=3, micro_batch=5, micro_batches=6)
    assert (layout.world_size, layout.mesh.world_size, layout.mesh.sizes["cp"]) == (32, 32, 2)
    assert (layout.data_size, layout.expert_dp, layout.num_stages, layout.sequences_per_step) == (8, 2, 6, 120)
    assert Layout(pp=2, schedule="zbv").num_stages == 4
    replicas = Layout.parse("dp=4,cp=2,ep=2,zero_stage=3,dp_replicate=2")
    assert (replicas.shard_size, replicas.expert_shard_size, str(replicas)) == (
        4,
        2,
        "dp=4,cp=2,ep=2,zero_stage=3,dp_replicate=2",
    )
    assert Layout.from_dict(replicas.to_dict()) == replicas
    assert Layout(order=["tp", "pp", "dp", "cp"], tp=2, dp=2).mesh.ranks_along("tp", 0) == [0, 2]
    over_data, folded = Layout.parse("dp=4,tp=2,ep=4"), Layout.parse("dp=4,tp=2,ep=4,expert_tp=1,sequence_parallel=yes")
    assert (over_data.folded, over_data.expert_dp, folded.folded, folded.expert_dp) == (False, 1, True, 2)
    assert replace(over_data, ep=8, sequence_parallel=True).folded and not Layout(dp=2, ep=2, expert_tp=1).folded
    assert (folded.members(5)["ep"], folded.members(5)["expert_dp"]) == ([4, 5, 6, 7], [1, 5])


def test_layouts_of_published_runs_are_possible():
    llama = preset("llama-3.1-405b")  # Llama Team 2024 (arXiv:2407.21783), table 4, both lengths
    Layout(dp=128, tp=8, pp=16, zero_stage=2, micro_batches=16).check_model(llama, 8192)
    Layout(dp=8, cp=16, tp=8, pp=16, micro_batches=16).check_model(llama, 131_072)
    deepseek = preset("deepseek-v3")  # DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2: 2,048 GPUs
    Layout(dp=128, pp=16, ep=64, zero_stage=1, schedule="dualpipe_v", micro_batches=32).check_model(deepseek, 4096)
    # Megatron-Bridge 0.1.0, recipe of DeepSeek-V3: TP 2, PP 16, EP 64, expert-tensor-parallel size 1, 1,024 GPUs
    folded = Layout(dp=32, tp=2, pp=16, ep=64, zero_stage=1, sequence_parallel=True, micro_batches=32)
    folded.check_model(deepseek, 4096)
    assert (folded.world_size, folded.expert_dp, folded.members(1023)["ep"][0]) == (1024, 1, 960)
    Layout(tp=8, ep=8, sequence_parallel=True).check_model(preset("mixtral-8x7b"), 4096)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(dp=4, cp=2, ep=3), r"ep \(3\) must divide dp x cp = 4 x 2 = 8: .*; nearest: ep=2 or ep=4$"),
        (lambda: Layout(dp=2, tp=2, ep=8), r"divide dp x cp x tp = 2 x 1 x 2 = 4: .* of data and tp.*; nearest: ep=2$"),
        (lambda: Layout(dp=2, tp=2, ep=4, expert_tp=2), r"ep \(4\) must divide dp x cp = 2 x .*; nearest: ep=2$"),
        (
            lambda: Layout(dp=32, tp=2, pp=16, ep=64),
            r"ep \(64\) is more than dp x cp = 32 x 1 = 32, .*sequence_parallel \(false\).*; nearest: sequence_",
        ),
        (lambda: Layout(dp=2, tp=2, expert_tp=1), "expert_tp is 1, so whole .*; nearest: sequence_parallel=true"),
        (lambda: Layout(tp=4, expert_tp=2), r"expert_tp \(2\) must be 1 .*, or tp \(4\): .*; nearest: expert_tp=4"),
        (
            lambda: Layout(tp=8, ep=8, sequence_parallel=True).check_model(preset("toy-moe"), 60),
            r"seq_len \(60\) / cp \(1\) must be a multiple of tp \(8\): .*; nearest: ep=1",
        ),
        (
            lambda: Layout.parse("expert_tp=whole"),
            r"expert_tp \('whole'\) must be 1 \(whole experts, .*; nearest: expert_tp=1",
        ),
        (lambda: Layout(tp=3).check_model(TOY), r"num_heads \(8\) .* tp \(3\); .*; nearest: tp=2 or tp=4$"),
        (
            lambda: Layout(pp=4, schedule="interleaved", v=2, micro_batches=6),
            "nearest: micro_batches=4 or micro_batches=8",
        ),
        (
            lambda: Layout(pp=2, layers_of_stage=(-1, 5)),
            "one number, 0 or more, for each stage, like 3-5; nearest: .*=2-2",
        ),
        (
            lambda: Layout(pp=2, schedule="zbv", zero_stage=1).check_model(TIED),
            "two stages of one rank.*; nearest: zero_stage=0 or",
        ),
        (lambda: Layout(schedule="interleaved", v=2, zero_stage=1).check_model(TIED), r"interleaved with pp \(1\)"),
        (
            lambda: Layout(dp=4, dp_replicate=2),
            r"zero_stage \(0\) shards nothing; nearest: dp_replicate=1 or zero_stage=1",
        ),
        (lambda: Layout(dp=4, zero_stage=1, dp_replicate=3), r"= 4 x 1 / 1 = 4: .*; nearest: dp_replicate=2 or"),
        (lambda: Layout(expert_method="once_per_node"), "how many ranks share a node"),
        (lambda: Layout.parse(""), "'' in layout '' is not name=value; write dp=2"),
        (lambda: Layout.parse("dp=2,tp"), "'tp' in layout 'dp=2,tp' is not name=value"),
        (lambda: Layout.parse("zero_stge=1"), "a layout has no 'zero_stge'; did you mean zero_stage"),
        (lambda: Layout.parse("dp=two"), r"dp \('two'\) must be a whole number, 1 or more; nearest: dp=1"),
        (lambda: Layout.parse("dp=2,dp=2"), "dp stands twice"),
        (
            lambda: Layout.parse("sequence_parallel=maybe"),
            r"sequence_parallel \('maybe'\) is none of False, True; nearest: sequence_parallel=false",
        ),
        (
            lambda: Layout.parse("layers_of_stage=3+5"),
            "'3\\+5'.* one number, 0 or more, for each stage, like 3-5; nearest",
        ),
        (lambda: Layout.parse("order=pp-dp"), "order is .*; nearest: order=pp-dp-cp-tp"),
        (lambda: Layout.from_dict({"dp": 2, "gpus": 8}), "a layout has no 'gpus'; choose from dp, cp, tp"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_layout_places_stages_as_its_schedule_does(name):
    layout = Layout(pp=4, schedule=name, v=3 if name == "interleaved" else 1, micro_batches=8)
    made = make_schedule(name, 4, 8, layout.v)
    assert (layout.rank_of_stage, layout.splits_backward) == (made.rank_of_stage, made.splits_backward)
    assert [layout.stages_of_rank(rank) for rank in range(4)] == [made.stages_of_rank(rank) for rank in range(4)]
