"""What this process may use: the machine's memory, or less where a container or a job sets a limit; and its cores."""

import os
from pathlib import Path

import psutil

_FILES = {  # of a control group: its limit, what it uses, and the name of reclaimable file cache in memory.stat
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}


def slowness() -> float:
    """Return how many processes want each core, 1 at least: a limit of seconds that holds on an idle machine times this
    holds on a busy one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def usable_memory(of_process: str = "/proc/self/cgroup", mounted_at: str = "/sys/fs/cgroup") -> tuple[int, int]:
    """Return bytes of memory in all and free, within the limits of the control groups that this process is in."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder, version in _groups(Path(of_process), Path(mounted_at)):
        limit_name, used_name, cache_name = _FILES[version]
        limit = _number(folder / limit_name)
        if limit is not None and limit < memory.total:
            used = (_number(folder / used_name) or 0) - _cache_bytes(folder / "memory.stat", cache_name)
            total, available = min(total, limit), max(0, min(available, limit - used))
    return total, available


def _groups(of_process: Path, mounted_at: Path) -> list[tuple[Path, str]]:
    """The folders of this process's memory groups, from its own up to the root; none on other systems."""
    found = []
    for line in of_process.read_text().splitlines() if of_process.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, version = (mounted_at / "memory", "v1") if controllers else (mounted_at, "v2")
        own = base / path.lstrip("/")  # inside a container it may not be visible; its root is then the limit's place
        found += [(folder, version) for folder in (own, *own.parents) if folder.is_relative_to(base)]
    return found


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None  # "max": no limit


def _cache_bytes(file: Path, name: str) -> int:
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
