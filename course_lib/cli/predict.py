"""`course predict` and `course calibrate`: what runs of a table would show on a cluster.

course predict runs.csv --models models.json --gpu h100-80g --nodes-link efa --recipe nanotron --seq 4096 --out out.csv
course calibrate measured.csv --models models.json --gpu h100-80g --nodes-link efa --recipe torchtitan --out mine.json
course predict runs.csv ... --calibration mine.json --breakdown --sensitivity
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from course_lib.cli.asked import Nodes, Tokens, cluster_asked, models_asked
from course_lib.config import ModelConfig, preset
from course_lib.engines import ENGINES
from course_lib.estimate import Calibration, Estimate, calibrate, predict_rows, read_rows, write_table
from course_lib.estimate import sensitivity as assumptions
from course_lib.estimate.calibrate import BOUNDS, HELD, measured_step_s, ranges
from course_lib.hardware import GB, Cluster
from course_lib.shapes import is_preset
from course_lib.timing import RATES
from course_lib.validate import one_of, whole, writable_file


@dataclass(frozen=True, kw_only=True)
class Site(Nodes):
    """Where and with what the runs of a table train."""

    nodes_link: str = "efa"
    """the network between nodes, such as efa, with one port a GPU; or GB/s for each GPU"""
    recipe: str = "nanotron"
    """the engine whose runs these are: nanotron, megatron, fsdp2, torchtitan, deepspeed, course"""
    seq: Tokens = 4096
    """tokens of a sequence: 4096 or 4K"""

    def cluster(self) -> Cluster:
        whole("seq", self.seq)
        one_of("recipe", self.recipe, tuple(ENGINES))
        return cluster_asked(self.record(), self.nodes_link, self.inside, self.per_node)


def predict_runs(
    runs: Positional[Path],
    out: Path,
    models: Path | None = None,
    machine: OmitArgPrefixes[Site] = Site(),
    calibration: Path | None = None,
    error_bars: bool = False,
    breakdown: bool = False,
    sensitivity: bool = False,
) -> int:
    """Predict peak memory, tokens/s and MFU of each run of a table, and write the table with them added.

    Args:
        runs: CSV with model, nodes, gpus, mbs, grad_acc, dp, pp, tp, zero; also cp, ep, seq, precision, recompute,
            states, finetune, optimizer, offload, attention, loss_chunks, ...
        out: the CSV that is written
        models: JSON with the shapes of its models that are no presets, or a config.json of transformers
        machine: the cluster, and whose runs they are
        calibration: what `course calibrate` wrote
        error_bars: columns more: between which values nine in ten measured runs like it lay
        breakdown: of the fastest run that fits, for each model and number of GPUs: where time and memory go
        sensitivity: which assumption changes the fastest run
    """
    cluster, seq, recipe = machine.cluster(), machine.seq, machine.recipe
    _check_files(runs, calibration)
    writable_file("out", out)
    if calibration:
        cluster = Calibration.load(calibration).of(cluster)
    rows = _rows(runs)
    shapes = _models(rows, models, seq)
    predictions = predict_rows(rows, shapes, cluster, seq, recipe)
    write_table(rows, predictions, out, error_bars)
    fitting = sum(not isinstance(one, str) and one.may_run for one in predictions)
    print(f"{len(rows):,} runs, {fitting:,} predicted to fit; modelled with rates fitted to measured runs: {out}")
    if breakdown:
        for (model, gpus), index in assumptions.fastest(rows, predictions).items():
            layout = " ".join(f"{axis}={rows[index][axis]}" for axis in ("dp", "pp", "tp", "mbs", "grad_acc", "zero"))
            print(f"\n{model} on {gpus} GPUs, fastest of the table: {layout}\n{breakdown_of(predictions[index])}")
    if sensitivity:
        _print_sensitivity(rows, lambda *how: predict_rows(rows, shapes, how[0], seq, recipe, how[1]), cluster)
    return 0


def breakdown_of(one: Estimate) -> str:
    """Where the time goes and what the memory is, in lines to print; all of it is modelled."""
    slow, fast = one.speed_range
    few, most = (size / GB for size in one.memory_range)
    shares = {"MFU": one.mfu, "MFU of causal pairs": one.causal_mfu, "HFU with recomputation": one.hfu}
    lines = [
        f"step {one.step_s:.3g} s, {one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU; nine in ten such runs: "
        f"{slow:,.0f} to {fast:,.0f}",
        "where the time goes (modelled):",
        *_bars(one.seconds_by_part, "s"),
        f"peak {one.memory_bytes / GB:.1f} GB; nine in ten such runs: {few:.1f} to {most:.1f}",
        "what the memory is (modelled):",
        *_bars({kind: size / GB for kind, size in one.bytes_by_kind.items()}, "GB"),
        ", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
        *([one.note] if one.note else []),
    ]
    return "\n".join(lines)


def _bars(amounts: dict[str, float], unit: str) -> list[str]:
    total = sum(amounts.values())
    ranked = sorted(((size, name) for name, size in amounts.items() if size > 0.005 * total), reverse=True)
    return [
        f"  {name:16s}{size:9.2f} {unit} {size / total:5.0%}  {'#' * round(40 * size / total)}" for size, name in ranked
    ]


def calibrate_cluster(
    runs: Positional[Path], out: Path, models: Path | None = None, machine: OmitArgPrefixes[Site] = Site()
) -> int:
    """Fit what your cluster's GPUs and links reach to one to three measured runs, for `course predict --calibration`.

    Args:
        runs: the CSV of `course predict`, and of each run step_s, tok_s_gpu or log (a file of `course train`)
        out: the JSON that is written
        models: JSON with the shapes of its models that are no presets, or a config.json of transformers
        machine: the cluster, and whose runs they are
    """
    cluster, seq, recipe = machine.cluster(), machine.seq, machine.recipe
    _check_files(runs)
    writable_file("out", out)
    rows = _rows(runs)
    shapes = _models(rows, models, seq)

    def steps(calibration: Calibration) -> list[float]:
        found = predict_rows(rows, shapes, calibration.of(cluster), seq, recipe)
        for number, one in enumerate(found, 2):
            if isinstance(one, str):
                raise ValueError(f"line {number}: {one}")
        return [one.step_s for one in found]

    before = predict_rows(rows, shapes, cluster, seq, recipe)
    steps(Calibration())
    measured = [
        measured_step_s(row, round(one.tokens_per_s_per_gpu * one.step_s * int(row["gpus"])), runs.parent)
        for row, one in zip(rows, before, strict=True)
    ]
    found = calibrate(steps, measured)
    found.save(out)
    print("seconds of a step      measured    before     after")
    for row, told, old, new in zip(rows, measured, before, steps(found), strict=True):
        name = f"{row['model']} on {row['gpus']}"
        errors = f"{old.step_s / told - 1:+.0%} -> {new / told - 1:+.0%}"
        print(f"{name:20s}{told:11.3f}{old.step_s:10.3f}{new:10.3f}   {errors}")
    print("\n".join(_told_of_fit(found, ranges(steps, found, len(measured)))) + f": {out}")
    return 0


def _told_of_fit(found: Calibration, spans: dict[str, tuple[float, float]]) -> list[str]:
    """The factors, how well these runs determine each, and whether one ended where the search does."""
    texts, ends = [], []
    for name, label in {"compute": "compute", "network": "network", "node_link": "link of a node"}.items():
        value, span = getattr(found, name), spans.get(name)
        texts.append(f"{label} x {value} ({'{:.2g} to {:.2g}'.format(*span) if span else 'not fitted'})")
        if value in BOUNDS:
            ends.append(
                f"{label} x {value} is where the search ends: the runs are not of this cluster, models or recipe"
            )
    return [*ends, f"in brackets: what fits nearly as well, if steps are measured to {HELD:.0%}", ", ".join(texts)]


def _check_files(*files: Path | None) -> None:
    for path in files:
        if path is not None and not path.is_file():
            raise ValueError(f"there is no file {path}; give one")


def _models(rows: list[dict[str, str]], path: Path | None, seq_len: int) -> dict[str, ModelConfig]:
    """Of a file, if there is one, and the presets that rows name beside."""
    found = models_asked(path, seq_len)
    presets = {name for row in rows if (name := row["model"]) not in found and is_preset(name)}
    return found | {name: preset(name) for name in sorted(presets)}


def _rows(runs: Path) -> list[dict[str, str]]:
    rows = read_rows(runs)
    if not rows:
        raise ValueError(f"{runs} has a header and no run; required: a line for each run")
    return rows


def _print_sensitivity(rows: list[dict[str, str]], predict_all, cluster: Cluster) -> None:
    predictions: list[Estimate | str] = predict_all(cluster, RATES)
    cells = len(assumptions.fastest(rows, predictions))
    found = assumptions.sensitivity(rows, predict_all, cluster, RATES)
    print(f"\n{'assumption':32s}{'fastest run changes':>22s}{'largest change':>18s}")
    for name, (flips, largest) in sorted(found.items(), key=lambda one: (-one[1][0], -one[1][1])):
        print(f"{name:32s}{f'{flips} of {cells} cells':>22s}{largest:>17.0%}")
