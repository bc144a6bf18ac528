"""The corpus, the sampler that every number of ranks sees alike."""

import pytest
import torch

from course_lib.training import data
from course_lib.training.data import batch, corpus, micro_batches, tokens


def test_the_corpus_is_python_source_the_same_each_time():
    text = corpus(200_000)
    corpus.cache_clear()
    assert corpus(200_000) == text
    assert len(text) == 200_000
    assert text.startswith(corpus(1_000))
    assert b"\nimport " in text and b"    def " in text
    assert len(corpus(2_000_000)) == 2_000_000, "less text than the course trains on"


def test_no_file_of_the_corpus_is_a_test_or_made_by_the_installation():
    root = data.Path(data.sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in data.source_files(root)]
    assert names[0].startswith("__future__")
    assert "json/decoder.py" in names
    unwanted = {"test", "tests", "site-packages", "dist-packages", "idlelib"}
    assert not [name for name in names if unwanted & set(name.split("/")) or "_sysconfigdata" in name]


def test_tokens_are_bytes_and_held_out_text_is_apart():
    train, held_out = tokens(100_000), tokens(100_000, held_out=True)
    assert (len(train), len(held_out)) == (90_000, 10_000)
    assert bytes(torch.cat([train, held_out]).tolist()) == corpus(100_000)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
def test_ranks_together_see_the_rows_that_one_process_sees(dp_size):
    text = tokens(100_000)
    for index in (0, 1, 7):
        x_BS, y_BS = batch(text, index, 12, 20, seed=3)
        shares = [batch(text, index, 12, 20, rank, dp_size, seed=3) for rank in range(dp_size)]
        assert torch.equal(torch.cat([x for x, _ in shares]), x_BS)
        assert torch.equal(torch.cat([y for _, y in shares]), y_BS)
        for count in (1, 2, 5, 12):
            parts = [part for x, y in shares for part in micro_batches(x, y, min(count, len(x)))]
            assert torch.equal(torch.cat([x for x, _ in parts]), x_BS)


def test_targets_are_the_inputs_one_token_later():
    x_BS, y_BS = batch(torch.arange(1000), 0, 4, 10)
    assert torch.equal(y_BS, x_BS + 1)
    assert x_BS.is_contiguous() and y_BS.is_contiguous()


def test_steps_and_seeds_differ():
    text = tokens(100_000)
    first = batch(text, 0, 4, 32)[0]
    assert not torch.equal(first, batch(text, 1, 4, 32)[0])
    assert not torch.equal(first, batch(text, 0, 4, 32, seed=1)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batch(torch.arange(99), 0, 6, 8, 0, 4), r"batch_size \(6\) must be divisible by dp_size \(4\)"),
        (lambda: batch(torch.arange(99), 0, 8, 8, 4, 4), "dp_rank is 4; with dp_size 4 it must be from 0 to 3"),
        (lambda: batch(torch.arange(9), 0, 8, 9), "the text has 9 tokens; seq_len 9 needs at least 10"),
        (lambda: micro_batches(torch.ones(3, 2), torch.ones(3, 2), 4), "micro_batches is 4; the batch has 3 rows"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused_with_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_are_drawn_on_the_cpu_also_where_a_gpu_is_the_default_device():
    """Ranks that use NCCL make new tensors on their GPU; the generator of the rows is the CPU's."""
    text_T = torch.arange(500)
    want_BS, _ = batch(text_T, 3, 4, 8)
    with torch.device("meta"):  # stands for a GPU
        got_BS, _ = batch(text_T, 3, 4, 8)
    assert torch.equal(got_BS, want_BS)
