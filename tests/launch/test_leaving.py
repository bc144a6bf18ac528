"""What a rank leaves behind when its function has returned, and what a launch does when it is disturbed."""

import atexit
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from harness import free_port, hang_text

from course_lib.launch import RankError, _failures, _processes, _rank, _watch, launch

kept = []  # what a function forgets to close


def leave_everything_open(folder: Path) -> tuple[str, str]:
    rank = dist.get_rank()
    kept.append((folder / f"{rank}.txt").open("w"))
    kept[-1].write("still in the buffer")
    kept.append((folder / f"{rank}.bin").open("wb"))
    kept[-1].write(b"bytes")
    kept.append(shared_memory.SharedMemory(create=True, size=64))
    kept.append(tempfile.TemporaryDirectory(dir=folder))
    atexit.register((folder / f"{rank}.atexit").write_text, "ran")
    return kept[-2].name, kept[-1].name


def test_files_are_written_and_what_is_temporary_goes_when_ranks_leave(tmp_path):
    results = launch(leave_everything_open, 2, tmp_path)
    for rank, (memory, folder) in enumerate(results):
        assert (tmp_path / f"{rank}.txt").read_text() == "still in the buffer"
        assert (tmp_path / f"{rank}.bin").read_bytes() == b"bytes"
        assert (tmp_path / f"{rank}.atexit").read_text() == "ran"
        assert not Path(folder).exists()
        with pytest.raises(FileNotFoundError):
            shared_memory.SharedMemory(memory)


def wait_at_exit(folder: Path) -> None:
    atexit.register(time.sleep, 1000)
    kept.append((folder / "open.txt").open("w"))
    kept[-1].write("written before")


def kill_rank_1(name: str) -> None:
    rank = dist.get_rank()
    kept.append(shared_memory.SharedMemory(f"{name}_{rank}", create=True, size=64))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_shared_memory_of_ranks_that_are_killed_is_removed():
    name = f"course_killed_{os.getpid()}"
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(kill_rank_1, 2, name, timeout=30, quiet=True)
    for rank in range(2):
        with pytest.raises(FileNotFoundError):
            shared_memory.SharedMemory(f"{name}_{rank}")


def test_an_exit_function_that_never_ends_holds_no_launch_back(tmp_path):
    launch(wait_at_exit, 1, tmp_path, timeout=30)
    assert (tmp_path / "open.txt").read_text() == "written before"


def test_of_very_many_lines_the_first_and_the_last_are_kept(tmp_path):
    file = tmp_path / "0.out"
    file.write_text("".join(f"{number}\n" for number in range(300_000)))
    lines = _watch.read_lines(file)
    assert len(lines) == _watch.MAX_KEPT_LINES + 1
    assert (lines[0], lines[_watch.MAX_KEPT_LINES // 2], lines[-1]) == ("0", "... 200,000 lines left out", "299999")
    file.write_text("one\n\nthree\rfour")
    assert _watch.read_lines(file) == ["one", "", "four"] and _watch.read_lines(tmp_path / "none") == []


def test_an_interrupt_while_ranks_are_started_or_ended_keeps_the_fork_server(monkeypatch):
    launch(os.getpid, 1)
    server, send = _processes._server._process.pid, _processes.socket.send_fds

    def interrupted(control, messages, descriptors):
        signal.raise_signal(signal.SIGINT)
        return send(control, messages, descriptors)

    monkeypatch.setattr(_processes.socket, "send_fds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(os.getpid, 1)
    monkeypatch.undo()
    assert len(launch(os.getpid, 2)) == 2
    assert _processes._server._process.pid == server


def stop_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def test_a_rank_that_was_stopped_is_named_as_such():
    hang_text(stop_rank_1, 2, r"rank 1 stood still: a signal \(SIGSTOP\) or a debugger has stopped it")


def crash_when_asked() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    _rank.frames_of = lambda frames: signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
    dist.barrier()


def test_a_rank_that_crashes_while_it_is_asked_where_it_stands_is_not_to_blame():
    stopped, asked = "rank 0 stood still: a signal", r"rank 1 stood at .* in crash_when_asked: dist\.barrier"
    hang_text(crash_when_asked, 2, stopped, asked)


def connect_to_nobody() -> None:
    if dist.get_rank() == 1:
        socket.create_connection(("127.0.0.1", int(free_port())))
    dist.barrier()


def test_a_connection_of_the_functions_own_that_is_refused_is_no_echo():
    own = _rank.Failure("exception", 1.0, [([], "ConnectionRefusedError: [Errno 111] Connection refused")])
    torchs = _rank.Failure("exception", 1.0, [([], "torch.distributed.DistNetworkError: Connection refused")])
    assert not _failures.is_secondary(own) and _failures.is_secondary(torchs)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed.*ConnectionRefusedError"):
        launch(connect_to_nobody, 2, timeout=30)


def lose_the_tokenizer() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("Connection refused by the tokenizer")
    time.sleep(0.6)
    raise ValueError("something else, later")


def test_an_error_of_the_functions_own_that_reads_as_an_echo_is_none():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed.*RuntimeError: Connection refused by the tokenizer"):
        launch(lose_the_tokenizer, 2, timeout=30)


def reraise_what_torch_says() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os._exit(3)
    try:
        dist.barrier()
    except RuntimeError as error:
        raise RuntimeError("the barrier was not reached: connection closed by peer") from error


def test_an_echo_that_the_function_raises_anew_is_one():
    with pytest.raises(RankError, match="rank 1 of 2 ended with exit code 3"):
        launch(reraise_what_torch_says, 2, timeout=30)


def leave_sessions(folder: str, how: str) -> None:
    """A child with a session of its own, and a daemon, whose parent has ended; their ids go to files."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    Path(folder, str(child.pid)).touch()
    code = f"import os; pid = os.fork(); pid or os.setsid()\nif pid: open(os.path.join({folder!r}, str(pid)), 'w')"
    subprocess.run([sys.executable, "-c", f"{code}\nelse:\n    import time; time.sleep(300)"], check=True)
    dist.barrier()
    if how == "raise":
        raise ValueError("mine")
    if how == "hang":
        time.sleep(300)
    if how == "die" and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system lets a process adopt what others leave behind")
@pytest.mark.parametrize("how", ["return", "raise", "hang", "die"])
def test_processes_in_sessions_of_their_own_end_with_their_rank(tmp_path, how):
    with contextlib.suppress(RankError):
        launch(leave_sessions, 2, str(tmp_path), how, timeout=20 if how == "hang" else 60)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 4 and [pid for pid in started if psutil.pid_exists(pid)] == []


def test_a_launch_of_one_thread_leaves_the_sessions_of_another_alone(tmp_path):
    """Ranks of two launches at once: what belongs to the one that goes on is not ended with the other."""
    other = threading.Thread(target=launch, args=(hold_a_session, 1, str(tmp_path)), kwargs={"timeout": 60})
    other.start()
    while not list(tmp_path.glob("*.started")):
        time.sleep(0.01)
    launch(os.getpid, 2)
    pid = int(next(tmp_path.glob("*.started")).stem)
    assert psutil.pid_exists(pid)
    (tmp_path / "go").touch()
    other.join()
    assert not psutil.pid_exists(pid)


def hold_a_session(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    Path(folder, f"{child.pid}.started").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)


def test_a_launch_in_a_folder_that_has_been_removed_says_so(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match="the current folder, .* has been removed; os.chdir"):
        launch(os.getpid, 1)


def test_a_process_out_of_descriptors_is_told_so_and_loses_none():
    launch(os.getpid, 1)
    process, (soft, hard) = psutil.Process(), resource.getrlimit(resource.RLIMIT_NOFILE)
    before = process.num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
    try:
        with pytest.raises(RuntimeError, match="8 ranks need 32 more open files than this process may have"):
            launch(os.getpid, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.num_fds() == before
