"""The smallest whole program of each technique that is right: what the lessons show and run.

ring.py        all-reduce through rank 0, and around a ring
memory.py      a tracker of storages, what autograd saves, and the formulas that predict both
data.py        data parallelism: one message per parameter, buckets, overlap with backward
zero.py        ZeRO-1, ZeRO-2 and ZeRO-3
muon.py        Muon under ZeRO-1: shards that are whole matrices
tensor.py      tensor parallelism of a whole Llama: f and g, layers that are cut, a loss from parts of the logits
sequence.py    sequence parallelism on top of it: two functions change, and the norms' gradients are summed
one_f_one_b.py a pipeline: lists of instructions, and a rank that executes its list
precision.py   FP32 master weights, loss scaling, stochastic rounding
lora.py        a frozen linear layer and two thin matrices beside it
quantize.py    8-bit moments of Adam, and frozen weights in 4 bits, in blocks
eight_bits.py  FP8 and FP4: formats, scales, a linear layer's products, saved inputs, ZeRO-3's gathers
recompute.py   activation recomputation: of blocks, of segments of blocks, of attention cores, of norms and SwiGLU
flash.py       FlashAttention over blocks, forward and backward
ring_attention.py  context parallelism: ring attention forward and backward, tokens cut in two ways
moe.py         a mixture of experts on one process: router, sorted rows, experts, weighted sum, a loss that balances
experts.py     expert parallelism: rows to the ranks of their experts and back, and their gradients
axes.py        several axes at once: where a rank sits, over whom a gradient is summed
choose.py      a ladder of layouts to try in order, and where one may stop
accumulate.py  gradient accumulation
offload.py     activations that wait in the host's memory
planner.py     a planner: every layout that divides, those that fit, the fastest first
predict.py     a learner's prediction, kept and compared with the measurement
"""

from course_lib.minimal.predict import predict
