"""Optimizer states that wait on the host or on disk, as in ZeRO-Infinity: the device keeps parameters and gradients.

AdamW's FP32 master and two moments are 12 of the 16 bytes a parameter, and are used once a step. So they can wait
elsewhere, and the update runs where they are brought: on the host's processor, piece by piece:

    device  --- gradient, 2 bytes --->  host  <--- master and moments, 12 bytes ---  disk
            <-- parameter, 2 bytes ---        ---- the same, updated, 12 bytes -->

`link_bytes` counts where copies are made; `timing.crossing_s(link_bytes)` models what each link alone would take.

It takes any parameters; sharded ones make it ZeRO-Infinity: dp ranks use dp PCIe links at once, each for 1/dp of it
(`parallel.zero`'s engines hand out shards). What else the paper moves, stage 3's parameters, is in the formula
`offload_link_bytes` (memory/states.py), not in this code: each shard comes up before each of its all-gathers, so a step
of one micro-batch brings 2 + 2 bytes a parameter of the shard up, instead of the 2 that come up here after the update.

On a machine without GPU the device is the host: copies are made and counted all the same, and only "disk" frees memory.
Copies and arithmetic take turns here. Real systems overlap them: at best the slowest link's seconds remain.

Source   Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv:2104.07857); Ren et al. 2021 (ZeRO-Offload, arXiv:2101.06840)
"""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.training.precision import MasterAdamW, adamw_

STATES = ("master", "exp_avg", "exp_avg_sq")
_STATE_BYTES = 4 * len(STATES)  # a parameter
_CROSSINGS = ("device to host", "host to device", "disk to host", "host to disk")
_PIECE_NUMEL = 2**20  # parameters in one piece: 12 MiB of states on the host at a time
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class OffloadedAdamW(MasterAdamW):
    """MasterAdamW whose states wait in place="host" or "disk": the same arithmetic, run on the host, piece by piece.

    Make it when the parameters have their values: the master weights are copied from them then. States on disk are in a
    nameless file of `folder` (the system's for temporary files by default; useless if that is a disk in memory), mapped
    into memory: the system reads a page when it is touched, and drops it when memory is short. The file vanishes with
    `close()` or with the process, however that ends.
    link_bytes   of the last step, by crossing
    Bytes    a step, for each parameter with a gradient: gradient itemsize down, parameter itemsize up; on disk 12 read
             and 12 written. Host: one piece, and with place="host" 12 a parameter
    Raises   ValueError if the place is unknown, the folder is missing or too full, or a parameter is not a contiguous
             one of 16 or 32 bits with values
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        place: str = "host",
        folder: str | Path | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        piece_numel: int = _PIECE_NUMEL,
    ):
        if place not in ("host", "disk"):
            raise ValueError(f"place is {place!r}; choose host, or disk")
        if piece_numel < 1:
            raise ValueError(f"piece_numel is {piece_numel}; required: 1 or more, {_PIECE_NUMEL} by default")
        self.place, self.piece_numel = place, piece_numel
        self.link_bytes = dict.fromkeys(_CROSSINGS, 0)
        self._staging: dict[tuple, Tensor] = {}
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._file = None
        if place == "disk":
            if not self.folder.is_dir():
                raise ValueError(f"there is no folder {str(folder)!r}; required: one on a fast drive. Make it first")
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - closed by close()
        super().__init__(parameters, lr, betas, eps, weight_decay)

    @torch.no_grad()
    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        new = self.param_groups[-1]["params"]
        for parameter in new:
            _check_parameter(parameter)
        needed = _STATE_BYTES * sum(parameter.numel() for parameter in new)
        if self._file is not None and (free := shutil.disk_usage(self.folder).free) < needed:
            raise ValueError(
                f"the states need {needed:,} bytes, and {str(self.folder)!r} has {free:,} free; "
                "give a folder on a larger drive"
            )
        for parameter in new:
            rows = self._room(parameter.numel())
            self.state[parameter] = {key: row.view(parameter.shape) for key, row in zip(STATES, rows, strict=True)}
            self.state[parameter]["master"].copy_(parameter.detach())

    def _room(self, numel: int) -> Tensor:
        """Zeros for the states of so many parameters, a row each, on the host or at the end of the file."""
        if self._file is None:
            return torch.zeros(len(STATES), numel, dtype=torch.float32, device="cpu")
        start, left = self._file.seek(0, 2), _STATE_BYTES * numel
        zeros = memoryview(bytes(_STATE_BYTES * self.piece_numel))
        while left:  # written, not left as a hole: a full disk fails here, and not as a crash when a page is touched
            left -= self._file.write(zeros[:left])
        mapped = np.memmap(self._file, np.float32, mode="r+", offset=start, shape=(len(STATES), numel))
        return torch.from_numpy(mapped)

    @torch.no_grad()
    def step(self) -> None:
        if self._file is not None and self._file.closed:
            raise ValueError("this optimizer was closed, and its states with it; make a new one, or close it later")
        self.link_bytes.update(dict.fromkeys(_CROSSINGS, 0))
        super().step()

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict) -> None:
        flat_p, gradient_p, pinned = parameter.view(-1), gradient.reshape(-1), parameter.is_cuda
        states_p = {key: state.view(-1) for key, state in self.state[parameter].items()}
        for start in range(0, parameter.numel(), self.piece_numel):
            piece = slice(start, start + self.piece_numel)
            master, exp_avg, exp_avg_sq = (states_p[key][piece] for key in STATES)
            down = self._stage("down", gradient.dtype, pinned)[: len(master)].copy_(gradient_p[piece])
            adamw_(master, down.float(), exp_avg, exp_avg_sq, group)
            up = self._stage("up", parameter.dtype, pinned)[: len(master)].copy_(master)
            flat_p[piece].copy_(up)
            self.link_bytes["device to host"] += down.nbytes
            self.link_bytes["host to device"] += up.nbytes
            if self._file is not None:
                for crossing in ("disk to host", "host to disk"):
                    self.link_bytes[crossing] += len(STATES) * master.nbytes

    def _stage(self, use: str, dtype: torch.dtype, pinned: bool) -> Tensor:
        """A buffer on the host that is used again for every piece; pinned, PCIe copies run at full speed."""
        key = (use, dtype, pinned)
        if key not in self._staging:
            self._staging[key] = torch.empty(self.piece_numel, dtype=dtype, device="cpu", pin_memory=pinned)
        return self._staging[key]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Takes the states of another OffloadedAdamW or MasterAdamW, and puts them in their place."""
        in_place = dict(self.state)
        super().load_state_dict(state_dict | {"state": {}})
        self.state.update(in_place)
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            for key, state in in_place[order[index]].items():  # a 32-bit parameter is its own master
                state.copy_(saved.get(key, order[index]))

    def close(self) -> None:
        """Gives the disk space back; no step can follow."""
        if self._file is not None:
            self.state.clear()
            self._file.close()

    def __enter__(self) -> "OffloadedAdamW":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _check_parameter(parameter: nn.Parameter) -> None:
    found = f"a parameter of shape {tuple(parameter.shape)}"
    if parameter.dtype not in DTYPES:
        raise ValueError(
            f"{found} has dtype {parameter.dtype}; required: {DTYPES}, as the master weights are FP32. Convert it"
        )
    if parameter.device.type == "meta":
        raise ValueError(f"{found} has no values yet (device meta); load them before making the optimizer")
    if not parameter.is_contiguous():
        raise ValueError(f"{found} is strided; required: contiguous. Make it so with parameter.data.contiguous()")
