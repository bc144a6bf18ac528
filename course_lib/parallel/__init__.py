"""Every parallelism from scratch, one file each; native/ has the same file names, with what PyTorch ships.

data.py              data parallel: naive, overlapped, bucketed
shards.py            flat padded parameters in shards, the units of stage 3
zero.py              ZeRO: optimizer, gradients, parameters sharded
offload_states.py    optimizer states that wait on the host or on disk
linear.py            column and row linear: a matrix cut over ranks, and what enters and leaves it
vocabulary.py        embedding and loss with the vocabulary cut over ranks
tensor.py            tensor parallel: a Llama or GPT cut in one call
sequence.py          sequence parallel: norms, dropout and residual, each rank for its own tokens
dispatch.py          tokens to the ranks of their experts and back: uneven all-to-alls with gradients
expert_tensor.py     experts whose matrices are cut over tp as well
expert.py            expert parallel: experts spread over ranks, gradients summed over the right ones
tiles.py             attention over blocks of other ranks: kernels of a tile, parts merged
ring.py              ring attention: keys and values travel, their gradients follow (dKV rotation); by all-gather too
ulysses.py           context parallel by heads: all-to-all, alone or inside a ring
context.py           context parallel: a Llama or GPT whose sequences are cut in one call
stages.py            a model cut into stages of consecutive layers
channels.py          pipeline: who sends what to whom, and why nobody waits for ever
weight_gradients.py  backward in two parts: weight gradients that wait
executor.py          does a rank's list of a pipeline schedule, one instruction after the other
pipeline.py          pipeline parallel: any schedule in one call
engine.py            what an engine is, and the one step of all techniques
sums.py              whose gradients are summed over whom, when all parallelisms meet
five_d.py            all five at once: a layout applied by calling the files above
whole.py             whole tensors from all ranks of a layout
positions.py         where a rank's tokens stand in the whole sequence, as tensors
"""
