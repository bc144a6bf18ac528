"""Layouts: how a training run lies on its ranks. Plain arithmetic, without torch.

partition.py          elements, heads and layers divided over ranks; which numbers of ranks suit them
mesh.py               the mesh pp x dp x cp x tp: rank <-> coordinates, and who is near whom
sequence_sharding.py  which tokens each rank of context parallelism has, and how much of the mask it computes when
experts.py            which rank has which experts
check.py              what a layout cannot be, why, and the nearest that can
record.py             `Layout`: sizes and choices in one record, checked when made
"""

from course_lib.layout.mesh import ALL_AXES, AXES, AxisLinks, Mesh, links_of_axes
from course_lib.layout.partition import even_layers, fewer_at_the_ends, piece_sizes
from course_lib.layout.record import DEFAULTS, Layout
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, Tile, check_context, tile
