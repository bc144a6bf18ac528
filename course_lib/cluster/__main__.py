"""`torchrun -m course_lib.cluster`, or `srun python -m course_lib.cluster`: look before a long job.

torchrun --nproc-per-node 4 -m course_lib.cluster --layout dp=2,tp=2 --folder /shared/me
"""

import json
import os
from typing import NoReturn

import torch
import torch.distributed as dist
import tyro

from course_lib.cluster.judge import Limits
from course_lib.cluster.measure import check_cluster, probe_for
from course_lib.cluster.options import Check
from course_lib.devices import rank_device
from course_lib.hardware import Cluster, gpu_of_device, link
from course_lib.launch.rendezvous import join_world, place_of, run_script
from course_lib.layout import Layout
from course_lib.train.options import check_world


def _run_check(options: Check) -> int:
    """Join the world that started this process, measure, print on rank 0; 0 if nothing is wrong, otherwise 1."""
    place = place_of(os.environ)
    layout = Layout.parse(options.layout or f"dp={place.world_size}")
    check_world(layout, place.world_size, place.engine)
    between = link(options.between) if options.between else None
    join_world(place, options.backend)
    on_gpu = rank_device().type == "cuda"
    probe = probe_for(layout, rank_device(), options.folder and str(options.folder), options.message_mb)
    limits = Limits(slower_than=options.slower_than or (1.3 if on_gpu else 3.0))  # CPU ranks share cores
    report = check_cluster(probe, limits, _cluster_here(between, place.local_world_size))
    if dist.get_rank() == 0:
        print(json.dumps(report.to_dict(), indent=2) if options.json else f"{report.table()}\n{report.finding}")
    dist.barrier()
    return 1 if report.faults else 0


def _cluster_here(between, gpus_per_node: int) -> Cluster | None:
    """The links that this machine's GPUs should have; None on a CPU, whose loopback no table has."""
    if rank_device().type != "cuda" or between is None:
        return None
    properties = torch.cuda.get_device_properties(rank_device())
    gpu = gpu_of_device(properties.name, properties.total_memory)
    return gpu and Cluster(gpu, link(gpu.link), between, gpus_per_node)


def run_as_script(options: Check | None = None) -> NoReturn:
    """Check, and end this process with the exit code; without options they are read from the command line."""
    name = "course_lib.cluster"
    run_script(name, lambda: _run_check(options or tyro.cli(Check, prog=f"python -m {name}")))


if __name__ == "__main__":
    run_as_script()
