"""Byte-pair encoding: any bytes come back, words are merged as by hand, and files that are damaged are named."""

import json

import pytest
import torch

from course_lib.training.tokenizer import NUM_BYTES, Tokenizer, learn_pairs, load_pairs, merge, save_pairs
from course_lib.weights.base import load_tokenizer

TEXT = "low low low lower lowest newest newest"


def test_the_pairs_of_a_small_text_are_those_found_by_hand():
    first, second = learn_pairs(TEXT, NUM_BYTES + 2)
    # "ow" and "lo" stand 5 times each, " l" 4 times; of equals the later pair of bytes is taken.
    assert first == tuple(b"ow") and second == (ord("l"), NUM_BYTES)
    tokens = Tokenizer([first, second]).encode("low lower")
    assert tokens.tolist() == [257, ord(" "), 257, ord("e"), ord("r")]


def test_no_more_pairs_are_learned_than_words_have():
    assert [len(learn_pairs("abc abc", size)) for size in (NUM_BYTES, NUM_BYTES + 1, 10_000)] == [0, 1, 3]


def test_a_pair_is_merged_from_left_to_right():
    assert merge((1, 1, 1, 2, 1, 1), (1, 1), 9) == (9, 1, 2, 9)


@pytest.mark.parametrize("name", ["bytes", "base"])
def test_any_bytes_come_back(name):
    tokenizer = Tokenizer([]) if name == "bytes" else load_tokenizer()
    noise = bytes(torch.randint(256, (5000,), generator=torch.Generator().manual_seed(0)).tolist())
    for raw in (b"", bytes(range(256)), b"  two  spaces\n\n\tand a tab ", "가나다 e\u0301 \U0001f600".encode(), noise):
        tokens = tokenizer.encode(raw)
        assert tokenizer.to_bytes(tokens) == raw
        assert tokens.dtype == torch.long and tokens.numel() <= len(raw)
        assert tokens.numel() == 0 or tokens.max() < tokenizer.vocab_size


def test_the_base_s_tokens_are_words_and_their_parts():
    tokenizer = load_tokenizer()
    assert tokenizer.vocab_size == 2048
    words = [tokenizer.decode(token) for token in tokenizer.encode("The gradient of the loss").split(1)]
    assert "".join(words) == "The gradient of the loss" and {"The", " gradient", " of", " the"} <= set(words)


def test_a_character_that_is_cut_is_replaced_and_its_bytes_stay():
    tokens = Tokenizer([]).encode("é")[:1]
    assert Tokenizer([]).decode(tokens) == "\ufffd" and Tokenizer([]).to_bytes(tokens) == "é".encode()[:1]


def test_pairs_are_saved_and_read(tmp_path):
    tokenizer = Tokenizer(learn_pairs(TEXT, 265))
    save_pairs(tokenizer, tmp_path / "pairs.json")
    assert load_pairs(tmp_path / "pairs.json").pairs == tokenizer.pairs


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("[[1, 2], [3", "delimiter"),
        ("[[1, 2], [3, 257]]", "pair .3, 257. makes token 257; required: two tokens below 257"),
        ("[[1, 2, 3]]", "required: two tokens"),
        ("[[-1, 2]]", "required: two tokens"),
        ("[[1.0, true]]", "required: two tokens"),
        ("[7]", "not iterable"),
        (json.dumps({"a": 1}), "required: two tokens"),
        ("7", "not iterable"),
    ],
)
def test_a_damaged_file_of_pairs_is_named_with_what_to_do(tmp_path, text, why):
    path = tmp_path / "pairs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"pairs.json cannot be read as pairs of tokens .*{why}.*install the course"):
        load_pairs(path)


def test_a_file_that_is_no_text_is_named_too(tmp_path):
    (tmp_path / "pairs.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read as pairs of tokens"):
        load_pairs(tmp_path / "pairs.json")
