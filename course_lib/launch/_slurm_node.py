"""Ranks on the nodes of a Slurm job: what each task of `srun` does, and how it talks to the notebook through files.

Slurm starts one task for each rank. The task is the rank's host: it forks the rank, answers the notebook's questions,
and says how the rank died if it can no longer say so itself. From here it does what a rank on one machine does, in the
same functions of _rank.py.
"""

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from course_lib.launch import _rank
from course_lib.launch._failures import frames_in_stack_file
from course_lib.launch._file_link import POLL_S, FileLink
from course_lib.launch.rendezvous import Place, as_torchrun, open_store, place_of


class RankLink(FileLink):
    """What a rank has instead of a connection: launch.progress and nested launches look at it."""

    def __init__(self, rank: int, path: Path):
        super().__init__(path)
        self.rank = rank

    def send(self, name: str, *content) -> None:
        """Send a message; of a failure with the time of the clock that nodes share."""
        if name == "failed":
            content = (replace(content[0], when=time.time()),)
        super().send(name, *content)


def be_host(folder: str, timeout: float, lost_s: float) -> None:
    """Be the host of this task's rank until the rank has ended. Called by submitit in every task.

    The notebook ends the job at the launch's limit; if it is gone, the job ends itself lost_s later.
    """
    give_up = time.monotonic() + timeout + lost_s
    rank, ranks = int(os.environ["SLURM_PROCID"]), Path(folder)
    to_notebook = RankLink(rank, ranks / f"{rank}.said")
    to_notebook.send("node", os.environ["SLURMD_NODENAME"])
    to_rank, to_host = Pipe()
    child = os.fork()  # torch is imported, but has no thread yet and has touched no GPU
    if child == 0:
        be_rank(ranks, timeout, to_notebook, to_host)
    try:
        code = attend(child, ranks, to_notebook, to_rank, give_up)
    except BaseException:  # such as the folder gone
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        raise
    if code is not None:
        frames = stack(ranks / f"{rank}.stack")
        to_notebook.send("failed", _rank.Failure("died", time.time(), [(frames, "")] if frames else [], code))
        time.sleep(max(0.0, give_up - time.monotonic()))  # the notebook asks where the others stand, then ends the job


def attend(child: int, ranks: Path, to_notebook: RankLink, to_rank: Connection, give_up: float) -> int | None:
    """Wait for the end of the rank, and answer for it. Its exit code if it ended without being asked to."""
    asked_to_end = []

    def pass_on(number, frame):
        asked_to_end.append(number)  # by scancel, by the job's time limit, by preemption
        os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's notice that the job's time is nearly over
    place = ranks / f"{to_notebook.rank}.where"
    questions = FileLink(ranks / f"{to_notebook.rank}.asked")
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what the rank has started and left behind
            if asked_to_end[:1] == [signal.SIGTERM]:
                to_notebook.send("where", stack(place))
            return None if asked_to_end else os.waitstatus_to_exitcode(status)
        for (question,) in questions.receive():
            if question == "leave":
                asked_to_end.append(question)
            else:
                os.kill(child, signal.SIGUSR1)
                to_rank.send(question)
                time.sleep(2 * POLL_S)  # faulthandler writes at once, whatever the rank is doing
                to_notebook.send("where", stack(place), to_rank.recv() if to_rank.poll() else "")
        if time.monotonic() > give_up:
            os.killpg(child, signal.SIGKILL)
            if to_notebook.rank == 0:
                shutil.rmtree(ranks.parent, ignore_errors=True)  # nobody waits for these files
            sys.exit("the notebook is gone")  # srun ends all tasks when one fails
        time.sleep(POLL_S)


def be_rank(ranks: Path, timeout: float, to_notebook: RankLink, to_host: Connection) -> None:
    """Be the rank: as `_rank.run_rank` on one machine. Never returns."""
    rank = to_notebook.rank
    os.setpgid(0, 0)  # it is ended with the processes that it has started
    for number in (signal.SIGCONT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # submitit has handlers for them, which a fork inherits
    places = (ranks / f"{rank}.where").open("w")
    faulthandler.register(signal.SIGUSR1, file=places)
    faulthandler.register(signal.SIGTERM, file=places, chain=True)  # writes where it stands, then ends it
    threading.Thread(target=_tell_tensors, args=(to_host, threading.get_ident()), daemon=True).start()

    def here(settings: _rank.Settings) -> _rank.Settings:
        place, store = meet(ranks, timeout)
        return replace(
            settings,
            deadline=time.monotonic() + timeout,  # each machine has a clock of its own
            environment=_environment_here(settings.environment),
            variables={"OMP_NUM_THREADS": str(settings.threads), "MPLBACKEND": "Agg", **as_torchrun(place)},
            store=store,
        )

    def wait_to_leave() -> None:
        questions = FileLink(ranks / f"{rank}.asked")
        while ("leave",) not in questions.receive():
            time.sleep(POLL_S)

    _rank.be_rank(to_notebook, ranks, here, wait_to_leave)


def _tell_tensors(to_host: Connection, main_thread_id: int) -> None:
    """Answer the host with what the collective was given in which the rank stands; faulthandler tells the rest."""
    with contextlib.suppress(EOFError, OSError):  # the host is gone
        while to_host.recv():
            to_host.send(_rank.tensors_in(list(traceback.walk_stack(sys._current_frames()[main_thread_id]))))


def _environment_here(of_notebook: dict[str, str]) -> dict[str, str]:
    """This task's environment: the notebook's, which sbatch passes on, with what Slurm and the node have added."""
    environment = {**of_notebook, **os.environ}
    environment.pop("PYTHONPATH", None)  # the launch set it, so that the course is found
    if "PYTHONPATH" in of_notebook:
        environment["PYTHONPATH"] = of_notebook["PYTHONPATH"]
    return environment


def meet(ranks: Path, timeout: float) -> tuple[Place, dist.Store]:
    """This rank's place and the store through which all ranks meet: rank 0 opens it on a free port and tells where."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("SLURM")}
    place, link = place_of(variables), FileLink(ranks / "master")
    limit = timedelta(seconds=timeout)
    if place.rank == 0:
        address = _address_of_node(variables["SLURMD_NODENAME"])
        store = open_store(replace(place, address=address, port=0), limit)
        link.send(address, store.port)
        return replace(place, address=address, port=store.port), store
    address, port = wait_for(link, timeout)
    store = dist.TCPStore(address, port, place.world_size, is_master=False, timeout=limit)
    return replace(place, address=address, port=port), store


def _address_of_node(name: str) -> str:
    """By which address Slurm itself reaches a node; its name where Slurm does not say."""
    with contextlib.suppress(OSError):  # no scontrol on this node
        said = subprocess.run(["scontrol", "--oneliner", "show", "node", name], capture_output=True, text=True)
        if match := re.search(r"\bNodeAddr=(\S+)", said.stdout):
            return match.group(1)
    return name


def wait_for(link: FileLink, limit_s: float) -> tuple:
    """The first message that comes through `link`."""
    give_up = time.monotonic() + limit_s
    while not (messages := link.receive()):
        if time.monotonic() > give_up:
            raise TimeoutError(f"rank 0 had not said after {limit_s:g} s where it is")
        time.sleep(POLL_S)
    return messages[0]


def stack(path: Path) -> list[_rank.Frame]:
    """The newest stack that faulthandler wrote to a file, without what Slurm's task had done before it was a rank."""
    text = path.read_text(errors="replace") if path.exists() else ""
    start = max(text.rfind("Current thread"), text.rfind("Fatal Python error"))
    frames = frames_in_stack_file(text[max(start, 0) :])
    own = [index for index, (file, _, _) in enumerate(frames) if Path(file).name == Path(__file__).name]
    return frames[own[-1] + 1 :] if own else frames
