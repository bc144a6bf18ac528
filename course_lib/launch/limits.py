"""What this process may use: the machine's memory, cores and processes, or less where a container sets a limit."""

import os
import resource
from pathlib import Path

import psutil

_TIGHT_PROCESSES = 8192  # a limit above this, as systems have it by default, is not worth counting a user's threads
_FILES = {  # of a control group: its limit, what it uses, and the name of reclaimable file cache in memory.stat
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}


def slowness() -> float:
    """Return how many processes want each core, 1 at least: a limit of seconds that holds on an idle machine times this
    holds on a busy one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # none on macOS


def usable_processes(of_process: str = "/proc/self/cgroup", mounted_at: str = "/sys/fs/cgroup") -> int | None:
    """Return how many processes and threads more this user may start; None where only the kernel's own limit counts."""
    left = []
    for folder, _ in _groups(Path(of_process), Path(mounted_at), "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        left += [] if limit is None or used is None else [limit - used]
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.getuid() != 0 and 0 <= most <= _TIGHT_PROCESSES:
        found = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
        own = [info for info in found if info["uids"] and info["uids"].real == os.getuid()]
        left.append(most - sum(info["num_threads"] or 0 for info in own))
    return max(0, min(left)) if left else None


def usable_memory(of_process: str = "/proc/self/cgroup", mounted_at: str = "/sys/fs/cgroup") -> tuple[int, int]:
    """Return bytes of memory in all and free, within the limits of the control groups that this process is in."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder, version in _groups(Path(of_process), Path(mounted_at), "memory"):
        limit_name, used_name, cache_name = _FILES[version]
        limit = _number(folder / limit_name)
        if limit is not None and limit < memory.total:
            used = (_number(folder / used_name) or 0) - _cache_bytes(folder / "memory.stat", cache_name)
            total, available = min(total, limit), max(0, min(available, limit - used))
    return total, available


def _groups(of_process: Path, mounted_at: Path, controller: str) -> list[tuple[Path, str]]:
    """The folders of this process's groups of a controller, from its own up to the root; none on other systems."""
    found = []
    for line in of_process.read_text().splitlines() if of_process.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base, version = (mounted_at / controller, "v1") if controllers else (mounted_at, "v2")
        own = base / path.lstrip("/")  # inside a container it may not be visible; its root is then the limit's place
        found += [(folder, version) for folder in (own, *own.parents) if folder.is_relative_to(base)]
    return found


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None  # "max": no limit


def _cache_bytes(file: Path, name: str) -> int:
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
