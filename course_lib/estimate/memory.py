"""Bytes that the fullest rank of an engine holds at its peak, by kind: where an estimate asks for memory.

An engine that runs ahead of its GPU has tensors in the queue of launches: a collective of tp reads tensors of a whole
sequence, and their memory is free once the GPU has read them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from course_lib.config import ModelConfig
from course_lib.engines import Engine
from course_lib.flops import layer_matmul_parameters
from course_lib.hardware import Cluster
from course_lib.layout import Layout
from course_lib.memory.budget import fullest_budget, overheads_of
from course_lib.memory.states import recipe_of
from course_lib.run import Run
from course_lib.timing.rates import Rates
from course_lib.timing.step import StepTime, runs_ahead, stages_of

NO_TENSORS = "no tensor"  # CUDA's context, cuBLAS, NCCL's buffers
CROWDED_SHARE = 0.93  # of the memory: with more the allocator gives back what nobody holds, and nothing stays queued
SENT_OF_LAYER = 2  # tensors of a whole sequence that a layer sends in a pass: attention's, the MLP's
DRAINS = 8  # power by which waiting for other ranks empties the queue


def held_bytes(run: Run, cluster: Cluster, engine: Engine, time: StepTime, rates: Rates) -> dict[str, float]:
    """Bytes by kind at the largest moment of the fullest rank, and what is no tensor."""
    kinds = dict(_tensors(run, engine))
    kinds[NO_TENSORS] = float(sum(_overheads(run).values()))
    queued = _queued_bytes(run, cluster, engine, time, rates)
    if sum(kinds.values()) + queued <= CROWDED_SHARE * cluster.gpu.usable_bytes:
        kinds["queued"] = queued
    return {kind: float(size) for kind, size in kinds.items() if size}


def _queued_bytes(run: Run, cluster: Cluster, engine: Engine, time: StepTime, rates: Rates) -> float:
    """Of tensors in the queue of launches: as many as fill it, as far as Python runs ahead; in a pipeline at least
    those of the forwards that fill it."""
    layout = run.layout
    if layout.tp == 1 or not engine.queued_tensors:
        return 0.0
    a_pass = SENT_OF_LAYER * max(stages_of(run, engine))
    if layout.pp == 1:
        most, filling = a_pass * min(2, layout.micro_batches), 0
    else:
        ahead = min(layout.micro_batches, layout.pp) - 1
        most = engine.queued_tensors if layout.micro_batches > layout.pp else a_pass * max(1, ahead)
        filling = min(engine.queued_tensors, a_pass * max(0, ahead - 1))
    number = max(min(engine.queued_tensors, most) * runs_ahead(run, cluster, engine, rates), filling)
    size = 2 * layout.micro_batch * run.seq_len * run.config.d_model
    return number * size * (1 - time.waiting_s / time.total_s) ** DRAINS


@lru_cache(maxsize=4096)
def _overheads(run: Run) -> dict[str, int]:
    return overheads_of(run)


# ---- tensors: until memory/ takes an engine's record, what each engine has otherwise is put on top here


@lru_cache(maxsize=4096)
def _tensors(run: Run, engine: Engine) -> dict[str, float]:
    if engine.log_first:
        return _of_first_stage(run, engine)
    under = _run_under(run, engine)
    config, layout = under.config, under.layout
    kinds = {kind: float(size) for kind, size in fullest_budget(under).at_peak.items()}
    tokens = layout.micro_batch * run.seq_len / layout.cp
    if run.operators:
        in_flight = min(layout.micro_batches, layout.pp)
        kinds["activations"] += tokens * config.num_layers / layout.pp * in_flight * _kept_outputs(config, layout)
    if layout.zero_stage == 3 and engine.root_gathered:
        kinds["gathered"] += 2 * (1 if config.tied else 2) * config.vocab_size * config.d_model / layout.tp
    if layout.pp == 1:
        extra = engine.loss_bytes - 12 if layout.tp == 1 else engine.tp_loss_bytes - 10
        kinds["logits"] += extra * tokens * config.vocab_size / layout.tp
    elif engine.message_buffers:
        share = layout.tp if layout.sequence_parallel else 1
        kinds["messages"] = 2 * 2 * layout.micro_batches * tokens * config.d_model / share
    kinds["unfilled"] = (engine.reserved_share - 1) * sum(kinds.values())
    return kinds


def _run_under(run: Run, engine: Engine) -> Run:
    """The run as the course's engines would have it in order to hold as the engine does."""
    layout, changes, states = run.layout, {}, run.recipe
    if run.operators:
        changes["recompute"] = "full"
    if layout.data_size == 1 and run.offload.parameters == "device":
        changes["zero_stage"] = 0  # there is nobody to shard over
    elif engine.pipeline_grads_whole and layout.pp > 1 and layout.zero_stage > 0:
        changes["zero_stage"] = 1
        states = "bf16-master-fp32-grads" if run.recipe == "bf16-master" else run.recipe
    return replace(run, layout=replace(layout, **changes), recipe=states, operators=False)


def _kept_outputs(config: ModelConfig, layout: Layout) -> float:
    """Bytes a token and layer: outputs of q, v, gate and down, and of attention."""
    D, H = config.d_model, config.head_dim
    return 2 * (2 * config.num_heads * H + config.num_kv_heads * H + config.d_ff + D) / layout.tp


def _of_first_stage(run: Run, engine: Engine) -> dict[str, float]:
    """Tensor by tensor, as nanotron's rank 0 has them: the first stage, whose micro-batches in flight are the most."""
    config, layout, recipe = run.config, run.layout, recipe_of(run.recipe)
    layers, ends = stages_of(run, engine)[0], 1 if layout.pp > 1 or config.tied else 2
    parameters = layers * (layer_matmul_parameters(config) + 2 * config.d_model)
    parameters = (parameters + ends * config.vocab_size * config.d_model) / layout.tp
    tokens = layout.micro_batch * run.seq_len
    queries, pairs = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    copied = pairs if config.num_kv_heads == config.num_heads else 0  # of one tensor with q: beside attention's copy
    kept = 4 * config.d_model + 2 * queries + pairs + copied + engine.swiglu_tensors * config.d_ff
    in_flight = layers * tokens * min(layout.micro_batches, layout.pp)
    has_buckets = layout.zero_stage == 0 and layout.dp > 1
    step = {
        "activations": PIECES * 2 * in_flight * kept / layout.tp,
        "logits": engine.loss_bytes * tokens * config.vocab_size / layout.tp if layout.pp == 1 else 0.0,
        "whole sequences": engine.whole_sequences * 2 * tokens * config.d_model if layout.tp > 1 else 0.0,
        "backward": (engine.backward_grad_bytes + engine.bucket_bytes * has_buckets) * parameters,
    }
    if (update := engine.update_bytes * parameters) > sum(step.values()):
        step = {"update": update}
    return {
        "parameters": recipe.param_bytes * parameters,
        "gradients": recipe.grad_bytes * parameters,
        "optimizer": (recipe.master_bytes + recipe.moment_bytes) * parameters / (layout.dp if layout.zero_stage else 1),
        **step,
        "unfilled": float(engine.unfilled_bytes),
    }


PIECES = 1.055  # of activations, what is reserved for them: pieces of the allocator that they leave
