"""What the GPU tests measure, and how each ended, goes into the table that COURSE_GPU_TABLE names (labs/gpu_day.py)."""

import json
import os
from collections.abc import Callable

import pytest
import torch

from course_lib.labs.gpu_day import add_row

TABLE, PART = os.environ.get("COURSE_GPU_TABLE"), os.environ.get("COURSE_GPU_PART", "tests/gpu")


@pytest.fixture
def record(request) -> Callable[..., None]:
    """record(figure=value, ...) prints the figures and adds them to the table; `measured` is put beside `predicted`."""

    def write(**figures) -> None:
        print(json.dumps({"test": request.node.name, "gpu": torch.cuda.get_device_name()} | figures))
        if TABLE:
            add_row(TABLE, part=PART, name=request.node.name, outcome="measured", figures=figures)

    return write


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add how a test ended: after its call, or after what ended it before or behind."""
    report = yield
    if TABLE and (report.when == "call" or report.outcome != "passed"):
        reason = _reason(report.longrepr) if report.longrepr else ""
        row = {"name": item.name, "outcome": report.outcome, "seconds": round(report.duration, 2), "reason": reason}
        add_row(TABLE, part=PART, **row)
    return report


def _reason(longrepr) -> str:
    """The sentence of a skip, or of the exception."""
    if isinstance(longrepr, tuple):
        return longrepr[2].removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    return (crash.message if crash else str(longrepr))[:600]
