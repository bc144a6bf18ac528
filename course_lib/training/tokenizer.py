"""Byte-pair encoding in its smallest form: a text as tokens, and back without loss, whatever its bytes are.

Tokens 0 to 255 are the bytes. Each later token stands for a pair of earlier ones: the pair that was most frequent in
some text when the token was made. No token reaches from one word into the next.

Source   Sennrich et al. 2016 (arXiv:1508.07909); on bytes, as in GPT-2
"""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from course_lib.validate import Size, checked

NUM_BYTES = 256
# Words, numbers and signs, each with the space before it, or white space: every byte is in one of them.
WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+")


class Tokenizer:
    """Text <-> tokens, from the pairs that were merged, first to last. Without pairs a token is a byte.
    Raises   ValueError unless each pair is of two tokens that come before it
    """

    def __init__(self, pairs: list[tuple[int, int]]):
        self.pairs = [tuple(pair) for pair in pairs]
        self.token_of = {pair: NUM_BYTES + i for i, pair in enumerate(self.pairs)}
        self.bytes_of = [bytes([i]) for i in range(NUM_BYTES)]
        self._words: dict[bytes, tuple[int, ...]] = {}
        for pair in self.pairs:
            known = range(len(self.bytes_of))
            if len(pair) != 2 or not all(type(token) is int and token in known for token in pair):
                raise ValueError(f"pair {pair} makes token {len(known)}; required: two tokens below {len(known)}")
            self.bytes_of.append(self.bytes_of[pair[0]] + self.bytes_of[pair[1]])

    @property
    def vocab_size(self) -> int:
        return len(self.bytes_of)

    def encode(self, text: str | bytes) -> Tensor:
        """The tokens of a text, on the CPU. Shapes -> tokens_T"""
        raw = text.encode() if isinstance(text, str) else text
        tokens = [token for word in WORD.findall(raw) for token in self._tokens_of(word)]
        return torch.tensor(tokens, dtype=torch.long, device="cpu")  # also on a rank whose new tensors are on a GPU

    def decode(self, tokens_T: Tensor) -> str:
        """The text of tokens; where they end within a character of several bytes, a replacement character."""
        return self.to_bytes(tokens_T).decode("utf8", "replace")

    def to_bytes(self, tokens_T: Tensor) -> bytes:
        """The bytes of tokens: exactly those that were encoded."""
        return b"".join(self.bytes_of[token] for token in tokens_T.tolist())

    def _tokens_of(self, word: bytes) -> tuple[int, ...]:
        """A word's bytes, merged pair by pair in the order in which the pairs were learned."""
        if word not in self._words:
            tokens = tuple(word)
            while new := min((self.token_of[pair] for pair in pairwise(tokens) if pair in self.token_of), default=0):
                tokens = merge(tokens, self.pairs[new - NUM_BYTES], new)
            self._words[word] = tokens
        return self._words[word]


def merge(tokens: tuple[int, ...], pair: tuple[int, int], new: int) -> tuple[int, ...]:
    """The tokens with `new` wherever the pair stood, from left to right."""
    merged, i = [], 0
    while i < len(tokens):
        is_pair = tokens[i : i + 2] == pair
        merged.append(new if is_pair else tokens[i])
        i += 1 + is_pair
    return tuple(merged)


@checked
def learn_pairs(text: str, vocab_size: Size, most_words: Size = 8000) -> list[tuple[int, int]]:
    """The pairs that byte-pair encoding merges, first to last, counted over the text's most frequent words.

    Fewer than asked for if the words are used up.
    """
    words = {tuple(word): n for word, n in Counter(WORD.findall(text.encode())).most_common(most_words)}
    pairs = []
    for new in range(NUM_BYTES, vocab_size):
        counts = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                counts[pair] += n
        if not counts:
            break
        pairs.append(max(counts, key=lambda pair: (counts[pair], pair)))
        words = {merge(word, pairs[-1], new): n for word, n in words.items()}
    return pairs


def save_pairs(tokenizer: Tokenizer, path: Path) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(pair) for pair in tokenizer.pairs) + "\n]\n", encoding="utf-8")


def load_pairs(path: Path) -> Tokenizer:
    """A tokenizer from its pairs as JSON.
    Raises   ValueError if the file is missing or damaged
    """
    try:
        return Tokenizer(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:  # ValueError: no text, no JSON, or no pairs
        raise ValueError(f"{path} cannot be read as pairs of tokens ({error}); install the course again") from error
