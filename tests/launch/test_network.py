"""Another process of this machine cannot reach the ranks of a launch; where it can, a launch it disturbs says so."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import hang_text
from namespaces import own_network

from course_lib.launch import RankError, _network, launch, report


def listening_ports() -> set[int]:
    """Ports on which this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def wait_and_tell_ports(seconds: float) -> tuple[list[int], str]:
    ports = listening_ports()
    for port in ports:
        report("port", port)
    time.sleep(seconds)
    sums = torch.ones(1)
    dist.all_reduce(sums)
    assert sums.item() == dist.get_world_size()
    return sorted(ports), os.readlink("/proc/self/ns/net")


def attacked(seconds: float = 1.0):
    """What a launch returned, and to which of its ranks' ports this process could connect while it ran."""
    told, reached = [], []
    thread_results = {}

    def run() -> None:
        thread_results["of"] = launch(
            wait_and_tell_ports, 2, seconds, quiet=True, on_report=lambda name, value: told.append(int(value))
        )

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        for port in sorted(set(told)):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
                reached.append(port)
        time.sleep(0.1)
    thread.join()
    return thread_results["of"], told, reached


@own_network
def test_no_other_process_of_the_machine_reaches_the_sockets_of_ranks():
    results, told, reached = attacked()
    assert told, "ranks listen somewhere"
    assert reached == []
    assert len({network for _, network in results} | {os.readlink("/proc/self/ns/net")}) == 2  # one for both ranks


def connect(address: str, port: int, wrapped: bool) -> None:
    try:
        socket.create_connection((address, port), timeout=5)
    except OSError as error:
        if wrapped:  # as what downloads does
            raise RuntimeError("the model could not be had") from error
        raise


@own_network
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid", "127.0.0.1"])
def test_a_rank_that_wants_the_internet_or_a_server_is_told_how(address, wrapped):
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(RankError) as error:
        launch(connect, 1, address, server.getsockname()[1], wrapped)
    assert str(error.value).endswith(_network.OFFLINE), error.value


def test_an_error_that_has_nothing_to_do_with_the_network_is_told_as_it_is():
    with pytest.raises(RankError) as error:
        launch(open, 1, "/no/such/file")
    assert _network.CHOICE not in str(error.value)


HOST = """
import sys
sys.path[:0] = {tests!r}
import test_network
results, told, reached = test_network.attacked()
assert told and set(told) == set(reached), (set(told), set(reached))
import os
assert all(network == os.readlink("/proc/self/ns/net") for _, network in results)
from course_lib.launch import RankError, _network, launch
try:
    launch(test_network.connect, 1, "127.0.0.1", 1, False)  # nobody listens there
except RankError as error:
    assert "Connection refused" in str(error) and _network.CHOICE not in str(error), error
"""


@pytest.mark.programs
@own_network
def test_ranks_keep_the_machines_network_where_that_is_asked_for_and_the_attack_then_works():
    """So the attack of the test above is one."""
    code = HOST.format(tests=[str(folder) for folder in Path(__file__).parents[:2]])
    environment = os.environ | {_network.CHOICE: "host"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def hold_the_store(folder: Path, until: threading.Event) -> None:
    """Have a lock on the file through which ranks meet, as early as it can be there."""
    while not (found := list(folder.glob("course_launch_*/ranks"))):
        time.sleep(0.001)
    with (found[0] / "store").open("a") as store:
        fcntl.flock(store, fcntl.LOCK_EX)
        until.wait(60)


def test_ranks_that_were_kept_from_meeting_are_no_fault_of_the_function(tmp_path, monkeypatch):
    launch(os.getpid, 1, quiet=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    over = threading.Event()
    holder = threading.Thread(target=hold_the_store, args=(tmp_path, over))
    holder.start()
    with pytest.raises(RankError) as error:
        launch(os.getpid, 2, timeout=3)
    over.set()
    holder.join()
    text = str(error.value)
    assert "rank 0 had not met all other ranks" in text and "ranks could not connect to each other" in text, text
    assert "Do all ranks call" not in text


def never_meet_in_a_barrier() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(60)


def test_ranks_that_have_met_and_hang_are_told_about_their_collectives():
    assert "had not met" not in hang_text(never_meet_in_a_barrier, 2, "Do all ranks call the same collectives")
