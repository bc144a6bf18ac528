"""Engines as records: what differs between the course's own code and PyTorch, Megatron, DeepSpeed, nanotron.

    budgets(run, engine="megatron")     memory as that engine's ranks hold it (memory/budget.py reads the facts)

A formula is written once, for the course's engine; an engine changes numbers in it. Each fact is read in the engine's
code or counted there, and says where; none is fitted. Adding an engine is adding a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from course_lib.validate import Amount, Bytes, Share, check_fields, one_of

GIB = 2**30


@dataclass(frozen=True)
class File:
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

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Engine:
    """Facts of one engine.

    States
    recipes             names of `memory.states.RECIPES` that it can have
    recipe              that of its usual configuration
    zero_stages         which it can have without a pipeline
    pipeline_zero       and in one
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

    What is no state
    message_buffers     buffers for the messages of all micro-batches are there from the start of a step
    whole_sequences     tensors of a whole sequence that tp's collectives hold besides
    cut                 "even" layers a stage, or "cost": by parameters, embedding aside

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
    hides_ep            rows of experts travel beside another micro-batch, as DualPipe has them
    counts_tied_twice   its MFU counts embedding and head, a tied one in a pipeline twice

    file                what its configuration file can say
    """

    name: str
    recipes: tuple[str, ...]
    recipe: str
    file: File
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    pipeline_zero: tuple[int, ...] = (0, 1, 2, 3)
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
    message_buffers: bool = False
    whole_sequences: int = 0
    cut: Literal["even", "cost"] = "even"
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
    hides_ep: bool = False
    counts_tied_twice: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


_COURSE = Engine(
    "course",
    file=File("the course's trainer", {"fp32": {}, "bf16-master": {}, "bf16-master-fp32-grads": {}}, order=""),
    # course_lib/train/trainer.py and memory/states.py; the formulas answer for all of them
    recipes=(
        "fp32",
        "autocast",
        "bf16-master",
        "bf16-master-fp32-grads",
        "bf16-master-both-grads",
        "fp16-master-fp32-grads",
        "bf16",
    ),
    recipe="bf16-master",
    # counted with saved_tensors_hooks (torch 2.13): gate, up, silu(gate), silu(gate) up; its RMSNorm saves its input
    swiglu_tensors=4,
    norm_bytes=2,
    log_reserved=False,
)

# FSDP2 with eager PyTorch: torch.distributed.fsdp.fully_shard (torch 2.5 to 2.13), torchtitan's models uncompiled.
_FSDP2 = Engine(
    "fsdp2",
    # Accelerate 1.15, commands/launch.py: fsdp_version 2, reshard_after_forward, activation checkpointing; dp alone
    file=File(
        "Accelerate with FSDP2",
        {"fp32": {"precision": "fp32"}, "bf16-master": {"precision": "bf16"}},  # FP32 shards are the master copy
        axes=(),
        zero_stages=(2, 3),
        replicas=False,
        recomputes=("none", "full"),
    ),
    # FP32 shards are the master copy, of which BF16 casts are gathered: MixedPrecisionPolicy(param_dtype=bfloat16)
    recipes=("fp32", "bf16-master", "bf16-master-fp32-grads", "bf16"),
    recipe="bf16-master",
    # reshard_after_forward: True is ZeRO-3, False ZeRO-2; without fully_shard DDP. It has no ZeRO-1
    zero_stages=(0, 2, 3),
    # _fsdp_param_group.py: in a pipeline set_requires_gradient_sync(False) keeps unsharded FP32 gradients, and
    # set_reshard_after_backward(False) whole parameters, until the last micro-batch (torchtitan, pipeline_parallel.py)
    pipeline_zero=(0, 1),
    pipeline_grads_whole=True,
    root_gathered=True,  # _fsdp_state.py, _lazy_init: the root's post-forward mesh is none, it is not resharded
    norm_bytes=2,  # aten._fused_rms_norm on CUDA saves its input and 1/rms
    balanced_cp=False,  # published rates of torchtitan's cp (PyTorch blog, 2025) fall as those of contiguous pieces do
    # a loss that is not compiled (torchtitan 0.1, train.py): the BF16 logits stay; with tp DTensor's loss_parallel
    # backward makes two more FP32 copies (torch.distributed.tensor.parallel.loss)
    loss_bytes=14,
    tp_loss_bytes=20,
    chunked_loss=True,  # torchtune 0.6, modules/loss/cross_entropy_loss.py: LinearCrossEntropyLoss, 8 chunks
    message_buffers=True,  # torch.distributed.pipelining.stage: _RecvInfo buffers for all chunks, made once
    reserved_share=1.05,  # torchtitan logs max_reserved; assumed: pieces that no tensor fits
)

# FP32 shards are the master copy, gradients FP32
_FP32_SHARDS = {"dtype": "float32", "mixed_precision_param": "bfloat16"}

ENGINES: dict[str, Engine] = {
    one.name: one
    for one in (
        _COURSE,
        _FSDP2,
        # torchtitan with compile=true: counted with saved_tensors_hooks (torch 2.13), silu and product are made again
        replace(
            _FSDP2,
            name="torchtitan",
            swiglu_tensors=2,
            chunked_loss=False,
            fused=True,
            # torchtitan 0.2.1, config/job_config.py, models/llama3/infra/parallelize.py. FSDP shards all states or
            # none; in a pipeline gradients and parameters are whole to the end of a step: ZeRO-1. Mixed precision is
            # FSDP's. Its selective recomputation repeats other operators than attention.
            file=File(
                "torchtitan",
                {
                    "fp32": {"dtype": "float32", "mixed_precision_param": "float32"},
                    "bf16-master": _FP32_SHARDS,
                    "bf16-master-fp32-grads": _FP32_SHARDS,
                    "bf16": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
                },
                words={
                    "afab": "GPipe",
                    "1f1b": "1F1B",
                    "interleaved": "Interleaved1F1B",
                    "zbv": "ZBVZeroBubble",
                    "dualpipe_v": "DualPipeV",
                    "ring": "alltoall",
                    "all_gather": "allgather",
                },
                zero_stages=(0, 2, 3),
                pipeline_zero=(1,),
                zero_0_alone=True,
                data_needed=True,
                schedules=("afab", "1f1b", "interleaved", "zbv", "dualpipe_v"),
                recomputes=("none", "full"),
                cp_methods=("ring", "all_gather"),
                cp_shardings=("zigzag",),
                regathers=(False,),
                sequence_parallel=(True,),
                folds_all=True,  # distributed/parallel_dims.py, _validate
            ),
        ),
        Engine(
            "megatron",
            # Megatron-LM d98e8a6, training/arguments.py, core/transformer/transformer_config.py: ZeRO-2 and 3 are its
            # FSDP, which has no pipeline
            file=File(
                "Megatron-LM",
                {
                    "fp32": {},
                    "bf16-master": {"bf16": True, "grad-reduce-in-bf16": True},
                    "bf16-master-fp32-grads": {"bf16": True},
                    "fp16-master-fp32-grads": {"fp16": True, "accumulate-allreduce-grads-in-fp32": True},
                },
                words={"ring": "p2p", "all_gather": "allgather", "ulysses": "a2a"},
                pipeline_zero=(0, 1),
                schedules=("1f1b", "interleaved"),
                cp_shardings=("zigzag",),
                even_stages=True,
                told_stages=False,
                lacks=("latent attention", "experts but plain ones", "other bounds of scaled RoPE"),
            ),
            # megatron/training/theoretical_memory_usage.py (core 0.12): 18 bytes, or 6 + 12 / dp; --grad-reduce-in-bf16
            # gives 16
            recipes=("fp32", "bf16-master", "bf16-master-fp32-grads", "fp16-master-fp32-grads"),
            recipe="bf16-master-fp32-grads",
            # --data-parallel-sharding-strategy of Megatron-FSDP; arguments.py refuses pp > 1 there
            pipeline_zero=(0, 1),
            # fusions/fused_bias_swiglu.py: SwiGLUFunction saves gate with up; the product is down's input
            swiglu_tensors=3,
            norm_bytes=2,  # TransformerEngine's LayerNormLinear saves its input and its normalised output
            # TransformerEngine 1.x, pytorch/module/linear.py: in FP8 inputmat_fp8 is saved, or its transpose
            fp8_input_bytes=1,
            # tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication saves its piece of the input
            # and gathers it again in backward
            regathers=True,
            log_reserved=False,
            fused=True,  # TransformerEngine's kernels; optimizers/fused_adam
            hides_tp=0.8,  # assumed of --tp-comm-overlap: userbuffers cut collectives in pieces beside products
        ),
        Engine(
            "deepspeed",
            # 0.19.8, runtime/config.py: ZeRO; tp, pp and cp are asked for in the program. So is recomputation: the
            # file only says how it is done, and what is written says where to ask for it
            file=File(
                "DeepSpeed",
                {
                    "fp32": {"precision": "fp32"},
                    "bf16-master": {"precision": "bf16"},
                    "bf16-master-fp32-grads": {"precision": "bf16", "grad_accum_dtype": "fp32"},
                    "fp16-master-fp32-grads": {"precision": "fp16", "grad_accum_dtype": "fp32"},
                },
                axes=(),
                replicas=False,
                recomputes=("none", "full"),
            ),
            # runtime/bf16_optimizer.py, fp16/: BF16 gradients, or FP32 with grad_accum_dtype
            recipes=("fp32", "bf16-master", "bf16-master-fp32-grads", "fp16-master-fp32-grads"),
            recipe="bf16-master",
            pipeline_zero=(0, 1),  # 0.19.8, runtime/pipe/engine.py: ZeRO-2 and -3 are refused
            # transformers' LlamaRMSNorm: counted with saved_tensors_hooks (transformers 5.23, torch 2.13): an FP32 copy
            # and the normalised copy
            norm_bytes=6,
            chunked_loss=True,  # runtime/sequence_parallel/ulysses_sp.py: TiledFusedLogitsLoss
            reserved_share=1.05,  # assumed, as FSDP's
        ),
        Engine(
            "nanotron",  # its code of February 2025
            # 2411b02, config/parallelism_config.py, config.py and models_config.py
            file=File(
                "nanotron",
                {
                    "bf16-master-fp32-grads": {"accumulate_grad_in_fp32": True},
                    "bf16": {"accumulate_grad_in_fp32": False},
                },
                axes=("tp", "pp"),
                zero_stages=(0, 1),
                pipeline_zero=(0, 1),
                replicas=False,
                schedules=("1f1b", "afab"),
                recomputes=("none", "full"),
                told_stages=False,
                families=("llama",),
                lacks=(
                    "experts",
                    "latent attention",
                    "norms of queries and keys (QK-norm)",
                    "heads of another width",
                    "fewer key/value heads than tp",
                ),
            ),
            recipes=("fp32", "bf16-master-fp32-grads"),
            recipe="bf16-master-fp32-grads",  # optim/gradient_accumulator.py: FP32GradientAccumulator
            zero_stages=(0, 1),  # optim/zero.py
            pipeline_zero=(0, 1),
            backward_grad_bytes=2,  # BF16 gradients of one backward, which are added to the FP32 ones when it ends
            bucket_bytes=1,  # assumed: 2 bytes of DDP's buckets, of which half is found
            update_bytes=6,  # assumed: FP32 and BF16 copies of all gradients
            swiglu_tensors=4,  # models/llama.py: act_fn(gate) * up, eager
            regathers=True,  # parallel/tensor_parallel/functional.py: tp_recompute_allgather, on by default
            loss_bytes=8,  # FP32 logits and their softmax
            tp_loss_bytes=8,  # parallel/tensor_parallel/functional.py: _ShardedCrossEntropy
            # two that are gathered into for every layer (MemoryBuffer), one that a product makes, one sent
            whole_sequences=4,
            cut="cost",  # helpers.py and models/llama.py, get_block_compute_costs: a stage is full with its share
            log_unit=GIB,
            unfilled_bytes=GIB // 5,  # assumed
            # CUDA's queue holds 1,024 launches, of which about one in 20 is a collective of tp
            queued_tensors=50,
            log_first=True,  # rank 0 writes the log
            # parallel/data_parallel/utils.py: gradients are summed in FP32 when the last backward has ended; tp waits
            # for each collective
            hides_behind_weights=False,
            hides_data=False,
            counts_tied_twice=True,  # models/llama.py, get_flops_per_sec: 6 N of all parameters and 12 L h s
        ),
    )
}

# Files of programs that are no engine of their own here.
PICOTRON = File(  # 59714b1, template/base_config.json and train.py
    "picotron",
    {"bf16": {}},
    axes=("tp", "pp", "cp"),
    order="dp-pp-cp-tp",
    zero_stages=(0,),
    pipeline_zero=(0,),
    replicas=False,
    schedules=("1f1b", "afab"),
    recomputes=("none",),
    cp_methods=("ring",),
    cp_shardings=("contiguous",),
    sequence_parallel=(False,),
    told_stages=False,
    families=("llama",),
    lacks=(
        "latent attention",
        "norms of queries and keys (QK-norm)",
        "tied head",
        "heads of another width",
        "fewer key/value heads than tp",
        "vocabulary that tp cuts unevenly",
    ),
)
ACCELERATE_MEGATRON = replace(  # Accelerate 1.15, MegatronLMPlugin in utils/dataclasses
    ENGINES["megatron"].file,
    program="Accelerate's Megatron-LM plugin",
    recipes={"fp32": {"precision": "fp32"}, "bf16-master-fp32-grads": {"precision": "bf16"}},
    axes=("tp", "pp"),  # it counts cp's ranks as data
    zero_stages=(0, 1),
    replicas=False,
    schedules=("1f1b",),
    recomputes=("full",),  # what it does unasked
    lacks=(*ENGINES["megatron"].file.lacks, "experts", "norms of queries and keys (QK-norm)"),
)


def engine_of(engine: str | Engine) -> Engine:
    """The engine of that name, or that engine.

    Raises   ValueError naming the engines that there are
    """
    if isinstance(engine, Engine):
        return engine
    one_of("engine", engine, tuple(ENGINES))
    return ENGINES[engine]
