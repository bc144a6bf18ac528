"""The check before a long job: each planted fault is named, on ranks and in plain records; nothing else is."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from harness import free_port

from course_lib.cluster import Limits, gpus, judge, measure
from course_lib.cluster.judge import compare_seconds
from course_lib.cluster.measure import Probe, check_cluster, pairs_of, phases_of
from course_lib.hardware import Cluster, gpu, link
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.timing.collectives import collective_s

LAYOUT = Layout(dp=2, tp=2)
ROOT = Path(__file__).parents[2]
SLEEP_S = 0.4
PATIENT = Limits(slower_than=2.0, noise_s=SLEEP_S / 4)  # the best of some rounds is not so late on a busy machine


def small(folder=None, layout=LAYOUT) -> Probe:
    return Probe(layout, message_bytes=1024, width=32, rounds=2, folder=folder)


def check_with(plant=None, folder=None):
    """On a rank: plant a fault, then check."""
    if plant is not None:
        folder = plant(dist.get_rank()) or folder
    return check_cluster(small(folder), PATIENT)


def faults_of(plant=None, folder=None) -> tuple[str, ...]:
    """What all ranks say; they must say the same."""
    reports = launch(check_with, 4, plant, folder, quiet=True)
    assert all(report == reports[0] for report in reports)
    return reports[0].faults


def slowly(function, when=lambda *arguments: True):
    def run(*arguments):
        if when(*arguments):
            time.sleep(SLEEP_S)
        return function(*arguments)

    return run


def test_healthy_ranks_have_no_fault_and_every_axis_collective_and_pair_a_row(tmp_path):
    report = launch(check_with, 4, None, str(tmp_path), quiet=True)[0]
    assert report.faults == () and report.finding == "found: nothing wrong"
    kinds = [row.kind for row in report.rows]
    names = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")
    assert all(kinds.count(f"{axis} {name}") == 2 for axis in ("dp", "tp") for name in names)
    assert [row.where for row in report.rows if row.kind == "link"] == [
        f"{low} - {high}, inside a node" for low, high in ((0, 1), (0, 3), (1, 2), (2, 3))
    ]
    assert "no NVML: not looked at" in report.table() and max(map(len, report.table().splitlines())) <= 100
    assert list(tmp_path.iterdir()) == [], "rank 0 removes what it wrote"
    told = json.loads(json.dumps(report.to_dict()))
    assert told["healthy"] and len(told["rows"]) == len(report.rows)


def test_a_rank_that_computes_slowly_is_named_and_no_other():
    def plant(rank):
        if rank == 2:
            measure.multiply = slowly(measure.multiply)

    (fault,) = faults_of(plant)
    assert fault.startswith("rank 2 on ") and "times slower than the others' median" in fault


def test_a_slow_link_is_named_by_its_pair_and_a_rank_with_slow_links_by_itself():
    def plant(rank):
        measure.there_and_back = slowly(measure.there_and_back, lambda x, low, high: (low, high) == (1, 2))

    (fault,) = faults_of(plant)
    assert fault.startswith("the link between rank 1 on ") and " and rank 2 on " in fault

    def plant_rank(rank):
        measure.there_and_back = slowly(measure.there_and_back, lambda x, low, high: 3 in (low, high))

    assert [fault.partition(" on ")[0] for fault in faults_of(plant_rank)] == ["every link of rank 3"] * 2


def test_a_slow_group_of_an_axis_is_named():
    def plant(rank):
        if rank in (2, 3):
            measure.comm.all_to_all = slowly(measure.comm.all_to_all, lambda x, group: group.size() == 2 and tp(group))

    def tp(group):
        return dist.get_process_group_ranks(group) == [2, 3]

    (fault,) = faults_of(plant)
    assert fault.startswith("all_to_all over tp is ") and fault.endswith("slower in ranks 2, 3 than in others")


def test_another_version_another_clock_and_a_local_folder_are_named(tmp_path):
    def plant(rank):
        measure.SHARED_WAIT_S = 0.0
        if rank < 3:
            return str(tmp_path)
        measure.platform.python_version = lambda: "3.9.1"
        measure.host_name = lambda: "other"
        measure.now = lambda: time.time() + 60.0
        (tmp_path / "local").mkdir()
        return str(tmp_path / "local")

    version, folder, clock = faults_of(plant)
    assert version.startswith("python: rank 3 on other has 3.9.1, most have 3.")
    assert folder.startswith(f"rank 3 on other does not see in {tmp_path / 'local'} what rank 0 on ")
    assert clock.startswith("the clock of other is +60.0 s off that of ")


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank():
    def work():
        with pytest.raises(ValueError, match="rank 0 cannot write into '/proc/none'.*give a folder that all nodes see"):
            check_cluster(small("/proc/none", Layout(dp=2)), PATIENT)
        return True

    assert launch(work, 2, quiet=True) == [True, True]


# --- without processes


def told(rank=0, host="n1", **changes) -> dict:
    """What a well rank of two tells."""
    seconds = {name: [2.0, 1.0] for name in ("all_reduce", "send")}
    return {
        "host": host, "ranks_per_node": 1, "message_bytes": 10**9, "device": "NVIDIA H100", "backend": "nccl",
        "versions": {"torch": "2.13.0"}, "folder": None, "clock": None, "compute_s": [3.0, 1.0, 2.0], "flops": 10**12,
        "gpu": None, "links": {"0-1": [1.0]} if rank == 0 else {},
        "collectives": {"dp": {"ranks": [0, 1], "payload_bytes": 10**9, "seconds": seconds}},
    } | changes  # fmt: skip


def faults(*of_ranks, cluster=None) -> tuple[str, ...]:
    return judge(of_ranks, Layout(dp=len(of_ranks)), Limits(), cluster).faults


def test_every_link_has_one_pair_and_no_rank_is_twice_in_a_phase():
    assert pairs_of(4, 4) == [(0, 1), (0, 3), (1, 2), (2, 3)] and pairs_of(2, 2) == [(0, 1)] and pairs_of(1, 8) == []
    assert pairs_of(6, 2) == [(0, 1), (0, 2), (0, 4), (1, 3), (1, 5), (2, 3), (2, 4), (3, 5), (4, 5)]
    for pairs in (pairs_of(6, 2), pairs_of(64, 8)):
        phases = phases_of(pairs)
        assert sorted(pair for phase in phases for pair in phase) == pairs and len(phases) <= 7
        assert all(len({rank for pair in phase for rank in pair}) == 2 * len(phase) for phase in phases)


def test_the_median_of_the_others_forgives_nobody_and_blames_nobody_alone():
    def slower(*seconds):
        return list(compare_seconds(dict(enumerate(seconds))).values())

    assert slower(2.0) == [(1.0, False)] and slower(1.0, 1.0, 3.0) == [(0.5, False), (0.5, False), (3.0, True)]
    assert slower(1e-5, 1e-5, 9e-5)[2][1] is False, "less than the noise"
    alone = told(collectives={}, links={})
    assert "the only rank" in judge([alone], Layout()).table() and faults(alone) == ()
    assert faults(told(), told(1)) == ()
    assert len(faults(told(compute_s=[9.0, 1.31]), told(1))) == 1 and faults(told(compute_s=[9.0, 1.29]), told(1)) == ()


def test_a_collective_is_held_against_the_model_where_links_are_known():
    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"), 1)
    best = collective_s("all_reduce", 10**9, 2, cluster, 1)
    quick = {"dp": {"ranks": [0, 1], "payload_bytes": 10**9, "seconds": {"all_reduce": [best * 1.9]}}}
    slow = {"dp": {"ranks": [0, 1], "payload_bytes": 10**9, "seconds": {"all_reduce": [best * 2.1]}}}
    assert faults(told(collectives=quick), told(1, collectives=quick), cluster=cluster) == ()
    assert faults(told(collectives=quick), told(1, collectives=slow), cluster=cluster) == (
        "all_reduce over dp in ranks 0, 1 reaches 0.48 of the modelled bandwidth",
    ), "a round takes as long as its last rank"


def test_a_clock_within_what_is_known_of_it_is_no_fault():
    far = {"offset_s": 0.9, "error_s": 0.6}
    assert faults(told(), told(1, "n2", clock=far)) == ()
    (fault,) = faults(told(), told(1, "n2", clock=far | {"error_s": 0.1}))
    assert fault == "the clock of n2 is +0.9 s off that of n1: is it synchronised?"


class Driver(SimpleNamespace):
    """pynvml as nvidia-ml-py names it, with one GPU that is too warm, slowed and has lost bits."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 1, 0
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: uuid)
    nvmlDeviceGetCurrentClocksEventReasons = staticmethod(lambda gpu: 0x44)  # heat, and the power cap
    nvmlDeviceGetTemperature = staticmethod(lambda gpu, sensor: 91)
    nvmlDeviceGetClockInfo = staticmethod(lambda gpu, clock: 1200)
    nvmlDeviceGetMaxClockInfo = staticmethod(lambda gpu, clock: 1980)

    @staticmethod
    def nvmlDeviceGetTotalEccErrors(gpu, error, counter):
        return {(1, 0): 2}[error, counter]


def test_a_gpu_that_is_hot_slowed_or_has_lost_bits_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver)
    (fault,) = faults(told(gpu=gpus.ask_nvml("GPU-1")), told(1))
    why = "slowed by its hardware (heat); 2 uncorrected ECC errors since its driver was loaded; 91 C"
    assert fault == f"the GPU of rank 0 on n1: {why}"


def test_without_nvml_or_a_driver_or_ecc_nothing_is_claimed(monkeypatch):
    def refuse(*_):
        raise Driver.NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.ask_nvml("GPU-1") is None
    monkeypatch.setattr(Driver, "nvmlDeviceGetTotalEccErrors", refuse)
    monkeypatch.setitem(sys.modules, "pynvml", Driver)
    assert gpus.ask_nvml("GPU-1")["ecc_errors"] is None
    monkeypatch.setattr(Driver, "nvmlInit", refuse)
    assert gpus.ask_nvml("GPU-1") is None


@pytest.mark.programs
def test_under_torchrun_it_prints_a_table_a_verdict_and_exits_by_it(tmp_path):
    def check(ranks, *options):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
        command += ["--master-port", free_port()]
        command += ["-m", "course_lib.cluster", "--folder", str(tmp_path), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)

    done = check("2", "--layout", "tp=2", "--message-mb", "1", "--slower-than", "1000")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 ranks on 1 host, gloo, cpu; layout tp=2; messages of 1 MB" in done.stdout
    assert done.stdout.endswith("found: nothing wrong\n")
    # of six pairs' messages one takes .1 ms more than the median, on any machine
    done = check("4", "--layout", "dp=2,tp=2", "--message-mb", "16", "--slower-than", "0.001", "--json")
    assert done.returncode == 1, done.stderr[-2000:]
    assert not json.loads(done.stdout)["healthy"]
