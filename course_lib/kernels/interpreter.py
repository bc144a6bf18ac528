"""Loads and stores of Triton's interpreter, told to the same counts as those of tiles.py."""

from __future__ import annotations

import numpy as np
import torch

from course_lib.kernels.traffic import tell


def count() -> None:
    """Let the interpreter tell each load and store; every one of a kernel ends in one of these two methods."""
    from triton.runtime.interpreter import InterpreterBuilder  # an extra

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def told_load(builder, ptrs, mask, other, *rest):
        _tell("load", ptrs, mask)
        return load(builder, ptrs, mask, other, *rest)

    def told_store(builder, ptrs, value, mask, *rest):
        _tell("store", ptrs, mask)
        return store(builder, ptrs, value, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = told_load, told_store


def _tell(kind: str, ptrs, mask) -> None:
    addresses, left = np.broadcast_arrays(ptrs.data, mask.data)
    tell(kind, torch.from_numpy(addresses[left].astype(np.int64)), ptrs.get_element_ty().primitive_bitwidth // 8)
