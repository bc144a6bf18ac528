"""The clock: modelled seconds of one optimizer step of a whole layout, and what they are spent on.

It is a model with seven fitted constants (rates.py); docs/PREDICTOR.md has its errors beside measured and published
runs. An engine is data (engines.py). What the clock puts together are the models of the chapters:

    compute     products: FLOPs at a share of the peak that falls with few rows or narrow matrices, or the time to read
                their weights; attention at its kernel's rate; small operations: bytes over the memory's bandwidth
    launches    a layer takes at least the time to launch its kernels
    tp, sp      their calls (traffic/) as NCCL would do them, less what weight gradients hide (tensor.py)
    cp          of each layer what the ring does not hide, and what the busiest rank waits (context.py)
    ep          all-to-alls of expected rows, less what the engine hides
    bubble      what the busiest rank waits for other ranks, all of the above counted into the stages
    transfer    what the same step takes longer since messages between stages take time
    data        gradients and parameters of ZeRO, less what computing hides; once a step the other sums of gradients
    update      the optimizer's bytes, and what states that are offloaded take over PCIe

A network that was measured (`Link.by_nodes`) gives what it gave over that many nodes, and its ranks wait for each other
as they did in the measured runs. Assumed: each GPU has its own port to the network; computing and communicating do not
slow each other down; no expert is more popular than other experts.

Source   Narayanan et al. 2021 (arXiv:2104.04473), section 3; Llama Team 2024 (arXiv:2407.21783), table 4
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache

from course_lib.engines import ENGINES, EngineFacts, engine_of
from course_lib.flops import flops_per_token, matmul_parameters
from course_lib.hardware import Cluster, peak_flops
from course_lib.layout import Layout
from course_lib.layout.mesh import AXES
from course_lib.run import Run
from course_lib.schedules import bubble, stages_per_rank
from course_lib.schedules.simulator import Costs
from course_lib.timing.collectives import ranks_in_a_node
from course_lib.timing.data import exposed_data_s, update_s
from course_lib.timing.layer import Case, Times, ends_times, layer_times, stages_of
from course_lib.timing.rates import RATES, Rates
from course_lib.timing.rates import mfu as mfu_of
from course_lib.validate import Size, checked


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, as the busiest rank spends them; `parts` add up to total_s."""

    compute_s: float
    launches_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    bubble_s: float
    transfer_s: float
    waiting_s: float
    data_s: float
    update_s: float
    num_tokens: int
    num_gpus: int
    model_flops: float  # of the whole step: 6 N + 12 L h s a token, of frozen weights 4 N; without recomputation
    causal_flops: float  # with the half of attention's scores that a causal mask leaves
    peak_flops_per_s: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they are spent on, the first ten fields; all but compute is exposed: nothing hides it."""
        return {field.name[:-2]: getattr(self, field.name) for field in fields(self)[:10]}

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (0 to 1), attention counted whole, as most publish it."""
        return mfu_of(self.model_flops, self.total_s, self.num_gpus, self.peak_flops_per_s)

    @property
    def causal_mfu(self) -> float:
        """The same with half of attention's scores, as kernels do it: the longer sequences, the more that differs."""
        return mfu_of(self.causal_flops, self.total_s, self.num_gpus, self.peak_flops_per_s)

    @property
    def working_s(self) -> float:
        """What a GPU alone would take for its part: computing, launching, the update."""
        return self.compute_s + self.launches_s + self.update_s

    @property
    def waiting_share(self) -> float:
        """The share of the step (0 to 1) that is exposed communication, and the pipeline's bubble."""
        return 1 - self.working_s / self.total_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.num_tokens / self.total_s / self.num_gpus


@checked
def step_time(run: Run, cluster: Cluster, engine: str | EngineFacts = "course", rates: Rates = RATES) -> StepTime:
    """Model one optimizer step of a run; ValueError for experts that the engine has not."""
    case = Case(run, cluster, engine_of(engine), rates)
    config, layout = run.config, run.layout
    if config.moe is not None and "experts" in case.engine.file.refuses:
        able = ", ".join(name for name, one in ENGINES.items() if "experts" not in one.file.refuses)
        raise ValueError(f"{case.engine.name} has no experts, but {config.name} has; choose another engine ({able})")
    ranks = [Times()] * layout.pp  # of a micro-batch
    for rank, times in zip(layout.rank_of_stage, _stage_times(case), strict=True):
        ranks[rank] = ranks[rank].plus(times)
    busiest, bubble_s = _pipeline(layout, ranks)
    of_layers = ("compute_s", "launches_s", "tp_s", "cp_s", "ep_s")
    spent = {name: layout.micro_batches * getattr(ranks[busiest], name) for name in of_layers}
    data_s = max(exposed_data_s(case, ranks[pp_rank], pp_rank) for pp_rank in {0, layout.pp - 1})
    num_tokens = layout.sequences_per_step * run.seq_len
    frozen = 2 * matmul_parameters(config) if run.lora else 0  # FLOPs a token of weights' gradients that nobody makes
    # messages that a micro-batch waits for: at each neighbour of a stage, and while the pipeline fills
    waits = layout.micro_batches * min(2, layout.pp - 1) * layout.stages_per_rank + max(0, layout.pp - 2)
    return StepTime(
        **spent,
        bubble_s=bubble_s,
        transfer_s=2 * (layout.num_stages - 1) * _transfer_s(case),
        waiting_s=waits * rates.stall_s * case.slowness,
        data_s=data_s,
        update_s=update_s(case),
        num_tokens=num_tokens,
        num_gpus=layout.world_size,
        model_flops=num_tokens * (flops_per_token(config, run.seq_len) - frozen),
        causal_flops=num_tokens * (flops_per_token(config, run.seq_len, causal=True) - frozen),
        peak_flops_per_s=peak_flops(cluster.gpu),
    )


def _pipeline(layout: Layout, ranks: Sequence[Times]) -> tuple[int, float]:
    """The rank that decides how long a step takes, and the seconds that it waits for other ranks."""
    if layout.pp == 1:
        return 0, 0.0
    slots = [times.total_s for times in ranks]
    if layout.schedule == "1f1b":
        return _one_f_one_b_waits(slots, layout.micro_batches)
    busiest = max(range(layout.pp), key=lambda rank: slots[rank])
    if layout.schedule == "naive":  # one rank at a time
        return busiest, layout.micro_batches * (sum(slots) - slots[busiest])
    return busiest, sum(slots) / layout.pp * waiting_slots(layout.schedule, layout.pp, layout.micro_batches, layout.v)


@lru_cache(maxsize=1024)
def least_waiting_slots(name: str, pp: int, v: int) -> float:
    """How many micro-batches' time a rank waits in a step of equal stages at least; with m >= 2 pp - 1 just as long.

    The schedule's closed form, where it holds for these shares of a pass; on a V the simulator's (tests/timing), where
    a stage is half of a rank's layers.
    """
    forward, inputs, weights = _SHARES_OF_PASSES
    if name == "zbv":
        return (pp - 1) * inputs / 2
    if name == "dualpipe_v":
        return (pp - 1) * (inputs - weights + max(forward, inputs - forward / max(1, pp - 1))) / 2
    if name in ("naive", "1f1b"):
        return 0.0
    costs = Costs(*(share / stages_per_rank(name, v) for share in _SHARES_OF_PASSES))
    return bubble(name, pp, 2 * pp, v, costs, barrier=True).idle_s


def waiting_slots(name: str, pp: int, micro_batches: int, v: int) -> float:
    """How many micro-batches' time a rank waits in a step of equal stages, with any number of micro-batches.

    A form for each schedule, for these shares of a pass: the simulator finds the same (tests/timing).
    """
    forward, inputs, weights = _SHARES_OF_PASSES
    missing = max(0, 2 * pp - 1 - micro_batches)
    more = {
        "zb_h1": max(0, pp - micro_batches) * weights,
        "zb_h2": missing // 2 * inputs + missing % 2 * (inputs - weights),
        "zbv": missing * (inputs - weights) / 2,
    }.get(name, 0.0)
    waits = least_waiting_slots(name, pp, v) + more
    if name == "zbv":  # with few micro-batches no rank has other work until the first gradients have come
        waits = max(waits, (pp - 1) * inputs + (pp - micro_batches) * (forward if micro_batches < pp else weights))
    return waits


_SHARES_OF_PASSES = (0.33, 0.36, 0.31)  # of F, I and W, as attention's backward takes more than its forward


def _one_f_one_b_waits(slots: Sequence[float], micro_batches: Size) -> tuple[int, float]:
    """Return the stage that decides how long a 1F1B step takes, and the seconds that it waits in it. slots: seconds of
    each stage, forward and backward of one micro-batch. A stage first waits for stages before it. Then it runs ahead,
    one micro-batch for each stage behind it, and waits for the first gradient if that comes later; and again for the
    last one. A backward takes twice as long as a forward."""
    found, before, total = [], 0.0, sum(slots)
    for stage, slot in enumerate(slots):
        behind, ahead = total - before - slot, len(slots) - 1 - stage
        waits = before + max(0.0, behind - min(ahead, micro_batches - 1) * slot / 3)
        if micro_batches > ahead + 1:
            waits += max(0.0, behind - ahead * slot * 2 / 3)
        found.append((micro_batches * slot + waits, stage, waits))
        before += slot
    return max(found)[1:]


@checked
def stage_costs(run: Run, cluster: Cluster, engine: str | EngineFacts = "course", rates: Rates = RATES) -> Costs:
    """Return what the simulator needs: seconds of each stage's F, I and W, and of a transfer between stages."""
    case = Case(run, cluster, engine_of(engine), rates)
    columns = zip(*((times.forward_s, times.input_s, times.weight_s) for times in _stage_times(case)), strict=True)
    return Costs(*columns, _transfer_s(case))


def _transfer_s(case: Case) -> float:
    """Seconds of a message between stages: activations of one micro-batch."""
    layout = case.run.layout
    if layout.pp == 1:
        return 0.0
    is_one_node = layout.world_size <= case.cluster.gpus_per_node
    near = is_one_node if layout.order == AXES else ranks_in_a_node(layout, case.cluster, "pp") > 1
    link = case.cluster.inside if near else case.cluster.between
    size = 2 * case.tokens * case.run.config.d_model / (layout.tp if layout.sequence_parallel else 1)
    return link.latency_s + size / link.achieved_bytes_per_s


def _stage_times(case: Case) -> list[Times]:
    """The times of each stage: so many dense layers, so many with experts, and the two ends."""
    layers = stages_of(case.run, case.engine)
    config, found, before, last = case.run.config, [], 0, len(layers) - 1

    @cache
    def times_of(dense: int, moe: int, first: bool, last: bool) -> Times:
        times = Times()
        for number, experts in ((dense, False), (moe, True)):
            if number:
                times = times.plus(layer_times(case, experts), number)
        return times.plus(ends_times(case, first, last)) if first or last else times

    for stage, count in enumerate(layers):
        moe = config.moe_layers_before(before + count) - config.moe_layers_before(before)
        found.append(times_of(count - moe, moe, stage == 0, stage == last))
        before += count
    return found
