"""Loading a model onto many ranks: everybody reads everything, or each rank its own piece.

The usual way (`load_whole`) builds the whole model on every rank and copies the whole state dict into it; then a rank
keeps its shard and forgets the rest. With 8 ranks on a node, a model of 140 GB asks for over 1 TB of host memory.

The other way builds the model on the meta device, which has shapes and no numbers, and ZeRO-3 shards it there: each
rank reads just its numbers from the files (`Weights`, by our names and in our shapes), those from i to j of the
parameters laid end to end, wherever rows begin:

    weights = Weights(folder)
    zero.build(build(weights.config, device="meta"), group, load=partial(read_flat, weights))

Under any other layout a rank reads its pieces too: `checkpoint/export.py`, import_safetensors.

`host_bytes` tells the two apart. Memory of the process's own (anonymous) is what must exist; pages of mapped files are
counted as resident too, but all processes share one copy, and the system drops it when memory is short.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from course_lib.config import ModelConfig
from course_lib.devices import peak_memory_bytes
from course_lib.model import build
from course_lib.weights.hf_weights import (
    config_from_transformers,
    name_in_transformers,
    naming_of,
    tensor_in_transformers,
)
from course_lib.weights.tensor_files import FileTensor, TensorFiles

_NOT_WEIGHTS = (".inv_freq", ".attn.bias", ".attn.masked_bias", "position_ids")  # tables that older files carry


class Weights:
    """A model's weights in the files of `transformers`, by our names and in our shapes; nothing is read yet.
    config   by default what the folder's config.json says
    Raises   ValueError if files are missing, damaged or pickles, or hold tensors that this config has no place for
    """

    def __init__(self, folder: str | Path, config: ModelConfig | None = None):
        self.files = TensorFiles(folder)
        self.config = read_config(folder) if config is None else config
        meta = build(self.config, device="meta")
        self.shapes = {name: parameter.shape for name, parameter in meta.named_parameters()}
        used = {name_in_transformers(name, naming_of(self.config)) for name in self.shapes}
        spare = {name for name in self.files if not name.endswith(_NOT_WEIGHTS)} - used
        if self.config.tied:
            spare -= {"lm_head.weight"}
        if spare:
            raise ValueError(
                f"{folder} holds {sorted(spare)[:3]}{' and more' if len(spare) > 3 else ''}, for which config "
                f"{self.config.name} has no place; give the config of these files (num_layers, tied)"
            )

    def __getitem__(self, name: str) -> FileTensor:
        """The tensor of one of our parameters, still in its file.
        Raises   ValueError if it is not there, or has another shape than the config says
        """
        tensor = tensor_in_transformers(self.files, name, self.config)
        if tensor.shape != self.shapes[name]:
            raise ValueError(
                f"{name} ({tensor.name} in {tensor.file}) has shape {tuple(tensor.shape)}; required by config "
                f"{self.config.name}: {tuple(self.shapes[name])}. Give the config of these files"
            )
        return tensor


def read_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of a folder's config.json, of a Llama or a GPT-2; without `transformers`.
    Raises   ValueError if there is no such file, or it describes another kind of model
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no config.json; required: the one of these weights. Fetch it, or give config="
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    return config_from_transformers(found)


@torch.no_grad()
def load_whole(folder: str | Path, config: ModelConfig | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """The usual way, on every rank: a whole model with initial numbers, and a whole state dict copied into it.
    Raises   ValueError as Weights does
    """
    weights = Weights(folder, config)
    state = {}
    for file in {tensor.file for tensor in weights.files.values()}:
        state |= load_file(file)
    model = build(weights.config, dtype=dtype or weights["embed.weight"].dtype)
    for name, parameter in model.named_parameters():
        parameter.copy_(tensor_in_transformers(state, name, weights.config))
    return model


def read_flat(weights: Weights, names: Sequence[str], start: int, out_p: Tensor) -> None:
    """Fills out_p with the numbers from `start` on of these parameters laid end to end; past their end with zeros.

    A rank's shard of a padded flat unit is `read_flat(weights, names, rank * len(shard_p), shard_p)`.
    Bytes    read: exactly those numbers
    """
    position, stop = 0, start + len(out_p)
    out_p.data.zero_()
    for name in names:
        numel = prod(weights.shapes[name])
        first, last = max(start, position), min(stop, position + numel)
        if first < last:
            weights[name].read_flat_into(out_p.data[first - start : last - start], first - position)
        position += numel


@dataclass(frozen=True)
class HostBytes:
    """Memory of this process now, and its highest resident size so far.
    resident       all pages in memory, those of mapped files too
    anonymous      of these the process's own, which no file backs; None where the system does not tell (not Linux)
    """

    resident: int
    peak_resident: int
    anonymous: int | None


def host_bytes() -> HostBytes:
    """Measures this process. A launch forks its ranks, so torch's own pages are shared and part of every resident size.
    Source   Linux: /proc/self/smaps_rollup
    """
    detail = {}
    if os.path.exists("/proc/self/smaps_rollup"):
        with open("/proc/self/smaps_rollup") as file:
            pairs = [line.split() for line in file]
        detail = {words[0]: int(words[1]) * 1024 for words in pairs if words[-1] == "kB"}
    return HostBytes(psutil.Process().memory_info().rss, peak_memory_bytes(), detail.get("Anonymous:"))
