"""The model that speaks: as good as its page says, the same in transformers, made again by one command."""

import math
import shutil
import sys
import tomllib
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch

from course_lib.authoring import ROOT
from course_lib.config import preset
from course_lib.training.text import bits_per_byte, speak
from course_lib.weights.base import FOLDER, HELD_OUT, PAIRS, WEIGHTS, held_out_english, load_base, load_tokenizer
from course_lib.weights.loading import load_whole

sys.path.insert(0, str(ROOT / "benchmarks"))
import make_base


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other longer than they compute
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base():
    return load_base()


def test_it_knows_english_as_its_page_says(base):
    model, tokenizer = base
    held_T = held_out_english(tokenizer)
    bits = bits_per_byte(model, held_T, tokenizer)
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"it has {bits:.3f} bits per byte" in page and f"{len(held_T):,} tokens of English" in page
    assert f"{sum(param.numel() for param in model.parameters()):,} parameters" in page
    assert f"the {len(tokenizer.pairs):,} pairs" in page


def test_it_says_words_of_english(base):
    words = speak(*base, "The function returns", num_tokens=30, temperature=0.5).lower().split()
    assert len({"the", "a", "of", "to", "is", "in", "and"} & set(words)) >= 2


@pytest.mark.slow
def test_transformers_reads_the_same_model(base):
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokens_BS = base[1].encode("If the model is trained")[None]
    with torch.no_grad():
        assert torch.allclose(theirs(tokens_BS).logits, base[0](tokens_BS), atol=1e-4)


@pytest.mark.parametrize("damage", ["missing", "cut short", "another model's"])
def test_weights_that_are_damaged_are_named(tmp_path, damage):
    shutil.copytree(FOLDER, tmp_path / "speaks")
    file = tmp_path / "speaks" / WEIGHTS
    if damage == "missing":
        file.unlink()
    elif damage == "cut short":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        file.write_bytes(b"no tensors")
    message = f"holds neither {WEIGHTS} nor" if damage == "missing" else "cannot be read as safetensors"
    with pytest.raises(ValueError, match=message):
        load_base(tmp_path / "speaks")


def test_all_its_files_are_in_the_wheel_and_small():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["course_lib"]
    files = sorted(FOLDER.iterdir())
    assert [file.name for file in files] == ["README.md", "config.json", HELD_OUT, WEIGHTS, PAIRS]
    assert all(any(fnmatch(f"weights/speaks/{file.name}", pattern) for pattern in packaged) for file in files)
    assert sum(file.stat().st_size for file in files) < 4e6


@pytest.mark.slow
def test_the_command_makes_a_base_that_loads_and_has_learned(tmp_path, monkeypatch, capsys):
    """A few steps of the whole way: text, pairs, Muon and AdamW, files."""
    monkeypatch.setattr(make_base, "WARM_UP_STEPS", 1)
    config = replace(preset("speaks"), num_layers=1, d_model=64, head_dim=8, d_ff=64, vocab_size=300)
    bits = make_base.make_base(tmp_path, config, ["safetensors"], steps=20, rows=4)
    model, tokenizer = load_whole(tmp_path, config, torch.float32), load_tokenizer(tmp_path)
    held_T = tokenizer.encode((tmp_path / HELD_OUT).read_text(encoding="utf-8"))
    guessed = math.log2(300) * (len(held_T) - 1) / len(tokenizer.to_bytes(held_T[1:]))
    assert bits < 0.8 * guessed
    assert bits_per_byte(model, held_T, tokenizer) == pytest.approx(bits, abs=0.02)  # as saved in 16 bits
    assert "step 20" in capsys.readouterr().out


def test_the_text_to_train_on_has_nothing_that_is_held_out():
    trained, held = (set(text.split("\n\n")) - {""} for text in make_base.prose([]))
    assert len(trained) > 100 < len(held) and not trained & held
    assert all(line[0].isupper() and line[-1] in ".:!?" for line in trained | held)
