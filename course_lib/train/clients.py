"""The clients that get a run's numbers beside its own files: TensorBoard, Weights & Biases, trackio.

Each is an extra of the package, and is imported when it is asked for. Nothing leaves the machine: all write below the
folder of the log, and somebody sends it on, or not.

    tensorboard --logdir FOLDER/log/tensorboard      a run for each rank
    wandb sync FOLDER/log/wandb/offline-run-*        a run for each rank, in one group
    TRACKIO_DIR=FOLDER/log/trackio trackio show      the same
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PROJECT = "course"
Sink = Callable[[int, Mapping[str, float]], None]  # (step, its numbers by their names)


def check(names: Sequence[str]) -> None:
    """Raise ValueError if one of these clients is not installed: which extra brings it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"{name} is not installed; run: pip install 'course-lib[{name}]', or leave it out of log_to"
            )


@contextmanager
def open_tensorboard(folder: Path, rank: int) -> Iterator[Sink]:
    """Write event files with PyTorch's own writer."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / "tensorboard" / f"rank{rank}") as writer:

        def send(step: int, numbers: Mapping[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        yield send


@contextmanager
def open_wandb(folder: Path, rank: int) -> Iterator[Sink]:
    """Write an offline run, without a word about this machine, its program or its crashes."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
    import wandb

    quiet = wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
    )
    run = wandb.init(
        project=PROJECT, group=folder.parent.name, name=f"rank{rank}", dir=folder, mode="offline", settings=quiet
    )
    with run:
        yield lambda step, numbers: run.log(dict(numbers), step=step)


@contextmanager
def open_trackio(folder: Path, rank: int) -> Iterator[Sink]:
    """Write trackio's local data base, one for each rank: several processes would wait for each other's locks."""
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")  # read when trackio is imported
    import trackio

    run = trackio.init(
        f"{PROJECT}-rank{rank}",
        f"{folder.parent.name}-rank{rank}",
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    try:
        yield lambda step, numbers: run.log(dict(numbers), step=step)
    finally:
        run.finish()


OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}
