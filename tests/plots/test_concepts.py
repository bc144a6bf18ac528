"""The drawn pictures: each is small, has words and is shown somewhere; their numbers are the package's."""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from course_lib.authoring import ROOT, read
from course_lib.checks.ch13 import check_order
from course_lib.compare.one_gpu import PASS_CONFIG
from course_lib.compare.two_hosts import MEASURED
from course_lib.config import preset
from course_lib.float_formats import BLOCK_FORMATS, FORMATS
from course_lib.hardware import HOPPER, LINKS, gpu
from course_lib.layout import Mesh, links_of_axes, piece_sizes
from course_lib.layout.experts import ExpertLayout
from course_lib.layout.partition import even_layers
from course_lib.layout.sequence_sharding import pairs, pairs_of_ranks
from course_lib.memory.activations import block_terms, korthikanti_layer_bytes
from course_lib.memory.states import padded, zero_bytes_per_parameter
from course_lib.minimal.choose import COST_OF_RECOMPUTATION, MOST_WAITING
from course_lib.minimal.memory import block_saved_bytes
from course_lib.minimal.planner import cuts
from course_lib.palette import OKABE_ITO
from course_lib.plots.concepts import FOLDER, Concept, show_concept
from course_lib.run import RECIPES
from course_lib.schedules.instructions import loop_placement, v_placement
from course_lib.timing.kernel import Roof, product_bytes
from course_lib.units import show_bytes

NAMES = sorted(path.stem for path in FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
CHOSEN = {(0, "a"): (0, 2), (0, "b"): (1, 3), (1, "c"): (0, 1), (1, "d"): (2, 0)}  # (rank, token) -> experts


def elements(name: str, tag: str) -> list[dict]:
    """Attributes of each element of a picture, with those of the groups around it, and its words as `words`."""
    found = []

    def walk(node, inherited):
        here = inherited | node.attrib
        if node.tag == SVG + tag:
            words = "".join(node.itertext()).replace("\u200b", "").replace("\u00a0", " ")
            found.append(here | {"words": words})
        for child in node:
            walk(child, here)

    walk(ET.parse(FOLDER / f"{name}.svg").getroot(), {})
    return found


def texts(name: str) -> list[str]:
    return [one["words"].strip() for one in elements(name, "text")]


def rects(name: str, color: str) -> list[tuple[float, ...]]:
    """(x, y, width, height) of the rectangles of a colour, from left to right."""
    boxes = [one for one in elements(name, "rect") if one.get("fill") == color.lower()]
    return sorted(tuple(float(one[key]) for key in ("x", "y", "width", "height")) for one in boxes)


def read_by_rows(name: str, start: str) -> list[str]:
    """The texts that start so, from the top down, each row from the left."""
    found = [one for one in elements(name, "text") if one["words"].startswith(start)]
    return [one["words"] for one in sorted(found, key=lambda one: (round(float(one["y"])), float(one["x"])))]


# ---------------------------------------------------------------- what holds for all


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_a_title_a_sentence_and_a_light_ground_and_fits(name):
    root = ET.parse(FOLDER / f"{name}.svg").getroot()
    assert root.findtext(f"{SVG}title") and re.fullmatch(r"[A-Z].{20,}\.", root.findtext(f"{SVG}desc"))
    assert root.find(f"{SVG}rect").attrib == {"width": "100%", "height": "100%", "fill": "#fff"}  # on dark pages too
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    assert width <= 700 and height <= 520 and (FOLDER / f"{name}.svg").stat().st_size < 21_000
    for one in elements(name, "text"):
        assert one["words"].strip() and float(one["font-size"]) >= 6.9, one
        assert "rotate" in one.get("transform", "") or (0 <= float(one["x"]) <= width and 0 < float(one["y"]) < height)


def test_every_picture_is_shown_in_a_notebook_that_stores_it_with_its_words(capsys):
    shown = set()
    for cell in (cell for path in (ROOT / "notebooks").glob("*.ipynb") for cell in read(path).cells):
        if found := re.search(r'show_concept\("(\w+)"\)', cell.source):
            stored = [
                output.data["image/svg+xml"] for output in cell.outputs if "image/svg+xml" in output.get("data", {})
            ]
            assert stored == [(FOLDER / f"{found[1]}.svg").read_text(encoding="utf-8")], f"{found[1]}: run its notebook"
            shown.add(found[1])
    assert shown == set(NAMES)
    show_concept("merge")
    assert capsys.readouterr().out.startswith("Two blocks as boxes as wide as their sums of exponentials")
    with pytest.raises(ValueError, match="did you mean 'merge'"):
        show_concept("merged")


def test_words_are_shown_as_they_read_not_as_svg_writes_them():
    assert repr(Concept("<svg><desc>A step&#x27;s gain: a &lt; b &amp; c</desc></svg>")) == "A step's gain: a < b & c"


# ---------------------------------------------------------------- numbers in words


def flat_shards() -> list[str]:
    flat = torch.cat([torch.full((size,), index) for index, size in enumerate((5, 6, 1, padded(12, 5) - 12))])
    names = ("a", "b", "c", "padding")
    return [f"{names[i]}: {n}" for shard in flat.chunk(5) for i, n in Counter(shard.tolist()).items()]


def float_formats() -> list[str]:
    infos = [torch.finfo(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    facts = (
        "{0.bits} bits · largest {0.max:.3g} · smallest normal {0.smallest_normal:.2g} · after 1 comes 1 + {0.eps:.2g}"
    )
    return [facts.format(info) for info in infos]


def eight_bit_formats() -> list[str]:
    facts = "largest {0.largest:,.0f} · smallest {0.smallest:.2g} · after 1 comes 1 + {0.epsilon:g}"
    return [facts.format(FORMATS[name]) for name in ("fp8 e4m3", "fp8 e5m2", "fp4 e2m1")]


def kept_bytes() -> list[float]:
    """Of a block of 1,024 tokens without recomputation, with selective, with full."""
    terms = block_terms(PASS_CONFIG, 256, "standard", "fp32")
    entered = terms["block input"] + terms["first norm's statistics"]
    return [
        1024 * size for size in (sum(terms.values()), sum(terms.values()) - PASS_CONFIG.num_heads * 256 * 4, entered)
    ]


def recomputed_block() -> list[str]:
    modes = zip(("none", "selective", "full"), kept_bytes(), strict=True)
    return [f"{mode}: keeps {show_bytes(size)}" for mode, size in modes]


def regions(name: str, batch: tuple[int, int], *ranks: tuple[int, bool]) -> list[str]:
    sizes = [korthikanti_layer_bytes(preset(name), *batch, "selective", *how) for how in ranks]
    return [show_bytes(size, "MB") for size in sizes]


def table_of_vocabulary() -> list[str]:
    stops = [0]
    for size in piece_sizes(128_256, 4):
        stops.append(stops[-1] + size)
    return [f"{start:,} to {stop - 1:,}" for start, stop in pairwise(stops)]


def pairs_by_rank(sharding: str) -> str:
    totals = pairs_of_ranks(pairs(sharding, 16, 4))
    return f"{sharding}: pairs of " + ", ".join(f"rank {rank}: {total}" for rank, total in enumerate(totals))


def groups_along(axis: str) -> str:
    groups = sorted({tuple(MESH.ranks_along(axis, rank)) for rank in range(8)})
    return "groups " + " ".join("{" + ",".join(map(str, group)) + "}" for group in groups)


def inside_an_h100() -> list[str]:
    one, all_shared = gpu("h100"), HOPPER.count * HOPPER.lanes_bytes * gpu("h100").bf16_flops / HOPPER.count / 4096
    return [
        f"one SM, of {HOPPER.count}",
        f"registers: {HOPPER.registers * 4 >> 10} KiB",
        f"shared memory: {HOPPER.shared_bytes >> 10} KiB",
        f"{HOPPER.count} SMs: {HOPPER.count * HOPPER.registers * 4 >> 20} MiB, "
        f"{HOPPER.count * HOPPER.shared_bytes >> 20} MiB;",
        f"shared memory {all_shared / 1e12:.0f} TB/s",
        f"{HOPPER.l2_bytes >> 20} MiB",
        f"{one.memory_bytes_per_s / 1e12:.2f} TB/s",
        f"{one.memory_bytes >> 30} GiB",
        f"NVLink {LINKS[one.link].bytes_per_s / 1e9:.0f} GB/s one way,",
    ]


def roofs() -> list[str]:
    ridges = [f"{name}: ridge at {Roof(gpu(key), 1, 1).ridge:.0f}" for name, key in ROOFS.items()]
    n = 4096
    tiles = [(f"tile {t}", 2 * n**3 / sum(product_bytes(n, n, n, t, t))) for t in (16, 32, 128)]
    once = [f"each matrix once: {2 * n**3 / (2 * 3 * n**2):,.0f}"]
    return ridges + [f"{name}: {intensity:.3g}" for name, intensity in tiles] + once


def read_by_first_16(group: int) -> str:
    places = [check_order.reference(pid, 16, 16, group) for pid in range(16)]
    rows, columns = (len(set(of)) for of in zip(*places, strict=True))
    return f"{rows} + {columns} = {rows + columns} rows and columns of tiles"


ROOFS = {"A100": "a100-80", "H100": "h100", "B200": "b200"}
WIRES = [LINKS[key] for key in ("nvlink4", "pcie5", "pcie5", "efa")]  # from the top
MESH = Mesh(pp=2, dp=2, tp=2)
MIXED, LLAMA = RECIPES["bf16-master"], preset("llama-3.1-8b")
LOSS = F.cross_entropy(torch.tensor([1.0, 2, 4, 1]), torch.tensor(3))
SAID = {
    "zero_stages": [f"{zero_bytes_per_parameter(s, 4, optimizer_bytes=12):.4g} bytes per parameter" for s in range(4)],
    "flat_shards": flat_shards(),
    "float_formats": float_formats(),
    "eight_bit_formats": eight_bit_formats(),
    "scale_blocks": [f"{bits} bits{more} per element" for bits, more in (
                     (8, ""), (8, " + 32/K"), (round(8 + 32 / 128**2, 3), ""), (8 + 32 / 128, ""),
                     (BLOCK_FORMATS["mxfp8"].bits, f" (FP4: {BLOCK_FORMATS['mxfp4'].bits})"),
                     (BLOCK_FORMATS["nvfp4"].bits, ""))],
    "numbers": [f"is rounded to {torch.tensor(1.001).to(kind).item():.6g}" for kind in (torch.bfloat16, torch.float16)],
    "mixed_step": [*(f"16 bits, {size} B" for size in (MIXED.param_bytes, MIXED.grad_bytes)),
                   *(f"FP32, {size} B" for size in (MIXED.moment_bytes, MIXED.master_bytes))],
    "linear_pair": [f"{rows:,} × {LLAMA.d_model:,}" for rows in (2048, LLAMA.d_ff // 2)],
    "vocabulary": table_of_vocabulary(),
    "vocabulary_loss": [f"loss = log s - (zt - zmax) = {LOSS:.4f}"],
    "merge": ["output 12", "output 30", f"output {(2 * 12 + 6 * 30) / 8:g}"],
    "chunks": [pairs_by_rank(name) for name in ("contiguous", "zigzag")],
    "mesh": [groups_along(axis) for axis in ("tp", "dp", "pp")],
    "ring": [f"{(piece + 1) * 10**rank}" for rank in range(4) for piece in range(4)],
    "recomputed_block": recomputed_block(),
    "regions_tp": regions("gpt3-175b", (1, 2048), (1, False), (8, False)),
    "regions_sp": regions("llama-3.1-70b", (1, 4096), (8, False), (8, True)),
    "two_hosts": [f"{row.link_bytes / 1e6:.1f} MB on the link" for row in MEASURED]
                 + [f"{row.step_s:.1f} s for a step" for row in MEASURED],
    "node": [f"{one.name}: {one.bytes_per_s / 1e9:.0f} GB/s each way" for one in WIRES],
    "gpu_inside": inside_an_h100(),
    "roofline": roofs(),
    "tile_order": [read_by_first_16(group) for group in (1, 4)],
    "pipeline_cut": [f"layer {layer}" for layer in range(8)],
    "flow_chart": [f"{100 * MOST_WAITING:g} % of its step:",
                   f"so far waits for {100 * COST_OF_RECOMPUTATION:g} % or more"],
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_numbers_in_words_are_those_of_the_package(name):
    missing = Counter(SAID[name]) - Counter(texts(name))
    assert not missing


# ---------------------------------------------------------------- numbers as lengths and places


def test_a_block_saves_what_its_edges_say():
    config = preset("llama-3.1-8b")
    said = [text.rpartition(" ")[2].replace(",", "") for text in texts("llama_block") if "saves" not in text]
    sizes = [int(size) for size in said if size.isdigit()]
    statistics = 4 * (config.num_heads + 2)  # one FP32 number per norm and per head
    assert 2 * sum(sizes) + statistics == sum(block_saved_bytes(config, 2).values())
    assert f"One block of {config.name} saves {sum(sizes):,} elements per token" in texts("llama_block")


def test_all_cuts_of_64_are_there_and_grey_where_tp_leaves_a_node():
    tiles = [text for text in texts("cuts_of_64") if text.startswith("dp ")]
    assert Counter(tiles) == Counter(f"dp {dp}" for dp, _, _ in cuts(64))
    assert len(rects("cuts_of_64", "#D9D9D9")) == sum(tp > 8 for _, tp, _ in cuts(64))


def test_stages_lie_as_the_schedules_place_them():
    ways = [[(rank,) for rank in range(4)]]
    for owners in (loop_placement(4, 2), v_placement(4)):
        ways.append([tuple(s for s, owner in enumerate(owners) if owner == rank) for rank in range(4)])
    ways.append([(rank, 3 - rank) for rank in range(4)])  # DualPipe: DeepSeek-V3 (arXiv:2412.19437), section 3.2.1
    expected = [f"stage {stage}" for way in ways for stages in way for stage in stages]
    assert read_by_rows("placements", "stage") == expected
    assert len(even_layers(8, 4)) == 4 and set(even_layers(8, 4)) == {2}  # as the model in `pipeline_cut` is cut


def test_rows_are_sorted_by_expert_and_5_of_8_leave_their_rank():
    assert read_by_rows("sorted_rows", "t")[4:10] == ["t0", "t2", "t0", "t1", "t2", "t1"]
    layout = ExpertLayout(4, 2)
    rows = [(home, layout.rank_of_expert(expert)) for (home, _), chosen in CHOSEN.items() for expert in chosen]
    moved = sum(home != away for home, away in rows)
    assert f"{moved} of {len(rows)} rows leave their rank, and come back" in texts("travelling_rows")
    drawn = Counter(text for text in texts("travelling_rows") if len(text) == 2)
    expected = {f"{token}{expert}" for (_, token), chosen in CHOSEN.items() for expert in chosen}
    assert drawn == dict.fromkeys(expected, 4)  # at home, arrived, sorted, returned


def test_a_zero_stage_holds_a_quarter_of_what_it_cuts():
    held = Counter(round(width, 0) for _, _, width, height in rects("zero_stages", OKABE_ITO["green"]) if height > 15)
    (whole, first), (part, cut) = sorted(held.items(), reverse=True)
    assert (first, cut) == (4, 12) and whole == pytest.approx(4 * part, abs=4)


def test_a_block_of_keys_is_of_no_use_to_6_of_16_places_and_each_comes_to_every_rank():
    table = read_by_rows("ring_travel", "k v of")
    assert table == [f"k v of {(rank - step) % 4}" for rank in range(4) for step in range(4)]
    hatched = [one for one in elements("ring_travel", "rect") if "url" in one.get("fill", "")]
    assert len(hatched) == 6 == sum(of > rank for rank in range(4) for of in range(4))


def test_which_links_a_group_uses_is_what_the_mesh_says():
    links = links_of_axes(MESH, 4, 1, False)
    said = {"node": "{} 2: inside a node", "network": "{} 2: over 2 nodes, one rank in each"}
    assert all(said[links[axis].kind].format(axis) in texts("ranks_on_nodes") for axis in ("pp", "dp", "tp"))
