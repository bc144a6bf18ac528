"""The smallest whole program of each technique that is right: what the lessons show and run.

ring.py        all-reduce through rank 0, and around a ring
memory.py      a tracker of storages, what autograd saves, and the formulas that predict both
data.py        data parallelism: one message per parameter, buckets, overlap with backward
zero.py        ZeRO-1, ZeRO-2 and ZeRO-3
tensor.py      tensor parallelism of a whole Llama: f and g, layers that are cut, a loss from parts of the logits
sequence.py    sequence parallelism on top of it: two functions change, and the norms' gradients are summed
one_f_one_b.py a pipeline: lists of instructions, and a rank that executes its list
precision.py   FP32 master weights, loss scaling, stochastic rounding
lora.py        a frozen linear layer and two thin matrices beside it
quantize.py    8-bit moments of Adam, and frozen weights in 4 bits, in blocks
recompute.py   activation recomputation: of blocks, of segments of blocks, of attention cores
flash.py       FlashAttention over blocks, forward and backward
ring_attention.py  context parallelism: ring attention forward and backward, tokens cut in two ways
moe.py         a mixture of experts on one process: router, sorted rows, experts, weighted sum, a loss that balances
experts.py     expert parallelism: rows to the ranks of their experts and back, and their gradients
axes.py        several axes at once: where a rank sits, over whom a gradient is summed
choose.py      a ladder of layouts to try in order, and where one may stop
accumulate.py  gradient accumulation
offload.py     activations that wait in the host's memory
compare.py     one line each: the difference from one process, bytes sent, bytes held, a trace
compare_sums.py  the same for an all-reduce: the difference from the sum, bytes sent by each rank
compare_attention.py  the same for attention over cut sequences: differences, blocks sent, bytes kept
compare_parts.py  the same for a part of a model on ranks: an MLP, its gradients, a loss from parts of the logits
compare_cut_model.py  the same for a model that is cut: wrong gradients, what a block keeps, different copies
compare_layout.py  the same for several axes at once: wrong gradients by kind, losses, bytes along each axis
compare_pipeline.py  the same for a pipeline: gradients, bytes sent, activations held, when each rank computed
compare_experts.py  the same for a layer of experts: outputs, gradients, rows and bytes sent, load while training
peaks.py       one line each: the peak of a step by PyTorch's tracker, by kind, and by a profile
tiny_training.py   one line each, on one device: what a trainer moves, holds and learns
passes.py      one line each for one GPU: the difference of gradients, bytes kept, FLOPs
planner.py     a planner: every layout that divides, those that fit, the fastest first
predict.py     a learner's prediction, kept and compared with the measurement
"""

from course_lib.minimal.compare import (
    compare_with_one_process,
    held_bytes,
    memory_of_a_step,
    sent_bytes,
    sent_messages,
    started_in_backward,
    trace_of_a_step,
)
from course_lib.minimal.compare_pipeline import (
    busy_share,
    pipeline_difference,
    pipeline_kept,
    pipeline_sent,
    pipeline_trace,
)
from course_lib.minimal.compare_sums import compare_with_sum, sent_by_each_rank
from course_lib.minimal.passes import (
    flops_of_a_pass,
    gradient_difference,
    kept_bytes,
    memory_of_a_pass,
    peak_activations,
)
from course_lib.minimal.predict import predict
