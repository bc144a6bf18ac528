"""Programs for one GPU, in Triton's words, that run and are counted on any machine.

    language.py    which host runs them: torch (ours, everywhere), Triton's interpreter, a GPU
    tiles.py       the words that the course's kernels use, by torch: programs run one after the other
    traffic.py     what kernels ask memory for, to the byte: with KernelTraffic() as counted: kernel[grid](...)
    rows.py        softmax by four kernels and by one; SwiGLU forward and backward
    product.py     a tiled matrix product; sums along rows and along columns
    attention.py   FlashAttention's forward, and attention by three kernels
    compiled.py    the same kernels compiled for an H100 on a machine without one (needs Triton)
    timed.py       softmax and products timed on a GPU, beside what a CPU counts of them

The same bytes by arithmetic, roofline and occupancy: course_lib/timing/kernel.py.
A kernel asks for bytes; whether they come from HBM or from a cache, these counts do not say.
"""
