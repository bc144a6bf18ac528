"""Memory of training, as formulas.

states.py        parameters, gradients, optimizer: bytes a parameter, recipe by recipe
activations.py   what one block of the course's dense models saves for the backward pass, term by term
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
ledger.py        the peak needs the order of events: a ledger of what is made, saved and freed
operators.py     what each operator makes, saves and frees
blocks.py        one stage of a model on one rank: the order of its operators
replay.py        equal layers run once; the others repeat what they did
moments.py       what an instruction of a schedule changes; gradients without ZeRO and with it
least.py         what a run holds at least: sums by which a planner rejects most layouts
budget.py        budgets(run): all of it together, for each rank of a pipeline
"""
