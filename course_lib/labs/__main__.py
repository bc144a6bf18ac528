"""`torchrun -m course_lib.labs 05 --out lab05.json`: a lab on the ranks that were started."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import tyro
from tyro.conf import Positional

from course_lib.labs.measure import ROUNDS, run_lab
from course_lib.labs.sheet import form
from course_lib.labs.table import lab_named
from course_lib.launch.rendezvous import join_world, place_of, run_script
from course_lib.validate import Checked, Size, writable_file


@dataclass(frozen=True)
class Options(Checked):
    """Measure a lab on these ranks; rank 0 prints the form and writes the file."""

    chapter: Positional[str]  # 00 to 12
    out: Path | None = None  # the JSON that is written
    rounds: Size = ROUNDS  # steps of each layout, or calls of each way to sum


def run(options: Options) -> int:
    """Join the world that started this process, measure, print and write on rank 0."""
    lab, place = lab_named(options.chapter), place_of(os.environ)
    lab.check_ranks(place.world_size)
    if options.out and place.rank == 0:
        writable_file("out", options.out)
    join_world(place)
    measured = run_lab(lab.chapter, options.rounds)
    if dist.get_rank() == 0:
        if options.out:
            options.out.write_text(json.dumps(measured, indent=2), encoding="utf-8")
        print(form(lab, measured))
    dist.barrier()
    return 0


if __name__ == "__main__":
    run_script("course_lib.labs", lambda: run(tyro.cli(Options, prog="python -m course_lib.labs")))
