"""Real text with no download: the source code of Python's own standard library, one token a byte.

The text is the same on every run of one Python installation, and nearly so across installations of one version. `batch`
is the only sampler: step `index` names the same sequences however many ranks share them.
"""

import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from course_lib.devices import rank_device
from course_lib.validate import Index, Seed, Size, checked, whole

Bytes = Annotated[int, whole]
# Left out: what some installations lack or write themselves.
LEFT_OUT = {
    "antigravity", "distutils", "ensurepip", "idlelib", "lib2to3", "test", "this", "tkinter", "turtledemo", "venv",
}  # fmt: skip


@lru_cache(maxsize=4)
def corpus(max_bytes: Bytes = 2_000_000) -> bytes:
    """The first `max_bytes` of the standard library's Python files, sorted by path. Shorter if there is no more.
    Raises   RuntimeError if this Python came without its sources
    """
    parts, length = [], 0
    for path in source_files(Path(sysconfig.get_paths()["stdlib"])):
        parts.append(path.read_bytes())
        length += len(parts[-1])
        if length >= max_bytes:
            break
    if not parts:
        raise RuntimeError(
            "this Python has no .py files of its standard library; use one from python.org, conda or apt"
        )
    return b"".join(parts)[:max_bytes]


def source_files(root: Path) -> Iterator[Path]:
    """The standard library's modules without their tests, by name, whatever the file system's order."""
    for top in sorted(root.iterdir(), key=lambda path: path.name):
        if top.stem not in sys.stdlib_module_names or top.stem in LEFT_OUT:
            continue
        files = [top] if top.suffix == ".py" else sorted(top.rglob("*.py")) if top.is_dir() else []
        yield from (path for path in files if not {"test", "tests"} & set(path.relative_to(root).parts))


@checked
def tokens(max_tokens: Bytes = 2_000_000, held_out: bool = False) -> Tensor:
    """The corpus as numbers from 0 to 255. `held_out=True` gives its last tenth, which the other call leaves out.
    Shapes   -> tokens_T, T = 90 % or 10 % of max_tokens
    """
    everything = torch.frombuffer(bytearray(corpus(max_tokens)), dtype=torch.uint8).long()
    boundary = len(everything) * 9 // 10
    return everything[boundary:] if held_out else everything[:boundary]


@checked
def batch(
    tokens_T: Tensor,
    index: Index,
    batch_size: Size,
    seq_len: Size,
    dp_rank: Index = 0,
    dp_size: Size = 1,
    seed: Seed = 0,
) -> tuple[Tensor, Tensor]:
    """Return one rank's rows of step `index` on its device: inputs, and targets one later.

    `batch_size` counts the rows of all ranks.

    The ranks' rows, in rank order, are the rows that one process would get, so losses can be compared.
    Shapes   tokens_T -> x_bS, y_bS           (b = batch_size / dp_size)
    Raises   ValueError if batch_size % dp_size != 0, dp_rank is no rank, or the text is shorter than one sequence
    """
    if dp_rank >= dp_size:
        raise ValueError(f"dp_rank is {dp_rank}; with dp_size {dp_size} it must be from 0 to {dp_size - 1}")
    if batch_size % dp_size:
        raise ValueError(
            f"batch_size ({batch_size}) must be divisible by dp_size ({dp_size}): it counts the rows of all ranks; "
            f"choose {max(1, batch_size // dp_size) * dp_size} or {(batch_size // dp_size + 1) * dp_size}"
        )
    if len(tokens_T) <= seq_len:
        raise ValueError(f"the text has {len(tokens_T)} tokens; seq_len {seq_len} needs at least {seq_len + 1}")
    generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + index)
    starts_B = torch.randint(len(tokens_T) - seq_len, (batch_size,), generator=generator, device="cpu")
    starts_b = starts_B.view(dp_size, -1)[dp_rank]
    rows_bS = tokens_T[starts_b[:, None] + torch.arange(seq_len + 1, device="cpu")]
    rows_bS = rows_bS.to(rank_device())
    return rows_bS[:, :-1].contiguous(), rows_bS[:, 1:].contiguous()


@checked
def micro_batches(x_BS: Tensor, y_BS: Tensor, count: Size) -> list[tuple[Tensor, Tensor]]:
    """The rows of a batch in `count` parts, in order; if they do not divide evenly the first have one row more.
    Raises   ValueError if there are more parts than rows
    """
    if count > len(x_BS):
        raise ValueError(f"micro_batches is {count}; the batch has {len(x_BS)} rows: choose from 1 to {len(x_BS)}")
    return list(zip(x_BS.tensor_split(count), y_BS.tensor_split(count), strict=True))
