"""The same kernels compiled for an H100 by Triton's own compiler and assembler, on a machine without one.

    COURSE_KERNELS=gpu, and then     compiled(matmul, "*fp16 *fp16 *fp16 i32 i32 i32".split(), GROUP=8, BM=128, ...)
    anywhere                         FIGURES["product, tile 128 x 128"]

What is read off: registers of a thread, shared memory of a program, instructions. Nothing is executed.
FIGURES are those of Triton 3.9.0, by name; `make test-kernels` compiles PROGRAMS again and compares.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.kernels.attention import flash
from course_lib.kernels.product import matmul
from course_lib.kernels.rows import softmax_fused
from course_lib.timing.kernel import occupancy
from course_lib.validate import Bytes, Checked, Count, Share, Size


@dataclass(frozen=True)
class Compiled(Checked):
    """What the assembler says of a kernel.

    registers     of a thread
    shared_bytes  of a program
    spilled       bytes of a thread that found no register
    tensor_ops    instructions that start tensor cores on a whole tile (wgmma)
    loads, wide   loads from memory, and those of them of 16 bytes a thread
    occupancy     share of a multiprocessor's threads, by arithmetic
    """

    registers: Size
    shared_bytes: Bytes
    spilled: Count
    tensor_ops: Count
    loads: Count
    wide: Count
    occupancy: Share


def compiled(kernel, types: Sequence[str], warps: int = 4, aligned: bool = False, **constants: int) -> Compiled:
    """Compile a kernel of `language.jit` for compute capability 9.0.

    types     of the arguments that are no constants: "*fp16", "i32", "fp32"
    aligned   tell the compiler that pointers and sizes are multiples of 16, as Triton finds out at a launch

    Raises   RuntimeError where kernels are not Triton's, or run in its interpreter
    """
    from course_lib.kernels.language import HOST  # Triton, where it is there

    if HOST != "gpu":
        raise RuntimeError("kernels are compiled where the environment has COURSE_KERNELS=gpu and Triton is installed")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c in one instruction; Triton asks since 3.9
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    whole = [place for place, kind in enumerate(signature.values()) if kind.startswith("*") or kind == "i32"]
    hints = {(place,): [["tt.divisibility", 16]] for place in whole} if aligned else {}
    source = ASTSource(kernel, signature, values, hints)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    said = _assembled(made.asm["ptx"], get_ptxas(90).path)
    registers, shared = int(re.search(r"Used (\d+) registers", said)[1]), made.metadata.shared

    def count(pattern: str) -> int:
        return len(re.findall(pattern, made.asm["ptx"]))

    return Compiled(
        registers,
        shared,
        spilled=int(re.search(r"(\d+) bytes spill stores", said)[1]),
        tensor_ops=count(r"wgmma\.mma_async"),
        loads=count(r"ld\.global|cp\.async\.c[ag]"),
        wide=count(r"ld\.global\S*\.v[24]|cp\.async\S* .*0x10"),
        occupancy=occupancy(registers, shared, warps),
    )


def _assembled(ptx: str, assembler: str) -> str:
    """What Triton's assembler says of the program."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx, encoding="utf-8")
        command = [assembler, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120).stderr


_HALF, _FULL = (["*fp16"] * 3 + ["i32"] * 3, ["*fp32"] * 3 + ["i32"] * 3)
_FLASH = ["*fp16"] * 4 + ["*fp32", "i32", "fp32"]
_LARGE, _SMALL = {"GROUP": 8, "BM": 128, "BN": 128, "BK": 64}, {"GROUP": 8, "BM": 32, "BN": 32, "BK": 32}
PROGRAMS: dict[str, tuple] = {  # kernel, types of its arguments, how it is compiled
    "softmax of 1,024": (softmax_fused, ["*fp32", "*fp32", "i32"], {"aligned": True, "BLOCK": 1024}),
    "product, tile 32 x 32": (matmul, _HALF, _SMALL | {"aligned": True}),
    "product, tile 128 x 128": (matmul, _HALF, _LARGE | {"warps": 8, "aligned": True}),
    "the same, not aligned": (matmul, _HALF, _LARGE | {"warps": 8}),
    "the same, 4 warps": (matmul, _HALF, _LARGE),
    "product in FP32, 128 x 128": (matmul, _FULL, _LARGE | {"warps": 8, "aligned": True}),
    "FlashAttention, 64 x 64": (flash, _FLASH, {"aligned": True, "H": 64, "BQ": 64, "BK": 64}),
}
FIGURES = {
    "softmax of 1,024": Compiled(22, 16, 0, tensor_ops=0, loads=2, wide=2, occupancy=1.0),
    "product, tile 32 x 32": Compiled(46, 8192, 0, tensor_ops=0, loads=6, wide=6, occupancy=0.625),
    "product, tile 128 x 128": Compiled(112, 98_304, 0, tensor_ops=4, loads=24, wide=24, occupancy=0.25),
    "the same, not aligned": Compiled(254, 32_768, 0, tensor_ops=4, loads=64, wide=0, occupancy=0.125),
    "the same, 4 warps": Compiled(254, 32_768, 360, tensor_ops=8, loads=128, wide=0, occupancy=0.125),
    "product in FP32, 128 x 128": Compiled(231, 131_072, 0, tensor_ops=0, loads=48, wide=48, occupancy=0.125),
    "FlashAttention, 64 x 64": Compiled(125, 57_344, 0, tensor_ops=8, loads=28, wide=28, occupancy=0.25),
}
