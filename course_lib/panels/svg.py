"""Pictures of panels: rows of bars, columns, lanes over time, each a record; `drawing` makes one SVG of several.

    drawing("Memory", "8.2 GB fit.", [Bars("Largest moment", {"rank 0": {"parameters": 2e9, "gradients": 2e9}})])

Axes are linear and start at 0 where they measure bytes or seconds. What is drawn stands in the records, so that tests
read numbers and not pixels. A picture is WIDTH units wide, and as high as its forms; a host scales it. Its colours are
those of the course; ink and ground follow Jupyter's theme, elsewhere the reader's light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from course_lib.palette import AXIS_COLORS, KIND_COLORS, OKABE_ITO, mix, text_on
from course_lib.units import TIME_UNITS, UNITS, show_bytes, show_seconds, three_digits, time_unit_for, unit_for

WIDTH, LARGEST_HEIGHT = 720, 468  # 1,000 x 650 on a page 1,000 pixels wide
_EM = 0.6  # width of a letter, in font sizes
_PARTS = {  # names of parts by colour, beside kinds of memory and axes
    OKABE_ITO["sky"]: "compute, computing, queued, whole sequences, F forward, computed again, within the node, range",
    OKABE_ITO["orange"]: "backward, communication, waiting, latency, I input gradient",
    OKABE_ITO["green"]: "update, W weight gradients, expert_dp",
    OKABE_ITO["yellow"]: "launches",
    OKABE_ITO["blue"]: "data, moving bytes, computed, predicted",
    OKABE_ITO["vermillion"]: "B backward, not hidden, in flight, kept, dropped, between nodes, measured",
    OKABE_ITO["purple"]: "transfer",
    KIND_COLORS["overhead"]: "no tensor",
    "#999999": "allocator's reserve, bubble, world, other ranks",
    mix(KIND_COLORS["activations"], "#FFFFFF", 0.6): "waiting for weight gradients",
}
COLORS = KIND_COLORS | AXIS_COLORS | {part: color for color, parts in _PARTS.items() for part in parts.split(", ")}
_LINES = {  # over a colour, for those who see no colours: an SVG path in a square of 6
    "M0 6L6 0": "gradients, waiting, communication, latency, between nodes, measured, cp",
    "M3 2.4v1.2": "optimizer",
    "M0 6L6 0M0 0L6 6": "logits",
    "M0 0L6 6": "gathered, dropped, waiting for weight gradients",
    "M3 0v6": "temporary, computed again",
}
HATCHES = {part: path for path, parts in _LINES.items() for part in parts.split(", ")}
_LIGHT = "--ground:#fff;--ink:#1a1a1a;--soft:#595959;--grid:#dcdcdc;--faint:#ededed"
_DARK = "--ground:#181818;--ink:#ececec;--soft:#b0b0b0;--grid:#454545;--faint:#333"
NAME = "course-panel"
_CSS = (
    f"svg.{NAME}{{{_LIGHT}}}@media(prefers-color-scheme:dark){{svg.{NAME}{{{_DARK}}}}}"
    f"[data-jp-theme-light=true] svg.{NAME}{{{_LIGHT}}}[data-jp-theme-light=false] svg.{NAME}{{{_DARK}}}"
    + "".join(f"svg.{NAME} .{name}{{fill:var(--{name})}}" for name in ("ground", "ink", "soft", "faint"))
    + "".join(
        f"svg.{NAME} .{name}{{stroke:var(--{of})}}"
        for name, of in (("grid", "grid"), ("rule", "ink"), ("edge", "ground"))
    )
)
_PLAIN = {"ink": "#1a1a1a", "soft": "#595959", "faint": "#ededed", "grid": "#dcdcdc", "rule": "#1a1a1a"}  # without CSS

Unit = Literal["bytes", "seconds", "time", "share", "count", "exponent"]


@dataclass(frozen=True)
class Bars:
    """Rows of parts that lie end to end: label -> part -> amount. Lines mark limits; `notes` stand behind the sums."""

    title: str
    rows: Mapping[str, Mapping[str, float]]
    unit: Unit = "bytes"
    limits: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    chosen: str = ""

    def draw(self, top: float) -> tuple[list[str], float]:
        sums = {label: sum(parts.values()) for label, parts in self.rows.items()}
        end = max([*sums.values(), *self.limits.values(), 1e-12])
        ends = {label: f"{amount(size, self.unit, end)}{self.notes.get(label, '')}" for label, size in sums.items()}
        left = 20 + max(width(label) for label in self.rows)
        right = WIDTH - 14 - min(200, max(width(words) for words in ends.values()))
        scale = (right - left) / end
        lines, y = _limit_lines({name: left + scale * at for name, at in self.limits.items()}, top + 22)
        ticks, bottom = _axis(left, right, 0, end, self.unit, y, y + 22 * len(self.rows))
        found, sums_in_words = [_title(self.title, top), *ticks], []
        for row, (label, parts) in enumerate(self.rows.items()):
            at, middle = left, y + 22 * row + 15
            found.append(text(left - 6, middle, label, "end", bold=label == self.chosen))
            for part, size in parts.items():
                words = part if scale * size > width(part) + 8 else ""
                found += box((at, y + 22 * row + 2, scale * size, 18), part, words, f"{part} {amount(size, self.unit)}")
                at += scale * size
            sums_in_words.append(text(max(at, left) + 6, middle, ends[label], bold=label == self.chosen))
        found += [one.format(bottom=y + 22 * len(self.rows)) for one in lines] + sums_in_words
        legend, bottom = _legend([part for parts in self.rows.values() for part in parts if parts[part]], bottom)
        return [*found, *legend], bottom


@dataclass(frozen=True)
class Columns:
    """Columns of parts that lie one on the other, with a label below each that has room; lines mark limits."""

    title: str
    columns: Sequence[Mapping[str, float]]
    labels: Sequence[str]
    unit: Unit = "bytes"
    limits: Mapping[str, float] = field(default_factory=dict)
    chosen: str = ""
    height: float = 130

    def draw(self, top: float) -> tuple[list[str], float]:
        end = max([sum(parts.values()) for parts in self.columns] + [*self.limits.values(), 1e-12])
        factor, unit = _scale_of(end, self.unit)
        left, right, base = 60, WIDTH - 14, top + 24 + self.height
        pitch = (right - left) / len(self.columns)
        found = [_title(f"{self.title}{f' ({unit})' if unit else ''}", top)]
        for tick in ticks_of(0, end / factor, 4):
            at = base - self.height * tick * factor / end
            found.append(line(left, at, right, at, "grid"))
            found.append(text(left - 5, at + 4, f"{tick:,.6g}", "end", "soft", 11))
        every = math.ceil(max(width(label, 11) + 4 for label in self.labels) / pitch)
        for place, (label, parts) in enumerate(zip(self.labels, self.columns, strict=True)):
            at, x = base, left + pitch * place
            for part, size in parts.items():
                high = self.height * size / end
                at -= high
                gap = min(2, pitch / 8)
                found += box(
                    (x + gap, at, pitch - 2 * gap, high), part, "", f"{label}: {part} {amount(size, self.unit)}"
                )
            if place % every == 0:
                found.append(text(x + pitch / 2, base + 14, label, "middle", size=11, bold=label == self.chosen))
        for name, size in self.limits.items():
            at = base - self.height * size / end
            found += [line(left, at, right, at, "rule", "4 3"), text(right, at - 4, name, "end", size=11)]
        legend, bottom = _legend([part for parts in self.columns for part in parts if parts[part]], base + 20)
        return [*found, *legend], bottom


@dataclass(frozen=True)
class Box:
    """What a lane does from `start` to `stop`; `shade` is how much white is mixed in."""

    start: float
    stop: float
    part: str
    words: str = ""
    shade: float = 0.0


@dataclass(frozen=True)
class Lanes:
    """Rows over an axis, each with its boxes; `marks` are lines through all rows, `notes` stand behind them."""

    title: str
    lanes: Mapping[str, Sequence[Box]]
    start: float
    stop: float
    unit: Unit = "seconds"
    marks: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def draw(self, top: float) -> tuple[list[str], float]:
        left = 20 + max(width(label) for label in self.lanes)
        right = WIDTH - 14 - max([width(note) for note in self.notes.values()], default=0)
        scale, high = (right - left) / (self.stop - self.start), 24
        lines, y = _limit_lines({n: left + scale * (at - self.start) for n, at in self.marks.items()}, top + 22)
        ticks, bottom = _axis(left, right, self.start, self.stop, self.unit, y, y + high * len(self.lanes))
        found = [_title(self.title, top), *ticks]
        for row, (label, boxes) in enumerate(self.lanes.items()):
            place = y + high * row
            found.append(text(left - 6, place + 16, label, "end"))
            found.append(f'<rect x="{left}" y="{place + 2:g}" width="{right - left:.1f}" height="20"{look("faint")}/>')
            for one in boxes:
                x, wide = left + scale * (one.start - self.start), scale * (one.stop - one.start)
                words = one.words if wide > width(one.words, 10) else ""
                found += box((x, place + 2, wide, 20), one.part, words, f"{one.part} {one.words}", one.shade, 10)
            found.append(text(right + 6, place + 16, self.notes.get(label, "")))
        found += [one.format(bottom=y + high * len(self.lanes)) for one in lines]
        legend, bottom = _legend([one.part for boxes in self.lanes.values() for one in boxes], bottom)
        return [*found, *legend], bottom


Form = Bars | Columns | Lanes


def drawing(title: str, said: str, forms: Iterable[Form]) -> str:
    """Return forms one below the other as one SVG, with its title and what it shows in words."""
    found, top = [], 6.0
    for form in forms:
        drawn, top = form.draw(top)
        found += drawn
    body = "".join(found)
    used = [part for part in HATCHES if f"url(#{_hatch_id(part)})" in body]
    patterns = "".join(
        f'<pattern id="{_hatch_id(part)}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="{HATCHES[part]}" stroke="#fff" stroke-width="1" stroke-linecap="round"/></pattern>'
        for part in used
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{NAME}" viewBox="0 0 {WIDTH} {math.ceil(top)}" role="img" '
        f'width="100%" style="max-width:900px" font-family="system-ui, sans-serif" font-size="12">'
        f"<title>{escape(title)}</title><desc>{escape(f'{title}. {said}')}</desc><style>{_CSS}</style>"
        f"<defs>{patterns}</defs>"
        f'<rect class="ground" width="{WIDTH}" height="{math.ceil(top)}" fill="#fff"/>{body}</svg>'
    )


# ------------------------------------------------------------------------------------ amounts
def _scale_of(largest: float, unit: Unit) -> tuple[float, str]:
    """What amounts are divided by, and the unit of the result."""
    if unit == "bytes":
        return UNITS[unit_for(largest)], unit_for(largest)
    if unit == "seconds":
        return TIME_UNITS[time_unit_for(largest)], time_unit_for(largest)
    return (0.01, "%") if unit == "share" else (1, "")


def amount(size: float, unit: Unit, largest: float = 0.0) -> str:
    """An amount in words; bytes in the unit of the largest."""
    if unit == "bytes":
        return show_bytes(size, unit_for(largest) if largest else None)
    if unit == "seconds":
        return show_seconds(size)
    return f"{100 * size:.0f} %" if unit == "share" else three_digits(size)


def ticks_of(start: float, stop: float, most: int) -> list[float]:
    """Round numbers on a linear axis, at most so many and one."""
    rough = (stop - start) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * (1 - 1e-9))
    return [step * place for place in range(math.ceil(start / step), math.floor(stop / step * (1 + 1e-9)) + 1)]


def width(words: str, size: float = 12) -> float:
    return _EM * size * len(words)


# ------------------------------------------------------------------------------------ elements
def look(name: str) -> str:
    """A class for the theme, and its light colour where styles are taken out."""
    return f' class="{name}" {"stroke" if name in ("grid", "rule") else "fill"}="{_PLAIN[name]}"'


def text(x: float, y: float, words: str, anchor: str = "start", ink: str = "ink", size: float = 12, bold=False) -> str:
    if not words:
        return ""
    heavy = ' font-weight="bold"' if bold else ""
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {at}{heavy}{look(ink)}>{escape(words)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, name: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{dashed}{look(name)}/>'


def box(place: tuple[float, float, float, float], part: str, words="", says="", shade=0.0, size=11) -> list[str]:
    """A filled box (x, y, width, height) with its words in the middle; nothing where it is too thin to be seen."""
    x, y, wide, high = place
    if wide < 0.05 or high < 0.05:
        return []
    color = mix(COLORS[part], "#FFFFFF", shade) if shade else COLORS[part]
    at = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    edge = ' class="edge" stroke="#fff" stroke-width="0.6"' if wide > 3 and high > 3 else ""
    found = [f'<rect {at} fill="{color}"{edge}><title>{escape(says)}</title></rect>']
    if part in HATCHES:
        found.append(f'<rect {at} fill="url(#{_hatch_id(part)})" pointer-events="none"/>')
    if words:
        ground = f'stroke="{color}" stroke-width="3" paint-order="stroke"' if part in HATCHES else ""
        at = f'x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle" font-size="{size}"'
        found.append(f'<text {at} fill="{text_on(color)}" {ground} pointer-events="none">{escape(words)}</text>')
    return found


def _hatch_id(part: str) -> str:
    return f"{NAME}-{part.replace(' ', '-')}"


def _title(words: str, top: float) -> str:
    return text(8, top + 13, words, size=13, bold=True)


def _axis(left, right, start, stop, unit: Unit, top, bottom) -> tuple[list[str], float]:
    """Lines at round numbers from top to bottom, with the numbers below."""
    factor, name = _scale_of(stop, unit)
    found = []
    for tick in ticks_of(start / factor, stop / factor, 8):
        at = left + (right - left) * (tick * factor - start) / (stop - start)
        words = f"1e{tick:.0f}" if unit == "exponent" else f"{tick:,.6g} {name}".strip()
        found += [line(at, top, at, bottom, "grid"), text(at, bottom + 13, words, "middle", "soft", 11)]
    return found, bottom + 18


def _limit_lines(places: Mapping[str, float], top: float) -> tuple[list[str], float]:
    """Lines at some x with their names above them, in as many rows as they need; and where the rows end."""
    found, ends = [], []
    for name, at in sorted(places.items(), key=lambda place: place[1]):
        half = width(name, 11) / 2
        middle = min(max(at, half + 4), WIDTH - half - 4)
        row = next((row for row, end in enumerate(ends) if end < middle - half), len(ends))
        ends[row:] = [middle + half + 6]
        y = top + 13 * row + 9
        dashed = '<line x1="{0:.1f}" y1="{1:.1f}" x2="{0:.1f}" y2="{{bottom:.1f}}" stroke-dasharray="4 3"{2}/>'
        found.append(dashed.format(at, y + 3, look("rule")))
        found.append(text(middle, y, name, "middle", size=11).replace("{", "{{").replace("}", "}}"))
    return found, top + 13 * len(ends) + (2 if ends else 0)


def _legend(parts: Iterable[str], top: float) -> tuple[list[str], float]:
    """A square and a name for each part, in lines that fit; none for one part alone."""
    found, x, y = [], 14.0, top + 4
    names = list(dict.fromkeys(parts))
    if len(names) < 2:
        return [], top + 8
    for name in names:
        if x + 18 + width(name, 11) > WIDTH - 10:
            x, y = 14.0, y + 17
        found += [*box((x, y, 12, 12), name), text(x + 17, y + 10, name, size=11)]
        x += 30 + width(name, 11)
    return found, y + 26
