"""What `make bench` times beside parallel/, which has the same file names: every parallelism as PyTorch ships it.

data.py       DistributedDataParallel
zero.py       FSDP2
dtensor.py    what the engines on DTensors share
tensor.py     DTensor: a plan for parallelize_module, loss_parallel
sequence.py   the same plan, with the residual stream in pieces along the sequence
context.py    ring attention: PyTorch's template on a CPU, context_parallel on a GPU
pipeline.py   torch.distributed.pipelining: five schedules behind the same step
expert.py     all_to_all_single_autograd, grouped_mm, and DDP for the rest
"""
