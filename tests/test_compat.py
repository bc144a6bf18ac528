import re
import runpy
import tomllib
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from course_lib import compat
from course_lib.launch import launch


def _oldest_supported_torch() -> tuple[int, ...]:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    requirement = next(line for line in pyproject["project"]["dependencies"] if line.startswith("torch"))
    return tuple(int(part) for part in re.search(r">=([\d.]+)", requirement).group(1).split("."))


def test_what_is_for_torch_before_2_13_is_still_needed():
    """When this fails, delete course_lib/compat.py and what asks for it in comm/ and native/."""
    assert _oldest_supported_torch() < (2, 13)


def test_the_newest_name_is_taken_where_torch_has_it():
    assert compat.all_gather_single is getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    assert compat.reduce_scatter_single is getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _gather_and_scatter():
    whole, piece, group = torch.empty(4), torch.empty(2), dist.group.WORLD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.all_gather_single(whole, torch.full((2,), float(dist.get_rank())), group=group)
        compat.reduce_scatter_single(piece, whole, dist.ReduceOp.SUM, group=group)
    return whole.tolist(), piece.tolist()


def test_both_work_without_a_warning():
    assert launch(_gather_and_scatter, 2, backend="gloo") == [([0, 0, 1, 1], [0, 0]), ([0, 0, 1, 1], [2, 2])]


def test_the_old_name_is_taken_where_torch_lacks_the_new(monkeypatch):
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    monkeypatch.delattr(dist, "reduce_scatter_single", raising=False)
    older = runpy.run_path(compat.__file__)
    assert older["all_gather_single"] is dist.all_gather_into_tensor
    assert older["reduce_scatter_single"] is dist.reduce_scatter_tensor


def _gather_uneven_pieces():
    whole = torch.arange(14.0).view(2, 7)
    pieces = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(1)])
    gathered = pieces.redistribute(placements=[Replicate()]).to_local()
    return torch.equal(gathered, whole), gathered.is_contiguous()


def test_uneven_pieces_are_gathered_into_a_strided_tensor_where_the_flag_says_so():
    assert list(launch(_gather_uneven_pieces, 2, backend="gloo")) == [(True, compat.DTENSOR_GATHERS_UNEVEN)] * 2


def _messages_in_one_batch():
    """How many messages a stage of PyTorch's pipelines sends at once before its first step; one rank of two each."""
    stage = PipelineStage(torch.nn.Linear(2, 2), dist.get_rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_fn=lambda output, target: output.sum())
    in_pairs = hasattr(schedule, "_warmup_p2p") or not hasattr(stage, "_get_init_p2p_neighbors_ops")
    return 0 if in_pairs else len(stage._get_init_p2p_neighbors_ops())


def test_pipelines_open_connections_in_one_batch_where_the_flag_says_so():
    for messages in launch(_messages_in_one_batch, 2, backend="gloo"):
        assert (messages == 0) == compat.PIPELINE_WARMS_UP_ON_GLOO
