"""The words that a kernel is written in, and the host that runs it.

    torch         tiles.py, on any machine: the default
    interpreter   Triton's own interpreter on a CPU: COURSE_KERNELS=interpreter
    gpu           compiled by Triton: COURSE_KERNELS=gpu

The environment variable is read once, before the first kernel is made. Triton is an extra: `pip install triton`.
"""

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
        import numpy as np
        import torch
        from triton.runtime.interpreter import InterpreterBuilder

        from course_lib.kernels.traffic import tell

        def _telling(act, kind: str, place_of_mask: int):
            """Loads or stores of the interpreter, every one, told to the same counts as those of tiles.py."""

            def told(builder, ptrs, *rest):
                addresses, left = np.broadcast_arrays(ptrs.data, rest[place_of_mask].data)
                itemsize = ptrs.get_element_ty().primitive_bitwidth // 8
                tell(kind, torch.from_numpy(addresses[left].astype(np.int64)), itemsize)
                return act(builder, ptrs, *rest)

            return told

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        InterpreterBuilder.create_masked_load = _telling(load, "load", place_of_mask=0)
        InterpreterBuilder.create_masked_store = _telling(store, "store", place_of_mask=1)  # behind the values

__all__ = ["HOST", "HOSTS", "cdiv", "jit", "tl"]
