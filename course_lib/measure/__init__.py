"""What ranks really do: bytes on the wire and in memory, counted while they run.

meter.py         bytes on the wire, by collective and by axis
waits.py         seconds in which a rank waits for other ranks
storages.py      what the tracker must know of storages, DTensors and operators
tracker.py       which tensors are alive, of what kind, when: bytes by kind over time
snapshot.py      a measurement as a memory snapshot in PyTorch's format, and what its peak is made of
trace.py         a step of each rank as a Chrome trace; its seconds of computing and communication by axis
cuda.py          what a GPU counts besides tensors: reserved, context, rounding, fragmentation
"""

from course_lib.measure.cuda import CudaMemory, cuda_memory
from course_lib.measure.meter import ByteMeter, CommRecord
from course_lib.measure.tracker import KINDS, MemoryTracker, Timeline
