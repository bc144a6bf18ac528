"""PyTorch's pipeline schedules: gradients against one process, schedule by schedule; bytes; what is refused."""

import dataclasses
import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from course_lib import model, schedules, training
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.native import pipeline as native

pytestmark = pytest.mark.exhaustive  # the lessons hold PyTorch's own against one process as well

LLAMA = ModelConfig("llama", 9, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=32, max_seq_len=16)
GPT = dataclasses.replace(LLAMA, name="gpt", family="gpt", num_kv_heads=4)
TIED = dataclasses.replace(LLAMA, tied=True)
B, S = 2, 6
CASES = {  # on pp ranks: (config, schedule, v, micro-batches)
    2: [(TIED, name, 1, 4) for name in native.SCHEDULES]
    + [(LLAMA, "afab", 1, 1), (LLAMA, "1f1b", 1, 6), (LLAMA, "interleaved", 2, 1), (LLAMA, "interleaved_zb", 2, 4)]
    + [(GPT, "interleaved_zb", 2, 6), (GPT, "zbv", 1, 3)],
    4: [(TIED, "afab", 1, 2), (TIED, "1f1b", 1, 5), (GPT, "1f1b", 1, 4), (LLAMA, "interleaved", 2, 4)]
    + [
        (TIED, "interleaved_zb", 1, 4),
        (LLAMA, "interleaved_zb", 2, 8),
        (TIED, "zbv", 1, 2),
        (TIED, "dualpipe_v", 1, 8),
    ],
}
LISTED = ("afab", "interleaved_zb", "zbv", "dualpipe_v")
ORDERS = {  # on pp ranks: (schedule, v, micro-batches)
    2: [(name, 1, 4) for name in LISTED] + [("interleaved", 2, 4), ("interleaved", 4, 6)],
    4: [(name, 1, 8) for name in LISTED] + [("interleaved", 2, 8)],
}


def micro_batches(count, rows=B):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(LLAMA.vocab_size, (2, rows, S), generator=generator).unbind(0) for _ in range(count)]


@functools.cache
def one_process(config, count):
    """Gradients by name, and the loss."""
    whole = model.build(config, dtype=torch.float64)
    x_BS, y_BS = (torch.cat(tensors) for tensors in zip(*micro_batches(count), strict=True))
    loss = training.loss_of(whole, x_BS, y_BS)
    loss.backward()
    return {name: param.grad for name, param in whole.named_parameters()}, loss.detach()


def measure(case):
    """Two steps on one engine: the first opens connections, the second is metered."""
    config, schedule, v, count = case
    batches = micro_batches(count)
    engine = native.build(model.build(config, dtype=torch.float64), dist.group.WORLD, schedule, v)
    native.accumulate_gradients(engine, batches)
    engine.zero_grad()
    with ByteMeter() as meter:
        loss = native.accumulate_gradients(engine, batches)
    grads, expected = one_process(config, count)
    ours = native.full_gradients(engine)
    same_names = ours.keys() == grads.keys() == native.full_parameters(engine).keys()
    return {
        "apart": max((ours[name] - grad).abs().max().item() for name, grad in grads.items()) if same_names else 1.0,
        "loss": abs(loss - expected).item(),
        "bytes": meter.by_collective,
        "all reduced": [record.payload_bytes for record in meter.records if record.collective == "all_reduce"],
    }


def clipped_steps(config):
    """Largest difference from one process after two steps; the sum of squares is that of the whole model."""
    engine = native.build(model.build(config, dtype=torch.float64), dist.group.WORLD)
    whole = model.build(config, dtype=torch.float64)
    ours = native.make_optimizer(engine, lr=0.01)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(2):
        native.step(engine, micro_batches(4), ours, clip_norm=0.1)
        for x_BS, y_BS in micro_batches(4):
            (training.loss_of(whole, x_BS, y_BS) / 4).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        theirs.step()
        theirs.zero_grad()
    params = native.full_parameters(engine)
    return max((params[name] - param).abs().max().item() for name, param in whole.named_parameters())


def orders():
    """PyTorch's order of work, by schedule, v and micro-batches."""
    size, found = dist.get_world_size(), {}
    for name, v, count in ORDERS[size]:
        engine = native.build(model.build(LLAMA, device="meta"), dist.group.WORLD, name, v)
        engine.device = torch.device("cpu")
        found[name, v, count] = native.order_of(engine, count)
    return found


def on_ranks(cases):
    return [measure(case) for case in cases] + [orders(), clipped_steps(TIED)]


@pytest.fixture(scope="module")
def ranks():
    return {size: launch(on_ranks, size, cases, quiet=True) for size, cases in CASES.items()}


@pytest.mark.parametrize("size", CASES)
def test_loss_and_gradients_equal_one_process_schedule_by_schedule(ranks, size):
    for of_rank in ranks[size]:
        for case, found in zip(CASES[size], of_rank[:-2], strict=True):
            assert found["apart"] < 1e-12 and found["loss"] < 1e-12, (case, found)


@pytest.mark.parametrize("size", CASES)
def test_the_order_of_work_is_the_courses_instruction_by_instruction(ranks, size):
    for (name, v, count), order in ranks[size][0][-2].items():
        course = "zb_h1" if name == "interleaved_zb" else name
        assert order == str(schedules.make(course, size, count, v)), name


@pytest.mark.parametrize("size", CASES)
def test_clipped_steps_equal_one_process_and_tied_copies_count_once(ranks, size):
    assert max(of_rank[-1] for of_rank in ranks[size]) < 1e-9


def boundaries(schedule, v, size, rank):
    """How many of this rank's stages have a next stage, and a stage before, on another rank."""
    owners = native.ranks_of_stages(schedule, size, v)
    pairs = [pair for pair in itertools.pairwise(owners) if pair[0] != pair[1]]
    return sum(left == rank for left, _ in pairs) + sum(right == rank for _, right in pairs)


@pytest.mark.parametrize("size", CASES)
def test_activations_and_their_gradients_cross_each_boundary_once_a_micro_batch(ranks, size):
    for rank, of_rank in enumerate(ranks[size]):
        for (config, schedule, v, count), found in zip(CASES[size], of_rank[:-2], strict=True):
            message = B * S * config.d_model * 8
            assert found["bytes"].get("send", 0) == boundaries(schedule, v, size, rank) * count * message
            owners = native.ranks_of_stages(schedule, size, v)
            has_copy = config.tied and owners[0] != owners[-1] and rank in (owners[0], owners[-1])
            embedding = [config.vocab_size * config.d_model * 8] if has_copy else []
            assert found["all reduced"] == [*embedding, 8]


REFUSED = {
    "schedule is 'gpipe'; choose from afab, 1f1b": (LLAMA, 2, "gpipe", 1),
    "v is 2; zbv takes no v": (LLAMA, 2, "zbv", 2),
    "v is 0; interleaved takes 1 or more": (LLAMA, 2, "interleaved", 0),
    "num_stages (12) must not exceed num_layers (9)": (LLAMA, 4, "interleaved", 3),
    "family is 'xlmr'": (dataclasses.replace(GPT, family="xlmr"), 2, "1f1b", 1),
}
TOO_FEW = {
    "micro-batches are 3, but 1f1b on 4 ranks needs 4": ("1f1b", 4, [B] * 3),
    "micro-batches are 7, but dualpipe_v on 4 ranks needs 8": ("dualpipe_v", 4, [B] * 7),
    "micro-batches are 5; interleaved on 2 ranks does 2 rounds of equally many: bring a multiple of 2, 4 or 6": (
        "interleaved",
        2,
        [B] * 5,
    ),
    "micro-batches have shapes [(1, 6), (2, 6)]": ("afab", 2, [1, 2]),
    "there is no micro-batch": ("afab", 2, []),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_built_is_refused(message):
    with pytest.raises(ValueError) as error:
        native.check_pipeline(*REFUSED[message])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("message", TOO_FEW)
def test_micro_batches_that_a_schedule_cannot_take_are_refused(message):
    schedule, size, rows = TOO_FEW[message]
    with pytest.raises(ValueError) as error:
        native.check_micro_batches(schedule, size, [micro_batches(1, each)[0] for each in rows])
    assert str(error.value).startswith(message)
