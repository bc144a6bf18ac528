"""launch, tried where it is used: in the cells of a notebook kernel."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from jupyter_kernels import Kernel, remaining, still_there

from course_lib.launch.limits import slowness

pytestmark = [pytest.mark.launches, pytest.mark.long]

SETUP = """
import os, sys, time, signal, threading, subprocess, dataclasses
import torch, torch.distributed as dist
from course_lib.launch import launch, progress, report
"""


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.show(SETUP)
    yield kernel
    kernel.stop()


TRAIN = """
def train(scale):
    from torch.nn.parallel import DistributedDataParallel as DDP
    x = torch.ones(3) * dist.get_rank()
    dist.all_reduce(x)
    model = DDP(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    return x * scale
"""


def test_first_launch_takes_5_s_and_later_ones_0_3_s_whatever_the_kernel_did_before(kernel):
    before = """
a = torch.randn(400, 400, requires_grad=True); torch.set_num_threads(2)
(a @ a).sum().backward()                       # OpenMP and autograd threads in the kernel
stop = threading.Event(); threading.Thread(target=stop.wait, daemon=True).start()
"""
    first = kernel.show(before + TRAIN + "print(launch(train, 4, 2.0)[3])")
    assert first.out == "tensor([12., 12., 12.])\n"
    assert first.seconds < 5 * slowness()
    later = kernel.show(
        """
import statistics
print(statistics.median(launch(train, 4, 1.0).seconds for _ in range(9)))
"""
    )
    print(f"first {first.seconds:.2f} s, later median {float(later.out):.3f} s, load {os.getloadavg()[0]:.1f}")
    assert float(later.out) < 0.3 * slowness()


def test_objects_lines_and_measurements_of_every_rank_come_back(kernel):
    cell = kernel.show(
        """
@dataclasses.dataclass
class Record:
    rank: int
    view: torch.Tensor

def job(n):
    rank = dist.get_rank()
    time.sleep(0.02 * (2 - rank))
    print("first line of", rank); print("second line", n); sys.stderr.write("a warning\\n")
    os.system("echo from a child process")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, Record(rank, torch.zeros(1)))          # a class of the cell through plain pickle
    big = torch.zeros(1_000_000, requires_grad=True)
    model = torch.nn.Linear(2, 2)
    half = torch.ones(2, dtype=torch.bfloat16)
    return Record(rank, (big * 1)[:2]), [r.rank for r in everyone], model, half, os.environ["MINE"]

os.environ["MINE"] = "set in a cell"
results = launch(job, 2, 7)
record, everyone, model, half, mine = results[1]
assert isinstance(record, Record) and record.rank == 1 and everyone == [0, 1] and mine == "set in a cell"
assert not record.view.requires_grad and record.view.untyped_storage().nbytes() == 8
assert len(list(model.parameters())) == 2 and half.dtype == torch.bfloat16
assert len(results) == 2 and results.lines[1] == ["first line of 1", "second line 7", "from a child process"]
assert results.stderr[0] == ["a warning"]
assert results.seconds > max(results.rank_seconds) > 0.02 and results.rank_seconds[0] >= 0.04
assert all(100e6 < peak < 2e9 for peak in results.peak_bytes)
assert results.backend == "gloo" and "no GPU" in results.why or torch.cuda.is_available()
assert not torch.cuda.is_initialized()
assert launch(job, 2, 7, quiet=True).lines == results.lines
"""
    )
    lines = ["first line of {}", "second line 7", "from a child process"]
    assert cell.out == "".join(f"[rank {r}] {line.format(r)}\n" for r in (0, 1) for line in lines)
    assert cell.err == "[rank 0] a warning\n[rank 1] a warning\n"


def texts_of_bars(cell):
    """What the texts beside a cell's bars said, one after another, and whether each widget was closed."""
    comms = [message["content"] for message in cell.messages if message["msg_type"].startswith("comm")]
    opened = [message["content"]["comm_id"] for message in cell.messages if message["msg_type"] == "comm_open"]
    closed = [message["content"]["comm_id"] for message in cell.messages if message["msg_type"] == "comm_close"]
    states = [content["data"].get("state", {}) for content in comms]
    texts = [state["value"] for state in states if isinstance(state.get("value"), str) and state["value"]]
    return texts, set(closed) == set(opened)


def test_progress_of_rank_0_is_a_bar_in_the_cell_that_goes_and_leaves_nothing_to_store(kernel):
    cell = kernel.show(
        """
def slow():
    from tqdm import tqdm
    for step in progress(range(16), "steps"):
        time.sleep(0.1)
        if dist.get_rank() == 0:
            report("loss", 1 / (step + 1))
    for step in tqdm(range(3)):
        time.sleep(0.02)
heard = []
results = launch(slow, 2, on_report=lambda name, value: heard.append((name, value)))
assert [len(lines) for lines in results.stderr] == [1, 1]
print(heard == [("loss", 1 / (step + 1)) for step in range(16)])
"""
    )
    assert cell.out == "True\n"
    texts, all_closed = texts_of_bars(cell)
    counts = [int(text.split(" · ")[1].split(" of ")[0]) for text in texts]
    assert all(re.fullmatch(r"steps · \d+ of 16 · loss (?:1|0\.\d+) · \d+ s", text) for text in texts), texts
    assert len(set(counts)) >= 2 and counts == sorted(counts) and all_closed
    shown = [message["content"]["data"] for message in cell.messages if message["msg_type"] == "display_data"]
    assert [list(data) for data in shown] == [["application/vnd.jupyter.widget-view+json"]]  # no text, no picture
    assert cell.err.count("3/3") == 2 and "steps" not in cell.err  # a plain tqdm in a rank is one line of stderr


def test_a_launch_that_tells_nothing_shows_after_a_second_how_many_ranks_are_done(kernel):
    cell = kernel.show("launch(lambda: time.sleep(2.2 * dist.get_rank()), 2)")
    texts, all_closed = texts_of_bars(cell)
    assert len(texts) >= 2 and all_closed
    assert re.match(r"ranks done · [01] of 2", texts[0])  # the last may be told after the second rank is done
    assert all(re.fullmatch(r"ranks done · [012] of 2 · \d+ s", text) for text in texts), texts


def test_a_launch_that_fails_takes_its_bar_away(kernel):
    cell = kernel.fail("launch(lambda: (time.sleep(1.6), [][dist.get_rank()]), 2)")
    assert "IndexError" in cell.error
    texts, all_closed = texts_of_bars(cell)
    assert texts and all_closed


def test_a_loop_in_the_cell_has_the_same_bar(kernel):
    cell = kernel.show("for step in progress(range(8), 'loop'):\n    time.sleep(0.2)")
    texts, all_closed = texts_of_bars(cell)
    assert texts and all(re.fullmatch(r"loop · \d of 8 · \d s", text) for text in texts) and all_closed
    assert cell.out == cell.err == ""


def test_an_exception_names_its_rank_and_line_and_says_where_the_others_stood(kernel):
    cell = kernel.fail(
        """
def middle(x):
    return {}["missing key"] if dist.get_rank() == 2 else x
def outer():
    middle(1)
    dist.barrier()
failed_at = time.time()
try:
    launch(outer, 4)
finally:
    assert time.time() - failed_at < 2
"""
    )
    assert cell.error.startswith("RankError: rank 2 of 4 failed:")
    assert re.search(r"Cell, line 4, in outer\n    middle\(1\)", cell.error)
    assert 'return {}["missing key"] if dist.get_rank() == 2 else x' in cell.error
    assert "KeyError: 'missing key'" in cell.error
    for rank in (0, 1, 3):
        assert re.search(rf"rank {rank} stood at Cell, line 5, in outer: dist.barrier\(\)", cell.error)
    assert "site-packages" not in cell.error and "_rank.py" not in cell.error


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("sys.exit(0)", "rank 1 of 2 called sys.exit before its function returned:.*SystemExit: 0"),
        ("sys.exit('enough')", "called sys.exit.*SystemExit: enough"),
        ("os._exit(3)", "rank 1 of 2 ended with exit code 3 before its function returned"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 was killed by SIGKILL.*out-of-memory"),
        ("import ctypes; ctypes.string_at(0)", r"rank 1 of 2 was killed by SIGSEGV.*Cell, line 3, in work.*string_at"),
        ("raise MemoryError", "rank 1 of 2 failed:.*MemoryError"),
        ("return threading.Lock()", "rank 1 of 2 returned something that cannot be sent back.*cannot pickle"),
        ("raise ValueError('x' * 10**6)", r"ValueError: x+ \.\.\. \(1,000,012 characters in all\)"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "<exception str\\(\\) failed>"),
        ("work()", "RecursionError"),
        ("sys.stdout.close(); os.close(1); raise ValueError('mute')", "ValueError: mute"),
        ("print('y' * 5_000_000); raise ValueError('loud')", "ValueError: loud"),
        ("print('child', subprocess.Popen(['sleep', '1234']).pid); raise ValueError('parent')", "ValueError: parent"),
    ],
)
def test_every_way_to_fail_is_one_error_of_the_right_rank_in_2_s(kernel, body, expected):
    code = f"def work():\n    if dist.get_rank() == 1:\n        {body}\n    dist.barrier()\n"
    kernel.show("launch(lambda: 0, 1)")  # the fork server is there, so what is timed is the failure
    start = time.monotonic()
    cell = kernel.fail(code + "launch(work, 2)")
    assert time.monotonic() - start < 2 * slowness()  # with the start of the ranks, and one more launch
    assert re.search(expected, cell.error, re.DOTALL), cell.error
    assert cell.error.startswith("RankError: rank 1 of 2") and len(cell.error) < 10_000
    assert len(cell.out) < 10_000
    assert not any(still_there(int(pid)) for pid in re.findall(r"child (\d+)", cell.out))


def test_tensors_of_different_shapes_are_reported_as_the_abort_that_gloo_makes_of_them(kernel):
    cell = kernel.fail("def work():\n    dist.all_reduce(torch.ones(3 + 1000 * dist.get_rank()))\nlaunch(work, 2)")
    assert cell.seconds < 2 * slowness()
    assert re.search(r"rank \d of 2 was killed by SIGABRT; in gloo often tensors of different shapes", cell.error)
    assert "dist.all_reduce(torch.ones(3 + 1000 * dist.get_rank()))" in cell.error


def test_a_hang_ends_at_the_limit_and_says_where_every_rank_stood(kernel):
    hangs = """
def work():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    elif dist.get_rank() == 1:
        dist.broadcast(torch.ones(2), 0)
        while True:
            pass
    elif dist.get_rank() == 2:
        import ctypes
        ctypes.PyDLL(None).sleep(100)          # native code that does not let other threads run
launch(work, 4, timeout=LIMIT)
"""
    # On a busy machine ranks come late to where they hang.
    for limit in (1, 10, 60):
        cell = kernel.fail(hangs.replace("LIMIT", str(limit)))
        if len(re.findall(r"rank \d stood at Cell, line", cell.error)) == 3:
            break
    assert cell.seconds < limit + 2 * slowness()
    assert cell.error.startswith(f"RankError: time limit: after {limit} s the launch of 4 ranks had not finished")
    assert re.search(r"rank 0 stood at Cell, line 3, in work: .*\(inside all_reduce of\s+float32\[2\]\)", cell.error)
    assert re.search(r"rank 1 stood at Cell, line (5|6|7), in work", cell.error)
    assert re.search(r"rank 2 stood at Cell, line 10, in work: ctypes", cell.error)
    assert "rank 3 had returned" in cell.error


def test_the_rank_to_blame_is_the_one_that_failed_not_one_that_lost_its_peer(kernel):
    cell = kernel.fail(
        """
def work():
    if dist.get_rank() == 3:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
launch(work, 4)
"""
    )
    assert cell.error.startswith("RankError: rank 3 of 4 was killed by SIGKILL")


def test_results_of_ranks_with_forgotten_threads_and_children_come_back_and_nothing_stays(kernel):
    cell = kernel.show(
        """
def untidy():
    threading.Thread(target=time.sleep, args=(1000,)).start()           # not a daemon: would hold back a normal exit
    return subprocess.Popen(["sleep", "4321"]).pid
print(list(launch(untidy, 2)))
"""
    )
    assert cell.seconds < 2 * slowness()
    children = [int(pid) for pid in re.findall(r"\d+", cell.out)]
    assert len(children) == 2 and not any(still_there(pid) for pid in children)


def test_the_interrupt_button_ends_the_ranks_and_the_next_launch_works(kernel):
    message = kernel.start("launch(lambda: (report('up', 1), time.sleep(100)), 3, on_report=print)")
    printed = ""
    while printed.count("up") < 3:  # every rank has begun
        said = kernel.client.get_iopub_msg(timeout=60)
        printed += said["content"]["text"] if said["msg_type"] == "stream" else ""
    ranks = kernel.helpers()
    assert len(ranks) == 4  # the fork server and three ranks
    kernel.manager.interrupt_kernel()
    cell = kernel.finish(message)
    assert "Cell" in cell.error and "launch(lambda: (report('up', 1)" in cell.error
    assert "KeyboardInterrupt: the launch of 3 ranks was interrupted, and its ranks were ended" in cell.error
    assert "rank 2 stood at Cell, line 1, in <lambda>" in cell.error
    assert ".py" not in cell.error  # no line of the package
    assert len(kernel.helpers()) == 1
    assert kernel.show("print(list(launch(lambda: 5, 2)))").out == "[5, 5]\n"


def test_a_rank_cannot_launch_and_a_thread_of_the_notebook_can(kernel):
    cell = kernel.fail("launch(lambda: launch(print, 2), 2)")
    assert "RuntimeError: launch was called inside rank" in cell.error
    cell = kernel.show(
        """
found = {}
def in_thread(name):
    found[name] = list(launch(lambda: (name, dist.get_rank()), 2))
workers = [threading.Thread(target=in_thread, args=(name,)) for name in "ab"]
[w.start() for w in workers]; [w.join() for w in workers]
assert found == {name: [(name, 0), (name, 1)] for name in "ab"}
"""
    )


def test_an_edited_file_is_seen_by_the_next_launch(kernel, tmp_path):
    module = tmp_path / "my_helper.py"
    module.write_text("def value():\n    return 1\n")
    kernel.show(f"sys.path.insert(0, {str(tmp_path)!r})\nimport my_helper\nprint(list(launch(my_helper.value, 2)))")
    module.write_text("def value():\n    return 'edited'\n")
    assert kernel.show("print(list(launch(my_helper.value, 2)))").out == "['edited', 'edited']\n"
    kernel.show(f"sys.path.remove({str(tmp_path)!r})")


SLEEPING = "launch(lambda: (report('up', 1), subprocess.Popen(['sleep', '987']), time.sleep(100)), 2, on_report=print)"
HOLDING_THE_INTERPRETER = SLEEPING.replace("time.sleep(100)", "__import__('ctypes').PyDLL(None).sleep(100)")


@pytest.fixture(scope="module")
def other_kernel():
    kernel = Kernel()
    kernel.show(SETUP)
    yield kernel
    kernel.stop()


def test_two_notebooks_at_once_do_not_collide(kernel, other_kernel):
    code = "def work():\n    time.sleep(0.05)\n    x = torch.ones(1)\n    dist.all_reduce(x)\n    return x.item()\n"
    code += "print({tuple(launch(work, 2)) for _ in range(5)})"
    waiting = [(each, each.start(code)) for each in (kernel, other_kernel)]
    assert [each.finish(message).out for each, message in waiting] == ["{(2.0, 2.0)}\n"] * 2


def test_no_process_and_no_file_outlives_the_fork_server_or_the_kernel(other_kernel):
    kernel = other_kernel

    message, processes, folder = start_and_look(kernel, SLEEPING)
    kernel.process.children()[0].kill()
    assert "was lost: the process that starts ranks has ended" in kernel.finish(message).error
    assert not remaining(processes) and not folder.exists()

    message, processes, folder = start_and_look(kernel, SLEEPING)  # with a new fork server
    kernel.manager.restart_kernel(now=True)
    assert not remaining(processes) and not folder.exists()

    kernel.client.wait_for_ready(timeout=60)
    kernel.process = psutil.Process(kernel.manager.provisioner.pid)
    kernel.show(SETUP)
    message, processes, folder = start_and_look(kernel, HOLDING_THE_INTERPRETER)
    os.kill(kernel.process.pid, signal.SIGKILL)
    assert not remaining(processes) and not folder.exists()


def start_and_look(kernel, code):
    """Start a launch that takes long; the processes below the kernel, and the folder that they use."""
    message = kernel.start(code)
    while kernel.client.get_iopub_msg(timeout=30)["msg_type"] != "stream":
        pass
    time.sleep(0.3)
    processes = kernel.helpers()
    assert len(processes) == 5  # the fork server, two ranks, a child of each
    folders = {
        Path(file.path).parents[1] for process in processes for file in process.open_files() if ".out" in file.path
    }
    (folder,) = [folder for folder in folders if folder.name.startswith("course_launch_")]
    return message, processes, folder
