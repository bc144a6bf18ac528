"""A lab's sheet, and its form with measured values beside modelled ones: both are text, written from the table.

Speed and memory are modelled as of FSDP2 without torch.compile: of the engines that course_lib/engines.py knows it is
nearest to the course's own engine. Bytes sent are exact, but for tokens that choose experts. Sums of a tensor are
modelled as of NCCL; no published measurement on one node or on two is faster, and the slowest ends their error bars.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from course_lib.estimate import Estimate, estimate
from course_lib.hardware import GB, MEASURED_PER_NODE, PUBLISHED_BUS_BANDWIDTH, Cluster, gpu, gpu_of_device, link
from course_lib.labs.table import ONE_GPU, SEQ_LEN, SUMMED_BYTES, SUMMED_BYTES_ON_CPU, Lab
from course_lib.layout import Layout
from course_lib.run import Run
from course_lib.timing.collectives import bus_bandwidth, collective_s
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.traffic.step import sent
from course_lib.validate import LARGEST_SIZE, Bytes, Size, check_fields, checked, instance, number, whole

FRAMEWORK, RECIPE = "fsdp2", "bf16-master"
PORT = 29_500
FIRST_QUESTION = 3  # behind the file and the form
PUBLISHED_BYTES, PUBLISHED_NODES = 256e6, (1, 2)
SHOWN = (  # in a form: what, its name, the size of its unit, the unit
    ("step_s", "step", 1e-3, "ms"),
    ("tokens_per_s_per_gpu", "tokens/s/GPU", 1, ""),
    ("peak_bytes", "peak", GB, "GB"),
)


@dataclass(frozen=True)
class Nodes:
    """Where a lab runs."""

    nodes: Size = 2
    gpus_per_node: Size = 4
    gpu: str = "h100"  # a GPU, such as h100
    nodes_link: str = "efa"  # the network between nodes, such as efa

    def __post_init__(self) -> None:
        check_fields(self)
        self.cluster()

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def of(self, lab: Lab) -> "Nodes":
        """Return it for a lab: of a lab of one GPU a single one."""
        return replace(self, nodes=1, gpus_per_node=1) if lab.ranks == ONE_GPU else self

    def __str__(self) -> str:
        cluster = self.cluster()
        between = f" with {cluster.between.name} between them" * (self.nodes > 1)
        return f"{_counted(self.nodes, 'node')} of {self.gpus_per_node} {cluster.gpu.name}{between}"

    def cluster(self, device: str | None = None) -> Cluster:
        """Return it as a model takes it; with the GPU of that name, as CUDA prints it, where the course knows it."""
        of = (device and gpu_of_device(device)) or gpu(self.gpu)
        return Cluster(of, link(of.link), link(self.nodes_link), self.gpus_per_node)


@checked
def modelled(lab: Lab, layout: Layout, cluster: Cluster) -> Estimate:
    """Return what is predicted of one layout of a lab on GPUs."""
    config, seq_len = lab.model(on_gpu=True)
    return estimate(Run(config, layout, seq_len, RECIPE), cluster, FRAMEWORK)


@checked
def sent_by_axis(lab: Lab, layout: Layout, on_gpu: bool = True) -> dict[str, int]:
    """Return the bytes that rank 0 sends in a step of one layout, by axis."""
    config, seq_len = lab.model(on_gpu)
    return sent(Run(config, layout, seq_len, RECIPE), 0)


def modelled_sent(lab: Lab, layout: Layout, on_gpu: bool = True) -> float:
    """Return the bytes that rank 0 sends in a step of one layout."""
    return sum(sent_by_axis(lab, layout, on_gpu).values())


@checked
def modelled_sums(machine: Nodes, payload_bytes: Bytes = SUMMED_BYTES, device: str | None = None) -> dict[str, dict]:
    """Return for each way to sum a tensor the range of its seconds, and the bytes that rank 0 sends.

    The range begins at what is modelled, and ends where only the least published share of its bandwidth is reached.
    Through rank 0 one message follows the other. A ring by hand waits for each of its steps on the slowest link.
    """
    cluster, ranks = machine.cluster(device), machine.num_ranks
    inside, between = cluster.inside, cluster.between
    of_peers = [inside if peer < machine.gpus_per_node else between for peer in range(1, ranks)]
    ring_sent = ring_all_reduce_bytes(payload_bytes, ranks)
    step_s = collective_s("send", payload_bytes / ranks, 2, between if machine.nodes > 1 else inside)
    sums = {
        "through rank 0": (
            2 * sum(collective_s("send", payload_bytes, 2, peer) for peer in of_peers),
            payload_bytes * (ranks - 1),
        ),
        "ring by hand": (2 * (ranks - 1) * step_s, ring_sent),
        "backend": (collective_s("all_reduce", payload_bytes, ranks, cluster), ring_sent),
    }
    least, _ = published_shares()
    return {
        name: {"step_s": (seconds, seconds / least), "sent_bytes": sent_bytes}
        for name, (seconds, sent_bytes) in sums.items()
    }


def published_shares() -> tuple[float, float]:
    """Return the least and the most of the modelled bandwidth that published collectives of one and two nodes reach."""
    shares = []
    for name, published in PUBLISHED_BUS_BANDWIDTH.items():
        for nodes in PUBLISHED_NODES:
            machine = Nodes(nodes, MEASURED_PER_NODE)
            seconds = collective_s(name, PUBLISHED_BYTES, machine.num_ranks, machine.cluster())
            shares.append(published[nodes] / bus_bandwidth(name, PUBLISHED_BYTES, seconds, machine.num_ranks))
    return min(shares), max(shares)


def launch_lines(lab: Lab, machine: Nodes) -> dict[str, str]:
    """Four ways to start the same lab on the same ranks."""
    nodes, per_node, ranks = machine.nodes, machine.gpus_per_node, machine.num_ranks
    program = f"-m course_lib.labs {lab.chapter} --out lab{lab.chapter}.json"
    meeting = f"--master-addr FIRST-NODE --master-port {PORT}"
    many = "--multi_gpu " * (ranks > 1)
    return {
        "srun": f"srun --nodes {nodes} --ntasks-per-node {per_node} --gpus-per-node {per_node} --time {lab.minutes} "
        f"python {program}",
        "torchrun, on each node with its own --node-rank": f"torchrun --nnodes {nodes} --node-rank 0 {meeting} "
        f"--nproc-per-node {per_node} {program}",
        "accelerate, on each node with its own --machine_rank": f"accelerate launch {many}--num_machines {nodes} "
        f"--machine_rank 0 --num_processes {ranks} --main_process_ip FIRST-NODE --main_process_port {PORT} {program}",
        "on one machine without GPUs, with a toy": f"torchrun --nproc-per-node {lab.ranks[0]} {program}",
    }


@checked
def sheet(lab: Lab, machine: Nodes = Nodes()) -> str:
    """Return the sheet of a lab as Markdown."""
    machine = machine.of(lab)
    lab.check_ranks(machine.num_ranks)
    half, gpus = machine.num_ranks // 2, _counted(machine.gpus_per_node, "GPU")
    with_gpus = f"{machine.nodes} nodes with {gpus} each" if machine.nodes > 1 else f"1 node with {gpus}"
    ways = "\n\n".join(f"{way}:\n\n```sh\n{line}\n```" for way, line in launch_lines(lab, machine).items())
    return f"""# Lab {lab.chapter}: {lab.title}

{lab.aim.format(n=machine.num_ranks, half=half, many=4 * machine.num_ranks)}
The chapter is [{lab.notebook}](../../notebooks/{lab.notebook}.ipynb).

## What you need

{with_gpus}, for at most {lab.minutes} minutes. {_what_is_run(lab)}
Look at the nodes first: `course cluster init site` with your partition, then `sbatch site/check.sbatch`.

## What to submit

One of these. Each runs all lines of the table below, and rank 0 writes the file.
FIRST-NODE is the name of the first node. If its port {PORT} is taken, give another one on all nodes.

{ways}

From a notebook:

```python
from course_lib.cluster import read_site
from course_lib.labs.measure import run_lab
from course_lib.launch import launch

where = read_site("site/site.toml").slurm({machine.gpus_per_node})
measured = launch(run_lab, {machine.num_ranks}, "{lab.chapter}", where=where, timeout=600)[0]
```

## What it should show

Modelled, on {machine}.
Bytes sent are counted by formula.
{_layouts_table(lab, machine) if lab.layouts else _sums_table(machine)}

## What to hand in

1. `lab{lab.chapter}.json`.
2. The form: `course lab {lab.chapter} --measured lab{lab.chapter}.json`.
{chr(10).join(f"{number}. {question.asks}" for number, question in enumerate(lab.questions, FIRST_QUESTION))}
"""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _what_is_run(lab: Lab) -> str:
    if not lab.layouts:
        return f"Each rank has a tensor of {SUMMED_BYTES // 10**6} MB."
    name = lab.model(on_gpu=True)[0].name.replace("B", " billion parameters", 1)
    return f"The model has {name}, sequences have {SEQ_LEN:,} tokens."


def _sums_table(machine: Nodes) -> str:
    rows = []
    for name, told in modelled_sums(machine).items():
        fast, slow = (seconds * 1e3 for seconds in told["step_s"])
        rows.append(f"| {name} | {fast:.2f} to {slow:.2f} | {told['sent_bytes'] / 1e6:,.0f} |")
    return f"""The first time is modelled: no published collective is faster. The second is as slow \
as the slowest published one.

| sum | call, ms | sent by rank 0, MB |
|---|--:|--:|
{chr(10).join(rows)}"""


def _layouts_table(lab: Lab, machine: Nodes) -> str:
    layouts, cluster, rows = lab.layouts_on(machine.num_ranks), machine.cluster(), []
    for layout in layouts:
        one = modelled(lab, layout, cluster)
        (slow, fast), (few, most) = one.speed_range, one.memory_range
        megabytes = modelled_sent(lab, layout) / 1e6
        speed = f"{one.step_s * 1e3:,.0f} | {one.tokens_per_s_per_gpu:,.0f} ({slow:,.0f} to {fast:,.0f})"
        if one.memory_bytes > one.usable_bytes:  # no speed is told of what is estimated to need more than there is
            speed = f"{one.room} | "
        rows.append(
            f"| `{layout}` | {speed} | {one.memory_bytes / GB:.1f} ({few / GB:.1f} to {most / GB:.1f}) | "
            f"{megabytes:,.0f} |"
        )
    return f"""In brackets: between which values nine in ten measured runs of such a kind lay.
No speed is told of a layout that needs more than the {cluster.gpu.usable_bytes / GB:.1f} GB of a GPU.

| layout | step, ms | tokens/s/GPU | peak of a GPU, GB | sent by rank 0, MB |
|---|--:|--:|--:|--:|
{chr(10).join(rows)}"""


@checked
def compare(lab: Lab, measured: Mapping, machine: Nodes = Nodes()) -> list[dict]:
    """Return a row for each run: what was measured, what was modelled, and whether it lies where nine in ten do.

    Of CPU ranks only the bytes sent are modelled.
    Raises   ValueError for a file of another lab, or one that lacks something
    """
    if measured.get("lab") != lab.chapter:
        raise ValueError(f"the file is of lab {measured.get('lab')!r}; give one of lab {lab.chapter}")
    try:
        _check_measured(lab, measured)
        machine = replace(machine, nodes=measured["nodes"], gpus_per_node=measured["ranks"] // measured["nodes"])
        rows = []
        for run in measured["runs"]:
            told = _told(lab, run["run"], machine, measured["device"])
            ranges = {name: value for name, value in told.items() if name != "sent_bytes"}
            rows.append({
                "run": run["run"],
                "measured": {name: run[name] for name in ("step_s", "sent_bytes")} | {
                    name: run[name] for name in ("tokens_per_s_per_gpu", "peak_bytes") if lab.layouts
                },
                "modelled": told,
                "inside": {name: low <= run[name] <= high for name, (low, high) in ranges.items()},
            })  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the file lacks something, or has another kind of it ({error}); write one with: python -m course_lib.labs"
        ) from None
    return rows


def _check_measured(lab: Lab, measured: Mapping) -> None:
    needed = ("step_s", "sent_bytes", *["tokens_per_s_per_gpu"] * bool(lab.layouts))
    for name in ("ranks", "nodes"):
        whole(name, measured[name], most=LARGEST_SIZE)
    instance("device", measured["device"], str)
    for run in measured["runs"]:
        instance("run", run["run"], str)
        for name in ("step_s", "tokens_per_s_per_gpu", "peak_bytes", "sent_bytes"):
            if run.get(name) is not None or name in needed:
                number(f"{name} of {run['run']}", run[name], least=0, above=0 if name == "step_s" else None)
    if not measured["runs"]:
        raise ValueError("the file has no run; write one with: python -m course_lib.labs")


def _told(lab: Lab, run: str, machine: Nodes, device: str) -> dict[str, object]:
    """What is modelled of a run: the bytes sent, and on a GPU the ranges of the rest."""
    on_gpu = device != "cpu"
    if not lab.layouts:
        of_ways = modelled_sums(machine, SUMMED_BYTES if on_gpu else SUMMED_BYTES_ON_CPU, device)
        return {name: of_ways[run][name] for name in ("step_s", "sent_bytes")[not on_gpu :]}
    layout = Layout.parse(run)
    told: dict[str, object] = {"sent_bytes": modelled_sent(lab, layout, on_gpu)}
    if on_gpu:
        one = modelled(lab, layout, machine.cluster(device))
        told |= {"tokens_per_s_per_gpu": one.speed_range, "peak_bytes": one.memory_range}
    return told


@checked
def form(lab: Lab, measured: Mapping, machine: Nodes = Nodes()) -> str:
    """Return the form of a lab: measured values beside modelled ones, in lines to print."""
    rows = compare(lab, measured, machine)
    lines = [
        f"lab {lab.chapter}, {lab.title}: measured on {_counted(measured['ranks'], 'rank')} on "
        f"{_counted(measured['nodes'], 'node')}, {measured['device']}"
    ]
    for row in rows:
        seen, told = row["measured"], row["modelled"]
        lines.append(row["run"])
        for name, label, unit, word in SHOWN:
            if seen.get(name) is not None:
                lines.append(_line(label, seen[name], told.get(name), unit, word))
        same = "exactly as counted" if seen["sent_bytes"] == told["sent_bytes"] else (
            f"by formula {told['sent_bytes'] / 1e6:,.3f} MB"
        )  # fmt: skip
        lines.append(f"  sent by rank 0{seen['sent_bytes'] / 1e6:12,.3f} MB   {same}")
    if measured["device"] == "cpu":
        lines.append("The model is of GPUs: beside seconds of CPU ranks nothing is modelled.")
    fastest = max(rows, key=lambda row: row["measured"].get("tokens_per_s_per_gpu", 1 / row["measured"]["step_s"]))[
        "run"
    ]
    return "\n".join([*lines, f"fastest measured: {fastest}"])


def _line(name: str, seen: float, told: tuple[float, float] | None, unit: float, word: str) -> str:
    line = f"  {name:14}{seen / unit:12,.1f} {word:4}"
    if told is None:
        return line.rstrip()
    low, high = told
    where = "inside" if low <= seen <= high else "below" if seen < low else "above"
    return f"{line} modelled {low / unit:,.1f} to {high / unit:,.1f}: {where}"
