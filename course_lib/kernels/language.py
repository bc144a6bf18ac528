"""The words that a kernel is written in, and the host that runs it.

    torch         tiles.py, on any machine: the default
    interpreter   Triton's own interpreter on a CPU: COURSE_KERNELS=interpreter
    gpu           compiled by Triton: COURSE_KERNELS=gpu

The environment variable is read once, before the first kernel is made. Triton is an extra: `pip install triton`.
"""

from __future__ import annotations

import os
import sys

from course_lib.validate import one_of

HOSTS = ("torch", "interpreter", "gpu")
HOST = os.environ.get("COURSE_KERNELS", "torch")
one_of("COURSE_KERNELS", HOST, HOSTS)

if HOST == "torch":
    from course_lib.kernels import tiles as tl
    from course_lib.kernels.tiles import cdiv, jit
else:
    if HOST == "interpreter":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "Triton is imported already, and its words were made for a GPU; set TRITON_INTERPRET=1 in the "
                "environment before Python starts, or in the first line of the notebook"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton import cdiv, jit

    if HOST == "interpreter":
        from course_lib.kernels.interpreter import count

        count()

__all__ = ["HOST", "HOSTS", "cdiv", "jit", "tl"]
