"""Which rank this process is, by the variables of the engine that started it, and the world joined.

    engine        rank, world size, place on the node                              rank 0's address
    torchrun      RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE                   MASTER_ADDR, MASTER_PORT
    accelerate    the same: `accelerate launch --multi_gpu` is torchrun            the same
    srun          SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID,               MASTER_ADDR, MASTER_PORT; where they
                  SLURM_STEP_TASKS_PER_NODE                                        are missing, the first node of the
                                                                                   step and a port made of the job's id
    none          one process that is the whole world; `accelerate launch --cpu` too, whatever it is asked for

torchrun's variables win: inside a Slurm job it starts the ranks, and srun only the agents.

Who can reach the ports, and what for: docs/SHARED_MACHINES.md. Nothing that ranks send each other is unpickled.
"""

import errno
import ipaddress
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from course_lib.devices import choose_backend, device_for
from course_lib.launch import _rank

SHARED = "docs/SHARED_MACHINES.md"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STARTED_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # set by `accelerate launch`, whatever it starts
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # "1": torchrun opens a new store for the ranks of each attempt
FIRST_PORT, NUM_PORTS = 12_000, 20_000  # below those that systems hand out to clients


@dataclass(frozen=True)
class Place:
    """Where this process stands in the world. `address` and `port` are rank 0's; without them it is alone."""

    engine: str = "alone"  # "torchrun", "accelerate", "srun"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str | None = None
    port: int | None = None

    def __post_init__(self):
        for index, count in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, index) < getattr(self, count):
                raise ValueError(
                    f"{self.engine} says {index} {getattr(self, index)} of {count} {getattr(self, count)}; "
                    f"{index} must be from 0 to {count} - 1: look at the variables that it sets"
                )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()}, started by {self.engine}"


def place_of(environment: Mapping[str, str]) -> Place:
    """Reads what torchrun, accelerate launch or srun say; one process alone if none of them started it.

    Raises   ValueError naming the variable that is missing or no number
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun_place(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:  # a batch script alone has no step
        return _srun_place(environment)
    return Place("accelerate" if _STARTED_BY_ACCELERATE in environment else "alone")


def _torchrun_place(environment: Mapping[str, str]) -> Place:
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    engine = "accelerate" if _STARTED_BY_ACCELERATE in environment else "torchrun"
    if "MASTER_ADDR" not in environment and world_size > 1:
        raise ValueError(f"WORLD_SIZE is {world_size}, but MASTER_ADDR is not set; start ranks with torchrun or srun")
    local_rank, local_world_size = _number(environment, "LOCAL_RANK"), _number(environment, "LOCAL_WORLD_SIZE")
    address = environment.get("MASTER_ADDR")
    port = None if address is None else _number(environment, "MASTER_PORT")
    return Place(engine, rank, world_size, local_rank, local_world_size, address, port)


def _srun_place(environment: Mapping[str, str]) -> Place:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    world_size, node = _number(environment, tasks), _number(environment, "SLURM_NODEID")
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(world_size))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    job_and_step = 16 * _number(environment, "SLURM_JOB_ID") + _number(environment, "SLURM_STEP_ID")
    return Place(
        "srun",
        _number(environment, "SLURM_PROCID"),
        world_size,
        _number(environment, "SLURM_LOCALID"),
        tasks_of_nodes(per_node)[node],
        environment.get("MASTER_ADDR") or first_node(nodes),
        int(environment.get("MASTER_PORT") or FIRST_PORT + job_and_step % NUM_PORTS),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        raise ValueError(
            f"{name} is {environment.get(name)!r}; it must be a whole number: start ranks with torchrun or srun"
        ) from None


def first_node(node_list: str) -> str:
    """The first name of Slurm's short form: `gpu[003-007,12],cpu1` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", node_list)
    if match is None:
        raise ValueError(f"{node_list!r} names no node; set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "") + match[3]


def tasks_of_nodes(short: str) -> list[int]:
    """Tasks on each node, from Slurm's short form: `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", short):
        counts += [int(tasks)] * int(times or 1)
    return counts


def restart_hint(environment: Mapping[str, str]) -> str | None:
    """What to tell those who ask several agents of torchrun for restarts and would not get them on gloo.

    The agents' store outlives the ranks; from torch 2.13 on these use it too, and would find addresses of the dead.
    """
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0 or environment.get(_OWN_STORE) == "1":
        return None
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):  # one agent: see `_attempt_of`
        return None
    return f"restarts on gloo need {_OWN_STORE}=1 in torchrun's own environment, on each machine"


def _attempt_of(place: Place, environment: Mapping[str, str]) -> str:
    """Which start of the ranks this is: torchrun's own store outlives them, and has addresses of those that died.

    Of several agents each counts its own restarts, so that their numbers may differ: there all use one, and torchrun
    must give a new store (`restart_hint`).
    """
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") if place.local_world_size == place.world_size else "0"


def join_world(place: Place, backend: str = "auto", timeout_s: float = 600.0) -> str:
    """Initialise torch.distributed and the rank's device; return the backend with the reason.

    Backends are those of `launch`; "auto" takes NCCL if every rank of every node has a GPU of its own. From here on the
    variables that torchrun sets are set, whoever started the ranks.

    Raises   ValueError for a backend that is none, or NCCL without a GPU for every rank
    """
    os.environ.update(as_torchrun(place))
    if place.address is None:
        store = dist.HashStore()
    else:
        store = dist.PrefixStore(f"attempt {_attempt_of(place, os.environ)}", meet(place, timedelta(seconds=timeout_s)))
    backend, why = agree_on_backend(place, store, backend)
    limit = timedelta(seconds=timeout_s)
    store = dist.PrefixStore("course", store)
    _rank.join_world(backend, store, place.rank, place.world_size, place.local_rank, limit)
    return f"{why}; who can reach the ranks' ports: {SHARED}" if place.world_size > 1 else why


def meet(place: Place, timeout: timedelta) -> dist.Store:
    """The store at rank 0's address: torchrun's own, or one that rank 0 opens on that address and no other."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    if place.rank == 0:
        return open_store(place, timeout)
    return dist.TCPStore(place.address, place.port, place.world_size, is_master=False, timeout=timeout)


def open_store(place: Place, timeout: timedelta) -> dist.TCPStore:
    """On rank 0: a store that listens on one address. On all only where that one is not to be had, as behind NAT."""
    here = place.local_world_size == place.world_size
    found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # others try both of localhost's
    is_loopback = ipaddress.ip_address(address[0]).is_loopback
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Debian calls a node's own name 127.0.1.1, where no other node finds it.
        listener.bind(address if here or not is_loopback else ("", place.port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            listener.close()
            raise ValueError(
                f"rank 0 cannot listen at {place.address}, port {place.port} ({error.strerror}); set MASTER_PORT to a "
                "port that is free there"
            ) from error
        listener.bind(("", place.port))
    listener.listen(socket.SOMAXCONN)
    return dist.TCPStore(
        place.address, listener.getsockname()[1], place.world_size, is_master=True, timeout=timeout,
        wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip


def run_script(name: str, act: Callable[[], int]) -> NoReturn:
    """Act, and end this process with the exit code that it returns; what cannot be is one line, and 2."""
    try:
        code = act()
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = 2
    end_script(code)


def end_script(code: int) -> NoReturn:
    """End this process, a rank that an engine started, with this exit code, once all that it printed is out.

    No interpreter shutdown: gloo's threads outlive their groups, and one that then asks Python for its lock is ended
    with a SIGABRT.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_owned(folder: Path) -> None:
    """Raises ValueError if another user than root could put files of his own in place of those in this folder."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"folder {folder} belongs to user {status.st_uid}, who could put files in place of the launch's; required: "
            f"a folder of user {os.geteuid()}. Choose one of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise ValueError(
            f"folder {folder} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), who could put their "
            f"own files in place of the launch's; use one of your own, or chmod go-w {folder}"
        )


def as_torchrun(place: Place) -> dict[str, str]:
    """The variables that torchrun would set. Where rank 0's address is loopback, so is the network of all."""
    names = ("rank", "world_size", "local_rank", "local_world_size")
    variables = {name.upper(): str(getattr(place, name)) for name in names}
    if place.address is not None:
        variables |= {"MASTER_ADDR": place.address, "MASTER_PORT": str(place.port)}
    if place.address is None or place.address in LOOPBACK or place.local_world_size == place.world_size:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            variables[name] = os.environ.get(name, _rank.loopback_interface(sys.platform))
    return variables


def agree_on_backend(place: Place, store: dist.Store, backend: str) -> tuple[str, str]:
    """Choose for all ranks at once: nodes may differ in their GPUs, and half a world on NCCL would wait for the other.

    GPUs are counted by their ids, since `srun --gpus-per-task=1` shows each process one GPU as number 0, and without it
    every process sees all of the node.

    Bytes    an id of each rank to rank 0's store, and a number back
    """
    store.set(f"gpu/{place.rank}", _gpu_id(place.local_rank))
    if place.rank == 0:
        ids = {store.get(f"gpu/{rank}") for rank in range(place.world_size)} - {b""}
        store.set("gpus", str(len(ids)))
    return choose_backend(backend, place.world_size, int(store.get("gpus")))


def _gpu_id(local_rank: int) -> str:
    """Return what tells the GPU that this rank would use from all others, wherever they are; "" if there is none."""
    if not dist.is_nccl_available() or torch.cuda.device_count() == 0:
        return ""
    return str(torch.cuda.get_device_properties(device_for("nccl", local_rank)).uuid)
