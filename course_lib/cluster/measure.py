"""What one rank measures of itself, of its links and of the nodes around it.

All ranks call `check_cluster` at the same time. Each measures; all tell each other what they saw, as JSON; each of them
comes to the same report. A time is the best of some rounds: work of others disturbs single rounds, a fault all of them.
The seconds of a collective are those of its last rank.
"""

import hashlib
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import course_lib
from course_lib import comm
from course_lib.cluster.gpus import look_at_gpu
from course_lib.cluster.judge import Limits, Report, judge
from course_lib.comm.records import device_of
from course_lib.devices import rank_device
from course_lib.hardware import Cluster
from course_lib.layout import Layout
from course_lib.layout.mesh import AXES
from course_lib.training.loop import wait_for
from course_lib.validate import Checked, Size, checked

_CLOCK_ROUNDS = 10
SHARED_WAIT_S = 5.0  # how long a network file system may take to show what another node has written
MB = 10**6


@dataclass(frozen=True)
class Probe(Checked):
    """How much is measured, and under which layout.

    message_bytes    of a collective's payload, and of a message between two ranks
    width            of the square matrices that are multiplied
    folder           a folder that all nodes must see under this path; None: not looked at
    ranks_per_node   None: as the launcher says
    """

    layout: Layout
    message_bytes: Size = 4 * MB
    width: Size = 512
    rounds: Size = 5
    folder: str | None = None
    ranks_per_node: Size | None = None


@checked
def probe_for(layout: Layout, device: torch.device, folder: str | None = None, message_mb: Size | None = None) -> Probe:
    """Return sizes that keep a device busy: on a GPU large ones, on the CPU such as take milliseconds."""
    if device.type == "cuda":
        return Probe(layout, (message_mb or 256) * MB, width=8192, rounds=20, folder=folder)
    return Probe(layout, (message_mb or 4) * MB, folder=folder)


@checked
def check_cluster(probe: Probe, limits: Limits = Limits(), cluster: Cluster | None = None) -> Report:
    """Measure this rank together with all others; the same report on every rank.

    cluster   what the links should reach; None: groups and pairs are compared with each other
    Raises    ValueError if the world is not the layout's
    """
    of_ranks = comm.all_gather_json(measure(probe), dist.group.WORLD)
    return judge(of_ranks, probe.layout, limits, cluster)


def measure(probe: Probe) -> dict:
    """Everything that this rank can tell, made of JSON's kinds."""
    layout = probe.layout
    groups = comm.make_all_groups(layout.mesh, layout.ep, replicas=layout.dp_replicate, folded=layout.folded)
    of_node = probe.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    axes = [axis for axis in (*AXES, "ep") if groups.by_axis[axis].size() > 1]
    return {
        "host": host_name(),
        "ranks_per_node": of_node,
        "message_bytes": probe.message_bytes,
        "device": device_name(),
        "backend": dist.get_backend(),
        "versions": versions(),
        "folder": _see_shared_folder(probe.folder),
        "clock": _clock_offset(),
        "compute_s": _compute_seconds(probe),
        "flops": 2 * probe.width**3,
        "gpu": look_at_gpu(rank_device()),  # now that it is warm
        "links": _link_seconds(probe, pairs_of(dist.get_world_size(), of_node)),
        "collectives": {axis: _collective_seconds(groups.by_axis[axis], probe) for axis in axes},
    }


# --- what is here
def host_name() -> str:
    """The node as Slurm names it, otherwise as it names itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def device_name() -> str:
    device = rank_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    """Of everything that must be equal on all nodes; of the course also its source, which is what differs first."""
    source = hashlib.blake2b(digest_size=4)
    for path in sorted(Path(course_lib.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else ()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "course_lib": f"{importlib.metadata.version('course-lib')} (source {source.hexdigest()})",
        "NCCL": ".".join(map(str, nccl)) or "none",
    }


# --- computing
def _compute_seconds(probe: Probe) -> list[float]:
    """Of one multiplication of two matrices, all ranks at once: in BF16 on a GPU, in FP32 on the CPU."""
    device = rank_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.ones(probe.width, probe.width, dtype=dtype, device=device)
    return timed(lambda: multiply(x), probe.rounds)


def multiply(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def timed(work: Callable[[], object], rounds: int, group: dist.ProcessGroup | None = None) -> list[float]:
    """Seconds of `work`, round by round after one that is not counted; ranks of a group begin each together."""
    device, seconds = rank_device(), []
    for _ in range(rounds + 1):
        wait_for(device)
        if group is not None:
            comm.barrier(group)
        start = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


# --- collectives and links
def _collective_seconds(group: dist.ProcessGroup, probe: Probe) -> dict:
    """Seconds of each collective of one group, round by round; payloads as timing/collectives.py counts."""
    size = group.size()
    numel = max(1, probe.message_bytes // 4 // size) * size
    x, shard = (torch.ones(length, device=rank_device()) for length in (numel, numel // size))
    works = {
        "all_reduce": lambda: comm.all_reduce_(x, group, op="max"),
        "reduce_scatter": lambda: comm.reduce_scatter_into(shard, x, group),
        "all_gather": lambda: comm.all_gather_into(x, shard, group),
        "all_to_all": lambda: comm.all_to_all(x, group),
        "send": lambda: comm.pass_on(x, x, group),
    }
    seconds = {name: timed(work, probe.rounds, group) for name, work in works.items()}
    return {"ranks": dist.get_process_group_ranks(group), "payload_bytes": numel * 4, "seconds": seconds}


@checked
def pairs_of(world_size: Size, ranks_per_node: Size) -> list[tuple[int, int]]:
    """Pairs that have every link once: a ring in each node; and between nodes, for each place in them, a ring of nodes.

    Source   the rings that NCCL builds with a network port for each GPU
    """
    ranks = range(world_size)
    nodes = [ranks[first : first + ranks_per_node] for first in ranks[::ranks_per_node]]
    rings = [*nodes, *(ranks[place::ranks_per_node] for place in ranks[:ranks_per_node])]
    return sorted({tuple(sorted((ring[i - 1], ring[i]))) for ring in rings if len(ring) > 1 for i in range(len(ring))})


@checked
def phases_of(pairs: list) -> list[list[tuple[int, int]]]:
    """Deal pairs out to as few phases as a greedy choice needs, so that no rank is in two pairs of one phase."""
    phases: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = [phase for phase in phases if not {rank for other in phase for rank in other} & set(pair)]
        if free:
            free[0].append(pair)
        else:
            phases.append([pair])
    return phases


def _link_seconds(probe: Probe, pairs: list[tuple[int, int]]) -> dict[str, list[float]]:
    """Seconds of a message, half of there and back, of each pair whose lower rank this is: "0-1" -> round by round."""
    rank, world = dist.get_rank(), dist.group.WORLD
    x = torch.ones(max(1, probe.message_bytes // 4), device=rank_device())
    found = {}
    for phase in phases_of(pairs):
        comm.barrier(world)
        for low, high in phase:
            if rank in (low, high):
                seconds = timed(lambda pair=(low, high): there_and_back(x, *pair), probe.rounds)
                if rank == low:
                    found[f"{low}-{high}"] = [second / 2 for second in seconds]
    return found


def there_and_back(x: torch.Tensor, low: int, high: int) -> None:
    world = dist.group.WORLD
    if dist.get_rank() == low:
        comm.send(x, high, world)
        comm.recv(x, high, world)
    else:
        comm.recv(x, low, world)
        comm.send(x, low, world)


# --- clocks and folders
def now() -> float:
    return time.time()


def _clock_offset() -> dict | None:
    """How far this host's clock is ahead of rank 0's, by a message there and back; None but on a host's first rank.

    The answer was given between sending and receiving: half of the way there and back is the most that it is wrong by.
    """
    hosts = comm.all_gather_json(host_name(), dist.group.WORLD)
    firsts = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank and rank > 0]
    rank, world = dist.get_rank(), dist.group.WORLD
    second = torch.zeros(1, dtype=torch.float64, device=device_of(world))
    found = None
    for first in firsts:
        if rank == first:
            found = min((_ask_clock(second, 0) for _ in range(_CLOCK_ROUNDS)), key=lambda one: one["error_s"])
        elif rank == 0:
            for _ in range(_CLOCK_ROUNDS):
                comm.recv(second, first, world)
                comm.send(torch.full_like(second, now()), first, world)
    return found


def _ask_clock(second: torch.Tensor, of: int) -> dict:
    sent_at = now()
    comm.send(second, of, dist.group.WORLD)
    theirs = comm.recv(second, of, dist.group.WORLD).item()
    got_at = now()
    return {"offset_s": (sent_at + got_at) / 2 - theirs, "error_s": (got_at - sent_at) / 2}


def _see_shared_folder(folder: str | None) -> dict | None:
    """Rank 0 writes a file, all look for it: what each sees. None if no folder is asked for.

    Raises   ValueError on every rank if rank 0 cannot write there
    """
    if folder is None:
        return None
    rank, world = dist.get_rank(), dist.group.WORLD
    told = comm.all_gather_json(_write_note(Path(folder)) if rank == 0 else {}, world)[0]
    if "refused" in told:
        raise ValueError(f"rank 0 cannot write into {told['refused']}; give a folder that all nodes see with --folder")
    seen = {"folder": folder, "seen": sees(Path(folder) / told["name"], told["text"])}
    comm.barrier(world)
    if rank == 0:
        (Path(folder) / told["name"]).unlink()
    return seen


def _write_note(folder: Path) -> dict[str, str]:
    """Write a file with a text that nobody can guess; its name and its text, or why not."""
    text = os.urandom(16).hex()
    path = folder / f".course-check-{text[:8]}"
    try:
        with path.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return {"refused": f"{str(folder)!r} ({error.strerror})"}
    return {"name": path.name, "text": text}


def sees(path: Path, text: str) -> bool:
    """Whether the file is there with this text, or comes to be within SHARED_WAIT_S."""
    give_up = time.monotonic() + SHARED_WAIT_S
    while True:
        if path.parent.is_dir() and path.name in os.listdir(path.parent) and path.read_text() == text:
            return True
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
