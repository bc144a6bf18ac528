"""Communication between ranks.

collectives.py   the collectives as the course uses them, and a step around a ring
groups.py        the process groups of a mesh, one for each axis
records.py       JSON and named tensors of all ranks, without pickles
conjugate.py     what crosses between ranks forward, and the gradient backward, in pairs
"""

from course_lib.comm.collectives import (
    all_gather,
    all_gather_into,
    all_reduce,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast,
    check_point_to_point,
    gather,
    pass_on,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_into,
    scatter,
    send,
)
from course_lib.comm.conjugate import copy_in, gather_in, join, my_piece, scatter_sum, split, sum_out
from course_lib.comm.groups import Groups, make_all_groups, make_groups
from course_lib.comm.records import all_gather_json, all_gather_tensors
