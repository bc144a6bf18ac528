"""Each rank reads its piece of the files: the same numbers as from the whole model, exact bytes, less host memory."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from course_lib.config import preset
from course_lib.launch import RankError, launch
from course_lib.model import build
from course_lib.parallel import engine as engines
from course_lib.parallel import shards, zero
from course_lib.weights.hf_weights import config_from_transformers
from course_lib.weights.loading import Weights, host_bytes, load_whole, read_config, read_flat

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 8,
         "num_key_value_heads": 2, "intermediate_size": 110, "max_position_embeddings": 128}  # fmt: skip
LARGE = {"vocab_size": 4096, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
         "num_key_value_heads": 4, "intermediate_size": 2048, "max_position_embeddings": 256}  # fmt: skip


def their_model(name):
    """A model of the transformers library, which ranks do without: they import this file, too."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128, **ends))
    if name == "large":
        return LlamaForCausalLM(LlamaConfig(**LARGE))
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=name == "tied"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> (folder, logits): models with random numbers in every parameter, and one of them in several files."""
    made, x_BS = {}, some_tokens()
    for name in ("llama", "tied", "gpt2"):
        model = their_model(name).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0))
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = folder, model(x_BS).logits
            if name == "llama":
                folder = tmp_path_factory.mktemp("several")
                model.save_pretrained(folder, max_shard_size="100KB")
                assert len(list(folder.glob("*.safetensors"))) > 2
                made["several files"] = folder, model(x_BS).logits
    return made


def some_tokens():
    return torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "several files"])
@torch.no_grad()
def test_loaded_logits_are_those_of_transformers(folders, name):
    folder, expected = folders[name]
    model = load_whole(folder)
    torch.testing.assert_close(model.eval()(some_tokens()), expected, rtol=1e-5, atol=1e-5)
    assert (model.head.weight is model.embed.weight) == Weights(folder).config.tied


def test_config_json_says_what_transformers_reads_from_it(folders):
    for name in ("llama", "tied", "gpt2"):
        assert read_config(folders[name][0]) == config_from_transformers(their_model(name).config)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_flat_shards_are_the_pieces_of_the_flattened_whole(folders, name, ranks):
    folder, _ = folders[name]
    weights, model = Weights(folder), load_whole(folder)
    for _, members in zero.unit_parameters(model):
        names, parameters = zip(*members, strict=True)
        flat_P = shards.flatten_and_pad([parameter.detach() for parameter in parameters], ranks)
        for rank, expected_p in enumerate(flat_P.chunk(ranks)):
            shard_p = torch.full_like(expected_p, 7.0)
            read_flat(weights, names, rank * len(shard_p), shard_p)
            assert torch.equal(shard_p, expected_p)
    assert weights.files.read_bytes == 4 * sum(shape.numel() for shape in weights.shapes.values())  # each number once


def engines_from_files(folder):
    """Differences between stage 3 of a model on the meta device that read its shards, and of a whole one; bytes read.

    Of the logits, of whole parameters, of the loss and of gradients; then the bytes of this rank's shards.
    """
    group, weights = dist.group.WORLD, Weights(folder)
    x_BS = some_tokens()
    both_engines = [
        zero.build(build(weights.config, device="meta"), group, load=partial(read_flat, weights)),
        zero.build(load_whole(folder), group),
    ]
    with torch.no_grad():
        logits = [engine.eval()(x_BS) for engine in both_engines]
    parameters = [engines.full_parameters(engine) for engine in both_engines]
    losses = [engines.accumulate_gradients(engine, [(x_BS, x_BS.roll(-1, 1))]) for engine in both_engines]
    gradients = [engines.full_gradients(engine) for engine in both_engines]
    same = [
        torch.equal(*pair)
        for both in (parameters, gradients)
        for pair in zip(*(one.values() for one in both), strict=True)
    ]
    same += [torch.equal(*losses), list(parameters[0]) == list(parameters[1])]
    tied = both_engines[0].module.head.weight is both_engines[0].module.embed.weight
    return (
        logits[0],
        all(same),
        tied,
        weights.files.read_bytes,
        sum(flat.shard_p.nbytes for flat in both_engines[0].flats),
    )


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_stage_3_reads_its_shards_and_trains_as_if_it_had_had_the_whole(folders, name):
    folder, expected = folders[name]
    for logits, same, tied, read_bytes, held_bytes in launch(engines_from_files, 2, folder):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert same and tied == (name == "tied")
        assert read_bytes <= held_bytes < 0.51 * Weights(folder).files.nbytes  # all but padding is read


def test_dtypes_are_the_file_s_or_those_asked_for(folders, tmp_path):
    shutil.copytree(folders["llama"][0], tmp_path, dirs_exist_ok=True)
    halved = {name: value.bfloat16() for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(halved, tmp_path / "model.safetensors")
    assert {p.dtype for p in load_whole(tmp_path).parameters()} == {torch.bfloat16}
    wider = load_whole(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in wider.parameters()} == {torch.float32}
    assert torch.equal(wider.head.weight, halved["lm_head.weight"].float())


def edited(folder, tmp_path, change_tensors, change_config):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (change_tensors or len)(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (change_config or len)(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((lambda t: t.pop("model.norm.weight"), None), "no tensor 'model.norm.weight'.*check that the config"),
        ((lambda t: t.update(extra=torch.ones(1)), None), r"holds \['extra'\], for which config .* no place"),
        ((None, lambda c: c.update(num_hidden_layers=2)), "and more, for which config .*num_layers"),
        ((None, lambda c: c.update(vocab_size=98)), r"embed.weight .*shape \(97, 64\); required .*\(98, 64\)"),
        ((lambda t: t.update({"model.norm.weight": torch.ones(64).int()}), None), "stored as I32; required"),
        ((None, lambda c: c.update(model_type="mamba")), "model_type is 'mamba'; this course has llama"),
    ],
)
def test_files_that_do_not_fit_their_config_are_refused(folders, tmp_path, changes, message):
    folder = edited(folders["llama"][0], tmp_path, *changes)
    with pytest.raises(ValueError, match=message):
        weights = Weights(folder)
        for name in weights.shapes:
            weights[name].read()


def refused_by_other_stages():
    zero.build(build(preset("toy"), device="meta"), dist.group.WORLD, stage=2, load=print)


def test_other_stages_need_a_loaded_model():
    with pytest.raises(RankError, match="load is for stage 3.*stage 2 needs a loaded model"):
        launch(refused_by_other_stages, 1)


def test_a_folder_without_a_config_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json"):
        read_config(tmp_path)


# --- host memory

WAYS = ("whole", "zero3")


def host_memory(folder, size):
    """What loading adds to this process, as to a rank of `size`: bytes of its own at the end, resident at most.

    Each process of the launch goes another way.
    """
    rank, way = 1, WAYS[int(os.environ["RANK"])]
    config = read_config(folder)
    before = host_bytes()
    if way == "whole":
        kept = load_whole(folder)
    else:
        weights, kept = Weights(folder), []
        for _, members in zero.unit_parameters(build(config, device="meta")):
            names, parameters = zip(*members, strict=True)
            numel = -(-sum(parameter.numel() for parameter in parameters) // size)
            kept.append(torch.empty(numel))
            read_flat(weights, names, rank * numel, kept[-1])
    after = host_bytes()
    return after.anonymous - before.anonymous, after.peak_resident - before.resident


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="only Linux tells a process's own pages")
def test_a_rank_that_reads_its_piece_needs_a_share_of_the_memory(tmp_path):
    their_model("large").save_pretrained(tmp_path)
    model_bytes = Weights(tmp_path).files.nbytes
    assert model_bytes > 100e6
    results = launch(host_memory, len(WAYS), tmp_path, 4)
    own, peak = ({way: one[i] / model_bytes for way, one in zip(WAYS, results, strict=True)} for i in (0, 1))
    assert own["whole"] > 0.95 and peak["whole"] > 1.9  # the model, and the mapped file
    assert 0.15 < own["zero3"] < 0.30  # its quarter, less what an earlier allocation left free in the process
    assert peak["zero3"] < 0.5  # and of one tensor the mapped pages
