"""What all tests share: no display, one thread a process, and tests marked gpu say why they are skipped."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")
# Two test processes with two threads each on two cores wait for each other: small steps took thirty times as long.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none; the reason names what was looked for."""
    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA GPU; torch {torch.__version__} sees none on this machine"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
