"""`course doctor`: what this machine can run, chapter by chapter, after a real launch of two ranks."""

import importlib.metadata
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_lib.launch import RankError, launch, usable_memory
from course_lib.launch.limits import usable_cores

_PACKAGES = ("torch", "accelerate", "numpy", "matplotlib", "ipywidgets", "jupyterlab", "nbval", "transformers")
_LAUNCH_SECONDS = 60.0


_TRANSFORMERS = ("transformers",)
_ON_GPUS = "each rank computes on its own, through NCCL"
ON_CPU = "the notebook computes on the CPU"
_KERNELS = f"{ON_CPU}; its cell for GPUs times kernels there, with Triton"
ALONE = f"{ON_CPU}; its cell for GPUs times a step there"


@dataclass(frozen=True)
class Chapter:
    """What a chapter asks of a machine: the most ranks at once, what GPUs are used for, memory.

    needs          what it imports beside the packages that come with the course
    memory_bytes   notebook, ranks and kernel at their peak took 0.8 to 1.8 GiB on a CPU machine; rounded up
    """

    stem: str
    ranks: int
    on_gpu: str = _ON_GPUS
    needs: tuple[str, ...] = ()
    memory_bytes: int = 2 << 30


CHAPTERS = (
    Chapter("00_ranks_and_collectives", 4, f"{_ON_GPUS}; launches that look at gloo itself ask for it"),
    Chapter("00_ranks_and_collectives_in_depth", 8, f"{_ON_GPUS}; launches that look at gloo ask for it"),
    Chapter("01_single_gpu_memory", 1, ON_CPU),
    Chapter("01_single_gpu_memory_in_depth", 1, f"{ALONE}, two look at its allocator", _TRANSFORMERS),
    Chapter("02a_precision", 1, ON_CPU),
    Chapter("02b_activations", 1, ON_CPU),
    Chapter("02c_fine_tuning", 1, ON_CPU),
    Chapter("02_single_gpu_techniques_in_depth", 1, ALONE),
    Chapter("03_data_parallel", 4, f"{_ON_GPUS}; a step is traced on the CPU"),
    Chapter("03_data_parallel_in_depth", 4, f"{_ON_GPUS}; Accelerate's trap is shown on the CPU"),
    Chapter("04_zero", 4),
    Chapter("04_zero_in_depth", 4, f"{_ON_GPUS}; Accelerate's trap is shown on the CPU", _TRANSFORMERS),
    Chapter("05_tensor_parallel", 4),
    Chapter("05_tensor_parallel_in_depth", 4),
    Chapter("06_sequence_parallel", 4),
    Chapter("06_sequence_parallel_in_depth", 4),
    Chapter("07_context_parallel", 4),
    Chapter("07_context_parallel_in_depth", 4),
    Chapter("08_pipeline_parallel", 4, f"{_ON_GPUS}; pipelines written by hand stay on the CPU"),
    Chapter("08_pipeline_parallel_in_depth", 4),
    Chapter("09a_mixture_of_experts", 1, ON_CPU, _TRANSFORMERS),
    Chapter("09b_expert_parallel", 4),
    Chapter(
        "09_expert_parallel_in_depth", 4, f"{_ON_GPUS}; what the notebook trains itself stays on the CPU", _TRANSFORMERS
    ),
    Chapter("10_five_d", 16, memory_bytes=4 << 30),
    Chapter("10_five_d_in_depth", 8),
    Chapter("11_finding_a_configuration", 4),
    Chapter("11_finding_a_configuration_in_depth", 1, ON_CPU),
    Chapter("12_on_a_cluster", 4, "ranks stay on the CPU, where their waits are measured"),
    Chapter("12_on_a_cluster_in_depth", 4, "broken runs stay on the CPU, where gloo's errors are shown"),
    Chapter("13a_inside_a_gpu", 1, _KERNELS),
    Chapter("13b_eight_bits", 4, ON_CPU),
    Chapter("13_inside_a_gpu_in_depth", 2, _KERNELS),
)


@dataclass(frozen=True)
class Machine:
    """What this machine has. `launch_error` is empty if two ranks really started and summed their numbers."""

    python: str
    system: str
    packages: dict[str, str | None]
    cores: int
    memory_bytes: int
    available_bytes: int
    gpus: list[dict]
    backends: list[str]
    launch_s: float | None
    launch_backend: str | None
    launch_error: str


def look_at_machine() -> Machine:
    """Versions, cores, memory, GPUs, and a launch of two ranks."""
    memory_bytes, available_bytes = usable_memory()
    seconds, backend, error = _try_launch()
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in _PACKAGES},
        cores=usable_cores(),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        backends=[
            name for name, here in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if here
        ],
        launch_s=seconds,
        launch_backend=backend,
        launch_error=error,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict:
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory_bytes": properties.total_memory}


def _sum_of_ranks() -> int:
    one_more_than_rank = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(one_more_than_rank)
    return one_more_than_rank.item()


def _try_launch() -> tuple[float | None, str | None, str]:
    try:
        results = launch(_sum_of_ranks, 2, timeout=_LAUNCH_SECONDS, quiet=True)
    except (RankError, ValueError, OSError) as error:
        return None, None, str(error)
    wrong = "" if list(results) == [3, 3] else f"two ranks summed 1 + 2 to {list(results)}"
    return results.seconds, results.backend, wrong


def can_run(chapter: Chapter, machine: Machine) -> tuple[bool, str]:
    """Whether a chapter runs on a machine, and how or why not."""
    if machine.launch_error:
        return False, "ranks do not start here (see above)"
    missing = [name for name in chapter.needs if machine.packages[name] is None]
    if missing:
        return False, f"needs {' and '.join(missing)}, not installed: pip install {' '.join(missing)}"
    if machine.memory_bytes < chapter.memory_bytes:
        need, have = chapter.memory_bytes / 2**30, machine.memory_bytes / 2**30
        return False, f"needs {need:.0f} GiB of memory, and here are {have:.1f} GiB"
    gpus = len(machine.gpus)
    if gpus >= chapter.ranks:
        return True, f"with {chapter.ranks} GPU{'s' * (chapter.ranks > 1)}: {chapter.on_gpu}"
    if chapter.ranks == 1:
        return True, "on the CPU"
    sharing = f", sharing {machine.cores} cores" if machine.cores < chapter.ranks else ""
    on_cpu = f"on up to {chapter.ranks} CPU ranks (gloo){sharing}"
    if gpus < 2:
        return True, on_cpu
    return True, f"launches of up to {gpus} ranks with {gpus} GPUs: {chapter.on_gpu}; larger ones {on_cpu}"


def doctor() -> int:
    """Print what this machine can run; 0 if every chapter runs here, otherwise 1."""
    machine = look_at_machine()
    found = [(chapter.stem, *can_run(chapter, machine)) for chapter in CHAPTERS]
    print("\n".join([*_machine_lines(machine), "", *_chapter_lines(found)]))
    return 0 if all(runs for _, runs, _ in found) else 1


def _machine_lines(machine: Machine) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items() if version)
    missing = [name for name, version in machine.packages.items() if version is None]
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.1f} GiB)" for gpu in machine.gpus]
    lines = [
        f"python    {machine.python} on {machine.system}",
        f"packages  {versions}" + (f"; not installed: {', '.join(missing)}" if missing else ""),
        f"cores     {machine.cores}",
        f"memory    {machine.memory_bytes / 2**30:.1f} GiB, {machine.available_bytes / 2**30:.1f} GiB free",
        f"GPUs      {', '.join(gpus) or 'none: everything runs on the CPU, as real processes over gloo'}",
        f"backends  {', '.join(machine.backends)}",
    ]
    if machine.launch_error:
        return [*lines, f"launch    FAILED: {machine.launch_error}"]
    return [*lines, f"launch    2 ranks over {machine.launch_backend} in {machine.launch_s:.1f} s: right"]


def _chapter_lines(found: list[tuple[str, bool, str]]) -> list[str]:
    width = max(len(stem) for stem, _, _ in found)
    return [f"{stem:<{width}} {'runs' if runs else 'NO'}  {how}" for stem, runs, how in found]
