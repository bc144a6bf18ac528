"""Nothing that comes from another process is unpickled: unpickling runs code that the sender chose."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.authoring import ROOT
from course_lib.launch import launch

PICKLED = re.compile(r"\b((?:all_)?gather_object|(?:broadcast|scatter|send|recv)_object_list|dcp\.(?:async_)?save)\(")


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def everything(rank: int) -> tuple[dict, dict]:
    value = {"rank": rank, "text": "é" * rank, "list": [rank, None, 0.5]}
    tensors = {
        "whole": torch.arange(rank * 3),
        "": torch.tensor(rank + 0.5, dtype=torch.bfloat16),
        "cut": torch.ones(2, rank, 3, dtype=torch.bool)[:, :, :2],
    }
    return value, tensors


def gather_everything():
    value, tensors = everything(dist.get_rank())
    return comm.all_gather_json(value, dist.group.WORLD), comm.all_gather_tensors(tensors, dist.group.WORLD)


def test_json_and_tensors_of_all_ranks_arrive_whole():
    for values, tensors in launch(gather_everything, 3):
        for rank in range(3):
            value, mine = everything(rank)
            assert values[rank] == value and tensors[rank].keys() == mine.keys()
            assert all(torch.equal(x, mine[name]) and x.dtype == mine[name].dtype for name, x in tensors[rank].items())


def attacked(folder: Path, attack: str):
    """Rank 1 is somebody else, who took its place: it sends a pickle, lengths that cannot be, or too few bytes."""
    world, told = dist.group.WORLD, pickle.dumps(Evil(folder / "ran"))
    if dist.get_rank() == 1:
        if attack == "length":
            comm.all_gather(torch.tensor([1 << 60]), world)
            return "attacked"
        shapes = b'[["x", "float32", [1000]]]' if attack == "shapes" else told
        for message in (shapes, told)[: 1 + (attack == "shapes")]:
            comm.all_gather(torch.tensor([len(message)]), world)
            comm.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8), world)  # longer than rank 0's
        return "attacked"
    with pytest.raises(ValueError) as refusal:
        comm.all_gather_tensors({"x": torch.zeros(1)}, world)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        ("pickle", "what came from rank 1 is no JSON"),
        pytest.param("length", "at most", marks=pytest.mark.exhaustive),
        pytest.param("shapes", "rank 1 did not send the tens", marks=pytest.mark.exhaustive),
    ],
)
def test_a_process_that_took_a_ranks_place_runs_nothing(tmp_path, attack, said):
    pickle.loads(pickle.dumps(Evil(tmp_path / "works")))
    assert (tmp_path / "works").is_dir()
    refusal, attacker = launch(attacked, 2, tmp_path, attack, timeout=30)
    assert attacker == "attacked" and said in refusal
    assert not (tmp_path / "ran").exists()


def test_no_collective_of_pickles_is_left_in_package_notebooks_and_templates():
    """dcp.save sends pickles between ranks too. Two lessons show it as what PyTorch ships; the package has its own."""
    files = [path for path in (ROOT / "course_lib").rglob("*") if path.suffix in (".py", ".sbatch", ".sh")]
    found = [path for path in files if PICKLED.search(path.read_text(encoding="utf-8"))]
    notebooks = [path for name in ("notebooks", "solutions", "exercises") for path in (ROOT / name).rglob("*.ipynb")]
    lessons = [path for path in notebooks if "_object" in "".join(PICKLED.findall(path.read_text(encoding="utf-8")))]
    assert found + lessons == [], "send JSON or tensors instead: comm.all_gather_json, comm.all_gather_tensors"
    for planted in ("dist.all_gather_object(everyone, mine)", "dcp.save(state)", "broadcast_object_list([1], src=0)"):
        assert PICKLED.search(planted), planted
    assert len(files) > 200 and len(notebooks) > 40
