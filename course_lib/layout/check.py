"""Which layouts are refused, and why: one small check for each reason, and the nearest numbers that would be possible.

A check says which numbers do not fit. Which ones would is not written into each: it is looked for, by trying the fields
that the check names, nearest values first, until one passes all checks.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from course_lib.config import ModelConfig
from course_lib.layout.experts import ExpertLayout
from course_lib.layout.mesh import AXES, check_groups, check_order
from course_lib.layout.partition import CP_METHODS, check_heads, check_layers, check_ulysses, even_layers, piece_sizes
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, check_context
from course_lib.schedules import SCHEDULES, check_request

if TYPE_CHECKING:  # layout/record.py imports this file
    from course_lib.layout.record import Layout

SIZES = ("dp", "cp", "tp", "pp", "ep", "dp_replicate", "v", "micro_batch", "micro_batches")
CHOICES = {
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "regather": (False, True),
    "schedule": tuple(SCHEDULES),
    "recompute": ("none", "selective", "full"),
    "cp_method": CP_METHODS,
    "cp_sharding": SEQUENCE_SHARDINGS,
    "expert_method": ("plain", "once_per_rank"),
}
SPLIT_BACKWARD = ("zb_h1", "zb_h2", "zbv", "dualpipe_v")
FAMILIES = ("llama", "gpt")
_NEAREST = "; nearest: "
_FARTHEST = 16_384  # the largest number that is tried
BETWEEN_ITEMS = "-"  # layers_of_stage=3-5, order=pp-dp-cp-tp: no shell takes it for something else


Check = tuple[Callable[["Layout"], str | None], tuple[str, ...]]  # what says or raises why not; fields to change


def _size(name: str, layout: Layout) -> str | None:
    if type(size := getattr(layout, name)) is not int or size < 1:
        return f"{name} ({size!r}) must be a whole number, 1 or more"


def _choice(name: str, layout: Layout) -> str | None:
    choices, value = CHOICES[name], getattr(layout, name)
    if type(value) is not type(choices[0]) or value not in choices:
        why = ": it needs to know how many ranks share a node" if value == "once_per_node" else ""
        return f"{name} ({value!r}) is none of {', '.join(map(str, choices))}{why}"


def _expert_tp(layout: Layout) -> str | None:
    if layout.expert_tp is not None and (type(layout.expert_tp) is not int or layout.expert_tp not in (1, layout.tp)):
        whole = "1 (whole experts, spread over tp's ranks too)"
        cut = f", or tp ({layout.tp}): each matrix of an expert cut over tp" if layout.tp > 1 else ": tp is 1"
        return f"expert_tp ({layout.expert_tp!r}) must be {whole}{cut}"


def _tokens_of_tp(layout: Layout) -> str | None:
    if layout.folded and not layout.sequence_parallel:
        many = f"ep ({layout.ep}) is more than dp x cp = {layout.dp} x {layout.cp} = {layout.data_size}"
        why = many if layout.expert_tp is None else f"expert_tp is {layout.expert_tp}"
        return (
            f"{why}, so whole experts are spread over tp's ranks ({layout.tp}) too, each of which routes its own "
            "tokens; sequence_parallel (false) must be true"
        )


def _replicas(layout: Layout) -> str | None:
    check_groups(layout.dp, layout.cp, layout.ep, layout.dp_replicate, layout.fold)
    if layout.dp_replicate > 1 and layout.zero_stage == 0:
        made = f"dp_replicate ({layout.dp_replicate}) makes replicas of what ZeRO shards"
        return f"{made}, but zero_stage (0) shards nothing"


def _schedule(num_micro_batches: Callable[[Layout], int], layout: Layout) -> str | None:
    try:
        check_request(layout.schedule, layout.pp, num_micro_batches(layout), layout.v)
    except ValueError as error:
        return str(error).replace("num_micro_batches", "micro_batches")


def _layers_of_stage(layout: Layout) -> str | None:
    if (layers := layout.layers_of_stage) is None:
        return None
    if not isinstance(layers, tuple) or not layers or any(type(count) is not int or count < 0 for count in layers):
        return f"layers_of_stage is {layers!r}; it must have one number, 0 or more, for each stage, like 3-5"
    if len(layers) != (stages := layout.num_stages):
        told = f"layers_of_stage {list(layers)} has {len(layers)} stages"
        return f"{told}, but pp ({layout.pp}) with {layout.schedule} has {stages}"


_LAYOUT_CHECKS: list[Check] = [
    *[(partial(_size, name), (name,)) for name in SIZES],
    *[(partial(_choice, name), (name,)) for name in CHOICES],
    (lambda of: check_order(of.order), ("order",)),
    (_expert_tp, ("expert_tp",)),
    (lambda of: check_groups(of.dp, of.cp, of.ep, fold=of.fold), ("ep",)),
    (_tokens_of_tp, ("sequence_parallel", "ep")),
    (_replicas, ("dp_replicate", "zero_stage")),
    (
        lambda of: of.regather and (not of.sequence_parallel or of.tp == 1)
        and "regather gathers in backward what sequence_parallel has cut over the ranks of tp, but sequence_parallel "
        f"is {str(of.sequence_parallel).lower()} and tp is {of.tp}",
        ("regather", "sequence_parallel"),
    ),
    (
        lambda of: of.sequence_parallel and of.tp == 1
        and "sequence_parallel cuts norms and residual stream over the ranks of tp, but tp (1) has one",
        ("sequence_parallel", "tp"),
    ),
    (partial(_schedule, lambda of: 2 * of.pp), ("v", "schedule")),  # so many micro-batches suit every schedule
    (partial(_schedule, lambda of: of.micro_batches), ("micro_batches",)),
    (
        lambda of: of.zero_stage > 1 and of.schedule in SPLIT_BACKWARD
        and f"zero_stage ({of.zero_stage}) sums a layer's gradients when its backward is done; this engine does "
        f"not do so with {of.schedule}, whose weight gradients come later",
        ("zero_stage", "schedule"),
    ),
    (_layers_of_stage, ("layers_of_stage",)),
]  # fmt: skip


def _features(config: ModelConfig, layout: Layout) -> str | None:
    widths = {"d_ff": config.d_ff, "vocab_size": config.vocab_size}
    if config.moe is not None and not layout.folded:
        widths["d_expert"] = config.moe.d_expert
    for field, width in widths.items():
        if min(piece_sizes(width, layout.tp)) == 0:
            return f"{field} ({width}) leaves a rank of tp ({layout.tp}) with none"


def _heads_for_ulysses(config: ModelConfig, layout: Layout) -> str | None:
    if layout.cp > 1 and layout.cp_method == "ulysses":
        heads, kv_heads = config.num_heads // layout.tp, max(config.num_kv_heads // layout.tp, 1)
        try:
            check_ulysses(heads, kv_heads, layout.cp)
        except ValueError as error:
            of_rank = f" (with tp {layout.tp} a rank has {heads} heads, {kv_heads} of keys and values)"
            return f"{error}{of_rank if layout.tp > 1 else ''}"


def _experts(config: ModelConfig, layout: Layout) -> str | None:
    if config.moe is not None:
        ExpertLayout(config.moe.num_experts, layout.ep)
    elif layout.ep > 1:
        return f"ep ({layout.ep}) spreads experts, but {config.name} has 0 of them"


def _stages(config: ModelConfig, pp: Callable[[Layout], int], layout: Layout) -> str | None:
    has, need = f"{config.name} has {config.num_layers} layers", "and each stage needs one"
    each = layout.stages_per_rank
    if pp(layout) * each > config.num_layers and not layout.layers_of_stage:
        if pp(layout) == 1:
            return f"{layout.schedule} with v ({layout.v}) has {each} stages a rank, but {has} in all, {need}"
        return f"pp ({layout.pp}) x {each} stages a rank = {layout.pp * each} stages, but {has}, {need}"


def _tied_ends(config: ModelConfig, layout: Layout) -> str | None:
    together = layout.schedule in ("zbv", "dualpipe_v") or layout.pp == 1 < layout.stages_per_rank
    if config.tied and layout.zero_stage and together:
        return (
            f"{config.name} ties embedding and head, which {layout.schedule} with pp ({layout.pp}) puts into two "
            f"stages of one rank: this engine does not shard with zero_stage ({layout.zero_stage}) a weight that both "
            "share"
        )


def _routed_tokens(config: ModelConfig, seq_len: int, layout: Layout) -> str | None:
    if layout.folded and config.moe and seq_len // layout.cp % layout.tp:
        return (
            f"seq_len ({seq_len}) / cp ({layout.cp}) must be a multiple of tp ({layout.tp}): with whole experts "
            "(expert_tp 1) the ranks of tp route equally many tokens each"
        )


def _model_checks(config: ModelConfig, seq_len: int | None = None) -> list[Check]:
    """What this model needs of a layout; what no other layout would fix comes first."""
    family = f"{config.name} is of the {config.family} family; layouts know {', '.join(FAMILIES)}"
    checks = [
        (lambda of: config.family not in FAMILIES and family, ()),
        (lambda of: check_heads(config.num_heads, config.num_kv_heads, of.tp), ("tp",)),
        (partial(_features, config), ("tp",)),
        (partial(_heads_for_ulysses, config), ("cp", "cp_method")),
        (partial(_experts, config), ("ep",)),
        (partial(_stages, config, lambda of: 1), ("v", "schedule")),
        (partial(_stages, config, lambda of: of.pp), ("pp", "v")),
        (lambda of: of.layers_of_stage and check_layers(config, of.layers_of_stage, least=0), ("layers_of_stage",)),
        (partial(_tied_ends, config), ("zero_stage", "schedule")),
    ]
    if seq_len is None:
        return checks
    most = config.max_seq_len if config.family == "gpt" else seq_len
    positions = f"seq_len ({seq_len}) exceeds the learned positions of {config.name} ({most}); choose at most {most}"
    return [
        (lambda of: seq_len > most and positions, ()),
        *checks,
        (lambda of: check_context(seq_len, of.cp, of.cp_sharding if of.cp > 1 else "contiguous"), ("cp",)),
        (partial(_routed_tokens, config, seq_len), ("expert_tp", "ep", "tp")),
    ]


def check_layout(layout: Layout, config: ModelConfig | None = None, seq_len: int | None = None) -> None:
    """Raises ValueError if no model could lie so; with a config, if this one, or sequences of this length, cannot."""
    checks = _LAYOUT_CHECKS + (_model_checks(config, seq_len) if config else [])
    passed = len(_LAYOUT_CHECKS) if config else 0  # when the layout was made
    for index, (check, names) in enumerate(checks[passed:], passed):
        refusal = _refusal(check, layout)
        if refusal and _NEAREST not in refusal:
            # what passes all, else what passes so far, so that who follows the advice comes further, else this one
            options = (_nearest(layout, names, [checks[index], *more], config) for more in (checks, checks[:index], []))
            refusal += next((_NEAREST + " or ".join(nearest) for nearest in options if nearest), "")
        if refusal:
            raise ValueError(refusal)


def _refusal(check: Callable, layout: Layout) -> str | None:
    """Why a layout does not pass a check, which says so or raises."""
    try:
        return check(layout)
    except ValueError as error:
        return str(error)


def _nearest(layout: Layout, names: Sequence[str], needed: Sequence[Check], config: ModelConfig | None) -> list[str]:
    """One or two changes of a field after which the layout passes, such as "tp=2"."""
    found = []
    for name in names:
        for values in _candidates(layout, name, config):
            for value in values:
                other = copy(layout)
                object.__setattr__(other, name, value)  # unchecked
                if not any(_refusal(check, other) for check, _ in needed):
                    found.append(f"{name}={as_text(value)}")
                    break
    return found[:2]


def _candidates(layout: Layout, name: str, config: ModelConfig | None) -> list[Iterable]:
    """Other values of a field, nearest first: numbers in two directions, else one list."""
    value = getattr(layout, name)
    if name in SIZES or name == "zero_stage":
        value, lowest = _whole(value), int(name != "zero_stage")
        highest = min(2 * max(value, 0) + 2 * _whole(layout.pp) + _whole(layout.ep) + 8, _FARTHEST)
        return [range(min(value, _FARTHEST), lowest - 1, -1), range(max(value + 1, lowest), highest + 1)]
    if name in ("order", "expert_tp"):
        return [[AXES] if name == "order" else [1, layout.tp]]
    if name == "layers_of_stage":
        stages = layout.num_stages
        total = config.num_layers if config else sum(map(_whole, value)) if isinstance(value, tuple) else 0
        return [[tuple(even_layers(total, stages))] if total >= stages else [None]]
    close = difflib.get_close_matches(str(value), map(str, CHOICES[name]), n=1)
    return [sorted(CHOICES[name], key=lambda choice: (str(choice) not in close, choice != "1f1b"))]


def _whole(value: object) -> int:
    """A whole number near what was given, 1 where it is none."""
    return int(value) if isinstance(value, int | float) and abs(value) < 2**63 else 1


def as_text(value: object) -> str:
    """A value as `Layout.parse` reads it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return BETWEEN_ITEMS.join(map(str, value)) if isinstance(value, tuple) else str(value)
