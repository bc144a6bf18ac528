"""A file that a docstring, a comment or a document names is there."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from test_project import files

from course_lib.authoring import ROOT

pytestmark = pytest.mark.launches  # git lists the files

NAMED = re.compile(r"(?<![\w/.*<{}\-])[\w./-]*\w\.(?:py|ipynb|md)\b(?!\.\w)")
PLACEHOLDER = re.compile(r"NN|NAME")
# Files of other programs, whose names stand where the course says what it has from them; and what the reader writes.
FOREIGN = (
    *("05-answers.md", "jupyterhub_config.py"),
    *("train.py", "lab05.md", "docs/performance.md", "parallelize_llama.py", "config/job_config.py"),
    *("config/parallelism_config.py", "parallelism_config.py", "models_config.py", "src/nanotron/helpers.py"),
    *("training/arguments.py", "transformer_config.py", "theoretical_memory_usage.py"),
    *("commands/launch.py", "utils/dataclasses.py", "distributed/parallel_dims.py", "pipeline_parallel.py"),
    *("_fsdp_param_group.py", "_fsdp_state.py", "arguments.py", "fusions/fused_bias_swiglu.py", "helpers.py"),
    *("models/llama.py", "modules/loss/cross_entropy_loss.py", "optim/gradient_accumulator.py", "optim/zero.py"),
    *("parallel/data_parallel/utils.py", "parallel/tensor_parallel/functional.py", "pytorch/module/linear.py"),
    *("runtime/bf16_optimizer.py", "runtime/config.py", "runtime/pipe/engine.py", "tensor_parallel/layers.py"),
    "runtime/sequence_parallel/ulysses_sp.py",
)


def texts(path: Path) -> list[str]:
    """The prose of a file: a Python file's docstrings and comments, of a document everything."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [source]
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, nodes)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return docstrings + [token.string for token in tokens if token.type == tokenize.COMMENT]


def missing(text: str, beside: Path, tracked: list[str]) -> list[str]:
    """The names in a text that end no path of the repository, and belong to nobody else."""
    found = []
    for name in NAMED.findall(text):
        there = any(f"/{file}".endswith(f"/{name}") for file in tracked) or (beside / name).exists()
        foreign = any(name == known or name.endswith(f"/{known}") for known in FOREIGN)
        if not (there or foreign or PLACEHOLDER.search(name)):
            found.append(name)
    return found


def documents() -> list[str]:
    return [name for name in files() if name.endswith((".py", ".md")) or name == ".ci/run"]


def test_every_file_that_a_docstring_or_a_document_names_is_there():
    tracked = files()
    gone = {
        f"{name}: {lost}"
        for name in documents()
        for text in texts(ROOT / name)
        for lost in missing(text, (ROOT / name).parent, tracked)
    }
    assert sorted(gone) == []


def test_a_name_of_a_file_that_is_gone_is_found():
    text = "The words are those of no_such_file.py; see README.md, NN_name.ipynb and docs/NO_SUCH_PAGE.md. Then go on."
    assert missing(text, ROOT, files()) == ["no_such_file.py", "docs/NO_SUCH_PAGE.md"]


def test_each_file_of_another_program_is_named_somewhere():
    everything = "\n".join(
        (ROOT / name).read_text(encoding="utf-8") for name in documents() if name != Path(__file__).name
    )
    assert [name for name in FOREIGN if name not in everything] == []
