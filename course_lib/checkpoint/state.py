"""Checkpoints of an engine of parallel/five_d.py: saved under one layout, loaded under any other.

What is in it: parameters, AdamW's moments, FP32 master weights, counts of steps, learning rates, balancing biases of
experts; of each rank its random number generators. All of it is in pieces of whole tensors (weights/pieces.py), so that
a layout is only a way to cut them; checkpoint/files.py makes files of them.

A precision is a way to round them. A parameter of 16 bits has an FP32 master in the optimizer; one of 32 bits is its
own. Going from one to the other, the wide numbers keep their bits; there and back again changes nothing:

    saved                      an engine of fp32           an engine of bf16
    fp32                       as saved                    master weights: the parameters; parameters: those, rounded
    bf16 with master weights   parameters: the master weights     as saved
    moments (FP32)             as saved                    as saved

float64, in comparisons, goes by the same rule, and is then rounded.

Memory beside the engine's own: `save` one piece (64 MiB at most) at a time, `load` twice that; `save_async` a copy on
the host of what this rank writes. All ranks together write everything once.
"""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checkpoint import files
from course_lib.checkpoint import storage as stored_pieces
from course_lib.checkpoint.files import everywhere, together
from course_lib.checkpoint.optimizer import STATES, load_optimizer, options_of, options_to_load, state_dtypes, steps_of
from course_lib.checkpoint.storage import DTYPES, parameter_dtype, widest
from course_lib.layout import Layout
from course_lib.model import build
from course_lib.parallel.five_d import FiveD
from course_lib.weights.pieces import Holding, Piece, buffers_of, parameters_of

Optimizer = torch.optim.Optimizer

# Of each engine, for as long as it lives: its last save, and the group over which its ranks agree.
_savings: WeakKeyDictionary[FiveD, "Saving"] = WeakKeyDictionary()
_host_groups: WeakKeyDictionary[FiveD, dist.ProcessGroup] = WeakKeyDictionary()


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held besides the engine's numbers.
    about        what the caller gave as `about`
    same_mesh    the ranks stand as they stood: their random number generators go on where they were. In another mesh
                 they are as before, to be seeded
    """

    path: Path
    step: int
    about: dict
    same_mesh: bool


class Saving:
    """A save under way, or done."""

    def __init__(self, path: Path):
        self.path = path
        self.future: Future | None = None  # of the thread that writes

    @property
    def done(self) -> bool:
        return self.future is None or self.future.done()

    def wait(self) -> Path:
        """Returns once the checkpoint is complete on all ranks; raises, once, what went wrong."""
        future, self.future = self.future, None
        if future is not None:
            future.result()
        return self.path


def save(
    engine: FiveD,
    optimizer: Optimizer,
    folder: str | Path,
    step: int,
    about: dict | None = None,
    keep: int | None = None,
) -> Path:
    """Writes folder/step-..., of `step` steps done, and returns when it is complete. All ranks call it.
    about    of the whole run, of JSON's kinds; that of rank 0 counts
    keep     how many checkpoints remain in the folder; None: all. The older go when the new one is complete
    Raises   ValueError for arguments that cannot be, if the folder has this step or a later one, or is not the same for
             all ranks; CannotWrite if a rank cannot write. On every rank, and the checkpoints before are as they were
    """
    saving, arguments = prepare(engine, optimizer, folder, step, about, keep, copy=False)
    with torch.device("cpu"):
        stored_pieces.write(saving.path, *arguments)
    return saving.path


def save_async(
    engine: FiveD,
    optimizer: Optimizer,
    folder: str | Path,
    step: int,
    about: dict | None = None,
    keep: int | None = None,
) -> Saving:
    """As `save`, but returns when all is copied to the host: the next step may change what was copied.

    One save at a time: a second waits for the first. What goes wrong meanwhile is raised by the next `wait`, `save`,
    `save_async` or `load` of this engine.
    """
    saving, arguments = prepare(engine, optimizer, folder, step, about, keep, copy=True)
    saving.future = ThreadPoolExecutor(1).submit(stored_pieces.write, saving.path, *arguments)
    return saving


def prepare(engine, optimizer, folder, step, about, keep, copy: bool) -> tuple[Saving, tuple]:
    """What is done before files are written: (the save, the arguments of `checkpoint_pieces.write` behind the path)."""
    group = wait_for_earlier(engine)
    with files.writing(Path(folder)):
        final = everywhere(group, lambda: begin(Path(folder), step, about, keep, group.rank() == 0))
    pieces = everywhere(group, lambda: pieces_to_write(engine, optimizer, group.rank(), copy))
    manifest = {
        "step": step,
        "layout": engine.layout.to_dict(),
        "model": asdict(engine.config),
        "optimizer": {"options": options_of(optimizer), "steps": steps_of(engine, optimizer, group)},
        "about": about or {},
    }
    _savings[engine] = Saving(final)
    return _savings[engine], (pieces, manifest, group, keep)


def wait_for_earlier(engine: FiveD) -> dist.ProcessGroup:
    """Waits for the engine's save under way, raises its error; returns the group that checkpoints use, on the host."""
    if engine in _savings:
        _savings[engine].wait()
    if engine not in _host_groups:
        _host_groups[engine] = dist.new_group(backend="gloo")
    return _host_groups[engine]


def begin(folder: Path, step: int, about: dict | None, keep: int | None, is_first: bool) -> Path:
    """Where the checkpoint will be; the first rank makes way. Raises ValueError for what cannot be saved."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step is {step!r}; give the number of steps done, 0 or more")
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; keep at least 1 checkpoint, or None to keep all")
    try:
        json.dumps(about)
    except TypeError as error:
        raise ValueError(f"about cannot be said in JSON ({error}); give numbers, text, lists, dictionaries") from error
    final = folder / files.name_of(step)
    if is_first:
        files.clear_way(final)
    return final


def size_bytes(engine: FiveD, optimizer: Optimizer) -> int:
    """What a checkpoint takes on the disk, but for its lists: parameters, and what states the optimizer will have."""
    dtype = engine.pipeline.dtype
    each = dtype.itemsize + sum(state.itemsize for state in state_dtypes(optimizer, dtype).values())
    return each * sum(param.numel() for param in build(engine.config, device="meta").parameters())


def tensors_of(engine: FiveD, optimizer: Optimizer) -> list[tuple[Holding, str, Tensor]]:
    """(where it belongs, how its names begin, numbers) of all that this rank holds."""
    found = [(holding, "model.", holding.tensor) for holding in [*parameters_of(engine), *buffers_of(engine)]]
    for holding in parameters_of(engine):
        state = optimizer.state.get(holding.tensor, {})
        found += [(holding, f"{key}.", state[key]) for key in STATES if key in state]
    return found


def pieces_to_write(engine: FiveD, optimizer: Optimizer, rank: int, copy: bool) -> list[Piece]:
    """All that this rank writes; copy: on the host, in memory of their own, for which there may be no room."""
    pieces = [piece for holding, name, x in tensors_of(engine, optimizer) for piece in holding.pieces_to_write(x, name)]
    pieces += [_whole_piece(f"rank.{rank}.{name}", x) for name, x in rng_states().items()]
    return [replace(piece, tensor=piece.tensor.to("cpu", copy=True)) for piece in pieces] if copy else pieces


def _whole_piece(name: str, x: Tensor) -> Piece:
    return Piece(name, tuple(x.shape), (0,) * x.dim(), x)


def rng_states() -> dict[str, Tensor]:
    """Torch's random number generators of this process: the CPU's, and that of its GPU if it uses one."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


@torch.no_grad()
def load(engine: FiveD, optimizer: Optimizer | None, folder: str | Path, convert: bool = False) -> Restored:
    """Fills engine and optimizer from a checkpoint, whatever layout wrote it. All ranks call it.
    folder      a checkpoint, or a folder of them: then the last complete one
    optimizer   None: only the model's numbers are wanted
    convert     one of another precision is taken too, by the table above
    Bytes    read: each rank the stored pieces that it needs (FP32 parameters for 16-bit ones twice), and its share of
             all for the checksums; sent: with zero_stage 1 and 2 an all-gather of the parameters
    Raises   ValueError on every rank if there is none, it is torn, or of another model, precision (see `convert`) or
             optimizer: what, and what to do. The engine is then as before, unless a file was changed in a way that its
             checksum did not show
    """
    group = wait_for_earlier(engine)
    path = Path(together(group, lambda: str(files.find(Path(folder))) if group.rank() == 0 else None)[0])
    manifest = everywhere(group, lambda: _open_checkpoint(engine, optimizer, path, group, convert))
    restored = everywhere(group, lambda: fill(engine, optimizer, path, manifest, group.rank()))
    for sharded in engine.data_engines.values():
        sharded.share_update()
    return restored


def _open_checkpoint(
    engine: FiveD, optimizer: Optimizer | None, path: Path, group: dist.ProcessGroup, convert: bool
) -> dict:
    """Its manifest, once it is found to be whole, each rank checking some of the files, and to fit."""
    manifest = files.read_manifest(path)
    files.verify(path, manifest, group.rank(), group.size())
    check_model(engine, path, manifest)
    if not convert:
        _check_precision(engine, optimizer, path, manifest)
    if optimizer is not None:
        options_to_load(parameters_of(engine), optimizer, manifest["optimizer"])
    return manifest


def fill(engine: FiveD, optimizer: Optimizer | None, path: Path, manifest: dict, rank: int) -> Restored:
    held = parameters_of(engine)
    pieces = [piece for one in [*held, *buffers_of(engine)] for piece in one.pieces(one.tensor, "model.")]
    stored_pieces.read(path, manifest, widest(pieces, manifest))
    if optimizer is not None:
        load_optimizer(held, optimizer, path, manifest)
    return _restore_rank(engine, path, manifest, rank)


def check_model(engine: FiveD, path: Path, manifest: dict) -> None:
    """Raises ValueError if the checkpoint is of a model with other shapes or another architecture."""
    now, saved = asdict(engine.config), manifest["model"]
    if different := [key for key in now if key != "name" and saved.get(key) != now[key]]:
        values = ", ".join(f"{key} {saved.get(key)!r} (here {now[key]!r})" for key in different)
        raise ValueError(f"{path} is of another model: {values}. Build the engine with that config")


def _check_precision(engine: FiveD, optimizer: Optimizer | None, path: Path, manifest: dict) -> None:
    """Raises ValueError if parameters, or the optimizer's moments, have another dtype than those that were saved."""
    here, saved = {"parameters": engine.pipeline.dtype}, {"parameters": parameter_dtype(manifest)}
    moments = [DTYPES[stored["dtype"]] for name, stored in manifest["tensors"].items() if name.startswith("exp_avg.")]
    if optimizer is not None and moments:
        here["moments"], saved["moments"] = state_dtypes(optimizer, engine.pipeline.dtype)["exp_avg"], moments[0]
    if different := [what for what in here if here[what] != saved[what]]:
        values = ", ".join(f"{what} in {saved[what]} (here {here[what]})" for what in different)
        raise ValueError(
            f"{path} is of another precision: {values}. Build engine and optimizer in that one, or have the numbers "
            "cast: load(..., convert=True)"
        )


def _restore_rank(engine: FiveD, path: Path, manifest: dict, rank: int) -> Restored:
    """This rank's own: its random number generators."""
    now, before = engine.layout.to_dict(), Layout.from_dict(manifest["layout"]).to_dict()
    same_mesh = all(now[axis] == before[axis] for axis in ("dp", "cp", "tp", "pp", "ep", "order"))
    if same_mesh:
        found = {f"rank.{rank}.{name}": x for name, x in rng_states().items()}  # as long as those that are read
        cpu, cuda = (f"rank.{rank}.{name}" for name in ("rng.cpu", "rng.cuda"))
        pieces = [_whole_piece(name, x) for name, x in found.items() if name == cpu or name in manifest["tensors"]]
        stored_pieces.read(path, manifest, pieces)
        torch.set_rng_state(found[cpu])
        if cuda in found:  # where none was saved, the one that there is
            torch.cuda.set_rng_state(found[cuda])
    return Restored(path, manifest["step"], manifest["about"], same_mesh)
