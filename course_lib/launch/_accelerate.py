"""`accelerate.notebook_launcher` behind `launch(..., via="accelerate")`, with what it lacks put around it.

| on its own                                           | here                                                          |
|------------------------------------------------------|---------------------------------------------------------------|
| forks the notebook: fails after any use of a GPU,    | runs in a fresh process of the fork server, the host          |
| hangs after a two-threaded matrix multiplication     |                                                               |
| returns nothing                                      | each rank writes its result to a file                         |
| fixed port 29500                                     | a free one                                                    |
| names the wrong rank in an error                     | each rank writes its own failure                              |
| no time limit; ranks print over each other           | launch's own                                                  |

What stays: 0.2 s more for each launch; no Windows; when a rank fails, the error does not say where
the others stood. In a function that uses accelerate on a machine without GPUs write `Accelerator(cpu=True)`: a plain
`Accelerator()` makes each rank train alone.
"""

import dataclasses
import faulthandler
import os
import pickle
import socket
import time
from pathlib import Path

from course_lib.launch import _failures, _processes, _rank
from course_lib.launch._watch import Outcome, Output, Watch, read_text

ECHO_S = 1.0  # how long a rank that lost its peer waits, so that accelerate sees the peer's death first


def run(folder: Path, settings: _rank.Settings, output: Output) -> Outcome:
    """In the notebook process: start the host, wait for it, and gather what its ranks have written."""
    ranks, host = folder / "ranks", folder / "host"
    host.mkdir()
    host_settings = dataclasses.replace(settings, world_size=1, backend=None)
    (host / "settings.pkl").write_bytes(pickle.dumps(host_settings))
    (host / "function.pkl").write_bytes(pickle.dumps((be_host, (str(ranks), settings.world_size))))
    world = _processes.start_world(str(host), 1, "forkserver")
    try:
        watch = Watch(world, 1, output, host)
        watch.until(settings.deadline)
        if watch.unfinished():
            time.sleep(_rank.DUMP_S + 0.2)  # faulthandler in every rank writes where it stands when the time is up
    finally:
        world.end()
    if watch.failures:
        return Outcome({}, watch.failures, {}, {})
    failures = pickle.loads((host / "0.result").read_bytes()) if watch.done else {}
    done, places = {}, {}
    for rank in set(range(settings.world_size)) - set(failures):
        if (ranks / f"{rank}.report").exists():
            done[rank] = pickle.loads((ranks / f"{rank}.report").read_bytes())
        elif not failures:
            places[rank] = _failures.describe_place(_failures.frames_in_stack_file(read_text(ranks / f"{rank}.stack")))
    return Outcome(done, failures, places, {})


def be_host(ranks: str, world_size: int) -> dict[int, _rank.Failure]:
    """In the host: let accelerate start the ranks; what failed in which of them."""
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    faulthandler.cancel_dump_traceback_later()  # its thread would not survive the fork, but its lock would
    died = {}
    try:
        notebook_launcher(be_rank, args=(ranks,), num_processes=world_size, use_port=str(free_port()))
    except ChildFailedError as error:
        died = {rank: failure.exitcode for rank, failure in error.failures.items()}
    failures = {int(file.stem): pickle.loads(file.read_bytes()) for file in Path(ranks).glob("*.failure")}
    for rank, code in died.items():
        if rank not in failures:
            frames = _failures.frames_in_stack_file(read_text(Path(ranks) / f"{rank}.stack"))
            failures[rank] = _rank.Failure("died", 0.0, [(frames, "")] if frames else [], code)
    return failures


def be_rank(ranks: str) -> None:
    """In a rank that accelerate has started: the same as in any other rank, but with files instead of messages."""
    rank, folder = int(os.environ.get("RANK", "0")), Path(ranks)
    settings = pickle.loads((folder / "settings.pkl").read_bytes())
    settings = dataclasses.replace(settings, environment=dict(os.environ))  # with what accelerate has added to it
    _rank.link = _rank.Link(rank, _rank.link.connection)
    _rank.prepare_process(rank, settings, folder)
    name, *content = _rank.call(rank, settings, folder)
    _rank.flush_output()
    if name == "done":
        write_whole(folder / f"{rank}.report", pickle.dumps(tuple(content)))
        while len(list(folder.glob("*.report"))) < settings.world_size:  # leave together
            time.sleep(0.01)
        return
    write_whole(folder / f"{rank}.failure", pickle.dumps(content[0]))
    if settings.world_size > 1:
        time.sleep(ECHO_S if _failures.is_secondary(content[0]) else 0)
        os._exit(1)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see complete or not at all."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").replace(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
