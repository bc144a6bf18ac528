"""How long: modelled seconds of collectives, of overlap, and of a whole step. Nothing here is measured.

step.py          step_time, the clock: everything; stage_costs: one micro-batch on each stage, for the simulator
layer.py         one layer of one micro-batch: products, attention, small operations, launches, what is sent
rates.py         the clock's constants; the share of its peak that a GPU reaches; MFU, HFU, roofline
collectives.py   a collective as NCCL would do it: algorithm, protocol, link
data.py          data parallelism and ZeRO: gradients, parameters, the update, offload; buckets
tensor.py        a layer of tensor and sequence parallelism: which sums hide
context.py       a layer's attention over context-parallel ranks: which ring steps hide
kernel.py        one kernel: bytes that it asks for, roofline, multiprocessors
timelines.py     what a rank computes and what travels beside it, span by span
"""

from course_lib.flops import flops_per_token, layer_matmul_parameters, step_flops
from course_lib.span import exposed_s, waiting_s
from course_lib.timing.collectives import bus_bandwidth, bus_factor, calls_s, collective_costs, collective_s, fastest
from course_lib.timing.context import tokens_that_hide_a_hop
from course_lib.timing.data import accumulation_steps, crossing_s, dp_step_s, dp_throughput, tokens_that_hide_a_gather
from course_lib.timing.rates import RATES, Rates, Utilisation, hfu, mfu, roofline_s, tokens_per_s
from course_lib.timing.step import stage_costs, step_time
from course_lib.timing.timelines import (
    copy_spans,
    dp_spans,
    ring_spans,
    tensor_parallel_layer_spans,
    zero3_backward_spans,
    zero3_spans,
)
