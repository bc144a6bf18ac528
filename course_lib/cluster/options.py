"""The command line of the check; nothing here needs torch."""

from dataclasses import dataclass
from pathlib import Path

from course_lib.validate import Checked, Positive, Size


@dataclass(frozen=True)
class Check(Checked):
    """Look at every rank, link and node before a long job; start it as the job, with torchrun or srun.

    Exit code 1 if something is wrong, and the finding says what.
    """

    # No option may begin one of torchrun's: it would take it, behind the module's name, for its own.
    layout: str | None = None  # such as dp=4,tp=8; None: all ranks along dp
    folder: Path | None = None  # a folder that all nodes should see
    between: str | None = None  # the network between nodes, such as efa: GPUs are then compared with the model too
    message_mb: Size | None = None  # of a collective's payload; None: 256 on GPUs, 4 on the CPU
    slower_than: Positive | None = None  # times the others' median is a fault; None: 1.3 on GPUs, 3 on the CPU
    backend: str = "auto"  # auto, nccl, gloo
    json: bool = False  # the report as JSON
