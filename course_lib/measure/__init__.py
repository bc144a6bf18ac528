"""What ranks really do: bytes on the wire and in memory, counted while they run.

meter.py         bytes on the wire, by collective and by axis
waits.py         seconds in which a rank waits for other ranks
timeline.py      the record of a measurement: bytes alive by kind over time
storages.py      what the tracker must know of storages, DTensors and operators
tracker.py       which tensors are alive, of what kind, when
snapshot.py      a measurement as a memory snapshot in PyTorch's format, and what its peak is made of
trace.py         a step of each rank as a Chrome trace; its seconds of computing and communication by axis
cuda.py          what a GPU counts besides tensors: reserved, context, rounding, fragmentation
"""

from course_lib.measure.cuda import CudaMemory, cuda_memory
from course_lib.measure.meter import ByteMeter, CommRecord
from course_lib.measure.timeline import KINDS, Timeline
from course_lib.measure.tracker import MemoryTracker
