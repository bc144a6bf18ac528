"""A strip of blocks: which of them keep their activations, and which compute them again in backward (lesson 2b)."""

from __future__ import annotations

from course_lib.config import preset
from course_lib.flops import step_flops
from course_lib.layout import Layout
from course_lib.memory.activations import layer_terms, part_of
from course_lib.panels.controls import controls, named, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Columns
from course_lib.run import Run
from course_lib.units import show_bytes

MODEL, RECIPE = "llama-3.2-1b", "bf16-master"
BLOCKS = preset(MODEL).num_layers


def kept_bytes(layer: int, how: str, seq_len: int, micro_batch: int, attention: str) -> int:
    """Bytes that a block saves in forward under one kind of recomputation."""
    run = Run(preset(MODEL), Layout(micro_batch=micro_batch, recompute=how), seq_len, RECIPE, attention)
    return sum(size for terms in layer_terms(part_of(run), layer) for size in terms.values())


def _draw_recompute(blocks: str, recompute: str, seq_len: int, micro_batch: int, attention: str) -> Shown:
    """What each block keeps, and what is there when backward comes to it: its own activations are whole again."""
    how, config = (seq_len, micro_batch, attention), preset(MODEL)
    whole = [kept_bytes(layer, "none", *how) for layer in range(BLOCKS)]
    kept = [kept_bytes(layer, recompute, *how) if again == "1" else whole[layer] for layer, again in enumerate(blocks)]
    columns = [{"kept": size, "computed again": all_of - size} for size, all_of in zip(kept, whole, strict=True)]
    moments = [
        {"kept": sum(kept[: layer + 1]), "computed again": whole[layer] - kept[layer]} for layer in range(BLOCKS)
    ]
    tokens, count = micro_batch * seq_len, blocks.count("1")
    once, again = (step_flops(config, tokens, seq_len, name) for name in ("none", recompute))
    totals = [sum(parts.values()) for parts in moments]
    most = max(range(BLOCKS), key=totals.__getitem__)
    said = (
        f"{count} of {BLOCKS} blocks are computed again: {show_bytes(sum(kept))} are kept in place of "
        f"{show_bytes(sum(whole))}. The largest moment of backward is at block {most}: "
        f"{show_bytes(totals[most])}. A step computes {(again - once) / once * count / BLOCKS:.1%} more."
    )
    labels = [str(layer) for layer in range(BLOCKS)]
    return [
        Columns(f"{MODEL}: activations of each block", columns, labels),
        Columns("Activations when backward comes to a block", moments, labels, limits={"none again": sum(whole)}),
    ], said


RECOMPUTE = Panel(
    "Recomputation, block by block",
    {
        "blocks": Control("again", tuple((str(layer), str(layer)) for layer in range(BLOCKS)), "0" * BLOCKS, "strip"),
        **controls(recompute=("full", named(("selective", "full")))),
        **controls(seq_len=(4096, powers(256, 65_536))),
        **controls(micro_batch=1, attention="fused"),
    },
    _draw_recompute,
    presets={
        "every block": ({"blocks": "1" * BLOCKS}, ""),
        "every second block": ({"blocks": "01" * (BLOCKS // 2)}, ""),
        "the first half": ({"blocks": "1" * (BLOCKS // 2) + "0" * (BLOCKS - BLOCKS // 2)}, ""),
    },
)
