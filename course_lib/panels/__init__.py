"""Panels to play with, one or more a lesson: controls by name, and pure functions from their values to a picture.

A picture is an SVG with what it shows in words. Nothing here shows anything: widgets/ does it in a notebook.

record.py       Control, Panel, Answer
svg.py          rows of bars, columns, lanes: records, and one SVG of several
controls.py     the controls that several panels have
collectives.py  COLLECTIVE: latency against moving bytes, by message, ranks and nodes
memory.py       MEMORY: a model against GPUs; OPTIMIZER: optimizers against each other
precision.py    PRECISION: a weight and an update in three formats
recompute.py    RECOMPUTE: a strip of blocks that keep their activations or compute them again
overlap.py      OVERLAP: buckets beside backward
runs.py         ZERO, TENSOR, TENSOR_SEQUENCE, CONTEXT, LAYOUT, PLAN: runs side by side, by the estimate
pipeline.py     PIPELINE: a schedule on the clock
puzzle.py       PUZZLE: a schedule placed by hand
experts.py      EXPERTS: load, drops, bytes within and between nodes
"""
