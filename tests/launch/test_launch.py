"""launch outside notebooks, and its pure parts."""

import functools
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import hang_text

from course_lib import devices
from course_lib.devices import choose_backend
from course_lib.launch import RankError, _bar, _failures, _rank, _watch, launch, progress, report
from course_lib.launch._turn import MOST_RANKS
from course_lib.launch.limits import slowness


def rank_and_sum(extra=0):
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), total.item() + extra


def test_a_function_of_a_test_module_runs_on_ranks_with_positional_and_bound_arguments():
    assert launch(rank_and_sum, 2, 1) == [(0, 3.0), (1, 3.0)]
    results = launch(functools.partial(rank_and_sum, extra=5), 1)
    assert results == [(0, 6.0)] and repr(results) == "[(0, 6.0)]"


def test_a_cell_s_function_may_say_dist_and_config():
    def config_of_rank():  # sent as code: torch.distributed.config, a module of a class of its own, comes along
        return functools.partial(dist.get_rank).func.__name__, _rank.config if hasattr(_rank, "config") else None

    assert launch(config_of_rank, 1) == [("get_rank", None)]


def threads_of_a_rank():
    return torch.get_num_threads(), dist.get_backend(), torch.randn(1).item()


def test_threads_and_backend_can_be_chosen_and_ranks_start_with_torchs_own_seed():
    results = launch(threads_of_a_rank, 2, threads=2, backend="gloo")
    assert [result[:2] for result in results] == [(2, "gloo")] * 2
    assert results[0][2] == results[1][2] == launch(threads_of_a_rank, 2)[0][2]


def numpy_draw():
    import numpy

    return numpy.random.random()


def test_ranks_do_not_share_numpys_random_state():
    assert len(set(launch(numpy_draw, 2)) | set(launch(numpy_draw, 2))) == 4


class NotRebuildable:
    def __reduce__(self):
        return failing, ()


def failing():
    raise ValueError("this object cannot be rebuilt")


def test_a_result_that_cannot_be_rebuilt_names_its_rank():
    with pytest.raises(RankError, match=r"rank 0 returned something that cannot be rebuilt .*cannot be rebuilt"):
        launch(NotRebuildable, 1)


def print_much():
    print("z" * 10_000)
    for line in range(3000):
        print(line)


def test_long_output_is_shown_in_part_and_kept_whole(capsys):
    results = launch(print_much, 2)
    shown = capsys.readouterr().out
    assert len(results.lines[0]) == 3001 and len(results.lines[1][0]) == 10_000
    assert len(shown) < 30_000 and shown.count("... 2,001 more lines") == 2
    launch(print_much, 2, quiet=True)
    assert capsys.readouterr().out == ""


def print_without_end():
    while True:
        print("w" * 1000)


def test_an_endless_print_loop_does_not_fill_the_disk(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_watch, "MAX_OUTPUT_BYTES", 100_000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    largest = []
    stop = threading.Event()

    def look():
        while not stop.wait(0.05):
            largest.append(sum(file.stat().st_size for file in tmp_path.glob("course_launch_*/ranks/*.out")))

    watcher = threading.Thread(target=look)
    watcher.start()
    with pytest.raises(RankError, match="time limit"):
        launch(print_without_end, 1, timeout=slowness())
    stop.set()
    watcher.join()
    assert max(largest) < 300e6  # about 1 GB is written in that second
    assert "bytes of earlier output dropped" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"world_size": 0}, "world_size is 0; give a whole number of at least 1"),
        ({"world_size": 2.0}, "world_size is 2.0"),
        ({"world_size": MOST_RANKS + 1}, rf"world_size \({MOST_RANKS + 1}\) must be at most .* use fewer ranks"),
        ({"fn": 3}, "fn must be a function, got 3"),
        ({"timeout": 0}, "timeout is 0; give a finite number above 0 and at most 1e\\+06"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"threads": 0}, "threads is 0; give a whole number of at least 1"),
        ({"backend": "mpi"}, "backend must be one of 'auto', 'gloo', 'nccl', 'shared-gpu', got 'mpi'"),
        ({"backend": "nccl", "world_size": 60}, "backend='nccl' needs a GPU for every rank, got .* for 60 ranks; use"),
        ({"fn": functools.partial(print, threading.Lock())}, "cannot be sent to the ranks .* create locks"),
        ({"fn": functools.partial(print, (x for x in "ab"))}, "cannot be sent to the ranks .* generator"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_with_what_to_do(change, text):
    arguments = {"fn": print, "world_size": 2, **change}
    with pytest.raises((TypeError, ValueError), match=text):
        launch(**arguments)


def test_auto_takes_nccl_only_with_a_gpu_for_every_rank():
    assert choose_backend("auto", 2, 2) == ("nccl", "nccl: 2 GPUs for 2 ranks")
    assert choose_backend("auto", 2, 1) == ("gloo", "gloo: 1 GPU for 2 ranks, and NCCL needs one for each rank")
    assert choose_backend("auto", 1, 0) == ("gloo", "gloo: no GPUs for 1 rank, and NCCL needs one for each rank")
    assert choose_backend("gloo", 2, 8)[0] == "gloo" and choose_backend("nccl", 8, 8)[0] == "nccl"


def test_ranks_share_gpus_only_where_that_is_asked_for_by_name():
    assert choose_backend("shared-gpu", 4, 1) == ("shared-gpu", "gloo: 1 GPU for 4 ranks, shared as asked for")
    with pytest.raises(ValueError, match="backend='shared-gpu' needs a GPU, got none"):
        choose_backend("shared-gpu", 4, 0)


def test_each_system_has_its_loopback():
    assert [_rank.loopback_interface(name) for name in ("linux", "darwin")] == ["lo", "lo0"]


SCRIPT = """
import os, sys
from course_lib.launch import launch
class Config:
    scale = 3
def work(config):
    return int(os.environ["RANK"]) * config.scale, isinstance(config, Config)
print(list(launch(work, 2, Config())))
"""


def output_of(*arguments):
    result = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return result.stdout


def disagree():
    x = torch.ones(2)
    try:
        dist.broadcast(x, 0) if dist.get_rank() == 1 else dist.all_reduce(x)
    except RuntimeError as error:
        return str(error)


def test_the_debug_level_set_in_a_cell_names_a_mismatched_collective(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for said in launch(disagree, 2, timeout=20, backend="gloo"):
        assert "Detected mismatch between collectives" in said
        assert "OpType=ALLREDUCE" in said and "OpType=BROADCAST" in said


@pytest.mark.programs
def test_a_script_needs_no_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert output_of("-W", "error", str(tmp_path / "script.py")) == "[(0, True), (3, True)]\n"


def test_progress_outside_a_launch_is_an_ordinary_bar(capsys):
    assert list(progress(range(3), "here")) == [0, 1, 2]
    assert "here: 100%" in capsys.readouterr().err


def test_report_takes_a_name_and_a_number_and_is_heard_by_nobody_outside_a_launch():
    assert report("loss", 1.5) is None
    for name, value, refused in ((3, 1.0, "name is 3; give a str"), ("loss", "low", "value must be one number")):
        with pytest.raises(TypeError, match=refused):
            report(name, value)
    with pytest.raises(TypeError, match=r"take .item\(\)"):
        report("loss", torch.ones(2))
    with pytest.raises(ValueError, match=r"on_report must be a function of \(name, value\) or None, got 3"):
        launch(print, 1, on_report=3)


def test_a_reported_number_stands_beside_the_bar_of_a_terminal(capsys):
    bar = _bar.TextBar()
    bar.draw("train", 1, 3, "loss 2.5")
    bar.draw("train", 3, 3, "loss 1.5")
    bar.draw("other", 0, 2)
    bar.wait(0, 2)
    bar.close()
    shown = capsys.readouterr().err
    assert "train: 100%" in shown and "3/3" in shown and "loss 1.5" in shown and "other:   0%" in shown


def test_lines_are_what_a_terminal_would_be_left_with():
    assert _watch.split_lines("a\nb\n") == ["a", "b"]
    assert _watch.split_lines("\r 1%\r 50%\r100%\nend") == ["100%", "end"]
    assert _watch.split_lines("windows\r\n") == ["windows"] and _watch.split_lines("") == []


def failure(when, text="ValueError: mine", kind="exception"):
    return _rank.Failure(kind, when, [([], text)])


def test_echoes_of_a_failure_are_not_blamed():
    echo = failure(1.0, "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711")
    assert _failures.first_failure({0: echo, 1: failure(3.0), 2: failure(2.0)}) == 2
    assert _failures.first_failure({0: echo, 1: failure(9.0, "", "died")}) == 1
    assert _failures.first_failure({0: echo}) == 0
    while_connecting = failure(1.0, "RuntimeError: Gloo connectFullMesh failed with ...", "start")
    assert _failures.first_failure({0: while_connecting, 1: failure(2.0, "", "died")}) == 1


class Base(Exception):
    pass


def raise_with_cause():
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise Base("outer") from error


def test_the_cause_of_an_exception_is_shown_before_it():
    with pytest.raises(RankError) as caught:
        launch(raise_with_cause, 1)
    text = str(caught.value)
    assert text.index("KeyError: 'inner'") < text.index("Base: outer") and caught.value.rank == 0


@pytest.mark.programs
def test_python_c_works_and_a_forked_copy_of_the_process_uses_a_server_of_its_own():
    code = """
import os
from course_lib.launch import launch
launch(print, 1, quiet=True)
if (pid := os.fork()) == 0:
    ok = list(launch(lambda: 7, 2)) == [7, 7]
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(list(launch(lambda: 8, 2)))
"""
    assert output_of("-c", code) == "[8, 8]\n"


def test_tensors_that_a_function_brings_along_arrive_whole():
    x_DS = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t().requires_grad_()  # neither contiguous nor plain
    got_DS, empty_S, trains = launch(lambda y_S: (x_DS, y_S, x_DS.is_leaf and x_DS.requires_grad), 1, torch.ones(0))[0]
    assert torch.equal(got_DS, x_DS.detach()) and got_DS.dtype == torch.bfloat16 and trains
    assert empty_S.shape == (0,)
    assert devices.unpack(*devices.pack(torch.tensor(True))).item() is True


def sum_as_many_as_my_rank() -> None:
    dist.all_reduce(torch.ones(1 + dist.get_rank()))  # too small for gloo to see that it is wrong


def test_small_tensors_of_different_shapes_hang_and_each_rank_says_its_own():
    said = hang_text(sum_as_many_as_my_rank, 2, *(rf"\(inside all_reduce of float32\[{size}\]\)" for size in (1, 2)))
    text = " ".join(said.split())
    assert "with the same shapes and dtypes?" in text and 'os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"' in text
    assert max(map(len, said.splitlines())) <= 100


def sum_against(other: str) -> None:
    x_2 = torch.ones(2)
    if dist.get_rank() == 0:
        dist.all_reduce(x_2)
    elif other == "reduce":
        dist.reduce(x_2, 0)
    elif other == "all_gather":
        dist.all_gather([torch.empty(2), torch.empty(2)], x_2)
    else:
        dist.barrier()


@pytest.mark.parametrize("other", ["reduce", "all_gather", "barrier"])  # lesson 00 shows it with broadcast
def test_equal_shapes_hang_where_operations_differ(other):
    told = r"inside all_reduce of float32\[2\]", rf"rank 1 stood at .*dist\.{other}\("
    hang_text(functools.partial(sum_against, other), 2, *told)


def test_tensors_are_told_by_dtype_and_shape_and_equal_ones_of_a_list_once():
    x_2 = torch.zeros(2, dtype=torch.bfloat16)
    assert _rank.tensor_text(x_2) == "bfloat16[2]" and _rank.tensor_text([x_2, x_2]) == "2 x bfloat16[2]"
    assert _rank.tensor_text([x_2, torch.zeros(3, 1)]) == "bfloat16[2], float32[3, 1]"
    assert _rank.tensor_text(None) == _rank.tensor_text([None]) == _rank.tensor_text([]) == ""


@pytest.mark.parametrize("file", ["/tmp/ipykernel_7/123456.py", "<ipython-input-3-abcdef>"])
def test_a_cell_of_ipython_7_has_its_name_in_an_error(monkeypatch, file):
    """Colab and Kaggle have IPython 7.34, whose compiler cannot name a cell."""
    old = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=object()))
    monkeypatch.setitem(sys.modules, "IPython", old)
    text = _failures.format_frames([(__file__, 1, "launch"), (file, 2, "broken")])
    assert "  Cell, line 2, in broken" in text and "test_launch.py" in text
    assert _failures.describe_place([(file, 2, "broken"), (threading.__file__, 9, "wait")]).startswith("stood at Cell")
