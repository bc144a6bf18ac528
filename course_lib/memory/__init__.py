"""Memory of training, as formulas.

states.py        parameters, gradients, optimizer, whole and under ZeRO; what crosses to the host and to disk
flats.py         the parameter tensors of a rank: stages, units, and the flats that are summed and sharded
activations.py   what is saved for the backward pass, term by term, under any layout
peak.py          the fullest moment of a step: what is in flight, what a backward holds, which gradients have come
budget.py        budgets(run): all of it together, for each rank of a pipeline
"""
