"""Memory of training, as formulas.

states.py       parameters, gradients, optimizer states, by precision recipe
activations.py  activations of the course's own models, term by term
papers.py       activations as the papers count them
formulas.py     the whole budget before running
zero.py         ZeRO's units, what a rank holds of each kind, offload
tensor.py       tensor and sequence parallelism as a narrower model
context.py      context parallelism: fewer tokens of each sequence, and others' keys for a moment
moe.py          a mixture of experts: total and active parameters, memory by EP x DP x TP
sharded.py      the whole budget of one rank among many
stages.py       a model cut into pipeline stages: layers, parameters, balance with embedding and head
pipeline.py     how many micro-batches a rank of a pipeline keeps, and its whole budget
five_d.py       the memory of each rank of a pipeline under a whole layout
"""
