"""Engines as records: what differs between the course's own code and PyTorch, Megatron, DeepSpeed, nanotron.

    budgets(run, engine="megatron")     memory as that engine's ranks hold it (memory/budget.py reads the facts)

A formula is written once, for the course's engine; an engine changes numbers in it. The records are in engines.toml:
each fact is read in the engine's code or counted there, and says where; none is fitted. Adding an engine is adding a
record there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from course_lib.validate import Amount, Bytes, Checked, Count, Share, one_of, read_toml


@dataclass(frozen=True)
class File(Checked):
    """What a configuration file can say of a layout, by field in engines.toml: search and export take no other."""

    program: str
    recipes: Mapping[str, dict] = field(hash=False)
    axes: tuple[str, ...] = ("tp", "pp", "cp", "ep")
    order: str = "pp-dp-cp-tp"
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    pipeline_zero: tuple[int, ...] = (0, 1, 2, 3)
    zero_0_alone: bool = False
    data_needed: bool = False
    replicas: bool = True
    schedules: tuple[str, ...] = ("naive", "afab", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    cp_methods: tuple[str, ...] = ("ring", "all_gather", "ulysses")
    cp_shardings: tuple[str, ...] = ("contiguous", "striped", "zigzag")
    even_stages: bool = False
    folds_all: bool = False
    families: tuple[str, ...] = ("llama", "gpt")
    refuses: Mapping[str, str] = field(default_factory=dict, hash=False)
    words: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class EngineFacts(Checked):
    """Facts of one engine; engines.toml says what each means."""

    name: str
    recipes: tuple[str, ...]
    recipe: str
    file: File
    pipeline_grads_whole: bool = False
    root_gathered: bool = False
    backward_grad_bytes: Bytes = 0
    bucket_bytes: Bytes = 0
    update_bytes: Bytes | None = None
    live_parameters: Bytes = 0
    swiglu_tensors: Literal[2, 3, 4] = 4
    norm_bytes: Bytes = 2
    fp8_input_bytes: Bytes = 2
    regathers: bool = False
    balanced_cp: bool = True
    loss_bytes: Amount = 12
    tp_loss_bytes: Amount = 10
    chunked_loss: bool = False
    chunks_make_gradients: bool = False
    message_buffers: bool = False
    whole_sequences: int = 0
    cut: Literal["even", "cost"] = "even"
    other_blocks: Count = 0
    log_unit: Bytes = 10**9
    log_reserved: bool = True
    reserved_share: Amount = 1.0
    unfilled_bytes: Bytes = 0
    queued_tensors: int = 0
    log_first: bool = False
    fused: bool = False
    hides_tp: Share = 0.0
    hides_behind_weights: bool = True
    hides_data: bool = True
    port_share: Share = 0.0
    hides_ep: tuple[str, ...] = ()
    counts_tied_twice: bool = False


def _read() -> dict[str, EngineFacts]:
    engines: dict[str, EngineFacts] = {}
    for name, fields in read_toml(Path(__file__).with_name("engines.toml"))["engines"].items():
        like = engines.get(fields.pop("like", None))
        fields |= {"name": name, "file": File(**fields["file"])}
        engines[name] = replace(like, **fields) if like else EngineFacts(**fields)
    return engines


ENGINES = _read()


def engine_of(engine: str | EngineFacts) -> EngineFacts:
    """The engine of that name, or that engine; raises ValueError naming the engines that there are."""
    if isinstance(engine, EngineFacts):
        return engine
    one_of("engine", engine, tuple(ENGINES))
    return ENGINES[engine]
