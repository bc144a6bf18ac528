"""Kernels timed on a GPU beside what a CPU counts of them, in a process of its own, as the host is chosen once.

print(on_a_gpu())       python -m course_lib.kernels.timed
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import torch

from course_lib.kernels import rows
from course_lib.kernels.language import HOST
from course_lib.kernels.product import matmul
from course_lib.timing.kernel import softmax_bytes

R, N, WIDTH = 8192, 4096, 4096
_NOT_HERE = (
    "Here no GPU with Triton. On one, this cell times softmax by four kernels and by one (GB/s),\n"
    "and products by tiles of 32, 64 and 128 (TFLOP/s)."
)


def on_a_gpu() -> str:
    """Return what this GPU does in a second, with its name; elsewhere what would stand here.

    Raises   RuntimeError with the last lines of the process if it fails
    """
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return _NOT_HERE
    command = [sys.executable, "-m", "course_lib.kernels.timed"]
    told = subprocess.run(command, env=os.environ | {"COURSE_KERNELS": "gpu"}, capture_output=True, text=True)
    if told.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{told.stderr[-2000:]}")
    return told.stdout.strip()


def _timed(launch) -> float:
    from triton.testing import do_bench  # an extra

    return do_bench(launch) / 1000


def _softmax() -> None:
    x, e, y = (torch.randn(R, N, device="cuda") for _ in range(3))
    largest, total = (torch.empty(R, device="cuda") for _ in range(2))
    ways = (lambda: rows.softmax_by_four(x, largest, e, total, y), lambda: rows.softmax_by_one(x, y))
    for name, way, size in zip(("four kernels", "one kernel"), ways, softmax_bytes(R, N), strict=True):
        seconds = _timed(way)
        print(f"softmax by {name}: {size / 1e9:.2f} GB, {1000 * seconds:.3f} ms, {size / seconds / 1e9:,.0f} GB/s")


def _products() -> None:
    a, b, c = (torch.randn(WIDTH, WIDTH, dtype=torch.float16, device="cuda") for _ in range(3))
    for tile in (32, 64, 128):
        launch, sizes = matmul[((WIDTH // tile) ** 2,)], (WIDTH, WIDTH, WIDTH, 8, tile, tile, 32)
        seconds = _timed(lambda launch=launch, sizes=sizes: launch(a, b, c, *sizes))
        print(f"product of {WIDTH:,}, tile {tile}: {2 * WIDTH**3 / seconds / 1e12:.0f} TFLOP/s")
    print(f"torch's product: {2 * WIDTH**3 / _timed(lambda: a @ b) / 1e12:.0f} TFLOP/s")


if __name__ == "__main__":
    if HOST != "gpu":
        raise SystemExit("COURSE_KERNELS=gpu python -m course_lib.kernels.timed")
    print(torch.cuda.get_device_name())
    _softmax()
    _products()
