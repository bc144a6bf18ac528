"""How long a save takes here, measured, for choosing the interval between checkpoints."""

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch.distributed as dist

from course_lib import checkpoint, comm
from course_lib.parallel import five_d
from course_lib.validate import Size, checked


@checked
def save_seconds(engine: five_d.FiveD, optimizer, folder: str | Path, repeats: Size = 3) -> float:
    """The median seconds for which training would stand still for a save; every rank calls it and gets the same.

    folder   on the disk on which checkpoints will be; what is written there goes again

    Bytes    a checkpoint, `repeats` times
    """
    group = checkpoint.wait_for_earlier(engine)
    is_first = dist.get_rank() == 0
    made = tempfile.mkdtemp(prefix="save_seconds_", dir=folder) if is_first else None
    place = Path(comm.all_gather_json(made, group)[0])
    seconds = []
    for step in range(repeats):
        dist.barrier(group)
        start_s = time.perf_counter()
        checkpoint.save(engine, optimizer, place, step, keep=1)
        dist.barrier(group)
        seconds.append(time.perf_counter() - start_s)
    if is_first:
        shutil.rmtree(place)
    return max(comm.all_gather_json(median(seconds), group))
