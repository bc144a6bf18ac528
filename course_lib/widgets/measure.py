"""What the button Measure of a panel does: train something small for real, and lay it on what is predicted.

Each takes a panel's values and returns what a panel's function does: charts and words.
"""

from collections.abc import Sequence

from course_lib.compare.five_d_profile import measure_five_d
from course_lib.compare.profile import profile_step, scale_down
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.panels.record import Shown
from course_lib.panels.runs import layout_run, zero_runs
from course_lib.panels.svg import Chart, bars
from course_lib.plots.comparison import error_text
from course_lib.units import show_bytes

MOST_ROWS, MOST_TOKENS = 4, 256  # of a batch, of a sequence: a matter of seconds
MOST_RANKS, MOST_MICRO_BATCHES = 4, 4  # ranks share this machine's cores; more micro-batches hold no more


def _compared_bars(rows: Sequence) -> Chart:
    """Return two bars for each row that is not empty: predicted and measured, with the error behind the second."""
    sizes, notes = {}, {}
    for row in rows:
        if row.predicted_bytes or row.measured_bytes:
            sizes[row.kind] = {"predicted": row.predicted_bytes}
            sizes[f"{row.kind}, measured"] = {"measured": row.measured_bytes}
            notes[f"{row.kind}, measured"] = f", {error_text(row.error_percent)}"
    return bars("Predicted beside measured: the largest of each kind", sizes, notes=notes)


def measure_memory(**values) -> Shown:
    """Train a scaled-down model of its kind on this CPU; raises ValueError for a recipe or optimizer not run here."""
    small = scale_down(preset(values["model"]))
    sizes = min(values["micro_batch"], MOST_ROWS), min(values["seq_len"], MOST_TOKENS)
    how = (values[name] for name in ("recipe", "optimizer", "attention", "recompute"))
    found = profile_step(small, *sizes, *how)
    peak = found.row("peak")
    return [_compared_bars(found.rows)], (
        f"Measured in {found.seconds:.1f} s: {small.name} ({small.num_layers} layers of {small.d_model}, "
        f"{sizes[0]} x {sizes[1]} tokens). Peak {show_bytes(peak.measured_bytes, 'MB')} measured, "
        f"{show_bytes(peak.predicted_bytes, 'MB')} predicted: {error_text(peak.error_percent)}."
    )


def measure_zero(**values) -> Shown:
    """Train a toy on real ranks at the chosen stage and precision; raises ValueError for what cannot be run here."""
    zero_runs(values)  # what is impossible is not measured either
    if values["offload"] != "none":
        raise ValueError("offload is not measured here; choose offload none (chapter 04 measures it)")
    ranks, few = min(values["dp"], MOST_RANKS), min(values["micro_batches"], MOST_MICRO_BATCHES)
    how = {"zero_stage": values["zero_stage"], "recompute": values["recompute"], "micro_batches": few}
    found = measure_five_d(preset("toy"), Layout(dp=ranks, micro_batch=2, **how), 128, values["recipe"])
    return [_compared_bars(found.rows)], f"{found} A small stand-in for {values['model']} on {values['dp']:,} GPUs."


def measure_layout(**values) -> Shown:
    """Train a toy on real ranks in the chosen layout; raises ValueError if it is impossible, or too large here."""
    run = layout_run(values)
    found = measure_five_d(run.config, run.layout, values["seq_len"])
    return [_compared_bars(found.rows)], str(found)
