"""What claims on messages between ranks are recomputed with: how many bytes, in which calls, over which link."""

from collections.abc import Sequence
from math import ceil
from typing import Literal

from course_lib.config import preset
from course_lib.hardware import (
    GB,
    GPUS,
    LINKS,
    PUBLISHED_DP_THROUGHPUT,
    Cluster,
    published_link,
)
from course_lib.hardware import gpu as gpu_of
from course_lib.hardware import link as link_of
from course_lib.layout import Layout, Mesh
from course_lib.layout.block_pairs import pairs, pairs_of_ranks
from course_lib.layout.mesh import links_of_axes
from course_lib.memory.flats import flats_of
from course_lib.memory.states import count_parameters
from course_lib.memory.zero import ZeroStage
from course_lib.run import Run
from course_lib.timing.collectives import collective_s, collective_steps
from course_lib.timing.data import accumulation_steps, dp_throughput, tokens_that_hide_a_gather
from course_lib.traffic import Call, attention_calls, calls, ring_all_reduce_bytes, sent_bytes
from course_lib.traffic.collectives import call_counts
from course_lib.traffic.data import flat_calls
from course_lib.traffic.tensor import tensor_calls
from course_lib.validate import Count, Index, Positive, Share, Size, checked

Values = dict[str, object]
H100 = GPUS["h100"]


def _zero_calls(stage: int, dp: int, micro_batches: int) -> list[Call]:
    run = Run(preset("toy"), Layout(dp=dp, zero_stage=stage, micro_batches=micro_batches), 64)
    return flat_calls(run, 1000 * dp, dp)


@checked
def zero_phases(stage: ZeroStage, micro_batches: Size = 1, dp: Size = 4) -> Values:
    """What a step sends in units of the parameters times (dp - 1) / dp: plain data parallelism sends 2."""
    listed = _zero_calls(stage, dp, micro_batches)
    unit = 2000 * dp * (dp - 1) // dp
    gathered = [call.place for call in listed if call.collective == "all_gather"]
    phases = {call.place: sent_bytes([call]) / unit for call in listed}
    total = sum(phases.values())
    return {
        "phases": total,
        "over_dp": total / 2,
        "gathered": gathered[0] if gathered else "nothing",
        "collectives": " and ".join(sorted({call.collective for call in listed})),
        "all_reduces": sum(call.count for call in listed if call.collective == "all_reduce"),
        "forward_calls": sum(call.count for call in listed if call.collective == "all_gather") // 2 * (stage == 3),
    }


def zero_table() -> Values:
    """Phases of each stage with one micro-batch, by what plain data parallelism sends, 2."""
    phases = [zero_phases(stage)["phases"] for stage in range(4)]
    return {"phases": phases, **{f"stage_{stage}": phases[stage] for stage in range(4)}}


@checked
def stage_1_phases(gradients: Literal["all_reduce", "reduce_scatter"]) -> Values:
    """ZeRO-1 with either way to sum gradients, then an all-gather of parameters."""
    summed = {"all_reduce": 2, "reduce_scatter": 1}[gradients]
    gathers = sum(call.count for call in _zero_calls(1, 4, 1) if call.collective == "all_gather")
    return {"phases": summed + gathers}


@checked
def buckets(model: str, dp: Size) -> Values:
    """Bytes and calls of the gradients of one step in buckets, beside one all-reduce for each tensor."""
    run = Run(preset(model), Layout(dp=dp), 64)
    flats = flats_of(run.config, run.layout)
    bucketed = [call for flat in flats for call in flat_calls(run, flat.numel, dp)]
    singly = [call for flat in flats for size in flat.sizes for call in flat_calls(run, size, dp)]
    return {
        "bytes_ratio": sent_bytes(bucketed) / sent_bytes(singly),
        "calls": len(bucketed),
        "calls_without": len(singly),
    }


@checked
def tensor_sums(model: str, tp: Size, seq_len: Size, sp: bool = False, passes: Literal[1, 2] = 2) -> Values:
    """Collectives of a layer under TP, forward (passes 1) or forward and backward, and what they send in a step."""
    run = Run(preset(model), Layout(tp=tp, sequence_parallel=sp), seq_len)
    places = ("layers forward", "layers backward")[:passes]
    listed = [call for call in tensor_calls(run, 0) if call.place in places]
    counted = call_counts(listed)
    layers = run.config.num_layers
    return {
        "calls_a_layer": sum(counted.values()) / layers,
        "gathers": counted.get("all_gather", 0) / layers,
        "payload_gb": sum(call.payload_bytes * call.count for call in listed) / GB,
        "sent": sent_bytes(listed),
        "forward_a_block": sum(c.count for c in listed if "forward" in c.place) / (2 * layers),
    }


@checked
def sequence_parallel_traffic(model: str, tp: Size, seq_len: Size, link: str = "nvlink3") -> Values:
    """What SP changes of TP's messages: bytes, calls, and seconds of two phases beside one all-reduce of 100 MB."""
    plain, sharded = (tensor_sums(model, tp, seq_len, sp) for sp in (False, True))
    network = Cluster(H100, link_of(link), LINKS["efa"])
    phases = sum(collective_s(name, 1e8, tp, network) for name in ("reduce_scatter", "all_gather"))
    return {
        "bytes_ratio": sharded["sent"] / plain["sent"],
        "calls_ratio": sharded["calls_a_layer"] / plain["calls_a_layer"],
        "time_ratio": phases / collective_s("all_reduce", 1e8, tp, network),
    }


@checked
def column_parallel_gathers(paired: bool, tp: Size = 8) -> Values:
    """All-gathers of the output of one column-parallel linear: none if a row-parallel one follows."""
    alone = Call("output", "all_gather", 2 * 4096, tp, 2)
    gathers = tensor_sums("llama-3.1-70b", tp, 4096)["gathers"] if paired else alone.count
    return {"gathers": gathers}


@checked
def input_gradient(summed: bool) -> Values:
    """x -> x w1 -> w2, cut for two ranks: the gradient of x on rank 0, beside that of one process."""
    w1, w2 = (2.0, 3.0), (5.0, 7.0)
    parts = [a * b for a, b in zip(w1, w2, strict=True)]
    return {"share": (sum(parts) if summed else parts[0]) / sum(parts)}


@checked
def tensor_traffic_share(model: str, tp: Size, utilisation: Share, gb_per_s: Positive) -> Values:
    """Seconds of TP's all-reduces beside seconds of computing, both of one token."""
    config = preset(model)
    sent = 4 * config.num_layers * ring_all_reduce_bytes(2 * config.d_model, tp, itemsize=2)
    compute_s = 6 * count_parameters(config) / (tp * utilisation * H100.bf16_flops)
    return {"share": sent / (gb_per_s * GB) / compute_s}


@checked
def hidden_gradients(model: str, shards: Size, dp: Size, sequences: Size, itemsize: Literal[2, 4] = 2) -> Values:
    """Seconds of the gradients' all-reduce over InfiniBand beside those of the last backward, at 40 % of the peak."""
    each = count_parameters(preset(model)) // shards
    comm_s = ring_all_reduce_bytes(each * itemsize, dp, itemsize=itemsize) / LINKS["ib-ndr400"].bytes_per_s
    backward_s = 4 * each * 4096 * sequences / (0.4 * H100.bf16_flops)
    return {"comm_s": comm_s, "backward_s": backward_s, "hidden": comm_s <= backward_s}


@checked
def gather_hidden(nodes: Size, tokens: Size) -> Values:
    """Whether ZeRO-3's gathers hide behind so many tokens a GPU, at measured bandwidths and 45 % of the peak."""
    bandwidth = published_link(nodes, "all_gather").bytes_per_s
    needed = tokens_that_hide_a_gather(8 * nodes, bandwidth, H100, 0.45)
    return {"needed": needed, "hidden": tokens >= needed}


@checked
def throughput_left(dp: Size, tokens: Size, link: str = "efa") -> Values:
    """Tokens/s per GPU beside those of 8 GPUs, modelled for 1.34B parameters at the playbook's speed."""
    second_per_token = 1 / PUBLISHED_DP_THROUGHPUT[8]
    of = {size: dp_throughput(size, tokens, tokens * second_per_token, 4 * 1.34e9, link_of(link)) for size in (8, dp)}
    return {"share": of[dp] / of[8]}


@checked
def reduce_scatter_gain(nodes: Count = 0) -> Values:
    """Seconds of an all-reduce over those of a reduce-scatter: by bytes (nodes 0), or by measured bandwidths."""
    if nodes == 0:
        return {"times": collective_steps("all_reduce", 8) / collective_steps("reduce_scatter", 8)}
    names = ("all_reduce", "reduce_scatter")
    seconds = [collective_s(name, 256e6, 8 * nodes, published_link(nodes, name)) for name in names]
    return {"times": seconds[0] / seconds[1]}


@checked
def ring_all_reduce(ranks: Size, more_ranks: Size = 512) -> Values:
    """Steps of a ring, what a rank sends of its payload, and how much more in a larger ring."""
    share = ring_all_reduce_bytes(ranks * 1000, ranks, itemsize=1) / (ranks * 1000)
    larger = ring_all_reduce_bytes(more_ranks * 1000, more_ranks, itemsize=1) / (more_ranks * 1000)
    return {"steps": collective_steps("all_reduce", ranks), "share": share, "times": larger / share}


@checked
def all_reduce_ms(payload_gb: Positive, ranks: Size) -> Values:
    """Milliseconds of a ring at line rate in one direction, over NVLink 4 and PCIe 4."""
    sent = ring_all_reduce_bytes(int(payload_gb * GB), ranks)
    return {name: 1e3 * sent / LINKS[key].bytes_per_s for name, key in (("nvlink", "nvlink4"), ("pcie", "pcie4"))}


@checked
def measured_bandwidth(nodes: Sequence[Size]) -> Values:
    """GB/s of an all-reduce of 256 MB, measured over so many nodes of 8 H100."""
    gb = [published_link(count).bytes_per_s / GB for count in nodes]
    return {"gb_per_s": gb, "falls": gb[0] / gb[-1]}


@checked
def boundary_message(batch: Size, seq_len: Size, width: Size) -> Values:
    """What crosses from stage to stage in BF16, and its milliseconds on a port of 400 Gb/s."""
    size = 2 * batch * seq_len * width
    return {"mb": size / 1e6, "mib": size / 2**20, "ms": 1e3 * size / LINKS["ib-ndr400"].bytes_per_s}


@checked
def boundary_ratio(model: str, pp: Size, v: Size, rank: Index) -> Values:
    """What a rank of an interleaved pipeline sends beside the same rank of 1F1B."""
    one, looped = (
        sent_bytes(calls(Run(preset(model), Layout.parse(f"pp={pp},micro_batches={2 * pp},{how}"), 4096), rank)["pp"])
        for how in ("schedule=1f1b", f"schedule=interleaved,v={v}")
    )
    return {"times": looped / one}


@checked
def ring_against_gather(model: str, seq_len: Size, cp: Size) -> Values:
    """Bytes and calls of keys and values of a layer, forward, by a ring and by an all-gather."""
    of = {}
    for method in ("ring", "all_gather"):
        listed = attention_calls(Run(preset(model), Layout(cp=cp, cp_method=method), seq_len))
        of[method] = [call for call in listed if "forward" in call.place]
    return {
        "bytes_ratio": sent_bytes(of["ring"]) / sent_bytes(of["all_gather"]),
        "ring_calls": sum(call.count for call in of["ring"]),
        "gather_calls": sum(call.count for call in of["all_gather"]),
    }


@checked
def ring_holds(cp: Size, from_rank: Literal["before", "after"]) -> Values:
    """Whose keys rank 0 has after one exchange, by the side from which it receives."""
    offset = -1 if from_rank == "before" else 1
    return {"keys_of": offset % cp}


@checked
def ulysses(model: str, seq_len: Size, cp: Size) -> Values:
    """What Ulysses sends forward in a layer, in units of tokens x width / P x (P - 1) / P, and its most ranks."""
    config = preset(model)
    run = Run(config, Layout(cp=cp, cp_method="ulysses"), seq_len)
    sent = sent_bytes(call for call in attention_calls(run) if "forward" in call.place)
    unit = 2 * seq_len * config.d_model // cp * (cp - 1) // cp
    return {"units": sent / unit, "most_ranks": config.num_kv_heads}


@checked
def causal_work(sharding: Literal["zigzag", "contiguous"], seq_len: Size, cp: Size) -> Values:
    """Pairs of queries and keys that each rank computes."""
    table = pairs(sharding, seq_len, cp)
    return {"pairs": pairs_of_ranks(table)}


@checked
def nodes_of_axis(layout: str, axis: Literal["tp", "cp", "pp", "data"]) -> Values:
    """How many nodes of 8 GPUs a group of an axis spans, and how many GPUs there are."""
    parsed = Layout.parse(layout)
    found = links_of_axes(parsed.mesh, 8, parsed.ep, parsed.folded)[axis]
    return {"nodes": found.nodes, "world_size": parsed.world_size}


@checked
def mesh(tp: Size, pp: Size, dp: Size) -> Values:
    """GPUs of a layout, and nodes of 8."""
    gpus = Mesh(tp=tp, pp=pp, dp=dp).world_size
    return {"gpus": gpus, "nodes": gpus / 8}


@checked
def degrees_left(gpus: Size, tp: Size, pp: Sequence[Size]) -> Values:
    """The dp that is left of so many GPUs, for each pp."""
    return {"dp": [gpus / (tp * size) for size in pp]}


@checked
def mixture(model: str, gpus: Size, pp: Size, ep: Size) -> Values:
    """The axes of a mixture of experts on so many GPUs: ep lies inside dp."""
    config = preset(model)
    layout = Layout(dp=gpus // pp, pp=pp, ep=ep, zero_stage=1, micro_batches=pp)
    layout.check_model(config, 4096)
    return {
        "dp": layout.dp,
        "tp": layout.tp,
        "gpus": layout.world_size,
        "expert_copies": layout.expert_dp,
        "top_k": config.moe.top_k,
        "nodes_a_token": config.moe.max_groups,
    }


@checked
def expert_capacity(tokens: Size, experts: Size, top_k: Size, capacity_factor: Positive) -> Values:
    """Rows that an expert takes."""
    return {"rows": ceil(capacity_factor * top_k * tokens / experts)}


@checked
def micro_batches(global_batch: Size, micro_batch: Size, dp: Size) -> Values:
    """Micro-batches of a step, as a fraction where the batch cannot be divided."""
    exact = global_batch / (micro_batch * dp)
    return {"steps": accumulation_steps(global_batch, micro_batch, dp) if exact % 1 == 0 else exact}


@checked
def line_rate(links: Sequence[str], directions: Literal[1, 2] = 1, lanes: Share = 1.0) -> Values:
    """GB/s of links, or of GPUs' links, in one direction or the sum of both; a drive has a share of 16 lanes."""
    found = [link_of(key if key in LINKS else gpu_of(key).link) for key in links]
    rates = [each.bytes_per_s if directions == 1 else each.both_directions_bytes_per_s for each in found]
    return {"gb_per_s": [lanes * rate / GB for rate in rates], "ratio": rates[0] / rates[-1]}


@checked
def ports_together(ports: Sequence[Size], gb_per_s: Positive) -> Values:
    """GB/s and Tb/s of so many links or ports of one rate."""
    return {
        "gb_per_s": [count * gb_per_s for count in ports],
        "tbit_per_s": [8 * count * gb_per_s / 1000 for count in ports],
    }
