"""Questions as people put them: tokens in words, models from files, GPUs and links by name or number, techniques."""

import csv
import json
from dataclasses import replace

import pytest

from course_lib.cli import main
from course_lib.cli.asked import Device, Techniques, offload_of
from course_lib.cli.plan import PlanOptions, job_of
from course_lib.config import preset
from course_lib.hardware import GPUS, LINKS, peak_flops
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.memory.states import state_bytes
from course_lib.run import Offload, Run
from course_lib.tensors import LoRA
from course_lib.units import read_tokens

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
ASKED = {"model": "llama-3.1-8b", "gpus": 8, "seq": 4096, "batch": 2**20}


def job(**changes):
    return job_of(PlanOptions(**ASKED | changes))


@pytest.mark.parametrize(
    ("text", "tokens"), [("4194304", 2**22), ("4M", 2**22), ("4m", 2**22), ("8K", 8192), ("0.5M", 2**19), ("512", 512)]
)
def test_tokens_are_numbers_or_so_many_k_or_m(text, tokens):
    assert read_tokens(text) == tokens


def test_a_config_json_is_planned_and_what_it_leaves_out_is_told(tmp_path, capsys):
    folder = tmp_path / "Qwen2.5-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | {"model_type": "qwen2"}))
    assert job(model=str(folder)).config.name == "Qwen2.5-7B"
    assert capsys.readouterr().err == "note: Qwen2.5-7B: the biases of its q, k and v are left out\n"


def test_efa_of_an_a100_is_a_p4ds_and_is_told(capsys):
    assert job(gpu="a100-40", link="efa").cluster.between is LINKS["efa-p4d"]
    assert capsys.readouterr().err.startswith(
        "note: efa of A100 SXM 40 GB is a p4d's: 4 x 100 Gb/s a node, here 6.25 GB/s"
    )
    assert job(gpu="h100", link="efa").cluster.between is LINKS["efa"] and not capsys.readouterr().err
    one_of_four = job(gpus=4, gpu="a100-40", link="efa", per_node=1).cluster.between
    assert one_of_four.bytes_per_s == 12.5e9


def test_links_and_nodes_are_the_gpus_own_unless_they_are_given():
    stock = job(gpu="4090").cluster
    assert stock.inside is LINKS["pcie4-host"] and stock.gpus_per_node == 8
    slow = job(gpu="4090", inside="5", link="1.25", per_node=4).cluster
    assert (slow.inside.bytes_per_s, slow.between.bytes_per_s, slow.gpus_per_node) == (5e9, 1.25e9, 4)
    assert job(gpus=72, batch=72 * 4096, gpu="gb200").cluster.gpus_per_node == 72


def test_gpus_without_bf16_train_in_fp16_unless_fp32_is_asked_for():
    assert job(gpu="t4").recipe == "fp16-master-fp32-grads" and peak_flops(job(gpu="t4").cluster.gpu) == 65e12
    assert peak_flops(job(gpu="v100-16", recipe="fp32").cluster.gpu) == 15.7e12
    with pytest.raises(ValueError, match="T4 has no bf16 units; choose recipe fp16-master-fp32-grads or fp32"):
        job(gpu="t4", recipe="bf16-master")
    with pytest.raises(ValueError, match="recipe of nanotron is 'bf16'; .*choose from fp32, bf16-master-fp32-grads"):
        job(framework="nanotron", recipe="bf16")
    assert job(recipe="bf16").recipe == "bf16" and job(framework="megatron").recipe == "bf16-master-fp32-grads"


def test_a_gpu_of_ones_own_is_given_by_three_numbers():
    device = job(gpu="mine", memory=48.0, tflops=200.0, bandwidth=900.0).cluster.gpu
    assert (device.name, peak_flops(device), device.link) == ("mine", 2e14, "pcie4")
    assert Device(gpu="mine", memory=48.0).record(holds_alone=True).memory_bytes == 48 * 2**30
    with pytest.raises(ValueError, match="GPU 'mine' is in no table: give its tflops and bandwidth too"):
        Device(gpu="mine", memory=48.0).record()
    assert Device(gpu="h100").record() is GPUS["h100"]


def test_techniques_are_fields_of_a_run():
    assert Techniques().run_fields() == {}
    asked = Techniques(finetune="lora", lora_rank=8, optimizer="adamw-8bit", offload="optimizer-activations")
    offload = Offload(optimizer="host", activations="host")
    assert asked.run_fields() == {"lora": LoRA(8), "optimizer": "adamw-8bit", "offload": offload}
    assert Techniques(attention="standard").run_fields() == {"attention": "standard"}
    assert offload_of("parameters") == Offload(parameters="host")
    eight = job(optimizer="adamw-8bit", attention="standard")
    assert (eight.optimizer, eight.attention) == ("adamw-8bit", "standard")


HEAD = "model,nodes,gpus,mbs,grad_acc,dp,pp,tp,zero,optimizer,finetune,precision,attention"


def predicted(folder, *rows, options=()):
    (folder / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    out = folder / "out.csv"
    assert main(["predict", str(folder / "runs.csv"), "--out", str(out), "--recipe", "course", *options]) == 0
    with out.open() as file:
        return list(csv.DictReader(file))


def test_predict_knows_presets_files_and_techniques(tmp_path, capsys):
    row = "llama-3.2-1b,1,2,1,4,2,1,1,0"
    plain, small, adapters, scores = predicted(
        tmp_path, f"{row},,,,", f"{row},adamw-8bit,,,", f"{row},,lora,,", f"{row},,,,standard"
    )
    memory = [float(one["predicted_mem_gb"]) for one in (adapters, small, plain, scores)]
    assert memory == sorted(memory) and memory[0] < memory[3] / 2
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_8B))
    (other,) = predicted(tmp_path, f"{tmp_path.name},1,8,1,1,8,1,1,3,,,,", options=("--models", str(config)))
    assert float(other["predicted_mem_gb"]) > 16 * 8.19 / 8


def test_a_v100_and_a_t4_are_predicted_in_fp16(tmp_path):
    row = "llama-3.2-1b,1,2,1,4,2,1,1,0"
    for gpu in ("t4", "v100-32"):
        usual, half, full, brain = predicted(
            tmp_path, f"{row},,,,", f"{row},,,fp16,", f"{row},,,fp32,", f"{row},,,bf16,",
            options=("--gpu", gpu, "--per-node", "2"),
        )  # fmt: skip
        assert usual["predicted_mem_gb"] == half["predicted_mem_gb"] != ""
        assert float(full["predicted_tok_s_gpu"]) < float(half["predicted_tok_s_gpu"]) / 3
        assert "has no bf16 units" in brain["why"] and brain["predicted_mem_gb"] == ""


@pytest.mark.slow
def test_pure_bf16_and_fp16_are_simulated_to_the_bytes_of_their_recipe(capsys):
    told, words = {}, ["simulate", "--model", "mini", "--layout", "dp=2,zero_stage=1", "--seq", "64", "--json"]
    for recipe in ("bf16", "fp16-master-fp32-grads", "bf16-master"):
        gpu = "h100" if recipe.startswith("bf16") else "v100-16"
        assert main([*words, "--recipe", recipe, "--gpu", gpu]) == 0
        told[recipe] = json.loads(capsys.readouterr().out)["ranks"][0]["states"]
    numel = told["bf16"]["parameters"] / 2
    assert told["bf16"]["optimizer"] == pytest.approx(2 * numel, rel=1e-5)  # 4 bytes over two ranks
    assert told["fp16-master-fp32-grads"]["gradients"] == pytest.approx(4 * numel, rel=1e-5)
    assert told["fp16-master-fp32-grads"]["optimizer"] == told["bf16-master"]["optimizer"] > 2.9 * 2 * numel


@pytest.mark.slow
def test_a_config_json_is_simulated(tmp_path, capsys):
    small = QWEN3_8B | {"num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(small))
    words = ["--model", str(tmp_path), "--gpu", "mine", "--memory", "48", "--layout", "dp=2", "--seq", "1K"]
    assert main(["simulate", *words]) == 0
    said = capsys.readouterr().out
    assert "on 2 x mine" in said and "GB at the peak of a step; usable on this GPU: 50.7" in said and "GiB" not in said


def test_qlora_stores_the_frozen_matrices_in_4_bits():
    """Lesson 02c: 16.1 and 5.8 GB of states for 8B; what a product dequantizes comes on top."""
    config = preset("llama-3.1-8b")
    adapters, four_bits = (state_bytes(config, lora=LoRA(8, four_bits=bits)) for bits in (False, True))
    assert adapters.total / 1e9 == pytest.approx(16.1, abs=0.05)
    assert four_bits.total / 1e9 == pytest.approx(5.76, abs=0.01)
    assert (four_bits.gradients, four_bits.optimizer) == (adapters.gradients, adapters.optimizer)
    run = Run(config, Layout.parse("dp=1,recompute=full"), 2048, lora=LoRA(16))
    whole, small = (budgets(replace(run, lora=LoRA(16, four_bits=bits)))[0].total_bytes for bits in (False, True))
    saved = adapters.parameters - four_bits.parameters - 2 * config.d_model * config.d_ff  # one matrix in BF16
    assert whole - small == pytest.approx(saved, rel=0.02)


def test_what_a_framework_does_not_have_is_one_sentence(capsys):
    asked = ["plan", "llama-3.2-1b", "--gpus", "8", "--seq", "4K", "--batch", "128K"]
    for words, said in {
        "--loss-chunks 8 --framework megatron": "loss_chunks is 8, but megatron has no loss in chunks; course, fsdp2, "
        "deepspeed have",
        "--framework megatron --recipe bf16": "recipe of megatron is 'bf16'",
        "--gpu a100": "GPU is 'a100', of which there are several: a100-pcie-40, a100-pcie-80, a100-40, a100-80",
        "--link nvlink4": "link between nodes is 'nvlink4'",
        "--inside efa": "link inside a node is 'efa'",
    }.items():
        assert main([*asked, *words.split()]) == 2, words
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
