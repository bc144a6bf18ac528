"""What the ranks of a fault test do: train by one parallelism until the fault comes, which one of them brings on."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import shared_memory

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import model
from course_lib.config import ModelConfig, MoeConfig
from course_lib.launch import report
from course_lib.layout import Layout
from course_lib.parallel import context, expert, five_d, pipeline, sequence, tensor, zero
from course_lib.parallel.data import BucketedDP
from course_lib.parallel.engine import make_optimizer, step

SEQ_LEN = 8
LLAMA = ModelConfig("llama", 2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=32, max_seq_len=SEQ_LEN)
EXPERTS = ModelConfig(
    "experts", 2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=32, max_seq_len=SEQ_LEN,
    moe=MoeConfig(4, 2, 8),
)  # fmt: skip
LAYOUT = Layout(dp=2, pp=2, micro_batch=2, micro_batches=2, zero_stage=1)
BUILDERS = {  # each on the whole world
    "data": lambda: BucketedDP(model.build(LLAMA), dist.group.WORLD),
    "zero": lambda: zero.build(model.build(LLAMA), dist.group.WORLD, stage=3),
    "tensor": lambda: tensor.build(model.build(LLAMA), dist.group.WORLD),
    "sequence": lambda: sequence.build(model.build(LLAMA), dist.group.WORLD),
    "context": lambda: context.build(model.build(LLAMA), dist.group.WORLD),
    "pipeline": lambda: pipeline.build(model.build(LLAMA), dist.group.WORLD, num_micro_batches=2),
    "expert": lambda: expert.build(model.build(EXPERTS), dist.group.WORLD),
    "five_d": lambda: five_d.build(LLAMA, LAYOUT),
}
RANKS = dict.fromkeys(BUILDERS, 2) | {"data": 3, "expert": 4, "five_d": 4}


@dataclass(frozen=True)
class Fault:
    """What one rank does to the others: at its `call`-th communication, or `after_s` seconds after its first step."""

    kind: str
    rank: int
    call: int | None = None
    after_s: float | None = None


class Planned(Exception):
    """The fault of a rank that raises."""


class Saboteur(TorchDispatchMode):
    """Notes this rank's communication by name, and brings the fault on at one of the calls."""

    def __init__(self, fault: Fault | None):
        super().__init__()
        self.calls: list[str] = []
        self._fault = fault

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            if self._fault is not None and self._fault.call == len(self.calls):
                args = bring_on(self._fault.kind, func, args)
            self.calls.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


def bring_on(kind: str, func, args: tuple) -> tuple:
    """The fault itself; who disagrees goes on with the arguments that are returned."""
    report("fault", dist.get_rank())
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hung":
        hang()
    elif kind == "raised":
        raise Planned("as planned")
    elif kind == "other collective":
        call_something_else(func, args)
    elif kind == "other shape":
        return longer(args)
    return args


def hang() -> None:
    time.sleep(1000)


def call_something_else(func, args: tuple) -> None:
    """A collective that no other rank of the group calls now."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    x, group = torch.zeros(5), dist.ProcessGroup.unbox(named["process_group"])
    if "allreduce" in func._schema.name:
        dist.broadcast(x, group=group, group_src=0)
    else:
        dist.all_reduce(x, group=group)


def longer(value):
    """The same arguments, with tensors of more elements."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.numel() * 2 + 3, dtype=value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(longer(one) for one in value)
    return value


def train(name: str, memory: str, fault: Fault | None = None, steps: int | None = None) -> tuple[list[str], float]:
    """Train for some steps, or until the fault ends it; returns this rank's calls, and seconds of the steps.

    Each rank keeps shared memory of a name that begins with `memory`, and a process of its own: what may be left.
    """
    rank = dist.get_rank()
    fault = fault if fault is not None and fault.rank == rank else None
    block = shared_memory.SharedMemory(f"{memory}_{rank}", create=True, size=64)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    engine = BUILDERS[name]()
    optimizer = make_optimizer(engine)
    x_BS, y_BS = torch.zeros(2, 2, SEQ_LEN, dtype=torch.long)
    start = time.perf_counter()
    if fault is not None and fault.after_s is not None:
        threading.Timer(fault.after_s, bring_on, (fault.kind, None, ())).start()
    with Saboteur(fault) as saboteur:
        for _ in range(steps) if steps else itertools.count():
            step(engine, [(x_BS, y_BS), (x_BS, y_BS)], optimizer, clip_norm=1.0)
    child.kill()
    child.wait()
    block.close()
    block.unlink()
    return saboteur.calls, time.perf_counter() - start
