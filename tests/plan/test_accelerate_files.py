"""Configs of Accelerate, read back by its own loader and launcher; DeepSpeed's own reading: test_deepspeed.py."""

import json

import pytest
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from course_lib.plan import config_files
from course_lib.run import Offload

TWO_MACHINES = {"machines": 2}


def launched(config, path):
    """What `accelerate launch --config_file` hands to the processes that it starts: environment variables."""
    config_files.write(config, path)
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    if arguments.use_fsdp:
        return prepare_multi_gpu_env(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ""
    return prepare_deepspeed_cmd_env(arguments)[1]


def test_the_fsdp2_file_is_read_by_accelerate(tmp_path):
    config = config_files.accelerate_fsdp2(["LlamaDecoderLayer", "Embedding"], num_processes=16, **TWO_MACHINES)
    read = load_config_from_file(str(config_files.write(config, tmp_path / "fsdp2.yaml")))
    assert (read.distributed_type, read.mixed_precision) == ("FSDP", "bf16")
    assert (read.num_processes, read.num_machines, read.main_process_port) == (16, 2, 29500)
    assert read.fsdp_config == config["fsdp_config"]


@pytest.mark.parametrize("reshard", [True, False])
def test_the_fsdp2_file_reaches_the_plugin_of_the_processes(tmp_path, monkeypatch, reshard):
    config = config_files.accelerate_fsdp2(["Block", "MLP"], 8, reshard_after_forward=reshard, recompute=True)
    for name, value in launched(config, tmp_path / "fsdp2.yaml").items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is reshard
    assert plugin.transformer_cls_names_to_wrap == ["Block", "MLP"]
    assert plugin.activation_checkpointing and not plugin.cpu_ram_efficient_loading


def test_a_deepspeed_file_is_named_to_the_processes_and_nothing_said_twice(tmp_path):
    path = config_files.write(config_files.deepspeed(3, micro_batch_size=1), tmp_path / "zero3.json")
    config = config_files.accelerate_deepspeed_file(path, 16, zero3_init=True, **TWO_MACHINES)
    environment = launched(config, tmp_path / "accelerate.yaml")
    assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(path)
    assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"
    assert set(config["deepspeed_config"]) == {
        "deepspeed_config_file",
        "zero3_init_flag",
        "deepspeed_multinode_launcher",
    }
    assert "mixed_precision" not in config


def test_deepspeeds_file_holds_what_was_chosen():
    config = config_files.deepspeed(
        3,
        micro_batch_size=2,
        accumulation_steps=8,
        clip_norm=None,
        offload=Offload("disk", "host"),
        nvme_path="/disk",
        sizes={"reduce_bucket_size": 10, "stage3_prefetch_bucket_size": 20, "stage3_param_persistence_threshold": 0},
    )
    assert config == json.loads(json.dumps(config)) == yaml.safe_load(yaml.safe_dump(config))
    zero = config.pop("zero_optimization")
    assert config == {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "bf16": {"enabled": True}}
    assert zero["offload_optimizer"] == {"device": "nvme", "pin_memory": True, "nvme_path": "/disk"}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (10, 20)
    assert zero["stage3_param_persistence_threshold"] == 0


def test_stages_have_the_keys_that_they_use():
    of_stage = [set(config_files.deepspeed(stage, 1)["zero_optimization"]) for stage in range(4)]
    assert "allgather_bucket_size" in of_stage[1] & of_stage[2] - of_stage[0] - of_stage[3]
    assert all(any(key.startswith("stage3") for key in keys) == (stage == 3) for stage, keys in enumerate(of_stage))


DEEPSPEED, YAML, FSDP2 = config_files.deepspeed, config_files.accelerate_deepspeed_file, config_files.accelerate_fsdp2


@pytest.mark.parametrize(
    ("function", "arguments", "part"),
    [
        (DEEPSPEED, {"stage": 2, "micro_batch_size": 1, "offload": Offload("device", "host")}, "only stage 3 has"),
        (DEEPSPEED, {"stage": 0, "micro_batch_size": 1, "offload": Offload("host")}, "choose stage 1, 2 or 3"),
        (
            DEEPSPEED,
            {"stage": 2, "micro_batch_size": 1, "offload": Offload("disk"), "nvme_path": "/d"},
            "needs stage 3",
        ),
        (DEEPSPEED, {"stage": 3, "micro_batch_size": 1, "offload": Offload("disk")}, "nvme_path is ''"),
        (DEEPSPEED, {"stage": 3, "micro_batch_size": 1, "nvme_path": "/d"}, "nvme_path is '/d'"),
        (YAML, {"deepspeed_json": "a.json", "num_processes": 9, **TWO_MACHINES}, r"num_processes \(9\).* divisible by"),
        (FSDP2, {"wrap": [], "num_processes": 8}, "list of class names"),
    ],
)
def test_a_wrong_choice_is_refused_with_what_to_do(function, arguments, part):
    with pytest.raises((TypeError, ValueError), match=part):
        function(**arguments)


def test_a_file_that_ends_in_anything_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="choose .json"):
        config_files.write({}, tmp_path / "config.toml")
