"""The trainer: one loss under any layout; killed and resumed, bit for bit what it would have been."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_lib import checkpoint, model
from course_lib.launch import launch
from course_lib.launch.rendezvous import Place
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.parallel import five_d
from course_lib.run import Run
from course_lib.train import Checkpoints, Logs, TrainPlan
from course_lib.train import trainer as train
from course_lib.train.options import layout_for, model_named
from course_lib.train.plan import learning_rate_of
from course_lib.training import data, loss_of
from course_lib.training.precision import clip_gradients

BATCH = 8
LLAMA = model_named("toy,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=2")
DROPOUT = "toy,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=4,family=gpt,dropout=0.2"
PLAN = TrainPlan(steps=6, seq_len=32, warmup=2, seed=3)
EVERYTHING = "dp=2,tp=2,zero_stage=1"


def by_one_process(plan: TrainPlan) -> list[float]:
    """Training as everybody knows it."""
    llama = model.build(LLAMA, plan.seed, torch.float64)
    optimizer = torch.optim.AdamW(llama.parameters(), betas=(0.9, 0.95), weight_decay=plan.weight_decay)
    losses, text_T = [], data.tokens()
    for step in range(plan.steps):
        loss = loss_of(llama, *data.batch(text_T, step, BATCH, plan.seq_len, seed=plan.seed))
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(llama.parameters(), plan.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate_of(plan, step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_each(runs: list[tuple]) -> list:
    """In one world, each rank: what `train` returns, or says is wrong, for each of some arguments."""
    return [attempt(*arguments) for arguments in runs]


def attempt(*arguments) -> train.RunRecord | str:
    try:
        return train.train(*arguments, say=train.ignore)
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"


def weights_in(folder: Path, config=LLAMA, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """The whole weights of the last checkpoint in a folder, read by one process."""

    def load() -> dict[str, torch.Tensor]:
        engine = five_d.build(config, Layout(), seed=99, dtype=dtype)
        checkpoint.load(engine, None, folder)
        return {name: param.detach() for name, param in five_d.named_parameters(engine).items()}

    return launch(load, 1)[0]


def equal_bits(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.long
def test_every_layout_sees_the_same_batches_and_has_the_losses_of_one_process():
    plan = replace(PLAN, steps=3, precision="fp64")
    texts = ["dp=4,zero_stage=3", "pp=2,dp=2,zero_stage=1", "cp=2,tp=2,sequence_parallel=true"]
    expected = torch.tensor(by_one_process(plan), dtype=torch.float64)
    alone = launch(by_each, 1, [(LLAMA, layout_for("dp=1,micro_batch=4", BATCH), plan)])
    mixed = (LLAMA, layout_for("dp=2,tp=2,zero_stage=2", BATCH), replace(plan, precision="bf16-master-fp32-grads"))
    ranks = launch(by_each, 4, [*[(LLAMA, layout_for(text, BATCH), plan) for text in texts], mixed])
    for text, record in zip(["dp=1", *texts], [*alone[0], *ranks[3][:-1]], strict=True):
        losses = torch.tensor(record.losses, dtype=torch.float64)
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10, msg=lambda why, text=text: f"{text}: {why}")
    assert [record.losses for record in ranks[0]] == [record.losses for record in ranks[3]]
    assert ranks[0][-1].losses == pytest.approx(expected.tolist(), rel=0.01) and ranks[0][-1].tokens_per_s > 0


@pytest.mark.long
def test_a_run_in_parts_is_bit_for_bit_the_run_in_one_on_four_ranks_with_dropout(tmp_path):
    config = model_named(DROPOUT)
    first, both = [Checkpoints(str(tmp_path / name), every=2) for name in ("parts", "one")]
    layout, background = layout_for(EVERYTHING, BATCH), replace(both, in_background=True)
    parts = [(config, layout, replace(PLAN, steps=steps), first) for steps in (3, 6, 6)]
    whole = (config, layout, PLAN, background)
    results = launch(by_each, 4, [*parts, whole])[0]
    assert [record.first_step for record in results] == [0, 3, 6, 0]
    assert results[0].losses + results[1].losses == results[3].losses
    assert equal_bits(weights_in(tmp_path / "parts", config), weights_in(tmp_path / "one", config))
    assert sorted(path.name for path in (tmp_path / "one").glob("step-*")) == ["step-00000004", "step-00000006"]


@pytest.mark.long
def test_a_run_goes_on_under_another_layout_with_the_same_losses(tmp_path):
    plan, kept = replace(PLAN, precision="fp64"), Checkpoints(str(tmp_path), every=3)
    texts = ["dp=2,tp=2,zero_stage=1", "pp=2,tp=2", "cp=2,dp=2,zero_stage=3"]
    runs = [(LLAMA, layout_for(text, BATCH), replace(plan, steps=2 * i + 2), kept) for i, text in enumerate(texts)]
    records = launch(by_each, 4, runs)[0]
    losses = [loss for record in records for loss in record.losses]
    assert losses == pytest.approx(by_one_process(plan), abs=1e-10)


@pytest.mark.long
def test_a_checkpoint_that_does_not_suit_the_run_is_refused_alike_on_every_rank(tmp_path):
    layout, kept = layout_for("dp=2", BATCH), Checkpoints(str(tmp_path), every=2)
    run = (LLAMA, layout, PLAN, kept)
    wrong = {
        (LLAMA, layout, replace(PLAN, seed=4), kept): "seed 3 (now 4)",
        (LLAMA, layout_for("dp=2", 16), PLAN, kept): "batch_size 8 (now 16)",
        (model_named("toy"), layout, PLAN, kept): "model.d_model 32 (now 64)",
        (LLAMA, layout, replace(PLAN, steps=4), kept): "has done 6 steps, more than steps (4)",
        (LLAMA, Layout(dp=4), PLAN, kept): "needs 4 ranks (dp 4), but there are 2; use",
    }
    results = launch(by_each, 2, [run, *wrong])
    for rank in range(2):
        for text, expected in zip(results[rank][1:], wrong.values(), strict=True):
            assert expected in text
    next(tmp_path.glob("step-00000006/*.distcp")).write_bytes(b"torn")
    (text,) = launch(by_each, 2, [run])[1]
    assert "torn" in text and "step-00000004" in text


def with_another_text(ranks: tuple[int, ...], run: tuple) -> train.RunRecord | str:
    """In a rank: the same run; on some ranks the text differs in its last byte, as another Python's would."""
    corpus = data.corpus
    text = corpus()
    if dist.get_rank() in ranks:
        data.corpus = lambda: text[:-1] + bytes([text[-1] ^ 1])
    try:
        return attempt(*run)
    finally:
        data.corpus = corpus


def texts_differ(folder: Path) -> tuple:
    """In each of two ranks: what runs say, refused or not, and what the first refused ones have left."""
    refused, left = [], []
    for text in ("dp=2", "pp=2"):
        run = (LLAMA, layout_for(text, BATCH), replace(PLAN, steps=2), Checkpoints(str(folder / text), every=1))
        refused.append(with_another_text((1,), run))
        left.append(checkpoint.latest(run[-1].folder))
    longer = (*run[:2], replace(PLAN, steps=4), run[3])
    return refused, left, [with_another_text(ranks, one) for ranks, one in (((), run), ((0, 1), longer), ((), longer))]


@pytest.mark.long
def test_a_rank_or_a_resumed_run_with_another_text_is_refused_before_its_first_step(tmp_path):
    for refused, left, (first, other_text, longer) in launch(texts_differ, 2, tmp_path):
        assert left == [None, None]
        for told in refused:
            assert told.startswith("Refused: rank 0 has text.sha256 ") and "(rank 1 " in told
        assert other_text.startswith("Refused: ")
        assert "text.sha256" in other_text and "use the same Python" in other_text
        assert (first.first_step, longer.first_step) == (0, 2)


def without_pickles(act: Callable, *arguments: object) -> object:
    """In a rank: call it where every pickle that is read is an error; what it returns, or the error's text."""

    def refuse(*arguments, **keywords):
        raise RuntimeError("a pickle was read")

    pickle.loads = pickle.load = pickle.Unpickler = distributed_c10d._unpickler = refuse
    try:
        return act(*arguments)
    except RuntimeError as error:
        return str(error)


@pytest.mark.long
def test_no_pickle_is_read_by_ranks_that_train_compare_save_and_load(tmp_path):
    experts = model_named("toy-moe")
    runs = []
    for layout in ("dp=2", "dp=2,zero_stage=3", "tp=2,sequence_parallel=true", "cp=2", "pp=2", "dp=2,ep=2"):
        config = experts if "ep" in layout else LLAMA
        kept = Checkpoints(str(tmp_path / layout), every=2, in_background=layout == "dp=2")
        plan = replace(PLAN, steps=2, compare_every=1)
        run = (config, layout_for(layout, BATCH), plan, kept, Logs(str(tmp_path / layout)))
        runs += [run, (*run[:2], replace(plan, steps=4), *run[3:])]
    for records in launch(without_pickles, 2, by_each, runs):
        assert [record.first_step for record in records] == [0, 2] * (len(runs) // 2), records
    gathered = launch(without_pickles, 2, lambda: dist.all_gather_object([None] * 2, "one that sends pickles"))
    assert list(gathered) == ["a pickle was read"] * 2


@pytest.mark.long
def test_a_second_run_in_a_folder_is_told_whose_it_is_and_the_first_goes_on(tmp_path):
    first = checkpoint.files.FileLock(tmp_path / checkpoint.files.LOCK)
    checkpoint.files.take(tmp_path, first, 0)
    (tmp_path / checkpoint.files.OWNER).read_text()
    run = (LLAMA, Layout(), PLAN, Checkpoints(str(tmp_path), every=2))
    (text,) = launch(by_each, 1, [run])[0]
    assert f"is in use by another run (process {os.getpid()} on " in text and "or give another folder" in text, text
    assert checkpoint.latest(tmp_path) is None
    first.release()  # as the system does when its process ends
    (done,) = launch(by_each, 1, [run])[0]
    assert checkpoint.latest(tmp_path).name == "step-00000006", done


def test_a_folder_that_cannot_be_written_or_is_too_full_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    run = (LLAMA, Layout(), PLAN, Checkpoints(str(tmp_path / "file" / "folder"), every=2))
    (text,) = launch(by_each, 1, [run])[0]
    assert text.startswith("Refused: the folder of checkpoints is ") and "cannot be written" in text
    lock = checkpoint.files.FileLock(tmp_path / checkpoint.files.LOCK)
    with pytest.raises(
        ValueError, match=r"takes 1,000,000,000.0 MB, 1 more must fit at once, and the disk of .* MB left"
    ):
        checkpoint.files.take(tmp_path, lock, 10**15)
    assert not lock.is_locked


def test_there_must_be_room_for_all_checkpoints_that_a_run_has_at_once(tmp_path, monkeypatch):
    """Two are kept, and a third is written before the oldest goes; what is there already is not needed again."""
    lock = checkpoint.files.FileLock(tmp_path / checkpoint.files.LOCK)
    monkeypatch.setattr(checkpoint.files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * 10**6))
    with pytest.raises(ValueError, match=r"a checkpoint takes 1.0 MB, 3 more must fit at once, .* has 2.0 MB left"):
        checkpoint.files.take(tmp_path, lock, 10**6, at_once=3)
    (tmp_path / "step-00000005").mkdir()
    checkpoint.files.take(tmp_path, lock, 10**6, at_once=3)
    lock.release()
    kept = Checkpoints(str(tmp_path), every=2, keep=2)
    assert [kept.most_at_once(steps) for steps in (1, 2, 3, 4, 60)] == [1, 1, 2, 2, 3]


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_step():
    (text,) = launch(by_each, 1, [(LLAMA, Layout(), replace(PLAN, learning_rate=1e35, warmup=0))])[0]
    assert text.startswith("FloatingPointError: the loss of step 2 is nan")


def on_a_machine_with(free: int, layout: Layout) -> str:
    """What training says where so many bytes are free; nothing may be built."""
    train.usable_memory = lambda: (free, free)
    five_d.build = lambda *arguments, **options: pytest.fail("built")
    return attempt(LLAMA, layout, PLAN)


def test_the_ranks_of_a_machine_must_fit_into_its_memory_together():
    layout = layout_for("dp=2,pp=2", BATCH)
    run = Run(LLAMA, layout, PLAN.seq_len, "fp32", device="cpu")
    needed = sum(budget.peak_bytes for budget in budgets(run)) * layout.dp
    for text in launch(on_a_machine_with, 4, needed - 1, layout):
        assert text.startswith("Refused: toy with sequences of 32 tokens takes ") and "for 4 ranks on" in text, text
        assert f"{needed / 1e9:,.2f} GB" in text and "GB are free there; choose" in text
    assert launch(train.check_memory, 4, LLAMA, layout, PLAN, quiet=True)[0] is None


def test_with_a_loss_in_chunks_the_trainer_has_the_same_losses_and_needs_less_memory():
    layout, plan = layout_for("dp=2", BATCH), replace(PLAN, steps=3, precision="fp64")
    chunked = replace(plan, loss_chunks=5)
    runs = [(LLAMA, layout, plan), (LLAMA, layout, chunked), (LLAMA, layout_for("tp=2", BATCH), chunked)]
    whole, *in_chunks = launch(by_each, 2, runs, quiet=True)[0]
    for one in in_chunks:
        assert one.losses == pytest.approx(whole.losses, rel=1e-12)
    config = replace(LLAMA, vocab_size=8192)
    peaks = [budgets(Run(config, layout, 256, loss_chunks=chunks))[0].peak_bytes for chunks in (1, 5)]
    assert peaks[1] < 0.9 * peaks[0]


@pytest.fixture
def lonely(monkeypatch):
    """No engine has started this process, and nothing has to be waited for."""
    for name in ("RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, "WAIT_FOR_RANK_0_S", 0.0)


def test_what_cannot_be_is_one_line_of_rank_0_and_exit_code_2(lonely, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # main says there who its ranks are
    for argv, text in [
        ("--layout dp=2,tp=2", "use torchrun --nproc-per-node 4, or torchrun --nnodes 2 --nproc-per-node 2"),
        ("--layout dp=2,zero_stage=9", "zero_stage (9)"),
        ("--model llama-9", "preset is 'llama-9'"),
        ("--backend smoke", "backend must be"),
    ]:
        for rank in (0, 1):
            place = Place("torchrun", rank, 3, rank, 3) if "dp=2,tp=2" in argv else Place()
            monkeypatch.setattr(train, "place_of", lambda environment, place=place: place)
            assert train.main(argv.split()) == 2
            out, err = capsys.readouterr()
            assert out == ""
            if place.rank:
                assert err == ""
            else:
                assert text in err and len(err.splitlines()) == 1
    assert not dist.is_initialized()
