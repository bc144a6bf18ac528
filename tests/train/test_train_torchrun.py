"""The trainer under engines that exist: torchrun that loses a rank or a machine, and accelerate launch."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import run_logs
import torch

from course_lib.authoring import ROOT
from course_lib.launch import launch
from course_lib.train import TrainPlan, trainer
from course_lib.train import log as train_log
from course_lib.train.options import layout_for, model_named

pytestmark = pytest.mark.programs

MODEL = "toy,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=4,family=gpt,dropout=0.2"
LAYOUT, BATCH, STEPS = "dp=2,tp=2,zero_stage=1", 8, 24
PATIENCE_S = 240.0  # ten times what the longest takes on two idle cores
LOOPBACK = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torch 2.13: else restarted ranks look for those that died
}


@contextmanager
def children() -> Iterator[dict[int, psutil.Process]]:
    """Collects what is added to it, and what these start; nothing of it may be left at the end."""
    seen: dict[int, psutil.Process] = {}
    try:
        yield seen
    finally:
        look(seen)
        left = [process for process in seen.values() if process.is_running() and process.status() != "zombie"]
        for process in left:
            process.kill()
    assert left == [], f"left behind: {left}"


def look(seen: dict[int, psutil.Process]) -> None:
    """Adds what these have started. It reads all of /proc for each: not to be done often."""
    for process in list(seen.values()):
        try:
            seen.update({child.pid: child for child in process.children(recursive=True)})
        except psutil.NoSuchProcess:
            continue


def start(seen: dict[int, psutil.Process], command: list[str], out: Path, **environment: str) -> subprocess.Popen:
    """A child whose output goes to a file. It is told nothing of the engine that may have started this process."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    with out.open("w") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=inherited | LOOPBACK | environment, stdout=file, stderr=subprocess.STDOUT
        )
    seen[child.pid] = psutil.Process(child.pid)
    return child


def wait_until(happened, seen: dict[int, psutil.Process]) -> None:
    deadline, looked = time.monotonic() + PATIENCE_S, 0.0
    while not happened():
        now = time.monotonic()
        assert now < deadline, "waited too long"
        if now > looked + 1.0:
            look(seen)
            looked = now
        time.sleep(0.02)


def options(folder: Path, steps: int = STEPS, layout: str = LAYOUT) -> list[str]:
    text = (
        f"--model {MODEL} --layout {layout} --batch {BATCH} --steps {steps} --seq-len 32 --seed 7 --warmup 4 --every 3"
    )
    return [*text.split(), "--checkpoint", str(folder), "--log-folder", str(folder)]


def uninterrupted(steps: int, layout: str) -> list[float]:
    """The losses of the same function in a launch."""
    lies, plan = layout_for(layout, BATCH), TrainPlan(steps, 32, seed=7, warmup=4)
    return launch(trainer.train, lies.world_size, model_named(MODEL), lies, plan, quiet=True)[0].losses


def test_accelerate_launch_runs_it(tmp_path):
    """`--multi_gpu` starts ranks without GPUs too."""
    common = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *common]
    script = ["-m", "course_lib.train", *options(tmp_path / "run", steps=4, layout="dp=2")]
    with children() as seen:
        run = start(seen, [*accelerate, "--multi_gpu", "--main_process_port", "0", *script], tmp_path / "run.txt")
        wait_until(lambda: run.poll() is not None, seen)
    said = (tmp_path / "run.txt").read_text()
    assert run.returncode == 0 and "started by accelerate" in said, said
    first = next(line for line in said.splitlines() if "started by" in line)
    assert "who can reach the ranks' ports: docs/SHARED_MACHINES.md" in first
    losses = run_logs.losses_of(train_log.log_path(tmp_path / "run"))
    assert [loss for of_step in losses.values() for loss in of_step] == uninterrupted(4, "dp=2")


def test_the_script_ends_without_python_s_shutdown(tmp_path):
    """Gloo's threads outlive their groups; one that asks Python for its lock while it shuts down ends in SIGABRT."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    script = [sys.executable, "-m", "course_lib.train", *options(tmp_path / "run", steps=4, layout="micro_batches=8")]
    with children() as seen:
        run = start(seen, script, tmp_path / "out.txt", PYTHONPATH=path)
        wait_until(lambda: run.poll() is not None, seen)
    assert run.returncode == 0 and "step 4 of 4" in (tmp_path / "out.txt").read_text()


# --- fewer ranks than before

EXACT = "toy,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=2"  # no dropout, whose places the layout decides
EXACT_PLAN = TrainPlan(STEPS, 32, seed=7, warmup=4, precision="fp64")


def elastic(folder: Path, layout: str) -> list[str]:
    """The trainer's options for a run that takes the ranks that there are."""
    plan = f"--steps {STEPS} --seq-len 32 --seed 7 --warmup 4 --precision fp64 --every 3"
    told = f"--model {EXACT} --layout {layout} --batch {BATCH} {plan} --checkpoint {folder}"
    return [*told.split(), "--log-folder", str(folder)]


def test_a_machine_is_lost_and_torchrun_goes_on_with_the_other_and_the_same_batch(tmp_path):
    """All processes of one of two machines are killed; torchrun may go on with one, and the trainer with its ranks."""
    folder, layout = tmp_path / "run", "dp=auto,zero_stage=1"
    log, meeting = (
        train_log.log_path(folder),
        f"--rdzv-endpoint {tmp_path / 'store'} --rdzv-id run --local-addr 127.0.0.1",
    )
    soon = "store_type=file,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    torchrun = f"--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-conf {soon} {meeting} --max-restarts 3"
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), "-m", "course_lib.train"]
    with children() as seen:
        outs = [tmp_path / f"agent{index}.txt" for index in range(2)]
        agents = [start(seen, [*command, *elastic(folder, layout)], out) for out in outs]
        wait_until(lambda: len(run_logs.losses_of(log)) > 7 or any(one.poll() is not None for one in agents), seen)
        assert all(one.poll() is None for one in agents), "\n".join(out.read_text() for out in outs)
        for process in [psutil.Process(agents[1].pid), *psutil.Process(agents[1].pid).children()]:
            process.kill()
        wait_until(lambda: agents[0].poll() is not None, seen)
    said = "".join(out.read_text() for out in outs)
    assert agents[0].returncode == 0, said
    before, after = (str(layout_for(layout, BATCH, ranks)) for ranks in (2, 1))
    assert f"on 2 ranks ({before})" in said and f"on 1 rank ({after})" in said, said
    assert said.count("starts anew") == 1 and said.count("goes on at step") == 1, said
    assert said.count("gloo: no GPUs for") == 2 * (not torch.cuda.is_available())  # rank 0 alone, each time
    whole = launch(trainer.train, 1, model_named(EXACT), layout_for("dp=auto", BATCH, 1), EXACT_PLAN, quiet=True)[0]
    losses = run_logs.losses_of(log)
    assert list(losses) == list(range(STEPS))
    for step, of_step in losses.items():
        assert of_step == pytest.approx([whole.losses[step]] * len(of_step), abs=1e-10)
