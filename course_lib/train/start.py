"""What a run begins from: weights and text of its model.

A run of the preset `speaks` goes on from its trained weights. It reads questions and answers, made from docstrings of
the standard library, in the model's own tokens: it learns their form, and hardly what they say. Any other model, the
same with a change too, begins at random, and reads the library's source, a byte a token.
"""

from torch import Tensor

from course_lib.checkpoint.export import import_safetensors
from course_lib.config import ModelConfig, preset
from course_lib.parallel.five_d import FiveD
from course_lib.training import data
from course_lib.training.text import questions
from course_lib.weights.base import FOLDER, load_tokenizer


def is_trained(config: ModelConfig) -> bool:
    return config == preset("speaks")


def text_of(config: ModelConfig) -> bytes:
    """The text that a run of this model reads. RuntimeError if this Python came without its sources."""
    return questions().encode() if is_trained(config) else data.corpus()


def tokens_of(config: ModelConfig) -> Tensor:
    """This text in the model's tokens, without what is held out. Shapes -> tokens_T"""
    return load_tokenizer().encode(questions()) if is_trained(config) else data.tokens()


def load_trained(engine: FiveD) -> None:
    """Fill the engine with trained weights, if its model has some. All ranks call it; each reads its own pieces."""
    if is_trained(engine.config):
        import_safetensors(engine, FOLDER)
