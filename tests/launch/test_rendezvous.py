"""Who am I: what torchrun, accelerate and srun say becomes one place; every rank takes the same backend."""

import dataclasses
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import free_port

from course_lib import devices
from course_lib.authoring import ROOT
from course_lib.launch import _network, _processes, launch, rendezvous
from course_lib.launch.rendezvous import (
    Place,
    agree_on_backend,
    as_torchrun,
    first_node,
    join_world,
    open_store,
    place_of,
    restart_hint,
    tasks_of_nodes,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "8",  # of the job; this step has fewer
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008,011]",
}


def test_torchruns_variables_win_over_those_of_the_slurm_job_around_it():
    assert place_of(SRUN | TORCHRUN) == Place("torchrun", 3, 4, 1, 2, "10.0.0.1", 29400)
    assert place_of(TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}).engine == "accelerate"


def test_srun_alone_gives_rank_place_on_the_node_and_the_first_nodes_address():
    assert place_of(SRUN) == Place("srun", 4, 5, 0, 1, "gpu007", 12_000 + (4711 * 16 + 1) % 20_000)
    given = place_of(SRUN | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert (given.address, given.port) == ("10.0.0.9", 4000)


def test_two_steps_of_a_job_do_not_share_a_port():
    assert place_of(SRUN).port != place_of(SRUN | {"SLURM_STEP_ID": "2"}).port


def test_a_batch_script_without_srun_is_one_process():
    assert place_of({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) == Place()
    assert place_of({}) == Place()
    assert place_of({"ACCELERATE_MIXED_PRECISION": "no"}) == Place("accelerate")  # accelerate launch --cpu


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"LOCAL_RANK": "two"}, "LOCAL_RANK is 'two'"),
        ({"RANK": "4"}, "rank 4 of world_size 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
    ],
)
def test_what_an_engine_says_wrongly_is_named(wrong, text):
    with pytest.raises(ValueError, match=text):
        place_of(TORCHRUN | wrong)


def test_slurms_short_forms_are_read():
    names = ["n1", "n[1-2]", "gpu[003-007,12],cpu1", "rack2-gpu[1,5]-ib", "a,b"]
    assert [first_node(name) for name in names] == ["n1", "n1", "gpu003", "rack2-gpu1-ib", "a"]
    assert [tasks_of_nodes(short) for short in ("4", "2(x3),1", "1,2(x2)")] == [[4], [2, 2, 2, 1], [1, 2, 2]]


def test_srun_ranks_look_like_torchruns_and_a_loopback_world_stays_on_loopback(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    place = place_of(SRUN)
    assert place_of(as_torchrun(place)) == dataclasses.replace(place, engine="torchrun")
    assert "GLOO_SOCKET_IFNAME" not in as_torchrun(place)
    assert "lo" in as_torchrun(dataclasses.replace(place, address="127.0.0.1"))["GLOO_SOCKET_IFNAME"].lower()


def test_one_node_without_gpus_takes_the_whole_world_to_gloo(monkeypatch):
    """Two nodes of two ranks: a node that had its GPUs and decided alone would wait for the other for ever."""
    monkeypatch.setattr(rendezvous.dist, "is_nccl_available", lambda: True)
    assert chosen_by_four_ranks(monkeypatch, ["ab", "ab", "cd", "cd"]) == {"nccl"}
    assert chosen_by_four_ranks(monkeypatch, ["ab", "ab", "c", "c"]) == {"gloo"}
    assert chosen_by_four_ranks(monkeypatch, ["ab", "ab", "", ""]) == {"gloo"}


def test_a_process_that_sees_one_gpu_of_its_own_has_one_whatever_its_place(monkeypatch):
    """As under `srun --gpus-per-task=1`: number 0 is another GPU in each process."""
    monkeypatch.setattr(rendezvous.dist, "is_nccl_available", lambda: True)
    assert chosen_by_four_ranks(monkeypatch, ["a", "b", "c", "d"]) == {"nccl"}
    assert chosen_by_four_ranks(monkeypatch, ["a", "b", "c", "c"]) == {"gloo"}


def test_a_rank_works_on_its_own_gpu_or_on_the_one_that_it_sees(monkeypatch):
    for visible, local_rank, index in ((4, 3, 3), (1, 3, 0), (2, 3, 1)):
        monkeypatch.setattr(devices.torch.cuda, "device_count", lambda visible=visible: visible)
        assert devices.device_for("nccl", local_rank) == torch.device("cuda", index)
        assert devices.device_for("gloo", local_rank) == torch.device("cpu")
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="'shared-gpu' needs a GPU for this rank"):
        devices.device_for("shared-gpu", 0)


def chosen_by_four_ranks(monkeypatch, visible: list[str]) -> set[str]:
    """visible[rank]: a letter for each GPU that the process sees; two ranks on a node."""
    store, chosen = dist.HashStore(), set()
    process = threading.local()
    cuda = rendezvous.torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: len(visible[process.rank]))
    by_index = lambda device: SimpleNamespace(uuid=visible[process.rank][device.index])  # noqa: E731
    monkeypatch.setattr(cuda, "get_device_properties", by_index)

    def decide(rank: int) -> None:
        process.rank = rank
        chosen.add(agree_on_backend(Place("torchrun", rank, 4, rank % 2, 2), store, "auto")[0])

    threads = [threading.Thread(target=decide, args=(rank,)) for rank in reversed(range(4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return chosen


def test_whoever_asks_torchrun_for_restarts_is_told_what_gloo_needs():
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert variable in restart_hint(TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3"})
    asked = {"TORCHELASTIC_MAX_RESTARTS": "3"}
    for enough in ({}, {"TORCHELASTIC_MAX_RESTARTS": "0"}, asked | {variable: "1"}, asked | {"LOCAL_WORLD_SIZE": "4"}):
        assert restart_hint(TORCHRUN | enough) is None


def listens_on(port: int) -> set[str]:
    """Addresses, as /proc writes them, on which somebody listens at that port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    local = [fields[1].rpartition(":") for fields in lines if fields[3:4] == ["0A"]]
    return {address for address, _, number in local if int(number, 16) == port}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")
def test_rank_0_listens_on_one_address_and_on_all_only_where_its_name_is_loopback_for_others():
    limit = timedelta(seconds=20)
    alone, several = Place("srun", 0, 1, 0, 1, "127.0.0.1", 0), Place("srun", 0, 2, 0, 1, "localhost", 0)
    store = open_store(alone, limit)
    store.set("x", "1")
    client = dist.TCPStore("127.0.0.1", store.port, 1, is_master=False, timeout=limit)
    assert client.get("x") == b"1" and listens_on(store.port) == {"0100007F"}
    assert listens_on(open_store(several, limit).port) <= {"00000000", "0" * 32}
    with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1, port {store.port} .*MASTER_PORT"):
        open_store(dataclasses.replace(alone, port=store.port), limit)


def joined_through_an_agents_store(port: int, attempt: int) -> float:
    """In a rank: leave the world of launch, and join as a process that torchrun has started for the nth time would."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    join_world(Place("torchrun", rank, 2, rank, 2, "127.0.0.1", port), "gloo", timeout_s=20)
    sum_1 = torch.ones(1)
    dist.all_reduce(sum_1)
    return sum_1.item()


@pytest.mark.programs
def test_ranks_that_start_again_do_not_look_for_those_that_died_in_a_store_that_outlived_them(monkeypatch):
    monkeypatch.setenv(_network.CHOICE, "host")  # the agent is no rank, and its store must be reached from there
    monkeypatch.setattr(_processes, "_server", None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        assert list(launch(joined_through_an_agents_store, 2, store.port, attempt, timeout=60)) == [2.0, 2.0]


def joined_without_an_agent(port: int) -> tuple[float, str]:
    """In a rank: leave the world of launch, and join as two tasks of srun on one machine do, the second one late."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    time.sleep(2.0 * rank)
    why = join_world(Place("srun", rank, 2, rank, 2, "127.0.0.1", port), "gloo", timeout_s=20)
    sum_1 = torch.ones(1)
    dist.all_reduce(sum_1)
    return sum_1.item(), why


def test_a_rank_that_comes_late_finds_the_store_through_which_ranks_meet_and_both_say_who_else_does():
    for total, why in launch(joined_without_an_agent, 2, int(free_port()), timeout=60):
        assert total == 2.0 and why.endswith("; who can reach the ranks' ports: docs/SHARED_MACHINES.md"), why
    page = " ".join((ROOT / rendezvous.SHARED).read_text(encoding="utf-8").split())
    assert "Ranks that share the machine's network: who has a login there can connect to their loopback ports" in page
    assert "all ranks that torchrun, accelerate or srun start (the first line of such a run names this page)" in page
