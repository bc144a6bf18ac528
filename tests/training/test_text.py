"""What a model says and how well it knows a text, by hand; the texts to fine-tune on."""

import math

import pytest
import torch
from torch import nn

from course_lib.training.text import bits_per_byte, questions, speak, zen
from course_lib.training.tokenizer import Tokenizer


class NextByte(nn.Module):
    """After each byte comes the next one, with this logit above all others."""

    def __init__(self, logit):
        super().__init__()
        self.logit = logit

    def forward(self, tokens_BS):
        return self.logit * nn.functional.one_hot((tokens_BS + 1) % 256, 256).float()


BYTES = Tokenizer([])
ALPHABET = BYTES.encode("abcdefghijklmnopqrstuvwxyz")


def test_a_sure_model_says_what_it_learned_whatever_the_seed():
    assert {speak(NextByte(100.0), BYTES, "ab", 4, seed=seed) for seed in range(3)} == {"abcdef"}
    assert speak(NextByte(100.0), BYTES, "ab", 0) == "ab"


def test_the_seed_and_the_temperature_decide_what_an_unsure_model_says():
    said = [speak(NextByte(4.0), BYTES, "a", 20, temperature, seed) for temperature, seed in ((1, 0), (1, 0), (1, 1))]
    assert said[0] == said[1] != said[2]
    assert speak(NextByte(4.0), BYTES, "a", 20, temperature=0.1) == "abcdefghijklmnopqrstu"


def test_nothing_cannot_be_gone_on_from():
    with pytest.raises(ValueError, match="prompt is ''; give at least one character"):
        speak(NextByte(1.0), BYTES, "")


def test_a_model_that_guesses_needs_eight_bits_per_byte_and_a_sure_one_none():
    assert bits_per_byte(NextByte(0.0), ALPHABET, BYTES, 8) == pytest.approx(8)
    assert bits_per_byte(NextByte(100.0), ALPHABET, BYTES, 8) == pytest.approx(0, abs=1e-6)
    by_hand = math.log2(1 + 255 / math.exp(4.0))
    assert bits_per_byte(NextByte(4.0), ALPHABET, BYTES, 5) == pytest.approx(by_hand, rel=1e-5)


def test_bits_per_byte_count_bytes_not_tokens():
    class Guess(nn.Module):
        def forward(self, tokens_BS):
            return torch.zeros(*tokens_BS.shape, 257)

    pairs = Tokenizer([tuple(b"ab")])
    tokens = pairs.encode("abababab" + "ab")  # one word of five tokens of two bytes
    assert len(tokens) == 5
    assert bits_per_byte(Guess(), tokens, pairs, 4) == pytest.approx(math.log2(257) / 2)


def test_a_text_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match="the text has 26 tokens; seq_len 26 needs at least 27"):
        bits_per_byte(NextByte(0.0), ALPHABET, BYTES, 26)


def test_the_zen_has_a_title_and_nineteen_lines_each_a_paragraph(capsys):
    lines = zen().split("\n\n")
    assert lines[0].startswith("The Zen of Python") and lines[1] == "Beautiful is better than ugly."
    assert len(lines) == 21 and lines[-1] == "" and all(lines[:-1])
    assert capsys.readouterr().out == ""


def test_questions_are_of_the_standard_library_each_once():
    pairs = questions(50).split("\n\n")[:-1]
    assert len(pairs) == 50 == len(set(pairs))
    for pair in pairs:
        question, answer = pair.split(" A: ", 1)
        assert question.startswith("Q: What does ") and question.endswith(" do?")
        assert answer[0].isupper() and answer[-1] == "." and "\n" not in answer
