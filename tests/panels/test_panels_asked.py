"""A host that is no Python asks panels in words: it gets what Python gets, and a sentence for what cannot be meant."""

import json
import sys

import pytest

from course_lib.config import preset
from course_lib.hardware import cluster_of, gpu
from course_lib.panels import asked
from course_lib.panels.plans import PLANNER
from course_lib.panels.record import Panel
from course_lib.plan import Job, search

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    "tie_word_embeddings": True, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
}  # fmt: skip


def test_every_panel_of_the_package_is_listed_once():
    modules = [module for name, module in sys.modules.items() if name.startswith("course_lib.panels.")]
    found = {id(one) for module in modules for one in vars(module).values() if isinstance(one, Panel)}
    assert sorted(found) == sorted(id(listed.panel) for listed in asked.PANELS.values())


@pytest.mark.parametrize("name", asked.PANELS)
def test_words_mean_the_values_that_they_look_like_and_all_that_is_told_is_plain_data(name):
    panel, told = asked.PANELS[name].panel, asked.described(name)
    assert json.loads(json.dumps(told)) == told
    words = {control["name"]: control["start"] for control in told["controls"]}
    assert asked.values_of(panel, words) == panel.start
    for control in told["controls"]:
        if control["kind"] in ("list", "slider"):
            values = [value for _, value in panel.controls[control["name"]].options]
            kept = [asked.values_of(panel, {control["name"]: word})[control["name"]] for _, word in control["options"]]
            assert kept == values and list(map(type, kept)) == list(map(type, values))
    shown = asked.answer({"do": "show", "panel": name, "words": words})
    assert (shown["said"], shown["svg"]) == (panel.answer().said, panel.answer().svg) == (told["said"], told["svg"])


@pytest.mark.parametrize(
    ("request_", "because"),
    [
        ({"do": "show", "panel": "zero", "words": {"dp": "63"}}, "dp is '63'; choose from 1, 2, 4"),
        ({"do": "show", "panel": "zero", "words": {"height": "3"}}, "this panel has no 'height'"),
        ({"do": "show", "panel": "nothing", "words": {}}, "panel is 'nothing'"),
        ({"do": "press", "panel": "job", "button": "Boom", "words": {}}, "button is 'Boom'"),
        ({"do": "eval", "text": "1"}, "do is 'eval'"),
        ({"do": "claim", "id": "none"}, "id is 'none'"),
        ({"do": "plan", "words": {"gpus": "many"}}, "'many' is no number of GPUs; give one such as 64"),
        ({"do": "plan", "words": {"batch": "4 M"}}, "'4 M' is no number of tokens"),
        ({"do": "plan", "words": {}, "file": "config.json", "text": "{"}, "config.json"),
        ({"do": "plan", "words": {}, "file": "../../x.json", "text": '{"model_type": "mamba"}'}, "mamba"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(request_, because):
    refused = asked.answer(request_)
    assert list(refused) == ["refused_because"] and because in refused["refused_because"]


def test_the_planner_is_the_search_of_that_job_with_the_files_of_its_engine():
    found = asked.answer({"do": "plan", "words": {"gpus": "8", "batch": "512K", "engine": "torchtitan"}})
    cluster = cluster_of(gpu("h100"), "ib-ndr400")
    best = search(Job(preset("llama-3.1-8b"), cluster, 8, 8192, 2**19, engine="torchtitan")).best
    assert f"->{best.memory_bytes / 1e9:>8.1f}" in "\n".join(found["lines"]) and f" {best.layout}: " in found["said"]
    assert list(found["files"]) == ["torchtitan.toml"] and found["refused"] == {}
    assert f"data_parallel_shard_degree = {best.layout.shard_size}" in found["files"]["torchtitan.toml"]


def test_a_config_json_takes_the_place_of_the_preset():
    words = {"gpus": "8", "batch": "512K", "seq_len": "4096"}
    found = asked.answer({"do": "plan", "words": words, "file": "config.json", "text": json.dumps(CONFIG)})
    assert "1. Fit. 0.60 billion parameters" in "\n".join(found["lines"])
    assert PLANNER.start["model"] == "llama-3.1-8b"


def test_a_press_on_a_grid_is_the_panels_own():
    grid = asked.PANELS["puzzle"].panel.controls["chart"]
    asks = {"panel": "puzzle", "control": "chart", "value": grid.start}
    found = asked.answer({"do": "place", "row": 0, "column": 1, "option": "F", **asks})
    assert found == {"value": grid.press(grid.start, 0, 1, "F"), "cells": grid.cells(found["value"])}
    assert found["cells"][0][:2] == ["F0", "F1"] and asked.answer({"do": "cells", **asks})["cells"][0][1] == "."


def test_a_claim_is_computed_anew():
    found = asked.answer({"do": "claim", "id": "C003"})
    assert found["answer"] and json.loads(json.dumps(found)) == found
