"""Memory of training, predicted and measured.

In reading order:

    states.py        parameters, gradients, optimizer: bytes a parameter, recipe by recipe
    activations.py   what the course's own models keep for the backward pass, term by term
    papers.py        the published activation formulas: Korthikanti, Megatron-Core, ZeRO
    formulas.py      the whole budget; everything above can be imported from here
    zero.py          ZeRO: units, what a rank holds of each kind, offload
    tensor.py        tensor and sequence parallelism as a narrower model
    moe.py           mixtures of experts: total and active parameters, rows routed, EP x DP x TP
    context.py       context parallelism: fewer tokens, and the keys and values of others
    sharded.py       the whole budget of one rank among many
    stages.py        a model cut into pipeline stages: layers, parameters, balance
    pipeline.py      how many micro-batches a rank of a pipeline keeps
    timeline.py      the record of a measurement: bytes alive by kind over time
    storages.py      what the tracker must know of storages, DTensors and operators
    tracker.py       measure: which bytes are alive, of what kind, when
    cuda.py          what a GPU counts besides tensors: reserved, context, rounding, fragmentation
    profile.py       predicted beside measured
"""
