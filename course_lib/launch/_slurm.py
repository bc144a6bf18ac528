"""The same launch as a Slurm job: submitit hands it in, the notebook waits, listens, and cancels it if need be.

submitit writes the batch script and starts one task for each rank; everything after that (messages, output, errors,
the time limit) is the launch's own, through files in a folder that all nodes see.
"""

import importlib.util
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.launch import _failures, _rank
from course_lib.launch._bar import open_bar
from course_lib.launch._failures import RankError
from course_lib.launch._file_link import FileLink
from course_lib.launch._watch import Output, Watch, read_text
from course_lib.launch.rendezvous import check_owned
from course_lib.validate import Count, Size, check_fields

STATE_S = 1.0  # how often Slurm is asked how the job is; its controller serves many
LOST_S = 60.0  # so long after the limit of a launch its job ends by itself, if the notebook is gone
LEAVE_S = 10.0
_CANCEL_S = 3.0
WAITING_FILES_S = 3.0  # how long the last messages of a job that has ended may take on a network file system
_LIVING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING"}
NEVER = {  # reasons of squeue with which a job would wait for ever
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows: use fewer nodes",
    "PartitionTimeLimit": "it asks for more time than the partition allows: use a smaller time_min",
    "BadConstraints": "no node has all that it asks for: ask for less on each node",
    "InvalidAccount": "no such account: use account= as your cluster names it",
    "AccountNotAllowed": "this account may not use the partition: use another partition= or account=",
}
_OURS = {
    "nodes", "ntasks-per-node", "ntasks", "time", "job-name", "output", "error", "wrap", "array", "chdir", "export",
}  # fmt: skip


@dataclass(frozen=True)
class Slurm:
    """The allocation that `launch(..., where=Slurm(...))` asks for.

    nodes, ntasks_per_node   ranks are their product
    partition, account       as your cluster names them; None: its defaults
    gpus_per_node            as many as ntasks_per_node: a GPU for each rank, and NCCL; 0: none, ranks use gloo
    time_min                 minutes after which Slurm ends the job, whatever it does
    options                  more of sbatch's, by their long names: {"mem": "8G", "exclusive": True}
    folder                   seen under this path by this machine and by all nodes; for each launch a folder of mode 700
                             is made in it and removed again
    """

    nodes: Size = 2
    ntasks_per_node: Size = 2
    partition: str | None = None
    gpus_per_node: Count = 0
    time_min: Size = 10
    account: str | None = None
    options: dict[str, str | int | bool] = field(default_factory=dict)
    folder: str = "~/.cache/course_lib/slurm"

    def __post_init__(self):
        check_fields(self)
        for name in ("partition", "account"):
            if getattr(self, name) is not None:
                _check_value(name, getattr(self, name))
        for name, value in self.options.items():
            if not re.fullmatch(r"[a-z][a-z_-]*", name):
                raise ValueError(f"options: {name!r} is no long option of sbatch; write {{'mem': '8G'}} for --mem=8G")
            if name.replace("_", "-") in _OURS:
                raise ValueError(f"options: {name!r} is set by the launch; use the arguments of Slurm(...)")
            _check_value(name, value)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ntasks_per_node

    def check_launch(self, world_size: int, timeout: float) -> None:
        """Whether this machine can hand in such a job. Nothing is sent yet."""
        if world_size != self.num_ranks:
            raise ValueError(
                f"world_size ({world_size}) must be nodes * ntasks_per_node ({self.nodes} * {self.ntasks_per_node} = "
                f"{self.num_ranks}); call launch(fn, {self.num_ranks}, ...) or change Slurm(...)"
            )
        if timeout > self.time_min * 60:
            raise ValueError(
                f"timeout ({timeout:g} s) must be at most time_min ({self.time_min} min), when Slurm ends the job; "
                f"pass time_min={math.ceil(timeout / 60)} or a smaller timeout"
            )
        if importlib.util.find_spec("submitit") is None:
            raise ImportError(
                "where=Slurm(...) needs submitit, which hands in the job and is not installed; install it here: "
                "pip install 'submitit>=1.5' (or the course with its extra: pip install -e '.[slurm]')"
            )
        missing = [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]
        if missing:
            raise ValueError(
                f"where=Slurm(...) needs Slurm's commands, and {', '.join(missing)} cannot be found; start the "
                "notebook on a machine that hands in jobs (a login node), or leave `where` out to use this one"
            )

    def shared_folder(self) -> str:
        """The folder in which launches make theirs."""
        folder = Path(self.folder).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owned(folder)
        return str(folder)


def _check_value(name: str, value) -> None:
    if not isinstance(value, str | int) or not re.fullmatch(r"[^\x00-\x1f]+", str(value)) or value is False:
        raise ValueError(f"{name} must be a text of one line, a number or True, got {value!r}")


def run(where: Slurm, timeout: float, folder: Path, settings: _rank.Settings, output: Output) -> Watch:
    """Hand in the job, wait for its ranks, end it."""
    world = SlurmWorld(folder, settings.world_size)
    start, bar = time.monotonic(), open_bar()
    try:
        world.submit(where, timeout, settings)
        watch = SlurmWatch(world, settings.world_size, output, folder / "ranks")
        while not watch.nodes:
            watch.look()
            bar.draw(world.waits(), int(time.monotonic() - start), None)
            if world.state == "PENDING" and world.reason in NEVER:
                raise RankError(f"{world.job} would wait for ever ({world.reason}): {NEVER[world.reason]}")
        bar.close()
        return watch.follow(time.monotonic() + timeout, LEAVE_S)
    finally:
        bar.close()
        world.end()


class SlurmWorld:
    """The job and its files: `connections` as those of ranks on this machine."""

    def __init__(self, folder: Path, world_size: int):
        self.name = folder.name  # unique, so that the job can be found even if sbatch's answer was lost
        self.folder = folder
        self.connections = [Connection(folder / "ranks", rank) for rank in range(world_size)]
        self.exits = []
        self.job: str | None = None  # not handed in yet
        self.state, self.reason = "PENDING", "None"
        self._asked_at = -math.inf
        FileLink(folder / "ranks" / "master").make()

    def submit(self, where: Slurm, timeout: float, settings: _rank.Settings) -> None:
        import submitit

        from course_lib.launch import _slurm_node  # imports launch, which imports this module

        chosen = {"partition": where.partition, "account": where.account, "gpus-per-node": where.gpus_per_node}
        options = {name: value for name, value in chosen.items() if value} | where.options
        executor = submitit.SlurmExecutor(self.folder / "job", python=shlex.quote(sys.executable))
        executor.update_parameters(
            job_name=self.name,
            nodes=where.nodes,
            ntasks_per_node=where.ntasks_per_node,
            cpus_per_task=settings.threads,
            time=where.time_min,
            setup=[f"export PYTHONPATH={shlex.quote(os.pathsep.join(path for path in settings.sys_path if path))}"],
            srun_args=["--kill-on-bad-exit=1", f"--cpus-per-task={settings.threads}"],
            additional_parameters={name.replace("_", "-"): value for name, value in options.items()},
        )
        try:
            job = executor.submit(_slurm_node.be_host, str(self.folder / "ranks"), timeout, LOST_S)
        except submitit.core.utils.FailedJobError as error:
            raise RankError(f"Slurm did not take the job: {error}; change Slurm(...) accordingly") from None
        self.job = f"Slurm job {job.job_id}"

    def look(self) -> None:
        """Ask Slurm how the job is; not too often."""
        if time.monotonic() - self._asked_at > STATE_S:
            said = _ask("squeue", "--noheader", "--states=all", f"--name={self.name}", "--format=%T|%r")
            if said is not None:
                self.state, _, self.reason = (said.strip() or "GONE|no trace of it").partition("|")
            self._asked_at = time.monotonic()

    def waits(self) -> str:
        """That the job waits, and why, in Slurm's word."""
        return f"{self.job} waits ({self.reason})" if self.state == "PENDING" else f"{self.job} starts"

    def log(self) -> str:
        """The end of what Slurm and the tasks wrote, beside the ranks' own output."""
        files = sorted((self.folder / "job").glob("*.err"))
        lines = [line for file in files for line in read_text(file).splitlines() if not line.startswith("submitit ")]
        return "\n".join("  " + line[:500] for line in lines[-12:])

    def end(self) -> None:
        """Cancel the job if it is still there, and give its processes a moment to go."""
        if self.job is None:
            time.sleep(0.5)  # interrupted while sbatch was talking to Slurm: the job may yet appear
        if self._in_queue() != "":
            _ask("scancel", "--quiet", f"--name={self.name}")
            self.wait_for(("",), _CANCEL_S)

    def wait_for(self, states: Sequence[str], limit_s: float) -> None:
        """Wait until the job is in one of these states; "" once Slurm has let go of it."""
        give_up = time.monotonic() + limit_s
        while self._in_queue() not in states and time.monotonic() < give_up:
            time.sleep(0.1)

    def _in_queue(self) -> str | None:
        """The job's state; "" once Slurm has let go of it, None while Slurm does not answer."""
        said = _ask("squeue", "--noheader", f"--name={self.name}", "--format=%T")
        return said and said.strip()


class Connection:
    """Both directions between the notebook and one rank, as `Watch` uses them."""

    def __init__(self, ranks: Path, rank: int):
        self._said = FileLink(ranks / f"{rank}.said").make()
        self._asked = FileLink(ranks / f"{rank}.asked").make()
        for name in ("out", "err"):  # a network file system shows late what was missing when it was looked for
            (ranks / f"{rank}.{name}").touch()
        self._messages: list[tuple] = []

    def poll(self) -> bool:
        self._messages += self._said.receive()
        return bool(self._messages)

    def recv(self) -> tuple:
        return self._messages.pop(0)

    def send(self, question: str) -> None:
        self._asked.send(question)


class SlurmWatch(Watch):
    """`Watch`, with messages that come through files, and a job that Slurm may end."""

    answer_s = 2.0

    def __init__(self, world: SlurmWorld, world_size: int, output: Output, folder: Path):
        super().__init__(world, world_size, output, folder)
        self._ended_at = math.inf

    def look(self) -> None:
        self._listen(0.1)

    def let_leave(self, limit_s: float) -> None:
        super().let_leave(limit_s)
        self._world.wait_for(("", "COMPLETING"), limit_s)  # all tasks have ended: COMPLETING for some time more

    def _listen(self, timeout: float) -> None:
        time.sleep(timeout)
        for rank in self._talking:
            self._hear(rank)
        self._world.look()
        if self._world.state not in _LIVING and self.unfinished() and not self.failures:
            self._ended_at = min(self._ended_at, time.monotonic())
            if time.monotonic() - self._ended_at > WAITING_FILES_S:
                world = self._world
                reason = f" ({world.reason})" if world.reason not in ("None", "") else ""
                what = f"{world.job} of {self._world_size} ranks was ended by Slurm: {world.state}{reason}"
                places = _failures.place_lines(self.places, self.nodes)
                raise RankError("\n".join([what, *places, world.log()]).rstrip())


def _ask(*command: str) -> str | None:
    """What a command of Slurm's prints; None if it failed, because the controller is busy for instance."""
    try:
        # In a session of its own: the interrupt button signals the kernel's whole process group.
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, start_new_session=True)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None
