"""A lab's sheet, and its form with measured values beside modelled ones: both are text, written from the table.

Speed and memory are modelled as of FSDP2 without torch.compile: of the frameworks that course_lib/predict knows it is
nearest to the course's own engine. Bytes sent are exact, but for tokens that choose experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from course_lib.hardware import GB, Cluster, gpu, gpu_of_device, link
from course_lib.labs.table import SEQ_LEN, Lab
from course_lib.layout import Layout
from course_lib.predict import Prediction, predict
from course_lib.run import Run
from course_lib.traffic.step import sent
from course_lib.validate import Size, check_fields, checked

FRAMEWORK, RECIPE = "fsdp2", "bf16-master"
PORT = 29_500


@dataclass(frozen=True)
class Machine:
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

    def cluster(self, device: str | None = None) -> Cluster:
        """Return it as a model takes it; with the GPU of that name, as CUDA prints it, where the course knows it."""
        of = (device and gpu_of_device(device)) or gpu(self.gpu)
        return Cluster(of, link(of.link), link(self.nodes_link), self.gpus_per_node)


@checked
def modelled(lab: Lab, layout: Layout, cluster: Cluster) -> Prediction:
    """Return what is predicted of one layout of a lab on GPUs."""
    config, seq_len = lab.model(on_gpu=True)
    return predict(Run(config, layout, seq_len, RECIPE), cluster, FRAMEWORK)


@checked
def modelled_sent(lab: Lab, layout: Layout, on_gpu: bool = True) -> float:
    """Return the bytes that rank 0 sends in a step of one layout."""
    config, seq_len = lab.model(on_gpu)
    return sum(sent(Run(config, layout, seq_len, RECIPE), 0).values())


def launch_lines(lab: Lab, machine: Machine) -> dict[str, str]:
    """Four ways to start the same lab on the same ranks."""
    nodes, per_node, ranks = machine.nodes, machine.gpus_per_node, machine.num_ranks
    program = f"-m course_lib.labs {lab.chapter} --out lab{lab.chapter}.json"
    meeting = f"--master-addr FIRST-NODE --master-port {PORT}"
    return {
        "srun": f"srun --nodes {nodes} --ntasks-per-node {per_node} --gpus-per-node {per_node} --time {lab.minutes} "
        f"python {program}",
        "torchrun, on each node with its own --node-rank": f"torchrun --nnodes {nodes} --node-rank 0 {meeting} "
        f"--nproc-per-node {per_node} {program}",
        "accelerate, on each node with its own --machine_rank": f"accelerate launch --multi_gpu --num_machines {nodes} "
        f"--machine_rank 0 --num_processes {ranks} --main_process_ip FIRST-NODE --main_process_port {PORT} {program}",
        "on one machine without GPUs, with a toy": f"torchrun --nproc-per-node 4 {program}",
    }


@checked
def sheet(lab: Lab, machine: Machine = Machine()) -> str:
    """Return the sheet of a lab as Markdown."""
    layouts, cluster = lab.layouts_on(machine.num_ranks), machine.cluster()
    config, _ = lab.model(on_gpu=True)
    rows = []
    for layout in layouts:
        one = modelled(lab, layout, cluster)
        (slow, fast), (few, most) = one.speed_range, one.memory_range
        megabytes = modelled_sent(lab, layout) / 1e6
        rows.append(
            f"| `{layout}` | {one.step_s * 1e3:,.0f} | {one.tokens_per_s_per_gpu:,.0f} ({slow:,.0f} to {fast:,.0f}) | "
            f"{one.memory_bytes / GB:.1f} ({few / GB:.1f} to {most / GB:.1f}) | {megabytes:,.0f} |"
        )
    ways = "\n\n".join(f"{way}:\n\n```sh\n{line}\n```" for way, line in launch_lines(lab, machine).items())
    half = machine.num_ranks // 2
    return f"""# Lab {lab.chapter}: {lab.title}

{lab.aim.format(n=machine.num_ranks, half=half, many=4 * machine.num_ranks)}
The chapter is [{lab.notebook}](../../notebooks/{lab.notebook}.ipynb).

## What you need

{machine.nodes} nodes with {machine.gpus_per_node} GPUs each, for at most {lab.minutes} minutes. The model has \
{config.name.replace("B", " billion parameters", 1)}, sequences have {SEQ_LEN:,} tokens.
Look at the nodes first: `course cluster init site` with your partition, then `sbatch site/check.sbatch`.

## What to submit

One of these. Each runs all layouts of the table below, and rank 0 writes the file.

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

Modelled, on {machine.nodes} nodes of {machine.gpus_per_node} {cluster.gpu.name} with {cluster.between.name} between \
them.
In brackets: between which values nine in ten measured runs of such a kind lay.
Bytes sent are counted by formula.

| layout | step, ms | tokens/s/GPU | peak of a GPU, GB | sent by rank 0, MB |
|---|--:|--:|--:|--:|
{chr(10).join(rows)}

## What to hand in

1. `lab{lab.chapter}.json`.
2. The form: `course lab {lab.chapter} --measured lab{lab.chapter}.json`.
{chr(10).join(f"{number}. {question}" for number, question in enumerate(lab.questions, 3))}
"""


@checked
def compare(lab: Lab, measured: Mapping, machine: Machine = Machine()) -> list[dict]:
    """Return a row for each layout: what was measured, what was modelled, and whether it lies where nine in ten do.

    Of CPU ranks only the bytes sent are modelled.
    Raises   ValueError for a file of another lab, or one that lacks something
    """
    if measured.get("lab") != lab.chapter:
        raise ValueError(f"the file is of lab {measured.get('lab')!r}; give one of lab {lab.chapter}")
    try:
        on_gpu, ranks = measured["device"] != "cpu", measured["ranks"]
        machine = Machine(measured["nodes"], ranks // measured["nodes"], machine.gpu, machine.nodes_link)
        runs = [(Layout.parse(run["layout"]), run) for run in measured["runs"]]
        rows = []
        for layout, run in runs:
            row = {
                "layout": str(layout),
                "measured": {
                    name: run[name] for name in ("step_s", "tokens_per_s_per_gpu", "peak_bytes", "sent_bytes")
                },
                "modelled": {"sent_bytes": modelled_sent(lab, layout, on_gpu)},
                "inside": {},
            }
            if on_gpu:
                one = modelled(lab, layout, machine.cluster(measured["device"]))
                row["modelled"] |= {"tokens_per_s_per_gpu": one.speed_range, "peak_bytes": one.memory_range}
                row["inside"] = {
                    name: low <= run[name] <= high
                    for name, (low, high) in (
                        ("tokens_per_s_per_gpu", one.speed_range), ("peak_bytes", one.memory_range),
                    )
                }  # fmt: skip
            rows.append(row)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the file lacks something ({error}); write one with: python -m course_lib.labs") from None
    return rows


@checked
def form(lab: Lab, measured: Mapping, machine: Machine = Machine()) -> str:
    """Return the form of a lab: measured values beside modelled ones, in lines to print."""
    rows = compare(lab, measured, machine)
    lines = [
        f"lab {lab.chapter}, {lab.title}: measured on {measured['ranks']} ranks on {measured['nodes']} "
        f"node{'s' * (measured['nodes'] > 1)}, {measured['device']}"
    ]
    for row in rows:
        seen, told = row["measured"], row["modelled"]
        lines.append(row["layout"])
        lines.append(f"  step          {seen['step_s'] * 1e3:12,.1f} ms")
        lines.append(_line("tokens/s/GPU", seen["tokens_per_s_per_gpu"], told.get("tokens_per_s_per_gpu"), 1, ""))
        if seen["peak_bytes"] is not None:
            lines.append(_line("peak", seen["peak_bytes"], told.get("peak_bytes"), GB, "GB"))
        same = "exactly as counted" if seen["sent_bytes"] == told["sent_bytes"] else (
            f"by formula {told['sent_bytes'] / 1e6:,.3f} MB"
        )  # fmt: skip
        lines.append(f"  sent by rank 0{seen['sent_bytes'] / 1e6:12,.3f} MB   {same}")
    if measured["device"] == "cpu":
        lines.append("The model is of GPUs: beside seconds of CPU ranks nothing is modelled.")
    fastest = max(rows, key=lambda row: row["measured"]["tokens_per_s_per_gpu"])["layout"]
    return "\n".join([*lines, f"fastest measured: {fastest}"])


def _line(name: str, seen: float, told: tuple[float, float] | None, unit: float, word: str) -> str:
    line = f"  {name:14}{seen / unit:12,.1f} {word:4}"
    if told is None:
        return line.rstrip()
    low, high = told
    where = "inside" if low <= seen <= high else "below" if seen < low else "above"
    return f"{line} modelled {low / unit:,.1f} to {high / unit:,.1f}: {where}"
