"""Checkpoints: an engine's state saved under one layout and loaded under any other, while training goes on.

files.py         folders of checkpoints: complete or not there, found to be whole, writable, large enough, of one run
manifest.py      what stands in a manifest, field by field
storage.py       pieces to files through torch.distributed.checkpoint; no code is run from a file
optimizer.py     what a checkpoint has of an optimizer: moments, master weights, counts of steps, learning rates
state.py         save, save_async, load
export.py        checkpoints to the files of transformers, and an engine from them
"""

from course_lib.checkpoint.files import CannotWrite, latest, one_run
from course_lib.checkpoint.state import Restored, load, save, save_async, size_bytes, wait_for_earlier
