"""Memory of training, as formulas.

states.py        tensors of a model and of a rank of tp; parameters, gradients, optimizer; adapters; ZeRO; offload
flats.py         the parameter tensors of a rank: stages, units, and the flats that are summed and sharded
run.py           a run as one record: model, layout, recipe, device, optimizer
activations.py   what is saved for the backward pass, term by term, under any layout
peak.py          the fullest moment of a step: what is in flight, what a backward holds, which gradients have come
budget.py        budgets(run): all of it together, for each rank of a pipeline
"""
