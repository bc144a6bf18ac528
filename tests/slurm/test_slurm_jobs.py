"""launch(..., where=Slurm()) from a notebook kernel, and the batch script, on a real Slurm: `make test-slurm`."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jupyter_kernels import Kernel, remaining

from course_lib import checkpoint
from course_lib.authoring import ROOT
from course_lib.checkpoint.files import read_manifest
from course_lib.cluster import Site, write_site
from course_lib.launch.limits import slowness

pytestmark = pytest.mark.skipif(
    "course_slurm_" not in os.environ.get("SLURM_CONF", ""),
    reason="runs inside tests/slurm/cluster.py: make test-slurm",
)
SETUP = """
import os, sys, time, subprocess, dataclasses
import torch, torch.distributed as dist
from course_lib.launch import launch, progress, report, Slurm
where = Slurm(folder={folder!r})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def kernel(folder):
    kernel = Kernel()
    kernel.show(SETUP.format(folder=str(folder)))
    yield kernel
    kernel.stop()


@pytest.fixture(autouse=True)
def nothing_stays(folder):
    yield
    until_queue_is_empty()
    assert list(folder.iterdir()) == []
    assert not remaining([process for process in psutil.process_iter() if "submitit" in " ".join(cmdline(process))])


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def queue(*options):
    return subprocess.run(["squeue", "--noheader", *options], capture_output=True, text=True, check=True).stdout


def until_queue_is_empty(within_s=20):
    """Jobs that were cancelled are COMPLETING for a moment."""
    give_up = time.monotonic() + within_s
    while queue() and time.monotonic() < give_up:
        time.sleep(0.1)
    assert queue() == ""


def test_four_ranks_on_two_nodes_send_objects_and_lines_back_to_the_cell(kernel):
    cell = kernel.show(
        """
@dataclasses.dataclass
class Seen:                                        # a class of the notebook comes back as itself
    rank: int
    local_rank: int
    of_node: int
    total_2: torch.Tensor
def work(scale):
    total_2 = torch.ones(2, requires_grad=True) * dist.get_rank()
    dist.all_reduce(total_2)
    for _ in progress(range(3), "bar"):
        pass
    node = os.environ["SLURMD_NODENAME"]
    print(f"hello from {node}")
    sys.stderr.write(f"a warning\\n" if dist.get_rank() == 3 else "")
    local_rank, of_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return Seen(dist.get_rank(), local_rank, of_node, total_2 * scale)
results = launch(work, 4, 2.0, where=where)
assert all(isinstance(seen, Seen) for seen in results)
print([(seen.rank, seen.local_rank, seen.of_node, seen.total_2.tolist()) for seen in results])
print(results.nodes, results.lines[2], results.stderr[3], results.backend, min(results.peak_bytes) > 2**20)
"""
    )
    lines = "".join(f"[rank {rank}] hello from {node}\n" for rank, node in enumerate(("n1", "n1", "n2", "n2")))
    seen = [(rank, rank % 2, 2, [12.0, 12.0]) for rank in range(4)]
    rest = "('n1', 'n1', 'n2', 'n2') ['hello from n2'] ['a warning'] gloo True\n"
    assert cell.out == f"{lines}{seen}\n{rest}"
    assert "[rank 3] a warning" in cell.err and "bar" not in cell.err


def test_a_failing_rank_is_named_with_its_node_and_the_others_with_where_they_stood(kernel):
    cell = kernel.run(
        """
def work():
    dist.barrier()
    if dist.get_rank() == 2:
        print("failed at", time.time())
        raise ValueError("mine")
    dist.barrier()
try:
    launch(work, 4, where=where)
finally:
    print("raised at", time.time())
"""
    )
    assert cell.error.startswith("RankError: rank 2 of 4 on n2 failed:\n  Cell, line 5, in work"), cell.error
    assert 'raise ValueError("mine")\nValueError: mine' in cell.error
    for rank, node in ((0, "n1"), (1, "n1"), (3, "n2")):
        assert f"rank {rank} on {node} stood at Cell, line 6, in work: dist.barrier()" in cell.error, cell.error
    failed_at, raised_at = (float(found) for found in re.findall(r"at (\d+\.\d+)", cell.out))
    assert raised_at - failed_at < 5 * slowness()


def test_a_hang_on_two_nodes_names_line_dtype_and_shape_of_every_rank(kernel):
    cell = kernel.run(
        """
def work():
    if dist.get_rank() == 2:
        time.sleep(60)
    dist.all_reduce(torch.zeros(2, 16))
launch(work, 4, where=where, timeout=20)
"""
    )
    assert "time limit: after 20 s the launch of 4 ranks had not finished" in cell.error, cell.error
    said = " ".join(cell.error.split())
    assert "rank 2 on n2 stood at Cell, line 3, in work: time.sleep(60)" in said, said
    for rank, node in ((0, "n1"), (1, "n1"), (3, "n2")):
        call = "dist.all_reduce(torch.zeros(2, 16)) (inside all_reduce of float32[2, 16])"
        assert f"rank {rank} on {node} stood at Cell, line 4, in work: {call}" in said, said


def test_a_rank_that_dies_is_named_and_so_is_a_job_that_slurm_ends(kernel):
    cell = kernel.run(
        """
def work():
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), 11)
    time.sleep(30)
launch(work, 4, where=where)
"""
    )
    assert cell.error.startswith("RankError: rank 3 of 4 on n2 was killed by SIGSEGV"), cell.error
    assert "rank 0 on n1 stood at Cell, line 5, in work: time.sleep(30)" in cell.error
    message = kernel.start("launch(lambda: (report('up', 1), time.sleep(30)), 4, where=where, on_report=print)")
    wait_for_output(kernel, "up")
    subprocess.run(["scancel", f"--user={os.environ.get('USER', 'root')}"], check=True)
    error = kernel.finish(message).error
    assert re.match(r"RankError: Slurm job \d+ of 4 ranks was ended by Slurm: CANCELLED", error), error
    assert re.search(r"rank [23] on n2 stood at Cell, line 1, in <lambda>", error), error


def test_a_cancelled_cell_cancels_its_job(kernel):
    message = kernel.start(
        "launch(lambda: (report('up', 1), subprocess.Popen(['sleep', '4711']), time.sleep(100)), 4, where=where, "
        "on_report=print)"
    )
    wait_for_output(kernel, "up")
    sleeping = [process for process in psutil.process_iter() if cmdline(process) == ["sleep", "4711"]]
    assert sleeping and queue("--format=%T %N") == "RUNNING n[1-2]\n"
    kernel.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in kernel.finish(message).error
    assert queue("--states=PENDING,RUNNING") == "" and not remaining(sleeping)


def test_a_job_that_waits_can_be_interrupted_and_one_that_would_wait_for_ever_does_not(kernel):
    busy = ["sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "srun sleep 100"]
    job = subprocess.run(busy, capture_output=True, text=True, check=True).stdout.strip()
    message = kernel.start("launch(lambda: 1, 4, where=where)")
    try:
        while "PENDING" not in queue("--format=%T"):
            time.sleep(0.2)
        kernel.manager.interrupt_kernel()
        assert "KeyboardInterrupt" in kernel.finish(message).error
        assert queue("--format=%A").split() == [job]
    finally:
        subprocess.run(["scancel", job], check=True)
    cell = kernel.run("launch(lambda: 1, 3, where=dataclasses.replace(where, nodes=3, ntasks_per_node=1))")
    assert re.match(r"RankError: Slurm job \d+ would wait for ever \(PartitionNodeLimit\)", cell.error), cell.error
    cell = kernel.run("launch(lambda: 1, 4, where=dataclasses.replace(where, partition='none'))")
    assert cell.error.startswith("RankError: Slurm did not take the job:") and "partition" in cell.error


def test_the_job_of_a_notebook_that_is_gone_ends_itself(folder):
    kernel = Kernel()
    kernel.show(SETUP.format(folder=str(folder)) + "from course_lib.launch import _slurm; _slurm.LOST_S = 4.0")
    where = "where=dataclasses.replace(where, nodes=1)"
    kernel.start(f"launch(lambda: (report('up', 1), time.sleep(100)), 2, {where}, on_report=print, timeout=6)")
    wait_for_output(kernel, "up")
    kernel.stop()
    assert queue("--states=RUNNING") != ""


def wait_for_output(kernel, text):
    """Wait until what the running cell writes contains `text`."""
    said = ""
    while text not in said:
        message = kernel.client.get_iopub_msg(timeout=60)
        said += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
        assert message["msg_type"] != "error", message["content"]


def test_the_batch_script_trains_four_ranks_on_two_nodes_stops_when_slurm_asks_and_goes_on(tmp_path):
    shutil.copy(ROOT / "course_lib" / "templates" / "train.sbatch", tmp_path)
    job, log = submit(tmp_path, STEPS="1000000")
    wait_until(lambda: log.exists() and "starts anew" in log.read_text(), log)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)  # as --signal=TERM@120 does, to the steps alone
    until_queue_is_empty(60)
    text = log.read_text()
    assert state_of(job) == "FAILED", text
    assert "started by torchrun" in text and "toy on 4 ranks (dp=2,tp=2,zero_stage=1)" in text, text
    (done,) = re.findall(r"^[01]: stopped by SIGTERM after step (\d+) of 1000000", text, re.MULTILINE)
    checkpoints, last = Path(tmp_path, "checkpoints", "course-train"), int(done) + 2
    assert f"step-{int(done):08d}" in [path.name for path in checkpoints.iterdir()], text
    job, log = submit(tmp_path, STEPS=str(last))
    until_queue_is_empty(120)
    text = log.read_text()
    assert state_of(job) == "COMPLETED" and f"goes on at step {done} from its checkpoint" in text, text
    assert re.findall(rf"^[01]: step {last} of {last}: loss", text, re.MULTILINE), text  # either node may have rank 0
    assert f"step-{last:08d}" in [path.name for path in checkpoints.iterdir()]


def test_a_job_whose_node_goes_down_waits_again_and_ends_bit_for_bit_as_an_undisturbed_one(tmp_path):
    shutil.copy(ROOT / "course_lib" / "templates" / "train.sbatch", tmp_path)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    submit(tmp_path, STEPS="100", CHECKPOINT=str(whole))
    until_queue_is_empty(240)
    job, log = submit(tmp_path, STEPS="100", CHECKPOINT=str(broken))
    wait_until(lambda: checkpoint.latest(broken) is not None, log)
    control("update", "NodeName=n2", "State=DOWN", "Reason=test")  # slurm.conf lets it come back by itself
    wait_until(lambda: state_of(job) == "PENDING", log)
    control("update", f"JobId={job}", "StartTime=now")  # Slurm itself would let it wait for two minutes
    until_queue_is_empty(240)
    text = log.read_text()
    (done,) = re.findall(r"goes on at step (\d+) from its checkpoint", text)
    assert state_of(job) == "COMPLETED" and 0 < int(done) < 100, text
    of_runs = [read_manifest(checkpoint.latest(folder))["files"] for folder in (whole, broken)]
    of_ranks = [{name: entry for name, entry in files.items() if name.endswith(".distcp")} for files in of_runs]
    assert len(of_ranks[0]) == 4 and of_ranks[0] == of_ranks[1]  # sizes and checksums of what each rank wrote


def wait_until(happened, log, within_s=120):
    give_up = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < give_up, log.read_text() if log.exists() else queue()
        time.sleep(0.1)


def control(*words):
    subprocess.run(["scontrol", *words], check=True)


def submit(folder, **variables):
    """(number, log) of the batch script as a job. `sbatch --wait` would look only every half minute in the end."""
    done = run_in(folder, ["sbatch", "--parsable", "train.sbatch"], PYTHON=sys.executable, **variables)
    return done.stdout.strip(), folder / f"course-train-{done.stdout.strip()}.log"


def state_of(job):
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=True)
    return re.search(r"\bJobState=(\w+)", done.stdout).group(1)


def test_srun_alone_starts_the_same_trainer(tmp_path):
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", "--label", sys.executable, "-m", "course_lib.train"]
    command += ["--layout", "pp=2,dp=2,micro_batches=2", "--steps", "2", "--checkpoint", "none"]
    done = run_in(tmp_path, command, MASTER_ADDR="127.0.0.1")  # no name service knows the virtual nodes
    assert done.returncode == 0 and "0: step 2 of 2: loss" in done.stdout, done.stdout + done.stderr
    assert "started by srun" in done.stdout and re.findall(r"^[123]:", done.stdout, re.MULTILINE) == []


def test_every_lab_runs_from_a_notebook_on_the_cluster_and_under_srun(kernel, tmp_path):
    kernel.show("""
from course_lib.labs import LABS
from course_lib.labs.measure import run_lab
from course_lib.labs.sheet import compare
def measure(chapters):
    return [run_lab(chapter, 1) for chapter in chapters]
done = []
for ranks, place in ((4, where), (1, dataclasses.replace(where, nodes=1, ntasks_per_node=1))):
    chapters = [lab.chapter for lab in LABS.values() if ranks in lab.ranks]
    done += [(chapter, measured["nodes"], len(compare(LABS[chapter], measured)))
             for chapter, measured in zip(chapters, launch(measure, ranks, chapters, where=place, timeout=500)[0])]
assert sorted(chapter for chapter, _, _ in done) == list(LABS), done
assert all(rows > 1 for _, _, rows in done), done
""")
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "course_lib.labs", "00"]
    done = run_in(tmp_path, [*command, "--out", "lab00.json", "--rounds", "1"], MASTER_ADDR="127.0.0.1")
    assert done.returncode == 0 and done.stdout.startswith("lab 00, Three ways to sum a tensor"), done.stderr
    assert "measured on 4 ranks on" in done.stdout and (tmp_path / "lab00.json").stat().st_size > 100


def run_in(folder, command, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_the_check_of_a_site_looks_at_both_nodes_and_says_what_it_saw(tmp_path):
    write_site(Site(python=sys.executable), tmp_path)
    done = run_in(tmp_path, ["sbatch", "--parsable", "check.sbatch"])
    until_queue_is_empty(120)
    text = (tmp_path / f"course-check-{done.stdout.strip()}.log").read_text()
    assert re.search(r"4 ranks on 2 hosts, gloo, cpu; layout dp=2,tp=2,zero_stage=1; messages of 4 MB", text), text
    assert re.search(r"shared folder +seen by 4 ranks", text)
    assert re.search(r"clock +n[12] +[+-]\d\.\d+ s  known to", text)
    assert all(f"{low} - {high}, between nodes" in text for low, high in ((0, 2), (1, 3))) and "found: " in text
