"""What the GPU tests measure can be kept: one JSON line a figure, appended to the file that COURSE_GPU_RECORD names."""

import json
import os
from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def record(request) -> Callable[..., None]:
    """record(figure=value, ...) prints the figures and, if COURSE_GPU_RECORD is set, appends them to that file."""

    def write(**figures) -> None:
        line = {"test": request.node.name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__} | figures
        print(json.dumps(line))
        if path := os.environ.get("COURSE_GPU_RECORD"):
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")

    return write
