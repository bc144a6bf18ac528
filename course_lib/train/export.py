"""The choices of a sharded run, written as the configuration files of Accelerate and DeepSpeed.

Functions return plain dicts; `write` puts them into a .yaml or .json file, which holds no code and runs none.

    write(deepspeed(stage=3, micro_batch_size=1, offload=OffloadTo(optimizer="cpu")), "zero3.json")
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import yaml

from course_lib.validate import Index, Positive, Size, check_fields, checked, whole

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # ours -> Accelerate's mixed_precision
Precision = Literal[tuple(PRECISIONS)]
Stage = Literal[0, 1, 2, 3]
Device = Literal["cpu", "nvme"]
Elements = Annotated[int, whole]
Port = Annotated[int, partial(whole, most=65_535)]


@dataclass(frozen=True)
class OffloadTo:
    """Where DeepSpeed keeps optimizer states (stages 1 to 3) and parameters (stage 3); None: on the GPU.

    nvme_path    a folder on the local disk, where a device is "nvme"

    Raises   ValueError unless "nvme" and its folder come together
    """

    optimizer: Device | None = None
    parameters: Device | None = None
    nvme_path: str | None = None

    def __post_init__(self):
        check_fields(self)
        on_disk = "nvme" in (self.optimizer, self.parameters)
        if on_disk and not self.nvme_path:
            raise ValueError('a device is "nvme" and nvme_path is missing; give a folder on the local disk')
        if self.nvme_path and not on_disk:
            raise ValueError(f'nvme_path is {self.nvme_path!r} and no device is "nvme"; leave it out, or choose it')

    def check_stage(self, stage: int) -> None:
        """Raise ValueError where DeepSpeed would fail, or leave the data where it is without a word."""
        if self.parameters is not None and stage != 3:
            raise ValueError(f"offloading parameters moves their shards, which only stage 3 has, got stage {stage}")
        if self.optimizer is not None and stage == 0:
            raise ValueError("offloading the optimizer moves sharded states, got stage 0; choose stage 1, 2 or 3")
        if self.optimizer == "nvme" and stage != 3:
            raise ValueError(f'an optimizer on "nvme" needs stage 3, got stage {stage}; choose "cpu", or stage 3')


@dataclass(frozen=True)
class Buckets:
    """Sizes of DeepSpeed's messages, in elements, not in bytes; the defaults are its own.

    reduce    gradients reduced, and in stages 1 and 2 parameters gathered, in one message
    prefetch  stage 3: how far ahead parameters are gathered
    persist   stage 3: parameters up to this size stay unsharded on every rank, such as norms
    """

    reduce: Elements = 500_000_000
    prefetch: Elements = 50_000_000
    persist: Index = 100_000

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class Machines:
    """How many machines there are, which of them this is, and where machine 0 waits for the others.

    Raises   ValueError for a rank that they do not have, or several machines that could not find each other
    """

    count: Size = 1
    rank: Index = 0
    main_process_ip: str | None = None
    main_process_port: Port | None = None

    def __post_init__(self):
        check_fields(self)
        if self.rank >= self.count:
            raise ValueError(f"rank is {self.rank}; with {self.count} machines it is 0 to {self.count - 1}")
        if self.count > 1 and not (self.main_process_ip and self.main_process_port):
            raise ValueError(
                f"{self.count} machines need main_process_ip and main_process_port, got {self.main_process_ip!r} and "
                f"{self.main_process_port!r}; give the address of machine 0, and a port free on it"
            )

    @property
    def rendezvous(self) -> dict:
        """Accelerate's keys for where the machines meet; one machine needs none."""
        if self.count == 1:
            return {}
        port = self.main_process_port
        address = {"main_process_ip": self.main_process_ip, "main_process_port": port}
        return address | {"rdzv_backend": "static", "same_network": True}

    @property
    def launcher(self) -> dict:
        """With "standard" each machine runs the command itself, as with torchrun; otherwise DeepSpeed uses pdsh."""
        return {} if self.count == 1 else {"deepspeed_multinode_launcher": "standard"}


# --- DeepSpeed


@checked
def deepspeed(
    stage: Stage,
    micro_batch_size: Size,
    accumulation_steps: Size = 1,
    clip_norm: Positive | None = 1.0,
    precision: Precision = "bf16",
    offload: OffloadTo = OffloadTo(),
    buckets: Buckets = Buckets(),
) -> dict:
    """DeepSpeed's JSON.

    micro_batch_size    sequences a rank works on at once; the global batch is this x accumulation_steps x ranks

    Raises   ValueError for a choice that DeepSpeed does not know, or would not honour at this stage
    Source   DeepSpeed's configuration reference, "ZeRO Optimizations for FP16 Training"
    """
    offload.check_stage(stage)
    zero = {
        "stage": stage,
        "overlap_comm": stage > 0,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": buckets.reduce,
    }
    if stage in (1, 2):
        zero["allgather_bucket_size"] = buckets.reduce
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = buckets.prefetch
        zero["stage3_param_persistence_threshold"] = buckets.persist
        zero["stage3_gather_16bit_weights_on_model_save"] = precision != "fp32"
    for key, device in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters)):
        if device is not None:
            zero[key] = offload_to(device, offload.nvme_path)
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        **deepspeed_precision(precision),
        "zero_optimization": zero,
        **({} if clip_norm is None else {"gradient_clipping": clip_norm}),
    }


@checked
def deepspeed_precision(precision: Precision) -> dict:
    """In 16 bits DeepSpeed keeps FP32 master weights by itself; fp16 gets a loss scale that adapts (0)."""
    if precision == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0}}
    return {"bf16": {"enabled": precision == "bf16"}}


@checked
def offload_to(device: Device, nvme_path: str | None) -> dict:
    """Pinned memory on the host's side: the GPU copies from it without the processor."""
    entry = {"device": device, "pin_memory": True}
    return entry | {"nvme_path": nvme_path} if device == "nvme" else entry


# --- Accelerate


@checked
def accelerate_fsdp2(
    wrap: Sequence[str],
    num_processes: Size,
    reshard_after_forward: bool = True,
    precision: Precision = "bf16",
    offload_params: bool = False,
    recompute: bool = False,
    load_on_first_rank: bool = False,
    machines: Machines = Machines(),
) -> dict:
    """Accelerate's YAML for FSDP2.

    wrap                 names of the classes whose instances are units, such as ["LlamaDecoderLayer"]
    recompute            activation checkpointing of each unit
    load_on_first_rank   only rank 0 reads a transformers model; the others begin on the meta device

    Raises   ValueError for numbers that do not fit each other, or an unknown precision
    """
    if not wrap or any("," in name for name in wrap):
        raise ValueError(f'wrap is {wrap!r}; it must be a list of class names, such as ["LlamaDecoderLayer"]')
    return {
        **accelerate_world("FSDP", precision, num_processes, machines),
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


@checked
def accelerate_deepspeed_file(
    deepspeed_json: str | Path, num_processes: Size, zero3_init: bool = False, machines: Machines = Machines()
) -> dict:
    """Accelerate's YAML that leaves everything to a JSON file of DeepSpeed's, of `deepspeed` above.

    Precision, stage, accumulation and clipping are in the JSON alone: Accelerate refuses to be told twice.
    """
    config = accelerate_world("DEEPSPEED", "fp32", num_processes, machines)
    del config["mixed_precision"]
    return {
        **config,
        "deepspeed_config": {
            "deepspeed_config_file": str(deepspeed_json),
            "zero3_init_flag": zero3_init,
            **machines.launcher,
        },
    }


@checked
def accelerate_world(kind: str, precision: Precision, num_processes: Size, machines: Machines) -> dict:
    """What every file of Accelerate's begins with: precision, processes, and where machines meet."""
    if num_processes % machines.count != 0:
        raise ValueError(
            f"num_processes ({num_processes}), of all machines, must be divisible by their number ({machines.count})"
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": PRECISIONS[precision],
        "num_processes": num_processes,
        "num_machines": machines.count,
        "machine_rank": machines.rank,
        "main_training_function": "main",
        "use_cpu": False,
        **machines.rendezvous,
    }


# --- the file


@checked
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
