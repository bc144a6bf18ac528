"""Files for other frameworks: their parsers read them, or their fields are known; what they cannot do is refused."""

import importlib.util
import json
import shlex
import tomllib
from dataclasses import replace

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from course_lib.cli.plan import write_files
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan import Job, export, work_out
from course_lib.plan.export import course_command
from course_lib.train.options import read

H100 = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
ALL = [
    "dp=16,zero_stage=3,micro_batches=2",
    "dp=16,micro_batches=2",
    "dp=4,tp=2,pp=2,sequence_parallel=true,zero_stage=1,micro_batches=8",
    "dp=4,tp=4,sequence_parallel=true,zero_stage=3,micro_batches=8,recompute=full",
    "dp=2,tp=2,pp=4,sequence_parallel=true,schedule=interleaved,v=2,micro_batches=16,recompute=selective",
    "dp=4,cp=2,pp=2,schedule=zb_h1,micro_batches=8",
    "dp=4,cp=4,micro_batches=8",
]

# https://github.com/huggingface/picotron/blob/59714b1bf255/template/base_config.json
PICOTRON = {
    "distributed": "tp_size cp_size pp_size dp_size pp_engine backend use_cpu",
    "model": "name num_hidden_layers num_attention_heads num_key_value_heads dtype use_flash_attention use_fused_adam",
    "training": "seed learning_rate total_train_steps seq_length micro_batch_size gradient_accumulation_steps "
    "num_samples max_tokens",
}
# https://github.com/huggingface/nanotron/blob/09fd0ece7579/examples/config_tiny_llama.yaml
NANOTRON = {
    "model": "ddp_bucket_cap_mb dtype init_method make_vocab_size_divisible_by model_config",
    "optimizer": "accumulate_grad_in_fp32 clip_grad learning_rate_scheduler optimizer_factory weight_decay zero_stage",
    "parallelism": "dp expert_parallel_size pp pp_engine tp tp_linear_async_communication tp_mode",
    "tokens": "batch_accumulation_per_replica limit_test_batches limit_val_batches micro_batch_size sequence_length "
    "train_steps val_check_interval",
}
# https://github.com/pytorch/torchtitan/blob/2dfaa2765e8c/tests/integration_tests/base_config.toml, and the fields of
# pipelines and of keys that travel in torchtitan/config/job_config.py
TORCHTITAN = {
    "training": "local_batch_size global_batch_size seq_len max_norm steps dataset",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree enable_async_tensor_parallel pipeline_parallel_degree context_parallel_degree "
    "expert_parallel_degree expert_tensor_parallel_degree pipeline_parallel_schedule pipeline_parallel_microbatch_size "
    "context_parallel_rotate_method",
    "activation_checkpoint": "mode selective_ac_option",
}
# https://github.com/NVIDIA/Megatron-LM: examples/llama/train_llama3_8b_h100_fp8.sh, megatron/training/arguments.py
MEGATRON = [
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "group-query-attention",
    "num-query-groups",
    "kv-channels",
    "seq-length",
    "max-position-embeddings",
    "swiglu",
    "normalization",
    "position-embedding-type",
    "untie-embeddings-and-output-weights",
    "tensor-model-parallel-size",
    "sequence-parallel",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "use-distributed-optimizer",
    "expert-model-parallel-size",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "micro-batch-size",
    "global-batch-size",
    "bf16",
    "num-layers-per-virtual-pipeline-stage",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
]


def option_of(text: str):
    layout = Layout.parse(text)
    tokens = layout.sequences_per_step * 4096
    return work_out(Job(preset("llama-3.1-8b"), H100, layout.world_size, 4096, tokens), layout)


@pytest.fixture(scope="module")
def exported():
    return {text: export(option_of(text)) for text in ALL}


def check_fields_of(sections: dict, known: dict) -> None:
    for name, values in sections.items():
        assert set(values) <= set(known[name].split()), name


def test_every_file_is_written_or_refused_with_a_reason(exported):
    written = set()
    for text, (files, refused) in exported.items():
        assert len(files) + len(refused) == 7 and not set(files) & set(refused), text
        assert all(reason.endswith("choose a layout without") for reason in refused.values())
        written |= set(files)
    assert len(written) == 7


def test_torchtitan_has_these_fields_and_as_many_ranks(exported):
    for text, (files, _) in exported.items():
        if "torchtitan.toml" in files:
            found, layout = tomllib.loads(files["torchtitan.toml"]), Layout.parse(text)
            check_fields_of(found, TORCHTITAN)
            sizes = [value for name, value in found["parallelism"].items() if name.endswith("_degree")]
            assert sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4] == layout.world_size
            assert found["training"]["global_batch_size"] == layout.sequences_per_step


def test_nanotron_and_picotron_have_these_fields(exported):
    for text, (files, _) in exported.items():
        layout = Layout.parse(text)
        if "nanotron.yaml" in files:
            found = yaml.safe_load(files["nanotron.yaml"])
            check_fields_of(found, NANOTRON)
            assert found["optimizer"]["zero_stage"] == layout.zero_stage
            assert (found["parallelism"]["tp_mode"] == "REDUCE_SCATTER") == layout.sequence_parallel
        if "picotron.json" in files:
            found = json.loads(files["picotron.json"])
            check_fields_of(found, PICOTRON)
            assert found["distributed"]["cp_size"] == layout.cp


def test_megatron_has_these_arguments(exported):
    for text, (files, _) in exported.items():
        if "megatron.args" in files:
            lines = dict((line.removeprefix("--") + " ").split(" ", 1) for line in files["megatron.args"].splitlines())
            assert set(lines) <= set(MEGATRON)
            layout = Layout.parse(text)
            assert int(lines["tensor-model-parallel-size"]) == layout.tp
            assert int(lines["global-batch-size"]) == layout.sequences_per_step
            assert ("sequence-parallel" in lines) == layout.sequence_parallel
    interleaved = exported[ALL[4]][0]["megatron.args"]
    assert "--num-layers-per-virtual-pipeline-stage 4\n" in interleaved  # 32 layers, 4 ranks of 2 stages


def test_accelerate_reads_its_files(exported, tmp_path):
    known = {action.dest for action in launch_command_parser()._actions}
    path = tmp_path / "megatron.yaml"
    path.write_text(exported[ALL[2]][0]["accelerate_megatron.yaml"])
    config = load_config_from_file(str(path))
    assert set(config.megatron_lm_config) <= known and config.megatron_lm_config["megatron_lm_pp_degree"] == 2
    for text in ALL[:2]:
        write_files(option_of(text), tmp_path / text, 8)
        for file in (tmp_path / text).glob("accelerate_[df]*.yaml"):
            assert load_config_from_file(str(file)).num_processes == 16
    assert (tmp_path / ALL[0] / "accelerate_fsdp2.yaml").is_file()


def test_deepspeed_reads_its_json(tmp_path):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed; make test-deepspeed installs it")
    from deepspeed.runtime.config import DeepSpeedConfig

    write_files(option_of(ALL[0]), tmp_path, 8)
    config = json.loads((tmp_path / "deepspeed.json").read_text())
    assert DeepSpeedConfig(config | {"train_batch_size": 2}).zero_optimization_stage == 3


def test_the_trainer_reads_its_command(exported):
    for text in ALL:
        words = shlex.split(course_command(option_of(text).run, 8).partition("-m course_lib.train ")[2])
        config, layout, plan, _, _ = read(words)
        assert (config, layout, plan.seq_len) == (preset("llama-3.1-8b"), Layout.parse(text), 4096)
        assert "--nodes=2\n" in exported[text][0]["course.sbatch"]


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        (ALL[2], "torchtitan.toml", "ZeRO-1"),
        (ALL[0], "megatron.args", "ZeRO-3"),
        (ALL[5], "megatron.args", "schedule zb_h1"),
        (ALL[6], "nanotron.yaml", "context parallelism"),
        (ALL[2], "picotron.json", "no sequence parallelism"),
        (ALL[4], "accelerate_megatron.yaml", "interleaved stages"),
        (ALL[4], "torchtitan.toml", "recomputation of attention alone"),
    ],
)
def test_what_a_framework_cannot_do_is_refused(exported, text, name, why):
    files, refused = exported[text]
    assert name not in files and why in refused[name]


def test_a_layer_left_over_is_refused():
    layout = Layout(pp=3, micro_batches=3)
    option = option_of(ALL[1])
    _, refused = export(replace(option, run=replace(option.run, layout=layout)))
    assert "32 layers over 3 equal stages" in refused["megatron.args"]
