"""English for a model with a tokenizer: what the model says, how well it knows a text, and texts to fine-tune it on.

Every Python has these texts, so nothing is downloaded.
"""

import ast
import codecs
import contextlib
import io
import math
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from course_lib.devices import rank_device
from course_lib.training.data import source_files
from course_lib.training.loop import loss_of
from course_lib.training.tokenizer import Tokenizer
from course_lib.validate import Count, Positive, Seed, Size, checked

MOST_TOKENS = 128  # that the model sees at once: the length of its rows in training
NUM_QUESTIONS = 1000


@checked
@torch.no_grad()
def speak(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: Count = 90,
    temperature: Positive = 0.8,
    seed: Seed = 0,
) -> str:
    """The prompt and `num_tokens` more tokens, each drawn from softmax(logits / temperature). No keys are cached.
    Raises   ValueError if the prompt is empty: the model needs a token to go on from
    """
    tokens_BS = tokenizer.encode(prompt)[None]
    if tokens_BS.numel() == 0:
        raise ValueError("prompt is ''; give at least one character, from which the model goes on")
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(num_tokens):
        logits_BV = model(tokens_BS[:, -MOST_TOKENS:].to(rank_device()))[:, -1].float().cpu()
        chosen_B1 = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
        tokens_BS = torch.cat([tokens_BS, chosen_B1], 1)
    return tokenizer.decode(tokens_BS[0])


@checked
@torch.no_grad()
def bits_per_byte(model: nn.Module, tokens_T: Tensor, tokenizer: Tokenizer, seq_len: Size = MOST_TOKENS) -> float:
    """Mean loss in bits for each byte of text, which models with different tokenizers share. What fills no row is left.
    Source   Gao et al. 2020 (arXiv:2101.00027), section 3.1
    Raises   ValueError if the text is shorter than one row
    """
    rows = (len(tokens_T) - 1) // seq_len
    if rows < 1:
        raise ValueError(f"the text has {len(tokens_T)} tokens; seq_len {seq_len} needs at least {seq_len + 1}")
    tokens_T = tokens_T[: rows * seq_len + 1].to(rank_device())
    x_BS, y_BS = tokens_T[:-1].view(rows, seq_len), tokens_T[1:].view(rows, seq_len)
    nats = loss_of(model, x_BS, y_BS).item() * y_BS.numel()
    return nats / math.log(2) / len(tokenizer.to_bytes(y_BS.flatten()))


def zen() -> str:
    """The Zen of Python by Tim Peters, its title and 19 lines: a paragraph each, as the base model writes."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").split("\n")
    return "".join(f"{line}\n\n" for line in lines if line)


@lru_cache(maxsize=2)
def questions(most: int = NUM_QUESTIONS) -> str:
    """What does each function of the standard library do? The first sentence of its docstring answers. A line each."""
    files = source_files(Path(sysconfig.get_paths()["stdlib"]))
    pairs, asked = {}, (pair for file in files for pair in _questions_of(file.read_bytes()))
    while len(pairs) < most and (pair := next(asked, None)):
        pairs[pair] = None
    return "".join(pairs)


def _questions_of(source: bytes):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
            answer = " ".join(doc.split("\n\n")[0].split())
            if answer[0].isupper() and answer.endswith(".") and 4 < len(answer.split()) < 30:
                yield f"Q: What does {node.name} do? A: {answer}\n\n"
