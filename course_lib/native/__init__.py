"""Every parallelism as PyTorch ships it, one file each; parallel/ has the same file names, from scratch.

data.py            DistributedDataParallel, and Accelerate on top
zero.py            FSDP2, ZeroRedundancyOptimizer, and Accelerate on top
dtensor.py         what the engines on DTensors share
deepspeed_zero.py  DeepSpeed's ZeRO, stages 0 to 3, where it is installed
tensor.py          DTensor: a plan for parallelize_module, loss_parallel
sequence.py        the same plan, with the residual stream in pieces along the sequence
context.py         ring attention: PyTorch's template on a CPU, context_parallel on a GPU
pipeline.py        torch.distributed.pipelining: six schedules behind the same step
expert.py          all_to_all_single_autograd, grouped_mm, and DDP for the rest
"""
