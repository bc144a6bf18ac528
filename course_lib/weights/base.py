"""The course's own base model: a Llama of 1.87 million parameters that was trained on English, and speaks.

The folder `speaks` has its weights in the files of `transformers`, the pairs of its tokenizer, and English that it
never saw. README.md in it says how it was made, from which documents, and under which licences they are.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from course_lib.config import preset
from course_lib.training.tokenizer import Tokenizer, load_pairs
from course_lib.validate import PACKAGE_ALONE
from course_lib.weights.loading import load_whole
from course_lib.weights.tensor_files import SINGLE

FOLDER = Path(__file__).with_name("speaks")
WEIGHTS, PAIRS, HELD_OUT = SINGLE, "pairs.json", "held_out.txt"  # files of the folder


def load_base(folder: str | Path = FOLDER) -> tuple[nn.Module, Tokenizer]:
    """The model in FP32, and its tokenizer. Another folder may have weights that were fine-tuned and exported.
    Raises   ValueError if a file is missing, damaged, a pickle, or of another model
    """
    if Path(folder) == FOLDER and not (FOLDER / WEIGHTS).exists():
        raise ValueError(f"the weights of the base model are not here: {PACKAGE_ALONE}")
    return load_whole(folder, preset("speaks"), torch.float32), load_tokenizer(folder)


def load_tokenizer(folder: str | Path = FOLDER) -> Tokenizer:
    """The folder's tokenizer; the base's where it has none: fine-tuning changes no tokenizer."""
    pairs = Path(folder) / PAIRS
    return load_pairs(pairs if pairs.exists() else FOLDER / PAIRS)


def held_out_english(tokenizer: Tokenizer) -> Tensor:
    """English that the base model never saw, of the same kind: 32 rows of 128 tokens. Shapes -> tokens_T"""
    return tokenizer.encode((FOLDER / HELD_OUT).read_text(encoding="utf-8"))
