"""Panels to play with, one or more a lesson: controls by name, and pure functions from their values to a picture.

A picture is an SVG with what it shows in words. Nothing here shows anything: widgets/ does it in a notebook.

record.py       Control, Panel, Answer
svg.py          rows of boxes over an axis, as bars, columns or lanes: records, and one SVG of several
controls.py     the controls of all panels, and the runs that their values mean
one_gpu.py      MEMORY, OPTIMIZER, PRECISION, RECOMPUTE, SCALES
kernel.py       TILES: a product by tiles on three GPUs
collectives.py  COLLECTIVE: latency against moving bytes; OVERLAP: buckets beside backward
ring.py         RING: an all-reduce around a ring, step by step
runs.py         ZERO, TENSOR, TENSOR_SEQUENCE, CONTEXT, LAYOUT: runs side by side, by the estimate
plans.py        PLAN, GAME: a layout for a job, by hand and by the search; PLANNER: for any model, with its files
pipeline.py     PIPELINE: a schedule on the clock; PUZZLE: a schedule placed on a grid by hand
experts.py      EXPERTS: load, drops, bytes within and between nodes
synthetic_routing.py  tokens that choose experts at random, and what a capacity drops
asked.py        all panels by name, asked in words and answered in plain data, for a host that is no Python
"""
