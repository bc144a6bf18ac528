"""Checkpoints of an engine of parallel/five_d.py: saved under one layout, loaded under any other.

    save(engine, optimizer, folder, step)                   # all ranks call it; then folder/step-00000120 is complete
    saving = save_async(engine, optimizer, folder, step)    # copies to the host; files are written meanwhile
    restored = load(engine, optimizer, folder)              # the last complete one, or the one that is named
    latest(folder)                                          # where that is, or None
    wait_for_earlier(engine)                                # at the end of a run: until the last save_async is complete

What is in it: parameters, AdamW's moments, FP32 masters, counts of steps, learning rates, balancing biases of experts;
of each rank its random number generators, and what the caller gives as `extra`. All of it is in pieces of whole tensors
(parallel/pieces.py), so that a layout is only a way to cut them; checkpoint_pieces.py makes files of them.

Memory beside the engine's own: `save` one piece (64 MiB at most) at a time, `load` twice that; `save_async` a copy on
the host of what this rank writes. All ranks together write everything once.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import checkpoint_files as files
from course_lib import checkpoint_pieces as stored_pieces
from course_lib.checkpoint_files import everywhere, latest, together
from course_lib.checkpoint_pieces import DTYPES
from course_lib.parallel.five_d import FiveD
from course_lib.parallel.pieces import Holding, Piece, buffers_of, parameters_of

__all__ = ["Restored", "Saving", "latest", "load", "save", "save_async", "wait_for_earlier"]

STATES = ("exp_avg", "exp_avg_sq", "master")
OPTIONS = ("lr", "betas", "eps", "weight_decay")
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held besides the engine's numbers.

    about        what the caller gave as `about`
    extra        what this rank gave; in another mesh what rank 0 gave
    same_mesh    the ranks stand as they stood: their random number generators go on where they were. In another mesh
                 they are as before, to be seeded
    """

    path: Path
    step: int
    about: dict
    extra: dict[str, Tensor]
    same_mesh: bool


class Saving:
    """A save under way, or done."""

    def __init__(self, path: Path):
        self.path = path
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def start(self, *arguments) -> None:
        """Writes in a thread of its own."""

        def run():
            try:
                stored_pieces.write(self.path, *arguments)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name=f"save {self.path.name}")
        self.thread.start()

    @property
    def done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()

    def wait(self) -> Path:
        """Returns once the checkpoint is complete on all ranks; raises, once, what went wrong."""
        if self.thread is not None:
            self.thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.path


# --- save


def save(
    engine: FiveD,
    optimizer: Optimizer,
    folder: str | Path,
    step: int,
    extra: Mapping[str, Tensor] | None = None,
    about: dict | None = None,
    keep: int | None = None,
) -> Path:
    """Writes folder/step-..., of `step` steps done, and returns when it is complete. All ranks call it.

    extra    tensors of this rank, such as its place in the data
    about    of the whole run, of JSON's kinds; that of rank 0 counts
    keep     how many checkpoints remain in the folder; None: all. The older go when the new one is complete

    Raises   ValueError for arguments that cannot be, if the folder has this step or a later one, or is not the same for
             all ranks; RuntimeError if a rank cannot write. On every rank, and the checkpoints before are as they were
    """
    saving, arguments = prepare(engine, optimizer, folder, step, extra, about, keep, copy=False)
    with torch.device("cpu"):
        stored_pieces.write(saving.path, *arguments)
    return saving.path


def save_async(
    engine: FiveD,
    optimizer: Optimizer,
    folder: str | Path,
    step: int,
    extra: Mapping[str, Tensor] | None = None,
    about: dict | None = None,
    keep: int | None = None,
) -> Saving:
    """As `save`, but returns when all is copied to the host: the next step may change what was copied.

    One save at a time: a second waits for the first. What goes wrong meanwhile is raised by the next `wait`, `save`,
    `save_async` or `load` of this engine.
    """
    saving, arguments = prepare(engine, optimizer, folder, step, extra, about, keep, copy=True)
    saving.start(*arguments)
    return saving


def prepare(engine, optimizer, folder, step, extra, about, keep, copy: bool) -> tuple[Saving, tuple]:
    """What is done before files are written: (the save, the arguments of `checkpoint_pieces.write` behind the path)."""
    group = wait_for_earlier(engine)
    final = everywhere(group, lambda: begin(Path(folder), step, extra, about, keep, group.rank() == 0))
    pieces = everywhere(group, lambda: pieces_to_write(engine, optimizer, group.rank(), extra, copy))
    manifest = {
        "step": step,
        "layout": engine.layout.to_dict(),
        "model": asdict(engine.config),
        "optimizer": {"options": options_of(optimizer), "steps": steps_of(engine, optimizer, group)},
        "about": about or {},
    }
    engine.saving = Saving(final)
    return engine.saving, (pieces, manifest, group, keep)


def wait_for_earlier(engine: FiveD) -> dist.ProcessGroup:
    """Waits for the engine's save under way, raises its error; returns the group that checkpoints use, on the host."""
    if getattr(engine, "saving", None) is not None:
        engine.saving.wait()
    if not hasattr(engine, "host_group"):
        engine.host_group = dist.new_group(backend="gloo")
    return engine.host_group


def begin(
    folder: Path, step: int, extra: Mapping[str, Tensor] | None, about: dict | None, keep: int | None, is_first: bool
) -> Path:
    """Where the checkpoint will be; the first rank makes way. Raises ValueError for what cannot be saved."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step is {step!r}; give the number of steps done, 0 or more")
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; keep at least 1 checkpoint, or None to keep all")
    for name, x in (extra or {}).items():
        if not isinstance(x, Tensor) or x.dtype not in DTYPES.values():
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"extra {name!r} is {what}; give a tensor of one of {', '.join(DTYPES)}")
    try:
        json.dumps(about)
    except TypeError as error:
        raise ValueError(f"about cannot be said in JSON ({error}); give numbers, text, lists, dictionaries") from error
    final = folder / files.name_of(step)
    if is_first:
        files.clear_way(final)
    return final


def tensors_of(engine: FiveD, optimizer: Optimizer | None) -> list[tuple[Holding, str, Tensor]]:
    """(where it belongs, how its names begin, numbers) of all that this rank holds."""
    found = [(holding, "model.", holding.tensor) for holding in [*parameters_of(engine), *buffers_of(engine)]]
    if optimizer is not None:
        for holding in parameters_of(engine):
            state = optimizer.state.get(holding.tensor, {})
            found += [(holding, f"{key}.", state[key]) for key in STATES if key in state]
    return found


def pieces_to_write(
    engine: FiveD, optimizer: Optimizer, rank: int, extra: Mapping[str, Tensor] | None, copy: bool
) -> list[Piece]:
    """All that this rank writes; copy: on the host, in memory of their own, for which there may be no room."""
    pieces = [piece for holding, name, x in tensors_of(engine, optimizer) for piece in holding.pieces_to_write(x, name)]
    pieces += pieces_of_rank(rank, rng_states() | {f"extra.{name}": x for name, x in (extra or {}).items()})
    return [replace(piece, tensor=piece.tensor.to("cpu", copy=True)) for piece in pieces] if copy else pieces


def pieces_of_rank(rank: int, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """What is one rank's own, whole and under its number."""
    return [Piece(f"rank.{rank}.{name}", tuple(x.shape), (0,) * x.dim(), x) for name, x in tensors.items()]


def rng_states() -> dict[str, Tensor]:
    """Torch's random number generators of this process: the CPU's, and that of its GPU if it uses one."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


def options_of(optimizer: Optimizer | None) -> list[dict]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [{key: options[key] for key in OPTIONS if key in options} for options in groups]


def steps_of(engine: FiveD, optimizer: Optimizer | None, group: dist.ProcessGroup) -> dict[str, int]:
    """Parameter -> how many steps it has taken, of all ranks' parameters. It differs where a gradient was missing."""
    mine = {}
    if optimizer is not None:
        common = {param: options.get("step") for options in optimizer.param_groups for param in options["params"]}
        for holding in parameters_of(engine):
            if state := optimizer.state.get(holding.tensor):
                count = int(state["step"] if "step" in state else common[holding.tensor])
                mine |= {place.name: count for place in holding.places}
    return {name: count for of_rank in together(group, lambda: mine) for name, count in of_rank.items()}


# --- load


@torch.no_grad()
def load(engine: FiveD, optimizer: Optimizer | None, folder: str | Path) -> Restored:
    """Fills engine and optimizer from a checkpoint, whatever layout wrote it. All ranks call it.

    folder      a checkpoint, or a folder of them: then the last complete one
    optimizer   None: only the model's numbers are wanted

    Bytes    read: each rank the stored pieces that it needs, and its share of all for the checksums; sent: with zero 1
             and 2 an all-gather of the parameters
    Raises   ValueError on every rank if there is none, it is torn, or of another model: what, and what to do. The
             engine is then as before, unless a file was changed in a way that its checksum did not show
    """
    group = wait_for_earlier(engine)
    path = together(group, lambda: files.find(Path(folder)) if group.rank() == 0 else None)[0]
    manifest = everywhere(group, lambda: open_checkpoint(engine, path, group))
    restored = everywhere(group, lambda: fill(engine, optimizer, path, manifest, group.rank()))
    for sharded in engine.zeros.values():
        sharded.share_update()
    return restored


def open_checkpoint(engine: FiveD, path: Path, group: dist.ProcessGroup) -> dict:
    """Its manifest, once it is found to be whole, each rank checking some of the files, and of this model."""
    manifest = files.read_manifest(path)
    files.verify(path, manifest, group.rank(), group.size())
    check_model(engine, path, manifest)
    return manifest


def fill(engine: FiveD, optimizer: Optimizer | None, path: Path, manifest: dict, rank: int) -> Restored:
    """Reads what this rank holds."""
    held = parameters_of(engine)
    tensors = [piece for one in [*held, *buffers_of(engine)] for piece in one.pieces(one.tensor, "model.")]
    stored_pieces.read(path, manifest, tensors)
    if optimizer is not None:
        load_optimizer(held, optimizer, path, manifest)
    return restore_rank(engine, path, manifest, rank)


def check_model(engine: FiveD, path: Path, manifest: dict) -> None:
    """Raises ValueError if the checkpoint is of a model with other shapes or another architecture."""
    now, saved = asdict(engine.config), manifest["model"]
    different = [f"{key} {saved.get(key)!r} (here {now[key]!r})" for key in now if saved.get(key) != now[key]]
    if different := [text for text in different if not text.startswith("name ")]:
        raise ValueError(f"{path} is of another model: {', '.join(different)}. Build the engine with that config")


def load_optimizer(held: list[Holding], optimizer: Optimizer, path: Path, manifest: dict) -> None:
    """Moments, masters, counts of steps, learning rates. What has no state in the checkpoint has none afterwards."""
    steps, stored, pieces = manifest["optimizer"]["steps"], manifest["tensors"], []
    for holding in held:
        optimizer.state.pop(holding.tensor, None)
        names = [place.name for place in holding.places if place.name in steps]
        if not names:
            continue
        state = optimizer.state[holding.tensor]
        if not counts_in_groups(optimizer):
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            state["step"] = torch.tensor(steps[names[0]], dtype=dtype, device="cpu")
        for key in STATES:
            if (like := stored.get(f"{key}.{names[0]}")) is not None:
                state[key] = new_state(key, holding.tensor, DTYPES[like["dtype"]])
                pieces += [piece for piece in holding.pieces(state[key], f"{key}.") if piece.name in stored]
    stored_pieces.read(path, manifest, pieces)
    set_options(held, optimizer, manifest["optimizer"])


def counts_in_groups(optimizer: Optimizer) -> bool:
    """Whether it counts the steps of all parameters together, as MasterAdamW does, and torch's AdamW does not."""
    return "step" in optimizer.param_groups[0]


def new_state(key: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """What an optimizer begins with: padding of flats, and what has had no gradient yet, stays so."""
    return numbers.to(dtype, copy=True) if key == "master" else torch.zeros_like(numbers, dtype=dtype)


def set_options(held: list[Holding], optimizer: Optimizer, saved: dict) -> None:
    """Learning rates and the like, and the count of steps where there is one for all."""
    groups, options = optimizer.param_groups, saved["options"]
    if len(options) != len(groups):
        if any(one != options[0] for one in options):
            raise ValueError(f"the checkpoint has {len(options)} groups of options, the optimizer {len(groups)}")
        options = options[:1] * len(groups)
    names = {holding.tensor: [place.name for place in holding.places] for holding in held}
    for group, one in zip(groups, options):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in one.items()})
        if counts_in_groups(optimizer):
            counts = {saved["steps"][n] for param in group["params"] for n in names[param] if n in saved["steps"]}
            if len(counts) > 1:
                raise ValueError(
                    f"parameters have taken {sorted(counts)} steps each, and this optimizer counts once for all; load "
                    "with zero=0 and 32-bit parameters"
                )
            group["step"] = counts.pop() if counts else 0


def restore_rank(engine: FiveD, path: Path, manifest: dict, rank: int) -> Restored:
    """This rank's own: generators and extras."""
    now, before = engine.layout.to_dict(), manifest["layout"]
    same_mesh = all(now[axis] == before[axis] for axis in ("dp", "cp", "tp", "pp", "ep", "order"))
    begins = f"rank.{rank if same_mesh else 0}."
    found = {
        name.removeprefix(begins): torch.empty(stored["shape"], dtype=DTYPES[stored["dtype"]], device="cpu")
        for name, stored in manifest["tensors"].items()
        if name.startswith(begins)
    }
    stored_pieces.read(
        path, manifest, [Piece(begins + name, tuple(x.shape), (0,) * x.dim(), x) for name, x in found.items()]
    )
    if same_mesh:
        torch.set_rng_state(found["rng.cpu"])
        if "rng.cuda" in found and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(found["rng.cuda"])
    extra = {name.removeprefix("extra."): x for name, x in found.items() if name.startswith("extra.")}
    return Restored(path, manifest["step"], manifest["about"], extra, same_mesh)
