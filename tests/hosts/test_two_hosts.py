"""Two emulated hosts with a thin link: `make test-hosts`, as root on Linux. Of seconds only the order is compared."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankError, launch
from course_lib.simulate import hosts
from course_lib.simulate.hosts import link_bytes, split_into_hosts, why_no_hosts
from course_lib.simulate.two_hosts import LAYOUTS, measure_two_hosts, table

WHY_NOT = why_no_hosts()
on_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
PATIENCE_S = 30.0
LINK_BYTES_PER_S = 2e6


def devices() -> set[str]:
    """Network devices of this machine."""
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def networks() -> set[str]:
    """Networks in which a process of this machine lives."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue  # the process has ended
    return found


def until_gone(some: set[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while some & networks():
        assert time.monotonic() < deadline, f"networks are left: {some & networks()}"
        time.sleep(0.1)


def my_network() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def exchange(elements: int) -> tuple:
    """In a rank: an all-reduce inside the hosts, one across; host, network, sum, link bytes and seconds of each."""
    host, rank = split_into_hosts(LINK_BYTES_PER_S), dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    measured = []
    for group in (groups[host], groups[2 + rank % 2]):
        numbers = torch.full((elements,), float(rank))
        start_bytes = link_bytes()  # before the barrier: behind it the host's other rank may send at once
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(numbers, group=group)
        dist.barrier()
        measured.append((numbers.unique().tolist(), link_bytes() - start_bytes, time.perf_counter() - start_s))
    return host, my_network(), int(os.environ["LOCAL_RANK"]), measured


@on_hosts
def test_two_ranks_share_a_host_and_its_network_and_the_link_carries_no_more_than_it_is_given():
    before, elements = devices(), 250_000
    ranks = launch(exchange, 4, elements, quiet=True)
    assert [(host, local) for host, _, local, _ in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    names = [network for _, network, _, _ in ranks]
    assert names[0] == names[1] != names[2] == names[3] and my_network() not in names
    payload = 2 * 4 * elements  # two groups cross, and of two ranks each sends a tensor's bytes
    for rank, (host, _, _, (inside, across)) in enumerate(ranks):
        assert inside[0] == [4.0 * host + 1.0] and across[0] == [2.0 * (rank % 2) + 2.0]
        assert inside[1] < 0.1 * payload and payload <= across[1] < 1.1 * payload
        assert across[2] > 0.8 * payload / LINK_BYTES_PER_S  # nothing makes the link faster; a burst passes at once
    until_gone(set(names))
    assert devices() == before


@on_hosts
def test_a_rank_that_raises_leaves_nothing_behind(tmp_path):
    def fail(folder):
        split_into_hosts(LINK_BYTES_PER_S)
        Path(folder, str(dist.get_rank())).write_text(my_network())
        dist.barrier()
        if dist.get_rank() == 1:
            raise KeyError("mine")
        dist.barrier()

    before = devices()
    with pytest.raises(RankError, match="rank 1 of 4 failed"):
        launch(fail, 4, str(tmp_path))
    until_gone({path.read_text() for path in tmp_path.iterdir()})
    assert devices() == before


@on_hosts
def test_the_launching_process_is_killed_and_nothing_is_left_behind(tmp_path):
    code = f"""
import os, time
from pathlib import Path
from course_lib.launch import launch
from course_lib.simulate.hosts import split_into_hosts

def wait(folder):
    split_into_hosts(1e6)
    Path(folder, os.environ["RANK"]).write_text(os.readlink("/proc/thread-self/ns/net"))
    time.sleep(1000)

launch(wait, 4, {str(tmp_path)!r}, timeout=2000)
"""
    before = devices()
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 2 * PATIENCE_S
    while len(told := [path.read_text() for path in tmp_path.iterdir()]) < 4 or not all(told):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert len(set(told)) == 2 and set(told) <= networks()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until_gone(set(told))
    assert devices() == before


@on_hosts
def test_tensor_parallelism_collapses_on_a_thin_link_and_the_pipeline_holds():
    rows = measure_two_hosts(LAYOUTS, LINK_BYTES_PER_S)
    pp_across, dp_across, tp_across, tp_and_pp_inside_out = rows
    assert [(row.inside, row.across) for row in rows] == [("tp", "pp"), ("tp", "dp"), ("dp", "tp"), ("pp", "tp")]
    for row in rows:
        assert row.formula_bytes < row.link_bytes < 1.1 * row.formula_bytes, row
        assert row.step_s > 0.8 * row.link_s, row
    assert tp_and_pp_inside_out.step_s > 3 * pp_across.step_s  # the same two axes, the other way round
    assert pp_across.step_s < tp_across.step_s / 2 and dp_across.step_s < tp_across.step_s
    assert len(table(rows)) == 5 and all(len(line) <= 100 for line in table(rows))


@on_hosts
def test_without_the_limit_tensor_parallelism_across_does_not_collapse():
    """The planted opposite: on a fast link the order above is gone, so it is the link that makes it."""
    rows = measure_two_hosts(LAYOUTS[2:], 1e9)
    assert all(row.step_s < row.link_bytes / LINK_BYTES_PER_S for row in rows), rows  # less than the thin link alone


def times_across(latency_s: float) -> tuple[str, list[float]]:
    """In a rank: this host's network, and the seconds of small messages there and back between the hosts."""
    split_into_hosts(1e8, 1, latency_s)
    x, seconds = torch.zeros(1), []
    for _ in range(5):
        dist.barrier()
        start_s = time.perf_counter()
        for source in (0, 1):
            dist.broadcast(x, source)
        seconds.append(time.perf_counter() - start_s)
    return my_network(), seconds


@on_hosts
def test_a_message_takes_as_much_longer_as_the_latency_says():
    before = devices()
    fastest = {}
    for latency_s in (0.0, 0.05, 0.2):
        ranks = launch(times_across, 2, latency_s, quiet=True)
        fastest[latency_s] = min(ranks[0][1])  # rank 0 sends, and waits for the answer
        until_gone({network for network, _ in ranks})
    assert fastest[0.0] < 0.1 <= fastest[0.05] < 0.4 <= fastest[0.2] < 0.8, fastest
    assert devices() == before


@on_hosts
def test_a_latency_alone_makes_tensor_parallelism_across_collapse():
    """Of the bandwidth there is plenty. Each of the many all-reduces of tp waits for the link; of pp few sends do."""
    latency_s = 0.05
    pp_across, tp_across = measure_two_hosts([LAYOUTS[0], LAYOUTS[3]], 1e8, seq_len=64, latency_s=latency_s)
    all_reduces = 4 * (4 * 4 + 2 + 3)  # of each micro-batch: blocks, both ends, loss
    assert tp_across.step_s > all_reduces * latency_s > 2 * pp_across.step_s, (tp_across, pp_across)


# --- what cannot be


def test_a_layout_that_is_not_two_axes_of_two_ranks_is_refused():
    for text in ("dp=4", "tp=2", "pp=2,dp=2,cp=2"):
        with pytest.raises(ValueError, match=r"two hosts of two ranks take two axes of size 2"):
            measure_two_hosts([text])
    with pytest.raises(ValueError, match="bytes_per_s is 1.0; give a finite number at least 10000"):
        measure_two_hosts(LAYOUTS, 1.0)


def test_why_hosts_cannot_be_is_one_sentence(monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert why_no_hosts() == "two hosts need root, who may make network devices; this is user 1000"
    with pytest.raises(ValueError, match="need root"):
        measure_two_hosts(LAYOUTS)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda name, path: None if name == "tc" else f"/bin/{name}")
    assert why_no_hosts() == "two hosts need the programs ip, tc, unshare; tc cannot be found"
    monkeypatch.setattr(hosts.shutil, "which", lambda name, path: "/bin/false")
    assert why_no_hosts() == "unshare cannot make an emulated host: exit code 1"
    monkeypatch.setattr(hosts.sys, "platform", "darwin")
    assert "this is darwin" in why_no_hosts()


@on_hosts
def test_without_tun_devices_a_latency_is_refused(monkeypatch):
    monkeypatch.setattr(hosts, "TUN", "/dev/net/none")
    with pytest.raises(OSError, match="a latency needs /dev/net/none, which is not here; use latency_s=0"):
        hosts._make_tun(os.getpid())
    with pytest.raises(ValueError, match="latency_s is 2.0"):
        measure_two_hosts(LAYOUTS, latency_s=2.0)


def test_a_world_of_another_size_and_a_rank_on_no_host_are_refused():
    with pytest.raises(RankError, match="ranks_per_host is 2, and the world has 2 ranks"):
        launch(split_into_hosts, 2, 1e6)
    with pytest.raises(RankError, match="this rank is on no emulated host"):
        launch(link_bytes, 1)
