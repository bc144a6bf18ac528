"""The choices of a sharded run, written as the configuration files of Accelerate and DeepSpeed.

Functions return plain dicts; `write` puts them into a .yaml or .json file, which holds no code and runs none.

    write(deepspeed(stage=3, micro_batch_size=1, offload_optimizer="cpu"), "zero3.json")
    write(accelerate_deepspeed_file("zero3.json", num_processes=8, zero3_init=True), "accelerate.yaml")
    write(accelerate_fsdp2(["LlamaDecoderLayer"], num_processes=8), "fsdp2.yaml")

    accelerate launch --config_file fsdp2.yaml train.py

Which name each choice has (the from-scratch ones: parallel/zero.py, parallel/offload_states.py):

    from scratch        DeepSpeed                        Accelerate, FSDP2
    stage 1             stage: 1                         (fully_shard alone can do it: native/zero.py)
    stage 2             stage: 2                         fsdp_reshard_after_forward: false
    stage 3             stage: 3                         fsdp_reshard_after_forward: true
    units               stage3_prefetch_bucket_size:     fsdp_transformer_layer_cls_to_wrap
                        parameters are fetched one by one, that many numbers ahead
    buckets             reduce_bucket_size               one message a unit
    states on the host  offload_optimizer                fsdp_offload_params: parameters and gradients with them
    meta device         zero3_init_flag: zero.Init       fsdp_cpu_ram_efficient_loading: rank 0 reads, and sends
                        cuts each layer as it is made
"""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

STAGES = (0, 1, 2, 3)
DEVICES = ("cpu", "nvme")
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # ours -> Accelerate's mixed_precision


# --- DeepSpeed


def deepspeed(
    stage: int,
    micro_batch_size: int,
    accumulation_steps: int = 1,
    clip_norm: float | None = 1.0,
    precision: str = "bf16",
    offload_optimizer: str | None = None,
    offload_param: str | None = None,
    nvme_path: str | None = None,
    bucket_numel: int = 500_000_000,
    prefetch_numel: int = 50_000_000,
    persistence_numel: int = 100_000,
) -> dict:
    """DeepSpeed's JSON. Sizes of buckets are counted in numbers, not in bytes; the defaults are DeepSpeed's own.

    micro_batch_size    sequences a rank works on at once; the global batch is this x accumulation_steps x ranks
    offload_optimizer   None, "cpu" (stages 1 to 3) or "nvme" (stage 3)
    offload_param       None, "cpu" or "nvme" (stage 3)
    nvme_path           a folder on the local disk, where a device is "nvme"
    bucket_numel        gradients reduced, and in stages 1 and 2 parameters gathered, in one message
    prefetch_numel      stage 3: how far ahead parameters are gathered
    persistence_numel   stage 3: parameters up to this size stay whole on every rank, such as norms

    Raises   ValueError for a choice that DeepSpeed does not know, or would not honour at this stage
    Source   DeepSpeed's configuration reference, "ZeRO Optimizations for FP16 Training"
    """
    check_choice("stage", stage, STAGES)
    check_offload(stage, offload_optimizer, offload_param, nvme_path)
    numbers = {"micro_batch_size": micro_batch_size, "accumulation_steps": accumulation_steps}
    numbers |= {"bucket_numel": bucket_numel, "prefetch_numel": prefetch_numel}
    for name, value in numbers.items():
        check_positive(name, value)
    if persistence_numel < 0:
        raise ValueError(f"persistence_numel is {persistence_numel}; choose 0 or more")
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        **deepspeed_precision(precision),
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": stage > 0,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket_numel,
        },
    }
    zero = config["zero_optimization"]
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm)
        config["gradient_clipping"] = clip_norm
    if stage in (1, 2):
        zero["allgather_bucket_size"] = bucket_numel
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = prefetch_numel
        zero["stage3_param_persistence_threshold"] = persistence_numel
        zero["stage3_gather_16bit_weights_on_model_save"] = precision != "fp32"
    if offload_optimizer is not None:
        zero["offload_optimizer"] = offload_to(offload_optimizer, nvme_path)
    if offload_param is not None:
        zero["offload_param"] = offload_to(offload_param, nvme_path)
    return config


def deepspeed_precision(precision: str) -> dict:
    """In 16 bits DeepSpeed keeps FP32 masters by itself; fp16 gets a loss scale that adapts (0)."""
    check_choice("precision", precision, PRECISIONS)
    if precision == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0}}
    return {"bf16": {"enabled": precision == "bf16"}}


def offload_to(device: str, nvme_path: str | None) -> dict:
    """Pinned memory on the host's side: the GPU copies from it without the processor."""
    entry = {"device": device, "pin_memory": True}
    return entry | {"nvme_path": nvme_path} if device == "nvme" else entry


# --- Accelerate


def accelerate_fsdp2(
    wrap: Sequence[str],
    num_processes: int,
    reshard_after_forward: bool = True,
    precision: str = "bf16",
    offload_params: bool = False,
    recompute: bool = False,
    load_on_first_rank: bool = False,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
) -> dict:
    """Accelerate's YAML for FSDP2.

    wrap                 names of the classes whose instances are units, such as ["LlamaDecoderLayer"]
    recompute            activation checkpointing of each unit
    load_on_first_rank   only rank 0 reads a transformers model; the others begin on the meta device

    Raises   ValueError for numbers that do not fit each other, or an unknown precision
    """
    if not wrap or isinstance(wrap, str) or any("," in name for name in wrap):
        raise ValueError(f'wrap is {wrap!r}; it must be a list of class names, such as ["LlamaDecoderLayer"]')
    return {
        **accelerate_world("FSDP", precision, num_processes, num_machines, machine_rank),
        **rendezvous(num_machines, main_process_ip, main_process_port),
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": reshard_after_forward,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(wrap),
            "fsdp_offload_params": offload_params,
            "fsdp_activation_checkpointing": recompute,
            "fsdp_cpu_ram_efficient_loading": load_on_first_rank,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }


def accelerate_deepspeed(
    stage: int,
    num_processes: int,
    accumulation_steps: int = 1,
    clip_norm: float | None = 1.0,
    precision: str = "bf16",
    offload_optimizer: str | None = None,
    offload_param: str | None = None,
    zero3_init: bool = False,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
) -> dict:
    """Accelerate's YAML for DeepSpeed, with the choices inside. What it has no key for: `accelerate_deepspeed_file`.

    zero3_init   every layer is cut as it is made (deepspeed.zero.Init), so that no rank holds the whole model

    Offload is None or "cpu" here: `accelerate launch` reads nvme_path but does not hand it on; "nvme" needs the file.

    Raises   ValueError for a choice that DeepSpeed does not know, or would not honour at this stage
    """
    check_choice("stage", stage, STAGES)
    check_positive("accumulation_steps", accumulation_steps)
    if "nvme" in (offload_optimizer, offload_param):
        raise ValueError(
            'a device is "nvme", whose nvme_path `accelerate launch` would lose; '
            "write `deepspeed(...)` to a .json file, and name that in `accelerate_deepspeed_file`"
        )
    check_offload(stage, offload_optimizer, offload_param, None)
    if zero3_init and stage != 3:
        raise ValueError(f"zero3_init cuts parameters as they are made, which is stage 3, got stage {stage}")
    options: dict = {"zero_stage": stage, "gradient_accumulation_steps": accumulation_steps}
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm)
        options["gradient_clipping"] = clip_norm
    options["offload_optimizer_device"] = offload_optimizer or "none"
    options["offload_param_device"] = offload_param or "none"
    options["zero3_init_flag"] = zero3_init
    if stage == 3:
        options["zero3_save_16bit_model"] = precision != "fp32"
    return {
        **accelerate_world("DEEPSPEED", precision, num_processes, num_machines, machine_rank),
        **rendezvous(num_machines, main_process_ip, main_process_port),
        "deepspeed_config": options | multinode_launcher(num_machines),
    }


def accelerate_deepspeed_file(
    deepspeed_json: str | Path,
    num_processes: int,
    zero3_init: bool = False,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
) -> dict:
    """Accelerate's YAML that leaves everything to a JSON file of DeepSpeed's, of `deepspeed` above.

    Precision, stage, accumulation and clipping are in the JSON alone: Accelerate refuses to be told twice.
    """
    config = accelerate_world("DEEPSPEED", "fp32", num_processes, num_machines, machine_rank)
    del config["mixed_precision"]
    return {
        **config,
        **rendezvous(num_machines, main_process_ip, main_process_port),
        "deepspeed_config": {
            "deepspeed_config_file": str(deepspeed_json),
            "zero3_init_flag": zero3_init,
            **multinode_launcher(num_machines),
        },
    }


def accelerate_world(kind: str, precision: str, num_processes: int, num_machines: int, machine_rank: int) -> dict:
    """What every file of Accelerate's begins with."""
    check_choice("precision", precision, PRECISIONS)
    check_positive("num_processes", num_processes)
    check_positive("num_machines", num_machines)
    if num_processes % num_machines != 0:
        raise ValueError(
            f"num_processes ({num_processes}), of all machines, must be divisible by num_machines ({num_machines})"
        )
    if not 0 <= machine_rank < num_machines:
        raise ValueError(f"machine_rank is {machine_rank}; with {num_machines} machines it is 0 to {num_machines - 1}")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": PRECISIONS[precision],
        "num_processes": num_processes,
        "num_machines": num_machines,
        "machine_rank": machine_rank,
        "main_training_function": "main",
        "use_cpu": False,
    }


def rendezvous(num_machines: int, ip: str | None, port: int | None) -> dict:
    """Where the machines meet; one machine needs nothing."""
    if num_machines == 1:
        return {}
    if not ip or not port:
        raise ValueError(
            f"{num_machines} machines need main_process_ip and main_process_port, got {ip!r} and {port!r}; "
            "give the address of machine 0, and a port free on it"
        )
    return {"main_process_ip": ip, "main_process_port": port, "rdzv_backend": "static", "same_network": True}


def multinode_launcher(num_machines: int) -> dict:
    """With "standard" each machine runs the command itself, as with torchrun; otherwise DeepSpeed logs in by pdsh."""
    return {} if num_machines == 1 else {"deepspeed_multinode_launcher": "standard"}


# --- checks, and the file


def check_choice(name: str, value, choices) -> None:
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{name} is {value!r}; choose from {', '.join(map(str, choices))}")


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")


def check_offload(stage: int, optimizer: str | None, param: str | None, nvme_path: str | None) -> None:
    """Raises   ValueError where DeepSpeed would fail, or leave the data where it is without a word"""
    for name, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device is not None:
            check_choice(name, device, DEVICES)
    if param is not None and stage != 3:
        raise ValueError(f"offload_param moves shards of parameters, which only stage 3 has, got stage {stage}")
    if optimizer is not None and stage == 0:
        raise ValueError("offload_optimizer moves sharded states, got stage 0; choose stage 1, 2 or 3")
    if optimizer == "nvme" and stage != 3:
        raise ValueError(f'offload_optimizer "nvme" needs stage 3, got stage {stage}; choose "cpu", or stage 3')
    if "nvme" in (optimizer, param) and not nvme_path:
        raise ValueError('a device is "nvme" and nvme_path is missing; give a folder on the local disk')
    if nvme_path and "nvme" not in (optimizer, param):
        raise ValueError(f'nvme_path is {nvme_path!r} and no device is "nvme"; leave it out, or choose the device')


def write(config: dict, path: str | Path) -> Path:
    """Writes .json or .yaml, by the name's ending; returns the path."""
    path = Path(path)
    if path.suffix == ".json":
        text = json.dumps(config, indent=2) + "\n"
    elif path.suffix in (".yaml", ".yml"):
        text = yaml.safe_dump(config, sort_keys=False)
    else:
        raise ValueError(f"{path.name} ends in {path.suffix!r}; choose .json (DeepSpeed) or .yaml (Accelerate)")
    path.write_text(text, encoding="utf-8")
    return path
