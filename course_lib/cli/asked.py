"""Words that `course plan`, `predict` and `simulate` share: tokens, models, GPUs, links, techniques."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.constructors import PrimitiveConstructorSpec

from course_lib.config import ModelConfig
from course_lib.estimate.table import offload_of
from course_lib.hardware import GPU, Cluster, cluster_of, gpu_for, gpu_with
from course_lib.hardware import gpu as gpu_named
from course_lib.run import OPTIMIZERS, RECIPES, Offload
from course_lib.shapes import Shape, read_model, read_shapes
from course_lib.tensors import LoRA
from course_lib.units import read_tokens
from course_lib.validate import one_of, whole

FP16 = "fp16-master-fp32-grads"

Tokens = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="TOKENS",
        instance_from_str=lambda words: read_tokens(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]


def model_asked(text: str, seq_len: int) -> ModelConfig:
    """The one model of a preset's name, a JSON file or a folder; what its shape leaves out is told.

    Raises   ValueError as `read_model`
    """
    shape = read_model(text, seq_len)
    _tell_left_out({shape.config.name: shape})
    return shape.config


def models_asked(path: Path | None, seq_len: int) -> dict[str, ModelConfig]:
    """The models of a file by name; what their shapes leave out is told. No file: presets alone."""
    shapes = read_shapes(path, seq_len) if path is not None else {}
    _tell_left_out(shapes)
    return {name: shape.config for name, shape in shapes.items()}


def _tell_left_out(shapes: dict[str, Shape]) -> None:
    """On standard error, so that JSON stays JSON."""
    for name, shape in shapes.items():
        for sentence in shape.left_out.values():
            print(f"note: {name}: {sentence}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Which GPU."""

    gpu: str = "h100"
    """a GPU, such as h100, a100-80 or 4090; any other by memory, tflops and bandwidth"""
    memory: float | None = None
    """GB of memory as the data sheet prints it, if not those of the table"""
    tflops: float | None = None
    """dense TFLOP/s of products in the run's precision, if not those of the table"""
    bandwidth: float | None = None
    """GB/s of memory, if not those of the table"""

    def record(self, holds_alone: bool = False) -> GPU:
        """The GPU of these numbers; where only what it holds is asked, its memory is enough.

        Raises   ValueError naming the GPUs that there are, or what an unknown one lacks
        """
        tflops, bandwidth = self.tflops, self.bandwidth
        if holds_alone and self.memory is not None:
            try:
                gpu_named(self.gpu)
            except ValueError:
                tflops, bandwidth = tflops or 1.0, bandwidth or 1.0
        return gpu_with(self.gpu, self.memory, tflops, bandwidth)


@dataclass(frozen=True, kw_only=True)
class Nodes(Device):
    """Of which nodes with which GPUs."""

    inside: str | None = None
    """the link inside a node, such as pcie4-host, or GB/s of one direction; without it the GPU's own"""
    per_node: int | None = None
    """GPUs of a node; without it as many as the GPU's nodes usually have"""


def cluster_asked(device: GPU, link: str, inside: str | None, per_node: int | None) -> Cluster:
    """The cluster of that GPU; tell where a name means another link than it would elsewhere."""
    if per_node is not None:
        whole("per_node", per_node)
    cluster = cluster_of(device, link, inside, per_node)
    if link.startswith("efa") and cluster.between.curve == "efa-p4d" and link != "efa-p4d":
        print(
            f"note: {link} of {device.name} is a p4d's: 4 x 100 Gb/s a node, here "
            f"{cluster.between.bytes_per_s / 1e9:g} GB/s for each GPU",
            file=sys.stderr,
        )
    return cluster


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """What saves memory, or computes otherwise."""

    recipe: str | None = None
    """dtypes of the states: fp32, bf16-master, bf16-master-fp32-grads, fp16-master-fp32-grads or bf16 (no FP32 copy)"""
    finetune: Literal["full", "lora", "qlora"] = "full"
    """train all weights, or adapters on q and v beside frozen weights (qlora: in 4 bits)"""
    lora_rank: int = 16
    """of the adapters"""
    optimizer: Literal[OPTIMIZERS] = "adamw"
    """which optimizer"""
    offload: str = "none"
    """what waits in the host's memory: optimizer, parameters, activations, joined by -"""
    attention: Literal["fused", "standard"] = "fused"
    """standard saves the scores, as without FlashAttention"""
    precision: Literal["bf16", "fp8"] = "bf16"
    """of products: fp8 has 16-bit states all the same"""
    loss_chunks: int = 1
    """head and loss go over the tokens in so many parts"""

    def run_fields(self) -> dict[str, object]:
        """The fields of a Run, or of a Job, that differ from their defaults.

        Raises   ValueError for a word that is none
        """
        found = {"optimizer": self.optimizer, "attention": self.attention, "offload": offload_of(self.offload)}
        whole("lora_rank", self.lora_rank, most=2**16)
        whole("loss_chunks", self.loss_chunks, most=2**16)
        if self.finetune != "full":
            found["lora"] = LoRA(self.lora_rank, four_bits=self.finetune == "qlora")
        if self.precision == "fp8":
            found["fp8"] = True
        if self.loss_chunks > 1:
            found["loss_chunks"] = self.loss_chunks
        return {name: value for name, value in found.items() if value not in ("adamw", "fused", Offload())}

    def recipe_on(self, device: GPU, usual: str = "bf16-master") -> str:
        """The recipe that was asked for; else the usual one, or FP16's on a GPU without BF16 units.

        Raises   ValueError for one that is none, or that the GPU has no units for
        """
        recipe = self.recipe or (usual if device.bf16_flops is not None else FP16)
        one_of("recipe", recipe, tuple(RECIPES))
        gpu_for(device, recipe)
        return recipe
