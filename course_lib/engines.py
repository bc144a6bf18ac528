"""Engines as records: what differs between the course's own code and PyTorch, Megatron, DeepSpeed, nanotron.

    budgets(run, engine="megatron")     memory as that engine's ranks hold it (memory/budget.py reads the facts)

A formula is written once, for the course's engine; an engine changes numbers in it. The records are in engines.toml:
each fact is read in the engine's code or counted there, and says where; none is fitted. Adding an engine is adding a
record there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from course_lib.validate import Amount, Bytes, Checked, Count, Share, one_of, read_toml


@dataclass(frozen=True)
class File(Checked):
    """What a configuration file can say of a layout: a search takes no other, an export refuses any other.

    program         who reads it
    recipes         names of `memory.states.RECIPES`, each with its fields in the file
    words           its words for ours, where they differ: of schedules and cp methods
    axes            beside dp
    order           of its axes on the hardware, outermost first; empty: any
    zero_stages     where ranks share the data, without a pipeline
    pipeline_zero   and in one
    zero_0_alone    ZeRO-0 only where dp is the only axis
    data_needed     tp and pp only beside dp or cp
    replicas        shards inside groups of ranks, and replicas of these (HSDP)
    schedules, recomputes, cp_methods, cp_shardings   words of a layout
    regathers       inputs of sequence-parallel products may stay gathered (False), be gathered again (True)
    sequence_parallel  with tp it may be off (False), on (True)
    even_stages     stages have equally many layers
    told_stages     layers of each stage can be told
    folds_all       whole experts go over all ranks of cp and tp only, not over some of them
    families        of models
    lacks           parts of models: those of `plan/config_files.py`
    """

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
    regathers: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (False, True)
    even_stages: bool = False
    told_stages: bool = True
    folds_all: bool = False
    families: tuple[str, ...] = ("llama", "gpt")
    lacks: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class EngineFacts(Checked):
    """Facts of one engine.

    States
    recipes             names of `memory.states.RECIPES` that it can have
    recipe              that of its usual configuration
    pipeline_grads_whole  in a pipeline gradients stay whole in FP32, and parameters gathered, to the end of a step
    root_gathered       with ZeRO-3 embedding and head, FSDP's root unit, stay gathered from forward to backward
    backward_grad_bytes  bytes a parameter of gradients of one backward, beside those that are kept; 0: none
    bucket_bytes        bytes a parameter of buckets that data parallelism without ZeRO sends from
    update_bytes        bytes a parameter that an update holds beside states; None: a tensor at a time

    What is saved for backward
    swiglu_tensors      tensors of d_ff numbers a token: 4 eager (gate, up, silu, product), 3 fused (gate, up, product),
                        2 compiled (gate, up)
    norm_bytes          bytes a number that a norm saves beside its output, in 2-byte precision
    fp8_input_bytes     bytes a number of a product's saved input, where products are in FP8
    regathers           with sequence parallelism inputs of products are saved in pieces, and gathered again
    balanced_cp         whether ranks of cp have equally many pairs; otherwise the last has most

    The loss
    loss_bytes          bytes a logit at its largest moment, without tp
    tp_loss_bytes       and where tp cuts the vocabulary
    chunked_loss        whether it can take the loss in chunks of tokens
    chunks_make_gradients  forward then makes the head's gradients, in FP32, and keeps them for backward

    What is no state
    message_buffers     buffers for the messages of all micro-batches are there from the start of a step
    whole_sequences     tensors of a whole sequence that tp's collectives hold besides
    cut                 "even" layers a stage, or "cost": by parameters, embedding aside
    other_blocks        of a pipeline beside layers, such as norm, head and loss: so many stages may have no layer

    What its log says
    log_unit            bytes of its GB
    log_reserved        what the allocator reserved, without CUDA's context and NCCL's buffers; else all of the device
    reserved_share      of tensors' bytes, so much is reserved
    unfilled_bytes      and so much besides, in pieces that no tensor fills
    queued_tensors      tensors of a whole sequence that wait at most in the queue of launches, where tp shares them
    log_first           the log is of the first stage alone

    Time (timing/step.py)
    fused               small operations run as one kernel, also the update: torch.compile, Transformer Engine
    hides_tp            share of tp's exposed time that is hidden: collectives cut in pieces beside products
    hides_behind_weights  backward's sums of tp travel beside weight gradients
    hides_data          gradients travel beside backward, parameters of ZeRO beside the layers before
    hides_ep            schedules in which rows of experts travel beside another micro-batch
    counts_tied_twice   its MFU counts embedding and head, a tied one in a pipeline twice

    file                what its configuration file can say
    """

    name: str
    recipes: tuple[str, ...]
    recipe: str
    file: File
    pipeline_grads_whole: bool = False
    root_gathered: bool = False
    backward_grad_bytes: Bytes = 0
    bucket_bytes: Bytes = 0
    update_bytes: Bytes | None = None
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
    hides_ep: tuple[str, ...] = ()
    counts_tied_twice: bool = False


def _read() -> dict[str, EngineFacts]:
    """Read engines.toml."""
    engines: dict[str, EngineFacts] = {}
    for name, fields in read_toml(Path(__file__).with_name("engines.toml"))["engines"].items():
        like = engines.get(fields.pop("like", None))
        fields |= {"name": name, "file": File(**fields["file"])}
        engines[name] = replace(like, **fields) if like else EngineFacts(**fields)
    return engines


ENGINES = _read()


def engine_of(engine: str | EngineFacts) -> EngineFacts:
    """The engine of that name, or that engine.

    Raises   ValueError naming the engines that there are
    """
    if isinstance(engine, EngineFacts):
        return engine
    one_of("engine", engine, tuple(ENGINES))
    return ENGINES[engine]
