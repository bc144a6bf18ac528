"""Memory of training, as formulas.

states.py        parameters, gradients, optimizer: bytes a parameter, recipe by recipe
activations.py   what is saved for the backward pass, term by term, under any layout
papers.py        the published activation formulas: Korthikanti, Megatron-Core, ZeRO
zero.py          ZeRO: what a rank holds of each kind, offload
tensor.py        tensor and sequence parallelism as a narrower model
moe.py           mixtures of experts: total and active parameters, EP x DP x TP
context.py       context parallelism: fewer tokens, and the keys and values of others
flats.py         the parameter tensors of a rank: stages, units, and the flats that are summed and sharded
stages.py        a model cut into pipeline stages: parameters, balance
pipeline.py      how many micro-batches a rank of a pipeline keeps
five_d.py        the states of each rank of a layout
run.py           a run as one record: model, layout, recipe, device, optimizer
peak.py          the fullest of four moments: what is in flight, and what each moment adds
backward.py      one stage in numbers: what a backward makes besides, its gradients, what ZeRO puts together
update.py        what stands between the last backward and the next step
budget.py        budgets(run): all of it together, for each rank of a pipeline
"""
