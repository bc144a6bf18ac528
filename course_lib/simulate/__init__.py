"""Clusters without hardware: one rank of thousands runs here, without its numbers.

fake_world.py    a world of any size in one process: fake ranks, fake tensors, whole numbers that stay real
tape.py          of many micro-batches few run, the rest is noted from a tape: bytes, messages, FLOPs
cluster.py       `simulate_ranks`: peak by kind, bytes by axis, FLOPs, for any stage
"""

from course_lib.simulate.cluster import simulate_rank, simulate_ranks
from course_lib.simulate.fake_world import fake_world
