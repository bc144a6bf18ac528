"""Bytes that the fullest rank of an engine holds at its peak, by kind: where an estimate asks for memory."""

from course_lib.engines import EngineFacts
from course_lib.flops import layer_matmul_parameters
from course_lib.hardware import Cluster
from course_lib.memory.budget import fullest_budget, overheads_of
from course_lib.run import Run, recipe_of
from course_lib.timing.layer import runs_ahead, stages_of
from course_lib.timing.rates import Rates
from course_lib.timing.step import StepTime

_RESERVE = "allocator's reserve"
NO_TENSORS = "no tensor"  # CUDA's context, cuBLAS, NCCL's buffers
# Of the memory: with more, over nodes, the allocator gives back what nobody holds, and nothing is queued.
_CROWDED_SHARE = 0.93
_SENT_OF_LAYER = 2  # tensors of a whole sequence that a layer sends in a pass: attention's, the MLP's
PIECES = 1.055  # of activations, what is reserved for them: pieces of the allocator that they leave
_DRAINS = 8  # power by which waiting for other ranks empties the queue


def held_bytes(run: Run, cluster: Cluster, engine: EngineFacts, time: StepTime, rates: Rates) -> dict[str, float]:
    """Bytes by kind at the largest moment of the fullest rank, and what is no tensor."""
    if engine.log_first:
        kinds = _of_first_stage(run, engine) | {NO_TENSORS: sum(overheads_of(run).values())}
    else:
        budget = fullest_budget(run, engine=engine.name)
        besides = dict(budget.overheads)
        kinds = dict(budget.at_peak) | {_RESERVE: besides.pop(_RESERVE, 0)}
        kinds[NO_TENSORS] = sum(besides.values())
    queued = _queued_bytes(run, cluster, engine, time, rates)
    in_a_node = run.layout.world_size <= cluster.gpus_per_node
    if in_a_node or sum(kinds.values()) + queued <= _CROWDED_SHARE * cluster.gpu.usable_bytes:
        kinds["queued"] = queued
    return {kind: float(size) for kind, size in kinds.items() if size}


def _queued_bytes(run: Run, cluster: Cluster, engine: EngineFacts, time: StepTime, rates: Rates) -> float:
    """Of tensors of a whole sequence that collectives of tp will read, in the queue of launches: as many as fill it, as
    far as Python runs ahead; in a pipeline at least those of the forwards that fill it."""
    layout = run.layout
    if layout.tp == 1 or not engine.queued_tensors:
        return 0.0
    a_pass = _SENT_OF_LAYER * max(stages_of(run, engine))
    if layout.pp == 1:
        most, filling = a_pass * min(2, layout.micro_batches), 0
    else:
        ahead = min(layout.micro_batches, layout.pp) - 1
        most = engine.queued_tensors if layout.micro_batches > layout.pp else a_pass * max(1, ahead)
        filling = min(engine.queued_tensors, a_pass * max(0, ahead - 1))
    number = max(min(engine.queued_tensors, most) * runs_ahead(run, cluster, engine, rates), filling)
    size = 2 * layout.micro_batch * run.seq_len * run.config.d_model
    return number * size * (1 - time.waiting_s / time.total_s) ** _DRAINS


def _of_first_stage(run: Run, engine: EngineFacts) -> dict[str, float]:
    """Tensor by tensor, as an engine whose log is of rank 0 keeps them: the first stage, with most micro-batches in
    flight. Of 592 measured runs this is 4 % off in the median; `budgets`, with what a backward makes besides, 5 %."""
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
        _RESERVE: float(engine.unfilled_bytes),
    }
