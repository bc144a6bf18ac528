"""Optimizer states that wait on the host or on disk, as in ZeRO-Infinity: the device keeps parameters and gradients.

AdamW's FP32 master and two moments are 12 of the 16 bytes a parameter, and are used once a step. So they can wait
elsewhere, and the update runs where they are brought: on the host's processor, piece by piece:

    device  --- gradient, 2 bytes --->  host  <--- master and moments, 12 bytes ---  disk
            <-- parameter, 2 bytes ---        ---- the same, updated, 12 bytes -->

    optimizer = OffloadedAdamW(shards, place="disk", folder="/nvme/scratch")
    optimizer.step()
    optimizer.link_bytes           # {"device to host": ..., ...}: counted where the copies are made
    timing.crossing_s(optimizer.link_bytes)     # modelled: what each link alone would take

It takes any parameters; sharded ones make it ZeRO-Infinity: dp ranks use dp PCIe links at once, each for 1/dp of it
(`parallel.zero`'s engines hand out shards). What else the paper moves, stage 3's parameters, is in the formula
`memory.zero.offload_link_bytes` and not in this code: each shard comes up before each of its all-gathers, so a step of
one micro-batch brings 2 + 2 bytes a parameter of the shard up, instead of the 2 that come up here after the update.

On a machine without GPU the device is the host: copies are made and counted all the same, and only "disk" frees memory.
Copies and arithmetic take turns here. Real systems overlap them: at best the slowest link's seconds remain.

Source   Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv:2104.07857); Ren et al. 2021 (ZeRO-Offload, arXiv:2101.06840)
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.training.precision import MasterAdamW, gradient_of

STATES = ("master", "exp_avg", "exp_avg_sq")
_STATE_BYTES = 4 * len(STATES)  # a parameter
_CROSSINGS = ("device to host", "host to device", "disk to host", "host to disk")
_PIECE_NUMEL = 2**20  # parameters in one piece: 12 MiB of states on the host at a time
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class OnHost:
    """Master and moments of one parameter in host memory."""

    def __init__(self, numel: int):
        self.tensors = {key: torch.zeros(numel, dtype=torch.float32, device="cpu") for key in STATES}

    @contextmanager
    def piece(self, start: int, stop: int) -> Iterator[dict[str, Tensor]]:
        """Numbers start..stop of each state, to be changed in place."""
        yield {key: tensor[start:stop] for key, tensor in self.tensors.items()}


class OnDisk:
    """Master and moments of one parameter in a file, one piece after the other, each with its three states together.

    A piece is mapped into memory, copied out, changed, copied back and unmapped: the process holds one piece. The
    system may still keep the pages in its cache, which it empties when memory is short.
    """

    def __init__(self, file: BinaryIO, numel: int, buffer: Tensor, link_bytes: dict[str, int]):
        self.file, self.start, self.buffer, self.link_bytes = file, file.seek(0, 2), buffer, link_bytes
        zeros, left = memoryview(bytes(buffer.nbytes)), _STATE_BYTES * numel
        while left:  # written, not left as a hole: a full disk fails here, and not as a crash when a page is touched
            left -= file.write(zeros[:left])

    @contextmanager
    def piece(self, start: int, stop: int) -> Iterator[dict[str, Tensor]]:
        """Numbers start..stop of each state, to be changed in place; read here, written back on leaving."""
        shape = (len(STATES), stop - start)
        mapped = torch.from_numpy(
            np.memmap(self.file, np.float32, mode="r+", offset=self.start + _STATE_BYTES * start, shape=shape)
        )
        states = self.buffer[: mapped.numel()].view(shape).copy_(mapped)
        self.link_bytes["disk to host"] += states.nbytes
        yield dict(zip(STATES, states, strict=True))
        mapped.copy_(states)
        self.link_bytes["host to disk"] += states.nbytes


class OffloadedAdamW(MasterAdamW):
    """MasterAdamW whose states wait in place="host" or "disk": the same arithmetic, run on the host, piece by piece.

    Make it when the parameters have their values: the master weights are copied from them then. States on disk are in a
    nameless file of `folder` (the system's for temporary files by default; useless if that is a disk in memory), which
    vanishes with `close()` or with the process, however that ends.

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
        self._where: dict[nn.Parameter, OnHost | OnDisk] = {}
        self._staging: dict[tuple, Tensor] = {}
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._file = _nameless_file(self.folder) if place == "disk" else None
        super().__init__(parameters, lr, betas, eps, weight_decay)

    @torch.no_grad()
    def add_param_group(self, param_group: dict) -> None:
        """As usual; the states of the new parameters are made and put in their place."""
        super().add_param_group(param_group)
        new = self.param_groups[-1]["params"]
        for parameter in new:
            _check_parameter(parameter)
        if self._file is not None:
            _check_space(self.folder, _STATE_BYTES * sum(parameter.numel() for parameter in new))
        for parameter in new:
            self._where[parameter] = self._make_states(parameter)
            for start, stop in self._pieces(parameter):
                with self._where[parameter].piece(start, stop) as states:
                    states["master"].copy_(parameter.detach().view(-1)[start:stop])
        self._forget_counts()

    def _make_states(self, parameter: nn.Parameter) -> OnHost | OnDisk:
        if self.place == "disk":
            buffer = self._stage("states", torch.float32, len(STATES) * self.piece_numel, pinned=False)
            return OnDisk(self._file, parameter.numel(), buffer, self.link_bytes)
        states = OnHost(parameter.numel())
        self.state[parameter] = states.tensors  # where a memory tracker looks for them
        return states

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._file is not None and self._file.closed:
            raise ValueError("this optimizer was closed, and its states with it; make a new one, or close it later")
        self._forget_counts()
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is not None:
                    for start, stop in self._pieces(parameter):
                        self._update_piece(parameter, gradient.reshape(-1)[start:stop], start, stop, group)
        return loss

    def _update_piece(self, parameter: nn.Parameter, gradient_p: Tensor, start: int, stop: int, group: dict) -> None:
        numel, pinned = stop - start, parameter.is_cuda
        on_host_p = self._stage("down", gradient_p.dtype, self.piece_numel, pinned)[:numel].copy_(gradient_p)
        self.link_bytes["device to host"] += on_host_p.nbytes
        updated_p = self._stage("up", parameter.dtype, self.piece_numel, pinned)[:numel]
        with self._where[parameter].piece(start, stop) as states:
            self.state[updated_p] = states
            self._update(updated_p, on_host_p.float(), group)  # MasterAdamW's own: the updated master, rounded
            del self.state[updated_p]
        parameter.view(-1)[start:stop].copy_(updated_p)
        self.link_bytes["host to device"] += updated_p.nbytes

    def _pieces(self, parameter: nn.Parameter) -> list[tuple[int, int]]:
        numel = parameter.numel()
        return [(start, min(start + self.piece_numel, numel)) for start in range(0, numel, self.piece_numel)]

    def _stage(self, use: str, dtype: torch.dtype, numel: int, pinned: bool) -> Tensor:
        """A buffer on the host that is used again for every piece; pinned, PCIe copies run at full speed."""
        key = (use, dtype, pinned)
        if key not in self._staging:
            self._staging[key] = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)
        return self._staging[key]

    def _forget_counts(self) -> None:
        for crossing in _CROSSINGS:
            self.link_bytes[crossing] = 0

    def states_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Copies of master, exp_avg and exp_avg_sq, whole, on the host, in the parameter's shape."""
        whole = {key: torch.empty(parameter.shape, dtype=torch.float32, device="cpu") for key in STATES}
        for start, stop in self._pieces(parameter):
            with self._where[parameter].piece(start, stop) as states:
                for key in STATES:
                    whole[key].view(-1)[start:stop] = states[key]
        return whole

    def state_dict(self) -> dict:
        """As MasterAdamW's, which can load it: all states are brought to the host for it."""
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        return super().state_dict() | {"state": {i: self.states_of(parameter) for i, parameter in enumerate(order)}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Takes the states of another OffloadedAdamW or MasterAdamW, and puts them in their place."""
        super().load_state_dict(state_dict | {"state": {}})
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            for start, stop in self._pieces(order[index]):
                with self._where[order[index]].piece(start, stop) as states:
                    for key in STATES:  # a 32-bit parameter is its own master
                        states[key].copy_(saved.get(key, order[index]).reshape(-1)[start:stop])
        if self.place == "host":
            self.state.update((parameter, self._where[parameter].tensors) for parameter in order)

    def close(self) -> None:
        """Gives the disk space back; no step can follow."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "OffloadedAdamW":
        return self

    def __exit__(self, *error) -> None:
        self.close()


# --- checks


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


def _nameless_file(folder: Path) -> BinaryIO:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; required: one on a fast drive. Make it first")
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"the states need {needed:,} bytes, and {str(folder)!r} has {free:,} free; give a folder on a larger drive"
        )
