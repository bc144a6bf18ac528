"""Pieces of tensors come out of safetensors files as slices of the whole would, and nothing else is read or run."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from course_lib.weights.tensor_files import INDEX, SINGLE, TensorFiles, flat_boxes


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 10, generator=generator)
    return {"matrix": matrix, "vector": matrix[:, 0].clone(), "half": matrix.bfloat16(), "counts": torch.arange(5)}


@pytest.fixture
def folder(tmp_path):
    save_file(some_tensors(), tmp_path / SINGLE)
    return tmp_path


def test_a_piece_is_the_slice_of_the_whole_in_memory_of_its_own(folder):
    files, matrix = TensorFiles(folder), some_tensors()["matrix"]
    piece = files["matrix"].part((1, 4), (2, 9)).read()
    assert torch.equal(piece, matrix[1:4, 2:9])
    assert piece.is_contiguous() and piece.untyped_storage().nbytes() == piece.nbytes
    assert files.read_bytes == piece.nbytes == 3 * 7 * 4
    piece.zero_()
    assert torch.equal(files["matrix"].read(), matrix)


def test_pieces_of_pieces_transposed_and_cut_are_those_of_the_tensor(folder):
    stored, matrix = TensorFiles(folder)["matrix"], some_tensors()["matrix"]
    assert torch.equal(stored.t().read(), matrix.t())
    assert torch.equal(stored.t().part((2, 7)).part((1, 4), (3, 6)).read(), matrix.t()[2:7][1:4, 3:6])
    for ours, theirs in [(stored.chunk(4), matrix.chunk(4)), (stored.t().chunk(3), matrix.t().chunk(3))]:
        assert [piece.shape for piece in ours] == [piece.shape for piece in theirs]
        assert all(torch.equal(a.read(), b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("turned", [False, True])
def test_any_stretch_of_the_flattened_tensor_can_be_read_and_nothing_else_is(folder, turned):
    files, matrix = TensorFiles(folder), some_tensors()["matrix"]
    stored, flat = files["matrix"].t() if turned else files["matrix"], (matrix.t() if turned else matrix).flatten()
    for start in range(0, 61, 3):
        for stop in range(start, 61, 4):
            files.read_bytes, out_p = 0, torch.full((stop - start,), 7.0)
            stored.read_flat_into(out_p, start)
            assert torch.equal(out_p, flat[start:stop])
            assert files.read_bytes == out_p.nbytes


def test_flat_boxes_are_a_rest_of_a_row_whole_rows_and_a_beginning():
    assert flat_boxes((4, 10), 7, 32) == [((0, 1), (7, 10)), ((1, 3), (0, 10)), ((3, 4), (0, 2))]
    assert flat_boxes((4, 10), 0, 40) == [((0, 4), (0, 10))]
    assert flat_boxes((4, 10), 12, 15) == [((1, 2), (2, 5))]
    assert flat_boxes((9,), 2, 5) == [((2, 5),)] and flat_boxes((9,), 5, 5) == flat_boxes((3, 3), 5, 5) == []


def test_the_file_s_dtype_is_kept_unless_another_is_asked_for(folder):
    half, tensors = TensorFiles(folder)["half"], some_tensors()
    assert torch.equal(half.read(), tensors["half"])
    assert half.read(torch.float64).dtype == torch.float64
    with torch.device("meta"):  # as on a rank whose new tensors are on a GPU
        assert half.read().device.type == "cpu"


def test_several_files_are_one_mapping(tmp_path):
    tensors = some_tensors()
    save_file({"matrix": tensors["matrix"]}, tmp_path / "a.safetensors")
    save_file({"vector": tensors["vector"]}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"matrix": "a.safetensors", "vector": "b.safetensors"})
    files = TensorFiles(tmp_path)
    assert set(files) == {"matrix", "vector"} and "matrix" in files and "half" not in files
    assert files.nbytes == (60 + 6) * 4
    assert torch.equal(files["vector"].read(), tensors["vector"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks \['b.safetensors'\], which its .* names; fetch"):
        TensorFiles(tmp_path)


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


class Bomb:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.ckpt"])
def test_a_pickle_is_refused_and_not_run(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=rf"{name} would be read as a pickle.*required: safetensors. Convert"):
            TensorFiles(path)
    (tmp_path / name).rename(tmp_path / SINGLE)  # nor under another name
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_is_missing_or_damaged_is_named(folder, tmp_path_factory):
    files = TensorFiles(folder)
    with pytest.raises(ValueError, match=r"no tensor 'other' in .*holds 4: counts, half, matrix ... vector"):
        files["other"]
    with pytest.raises(ValueError, match=r"shape \(6, 10\), so there is no piece \(\(0, 7\), \(0, 10\)\)"):
        files["matrix"].part((0, 7))
    with pytest.raises(ValueError, match="counts.*stored as I64; required: one of F64, F32, BF16, F16"):
        files["counts"].read()
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match="holds neither .*; save the model"):
        TensorFiles(empty)
    with pytest.raises(ValueError, match="is no folder; required"):
        TensorFiles(empty / "gone")
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-3])
    with pytest.raises(ValueError, match="cannot be read as safetensors.*Fetch it again"):
        TensorFiles(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"matrix": "../elsewhere.safetensors"}, "required: a .safetensors file of that folder"),
        ({"matrix": "weights.bin"}, "required: a .safetensors file of that folder"),
        ({"matrix": SINGLE, "lost": SINGLE}, r"lacks \['lost'\], which .* promises"),
        ("nonsense", "is damaged"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(folder, weight_map, message):
    write_index(folder, weight_map)
    with pytest.raises(ValueError, match=message):
        TensorFiles(folder)
