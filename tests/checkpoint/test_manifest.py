"""A manifest that somebody else made, with a right checksum: whatever field is of another kind, it is one sentence."""

import copy
import json

import pytest

from course_lib import checkpoint
from course_lib.checkpoint import files
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d

pytestmark = pytest.mark.launches

TINY = ModelConfig("tiny", 1, d_model=8, num_heads=2, num_kv_heads=2, d_ff=8, vocab_size=11, max_seq_len=8)
FILE, TENSOR = ["files", "__0_0.distcp"], ["tensors", "model.norm.weight"]
KINDS = (None, 3, 2.5, True, "x", [], [3])  # of JSON, but for objects
FIELDS = [  # the path of a field, and what it may not be
    (["step"], (None, -1, 2.5, True, "x", [], {})),
    *(([name], KINDS) for name in ("layout", "model", "optimizer", "about", "files", "tensors")),
    (["layout"], ({"dp": None}, {"dp": 0}, {"dp": "x"}, {"x": 1})),
    (["model"], ({}, {"x": 3})),
    (["model", "num_layers"], (None, 0, "x", [])),
    (["model", "moe"], (3, "x", [], {"x": 1})),
    (["optimizer"], ({}, {"options": [{}]}, {"steps": {}})),
    (["optimizer", "options"], (*KINDS, {})),
    (["optimizer", "options", 0], (*KINDS, {"params": []})),
    (["optimizer", "options", 0, "lr"], (None, True, "x", [], {})),
    (["optimizer", "options", 0, "betas"], (*KINDS, {}, [0.9, "x"])),
    (["optimizer", "steps"], (*KINDS, {"norm.weight": "x"}, {"norm.weight": -1})),
    (FILE, (*KINDS, {})),
    ([*FILE, "bytes"], (None, -1, 2.5, True, "x", [], 2**63)),
    ([*FILE, "sha256"], (None, 3, [])),
    (TENSOR, (*KINDS, {})),
    ([*TENSOR, "dtype"], (*KINDS, {})),
    ([*TENSOR, "shape"], (*KINDS, {}, [-8], [8.0], ["x"], [2**63], [8, 1])),
    ([*TENSOR, "boxes"], (None, 3, "x", {}, [3], [[]], [[[0], [8]]])),
    *(([*TENSOR, "boxes", 0, part], (None, 3, True, "x", [], {}, [-1], [9], ["x"], [0, 0])) for part in (0, 1)),
    ([*TENSOR, "boxes", 0, 2], (None, 3, [], {})),
    *(([*TENSOR, "boxes", 0, part], (None, -1, 2.5, True, "x", [], {})) for part in (3, 4)),
]


def save_one(folder):
    """In a rank: a checkpoint of a model without any step."""
    engine = five_d.build(TINY, Layout(), 0)
    return checkpoint.save(engine, engines.make_optimizer(engine), folder, 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return launch(save_one, 1, str(tmp_path_factory.mktemp("saved")))[0]


def forge(path, whole, field, value):
    """Write the manifest with one field of another kind, and the checksum of that."""
    manifest = copy.deepcopy(whole)
    *before, last = field
    within = manifest
    for name in before:
        within = within[name]
    within[last] = value
    (path / files.MANIFEST).write_text(json.dumps(manifest | {"sha256": files.digest(manifest)}))


def test_a_field_of_another_kind_is_told_in_one_sentence_that_names_it(path):
    text = (path / files.MANIFEST).read_text()
    whole = files.read_manifest(path)
    for field, values in FIELDS:
        for value in values:
            forge(path, whole, field, value)
            with pytest.raises(ValueError, match="is damaged: .*is not as a save writes it") as refusal:
                files.read_manifest(path)
            named = field[1] if field[0] in ("files", "tensors") and len(field) > 1 else field[0]
            assert named in str(refusal.value) and "\n" not in str(refusal.value), (field, value)
    (path / files.MANIFEST).write_text(text)
    assert files.read_manifest(path) == whole


def load_one(folder):
    """In a rank: what loading that checkpoint into a new engine says; nothing where it loads."""
    engine = five_d.build(TINY, Layout(), 0)
    try:
        checkpoint.load(engine, engines.make_optimizer(engine), folder)
    except ValueError as error:
        return str(error)
    return ""


def load_without(path, names):
    """In a rank: for each name what loading says if the manifest lists no such tensor; last if it lists all."""
    text, told = (path / files.MANIFEST).read_text(), []
    whole = files.read_manifest(path)
    for name in names:
        tensors = {key: stored for key, stored in whole["tensors"].items() if key != name}
        forge(path, whole, ["tensors"], tensors)
        told.append(load_one(path))
    (path / files.MANIFEST).write_text(text)
    return [*told, load_one(path)]


def test_a_tensor_that_is_not_listed_is_told_by_its_name(path):
    names = ["model.norm.weight", "model.embed.weight", "rank.0.rng.cpu"]
    *told, loaded = launch(load_without, 1, path, names)[0]
    assert loaded == ""
    for name, text in zip(names, told, strict=True):
        assert f"holds no {name}; it is of another model" in text, text
