"""A fake world: what is real in it, what arrives, and that nothing of it remains."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from course_lib import comm
from course_lib.comm import make_all_groups
from course_lib.launch import launch
from course_lib.layout import Mesh
from course_lib.simulate import fake_world


def test_floats_are_fake_and_whole_numbers_real():
    with fake_world(rank=1, world_size=4):
        x_BD = torch.randn(1 << 20, 1 << 20)  # four terabytes
        assert isinstance(x_BD, FakeTensor) and (x_BD @ x_BD).shape == x_BD.shape
        order = torch.arange(6).flip(0)
        assert order[order > 2].tolist() == [5, 4, 3] and torch.full((2,), 7).tolist() == [7, 7]
        assert int(torch.zeros(3, dtype=torch.int64).sum()) == 0 and torch.bincount(order).tolist() == [1] * 6
        assert isinstance(torch.full((2,), 7.0), FakeTensor) and isinstance(torch.arange(3.0), FakeTensor)
        assert x_BD[order].shape == (6, 1 << 20) and isinstance(x_BD[0, :4] > 0, FakeTensor)
        meta = torch.empty(3, device="meta")
        assert type(meta) is torch.Tensor and isinstance(torch.empty_like(meta, device="cpu"), FakeTensor)


def test_whole_numbers_arrive_as_if_all_ranks_were_alike():
    with fake_world(rank=1, world_size=4):
        world, mine = dist.group.WORLD, torch.tensor([5, 6, 7, 8])
        assert comm.all_reduce(mine, world).tolist() == [20, 24, 28, 32]
        assert comm.all_gather(mine, world).tolist() == [5, 6, 7, 8] * 4
        assert comm.reduce_scatter(mine, world).tolist() == [24]
        assert comm.broadcast(mine, 0, world).tolist() == [5, 6, 7, 8]
        assert comm.all_to_all(mine, world).tolist() == [6] * 4
        assert comm.all_to_all(mine, world, [0, 2, 1, 1], [2] * 4).tolist() == [5, 6] * 4
        floats = comm.all_gather(torch.ones(3), world)
        assert isinstance(floats, FakeTensor) and floats.shape == (12,)


def test_groups_of_one_rank_among_thousands():
    mesh = Mesh(pp=16, dp=128, tp=8)
    with fake_world(rank=9_999, world_size=mesh.world_size):
        groups = make_all_groups(mesh, ep_size=64, local_only=True)
        assert (groups.data.size(), groups.ep.size(), groups.expert_dp.size()) == (128, 64, 2)
        assert groups.world.rank() == 9_999 and groups.tp.rank() == 9_999 % 8


def test_nothing_remains_of_it_also_after_an_error():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="planted"), fake_world(rank=0, world_size=8):
        torch.manual_seed(99)
        raise RuntimeError("planted")
    assert not dist.is_initialized() and type(torch.ones(2)) is torch.Tensor
    assert torch.rand(2).equal(expected)


def inside_a_real_world() -> str:
    try:
        with fake_world(rank=0, world_size=8):
            return "entered"
    except ValueError as error:
        assert dist.get_world_size() == 2  # and it still works
        return str(error) if comm.all_reduce(torch.ones(1), dist.group.WORLD).item() == 2 else "broken"


def test_a_rank_of_a_real_world_cannot_enter_one():
    assert all("can be in one world only" in said for said in launch(inside_a_real_world, 2))
    with pytest.raises(ValueError, match=r"rank \(8\) must be one of 0..7"), fake_world(rank=8, world_size=8):
        pass


def test_the_hook_for_exceptions_is_the_one_from_before_also_after_an_error(monkeypatch):
    def hook(*error):
        pass

    monkeypatch.setattr(sys, "excepthook", hook)
    with fake_world(rank=0, world_size=2):
        assert sys.excepthook is not hook, "if torch no longer replaces it, fake_world need not put it back"
    assert sys.excepthook is hook
    with pytest.raises(KeyError), fake_world(rank=0, world_size=2):
        raise KeyError
    assert sys.excepthook is hook
