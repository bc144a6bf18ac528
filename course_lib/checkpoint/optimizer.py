"""What a checkpoint has of an optimizer: moments, master weights, counts of steps and learning rates, under any layout.

Moments and master weights are as long as their parameter and are stored in the same pieces of whole tensors, under the
names exp_avg., exp_avg_sq. and master. before the parameter's. Counts and options are a few numbers, in the manifest.

AdamW counts steps for each parameter, MasterAdamW once for all: `options_to_load` refuses counts
that one number cannot say.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.checkpoint import storage as stored_pieces
from course_lib.checkpoint.files import together
from course_lib.checkpoint.manifest import OPTIONS
from course_lib.checkpoint.storage import parameter_dtype, widest
from course_lib.parallel.five_d import FiveD
from course_lib.training.precision import MasterAdamW
from course_lib.weights.pieces import Holding, parameters_of

STATES = ("exp_avg", "exp_avg_sq", "master")
Optimizer = torch.optim.Optimizer


def options_of(optimizer: Optimizer) -> list[dict]:
    return [{key: options[key] for key in OPTIONS if key in options} for options in optimizer.param_groups]


def steps_of(engine: FiveD, optimizer: Optimizer, group: dist.ProcessGroup) -> dict[str, int]:
    """Parameter -> how many steps it has taken, of all ranks' parameters. It differs where a gradient was missing."""
    mine = {}
    common = {param: options.get("step") for options in optimizer.param_groups for param in options["params"]}
    for holding in parameters_of(engine):
        if state := optimizer.state.get(holding.tensor):
            count = int(state["step"] if "step" in state else common[holding.tensor])
            mine |= {place.name: count for place in holding.places}
    return {name: count for of_rank in together(group, lambda: mine) for name, count in of_rank.items()}


def options_to_load(held: list[Holding], optimizer: Optimizer, saved: dict) -> list[dict]:
    """Of each of the optimizer's groups: learning rate and the like, and the count of steps where there is one for all.
    Raises   ValueError if the checkpoint's do not fit this optimizer
    """
    groups, options = optimizer.param_groups, saved["options"]
    if len(options) != len(groups):
        if any(one != options[0] for one in options):
            raise ValueError(f"the checkpoint has {len(options)} groups of options, the optimizer {len(groups)}")
        options = options[:1] * len(groups)
    names = {holding.tensor: [place.name for place in holding.places] for holding in held}
    found = []
    for group, one in zip(groups, options, strict=True):
        found.append({key: tuple(value) if isinstance(value, list) else value for key, value in one.items()})
        if isinstance(optimizer, MasterAdamW):
            counts = {saved["steps"][n] for param in group["params"] for n in names[param] if n in saved["steps"]}
            if len(counts) > 1:
                raise ValueError(
                    f"parameters have taken {sorted(counts)} steps each, and this optimizer counts once for all; load "
                    "with zero_stage=0 and 32-bit parameters"
                )
            found[-1]["step"] = counts.pop() if counts else 0
    return found


def state_dtypes(optimizer: Optimizer, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states of a parameter of that dtype: MasterAdamW's have 32 bits at least, with a master for one of fewer."""
    if not isinstance(optimizer, MasterAdamW):
        return {"exp_avg": dtype, "exp_avg_sq": dtype}
    wide = torch.promote_types(dtype, torch.float32)
    return {key: wide for key in STATES if key != "master" or wide != dtype}


def load_optimizer(held: list[Holding], optimizer: Optimizer, path: Path, manifest: dict) -> None:
    """Moments, master weights, counts of steps, learning rates.

    What has no state in the checkpoint has none afterwards.

    Only a parameter narrower than what was saved has one all the same: its master keeps what rounding would lose.
    """
    steps, pieces = manifest["optimizer"]["steps"], []
    optimizer.state.clear()
    updated = {param for group in optimizer.param_groups for param in group["params"]}
    for holding in held:
        if (param := holding.tensor) not in updated:  # frozen here, whatever it was when it was saved
            continue
        counts = [steps[place.name] for place in holding.places if place.name in steps]
        dtypes = state_dtypes(optimizer, param.dtype)
        needs_master = "master" in dtypes and parameter_dtype(manifest) != param.dtype
        if not counts and not needs_master:
            continue
        state = optimizer.state[param]
        if not isinstance(optimizer, MasterAdamW):
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            state["step"] = torch.tensor(counts[0], dtype=dtype, device="cpu")
        for key, dtype in dtypes.items():
            state[key] = torch.zeros_like(param, dtype=dtype)  # what padding has, and moments before the first gradient
            pieces += holding.pieces(state[key], f"{key}.")
    pieces = [piece for piece in widest(pieces, manifest) if piece.name in manifest["tensors"]]
    stored_pieces.read(path, manifest, pieces)
    for group, options in zip(
        optimizer.param_groups, options_to_load(held, optimizer, manifest["optimizer"]), strict=True
    ):
        group.update(options)
