"""Make the base model that speaks anew, from the documentation of installed packages: nothing is downloaded.

    python benchmarks/make_base.py course_lib/weights/speaks        15 minutes of one core (1,500 steps)

where the core has instructions for bfloat16; any other multiplies it some 18 times as slowly as float32 (measured with
AVX2), and trains in float32.

Text: English paragraphs of the docstrings of six packages and of Python's language reference, each once; of the
standard library only that reference, because lessons fine-tune on the rest. What it makes: weights in bfloat16 as
`transformers` reads them, the pairs of the tokenizer, and English that is held out. Other versions of the packages, or
another processor, make other files, as good ones.
"""

import argparse
import ast
import json
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from course_lib.checkpoint.export import config_for_transformers
from course_lib.config import ModelConfig, preset
from course_lib.model import build
from course_lib.training import loss_of
from course_lib.training.data import batch
from course_lib.training.text import MOST_TOKENS, bits_per_byte, speak
from course_lib.training.tokenizer import Tokenizer, learn_pairs, save_pairs
from course_lib.weights.base import HELD_OUT, PAIRS, WEIGHTS, load_base
from course_lib.weights.hf_weights import name_in_transformers, naming_of

PACKAGES = ("numpy", "torch", "matplotlib", "scipy", "networkx", "transformers")
HELD_OUT_FROM = "o"  # topics of the language reference from this letter on are held out
HELD_OUT_TOKENS = 32 * MOST_TOKENS + 1
WARM_UP_STEPS, CONSTANT_SHARE = 30, 0.3  # then the learning rates fall in a straight line
PLAIN = re.compile(r"(?:[A-Za-z0-9 .,;:!?'\"()`/_*=“”’]|(?<=\w)-(?=\w))+")  # no tables, no mark-up


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs that are English sentences, each as one line."""
    for part in re.split(r"\n\s*\n", text):
        line = " ".join(part.replace("``", "`").split())
        letters = sum(char.isalpha() or char == " " for char in line)
        is_sentence = len(line.split()) > 6 and line[0].isupper() and line[-1] in ".:!?"
        if is_sentence and letters > 0.91 * len(line) and PLAIN.fullmatch(line):
            yield line


def long_strings(source: str) -> Iterator[str]:
    """Docstrings, and the long strings from which C functions get theirs."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a template, or of another Python
        return
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 60:
            yield node.value


def prose(packages: Sequence[str]) -> tuple[str, str]:
    """The text to train on, its paragraphs shuffled, and the text that is held out."""
    from pydoc_data.topics import topics

    warnings.simplefilter("ignore")  # of escapes in other packages' strings
    held = [line for name in sorted(topics) if name >= HELD_OUT_FROM for line in paragraphs(topics[name])]
    texts = [topics[name] for name in sorted(topics) if name < HELD_OUT_FROM]
    for package in packages:
        root = Path(find_spec(package).submodule_search_locations[0])
        files = [file for file in sorted(root.rglob("*.py")) if not {"test", "tests", "testing"} & set(file.parts)]
        texts += [text for file in files for text in long_strings(file.read_text("utf8", "ignore"))]
    lines = list(dict.fromkeys(line for text in texts for line in paragraphs(text)))
    lines = [line for line in lines if line not in set(held)]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    return "\n\n".join(lines[i] for i in order), "\n\n".join(held) + "\n\n"


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms.

    Source   Jordan et al. 2024, kellerjordan.github.io/posts/muon
    """
    named = list(model.named_parameters())
    matrices = [param for name, param in named if "blocks" in name and param.dim() == 2]
    others = [param for name, param in named if "blocks" not in name or param.dim() < 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def share_of_rate(step: int, steps: int) -> float:
    """Which share of its learning rate a step has."""
    return min((step + 1) / WARM_UP_STEPS, (1 - step / steps) / (1 - CONSTANT_SHARE), 1)


def save(model: nn.Module, tokenizer: Tokenizer, held_text: str, folder: Path) -> None:
    """Weights in bfloat16, config, pairs and held-out text, in the files that `load_base` reads."""
    naming, named = naming_of(model.config), dict(model.named_parameters())
    tensors = {name_in_transformers(name, naming): param.detach().bfloat16() for name, param in named.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    described = json.dumps(config_for_transformers(model.config, torch.bfloat16), indent=1)
    (folder / "config.json").write_text(described + "\n", encoding="utf-8")
    save_pairs(tokenizer, folder / PAIRS)
    (folder / HELD_OUT).write_text(held_text, encoding="utf-8")


def make_base(folder: Path, config: ModelConfig, packages: Sequence[str], steps: int, rows: int = 32) -> float:
    """Train a model of that shape and save it; returns its bits per byte of the held-out English."""
    text, held_text = prose(packages)
    tokenizer = Tokenizer(learn_pairs(text, config.vocab_size))
    tokens_T, held_T = tokenizer.encode(text), tokenizer.encode(held_text)[:HELD_OUT_TOKENS]
    model = build(config)
    optimizers = optimizers_of(model)
    decays = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: share_of_rate(step, steps)) for one in optimizers]
    print(
        f"{len(text):,} characters, {len(tokens_T):,} tokens, {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    folder.mkdir(parents=True, exist_ok=True)
    start_s, has_bf16 = time.time(), torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16):
            loss = loss_of(model, *batch(tokens_T, step, rows, MOST_TOKENS))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, decay in zip(optimizers, decays, strict=True):
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            bits = bits_per_byte(model, held_T, tokenizer)
            minutes = (time.time() - start_s) / 60
            print(
                f"step {step + 1}, {minutes:.1f} min: loss {loss.item():.3f}, held out {bits:.3f} bits per byte",
                flush=True,
            )
            save(model, tokenizer, tokenizer.decode(held_T), folder)
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what is in it under the same names is overwritten")
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    torch.set_num_threads(1)  # faster than two for so small a model, and sums come out in the same order
    make_base(options.folder, preset("speaks"), PACKAGES, options.steps)
    print(speak(*load_base(options.folder), "The function returns"))


if __name__ == "__main__":
    main()
