"""Pictures of panels: rows of boxes over an axis, as records; `drawing` makes one SVG of several.

    drawing("Memory", "8.2 GB fit.", [bars("Largest moment", {"rank 0": {"parameters": 2e9, "gradients": 2e9}})])

Axes are linear and start at 0 where they measure bytes or seconds. What is drawn stands in the records, so that tests
read numbers and not pixels. A picture is WIDTH units wide, and as high as its charts; a host scales it. Its colours are
those of the course; ink and ground follow Jupyter's theme, elsewhere the reader's light or dark.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from course_lib.language import told
from course_lib.palette import AXIS_COLORS, KIND_COLORS, OKABE_ITO, mix, text_on
from course_lib.units import TIME_UNITS, UNITS, show_bytes, show_seconds, three_digits, time_unit_for, unit_for
from course_lib.validate import read_toml

WIDTH, LARGEST_HEIGHT = 720, 468  # 1,000 x 650 on a page 1,000 pixels wide
_ROW, _NAME = 22, 13  # heights: of a row, of a name above the rows
_TABLE, _PALETTE = read_toml(Path(__file__).with_name("svg.toml")), OKABE_ITO | KIND_COLORS
COLORS = KIND_COLORS | AXIS_COLORS
COLORS |= {part: _PALETTE.get(color, color) for color, parts in _TABLE["colors"].items() for part in parts}
COLORS["waiting for weight gradients"] = mix(KIND_COLORS["activations"], "#FFFFFF", 0.6)
HATCHES = {part: path for path, parts in _TABLE["hatches"].items() for part in parts}
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

Unit = Literal["bytes", "seconds", "share", "count", "exponent", "place"]  # a place has no ticks


@dataclass(frozen=True)
class Box:
    """A part of a row from `start` to `stop`, its words in it where they fit; `shade`: so much white mixed in."""

    start: float
    stop: float
    part: str
    words: str = ""
    shade: float = 0.0


class Arrow(NamedTuple):
    """From a place of one row to a place of another."""

    row: str
    start: float
    to_row: str
    stop: float


class _Frame(NamedTuple):
    """Where a chart lies: its axis from `first` to `last`, its rows from `near` to `far`, one each `pitch`."""

    first: float
    last: float
    near: float
    far: float
    pitch: float


@dataclass(frozen=True)
class Chart:
    """Rows of boxes over an axis; `marks` are lines through all rows, `notes` stand behind a row.

    ground    what a row leaves free is seen: time that nobody uses
    upright   rows are columns, so many units high
    """

    title: str
    rows: Mapping[str, Sequence[Box]]
    stop: float
    start: float = 0.0
    unit: Unit = "bytes"
    marks: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    chosen: str = ""
    ground: bool = False
    upright: int = 0
    arrows: Sequence[Arrow] = ()

    def draw(self, top: float) -> tuple[list[str], float]:
        """Return the elements of the picture below `top`, and where it ends."""
        if self.upright:
            frame = _Frame(top + 24 + self.upright, top + 24, 60, WIDTH - 14, (WIDTH - 74) / len(self.rows))
            bottom, unit = frame.first + 20, _scale_of(self.stop, self.unit)[1]
        else:
            near, high = top + _ROW + _NAME * len(self.marks), _ROW * len(self.rows)
            right = WIDTH - 14 - min(210, max(map(_width, self.notes.values()), default=0))
            frame = _Frame(20 + max(map(_width, self.rows)), right, near, near + high, _ROW)
            bottom, unit = frame.far + 18, ""
        legend, bottom = _legend([one.part for boxes in self.rows.values() for one in boxes], bottom)
        title = _text(8, top + 13, self.title + f" ({unit})" * bool(unit), size=13, bold=True)
        drawn = [*self._ticks(frame), *self._boxes(frame), *self._marks(frame), *self._arrows(frame)]
        return [title, *drawn, *legend], bottom

    def _at(self, frame: _Frame, value: float) -> float:
        return frame.first + (frame.last - frame.first) * (value - self.start) / (self.stop - self.start)

    def _ticks(self, frame: _Frame) -> Iterator[str]:
        if self.unit == "place":
            return
        factor, name = _scale_of(self.stop, self.unit)
        form = "1e{:.0f}" if self.unit == "exponent" else "{:,.6g}" + f" {name}" * (bool(name) and not self.upright)
        for tick in ticks_of(self.start / factor, self.stop / factor, 4 if self.upright else 8):
            at = self._at(frame, tick * factor)
            yield self._across(frame, at, "grid")
            place = (frame.near - 5, at + 4, "end") if self.upright else (at, frame.far + 13, "middle")
            yield _text(*place[:2], form.format(tick), place[2], "soft", 11)

    def _across(self, frame: _Frame, at: float, name: str, longer: float = 0, dashes: str = "") -> str:
        ends = (frame.near, at, frame.far, at) if self.upright else (at, frame.near - longer, at, frame.far)
        return _line(*ends, name, dashes)

    def _boxes(self, frame: _Frame) -> Iterator[str]:
        """Each row's boxes, its label before them and its note behind."""
        every = math.ceil(max(_width(label, 11) + 4 for label in self.rows) / frame.pitch)
        gap = min(2, frame.pitch / 8)
        for place, (label, boxes) in enumerate(self.rows.items()):
            near, bold = frame.near + frame.pitch * place, label == self.chosen
            if self.ground:
                whole = f'x="{frame.first:.1f}" y="{near + gap:.1f}" width="{frame.last - frame.first:.1f}"'
                yield f'<rect {whole} height="{frame.pitch - 2 * gap:.1f}"{_look("faint")}/>'
            end = frame.last if self.ground else frame.first
            for one in boxes:
                start, stop = self._at(frame, one.start), self._at(frame, one.stop)
                along, across = (min(start, stop), abs(stop - start)), (near + gap, frame.pitch - 2 * gap)
                (x, wide), (y, high) = (across, along) if self.upright else (along, across)
                words = f" {one.words}" * (one.words not in ("", one.part))
                says = f"{label}: {one.part}{words}, {amount(one.stop - one.start, self.unit)}"
                yield from _box((x, y, wide, high), one.part, "" if self.upright else one.words, says, one.shade)
                end = max(end, stop)
            if not self.upright:
                yield _text(frame.first - 6, near + 15, label, "end", bold=bold)
                yield _text(end + 6, near + 15, self.notes.get(label, ""), bold=bold)
            elif place % every == 0:
                yield _text(near + frame.pitch / 2, frame.first + 14, label, "middle", size=11, bold=bold)

    def _arrows(self, frame: _Frame) -> Iterator[str]:
        """Lines from the middle of a row to the edge of another, with a head."""
        middles = {label: frame.near + frame.pitch * (place + 0.5) for place, label in enumerate(self.rows)}
        for one in self.arrows:
            y1, y2 = middles[one.row], middles[one.to_row]
            edge = math.copysign(frame.pitch / 10, y2 - y1)
            ends = self._at(frame, one.start), y1 + edge, self._at(frame, one.stop), y2 - edge
            yield _line(*ends, "rule").replace("/>", f' marker-end="url(#{NAME}-head)"/>')

    def _marks(self, frame: _Frame) -> Iterator[str]:
        """Lines with their names; above rows one below the other, from the right, so that no line crosses a name."""
        names = sorted(self.marks.items(), key=lambda mark: -mark[1])
        for place, (name, value) in enumerate(names):
            at, above = self._at(frame, value), _NAME * (len(names) - place)
            yield self._across(frame, at, "rule", above - 2, "4 3")
            x, y = (frame.far, at - 4) if self.upright else (at - 4, frame.near - above + 9)
            yield _text(x, y, name, "end", size=11)


Amounts = Mapping[str, Mapping[str, float]]  # label -> part -> how much


def bars(title: str, rows: Amounts, unit: Unit = "bytes", **fields) -> Chart:
    """Return a bar for each label, its parts end to end, its sum behind it."""
    chart, notes = _from_zero(title, rows, unit, fields), fields.get("notes", {})
    sums = {label: amount(sum(parts.values()), unit, chart.stop) for label, parts in rows.items()}
    return replace(chart, notes={label: words + notes.get(label, "") for label, words in sums.items()})


def columns(title: str, rows: Amounts, unit: Unit = "bytes", **fields) -> Chart:
    """Return a column for each label, its parts one on the other."""
    return _from_zero(title, rows, unit, {"upright": 130} | fields)


def _from_zero(title: str, rows: Amounts, unit: Unit, fields: dict) -> Chart:
    found = {label: [] for label in rows}
    for label, parts in rows.items():
        ends = list(accumulate(parts.values(), initial=0.0))
        found[label] = [
            Box(*edges, part, part) for part, *edges in zip(parts, ends, ends[1:], strict=False) if edges[1] > edges[0]
        ]
    stop = max([*(sum(parts.values()) for parts in rows.values()), *fields.get("marks", {}).values(), 1e-12])
    return Chart(title, found, stop, unit=unit, **fields)


_HEAD = (  # of an arrow
    f'<marker id="{NAME}-head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L6 3L0 6z" class="ink"/></marker>'
)


def drawing(title: str, said: str, charts: Iterable[Chart]) -> str:
    """Return charts one below the other as one SVG, with its title and what it shows in words."""
    found, top = [], 6.0
    for chart in charts:
        drawn, top = chart.draw(top)
        found += drawn
    body, high = "".join(found), math.ceil(top)
    patterns = "".join(
        f'<pattern id="{_hatch_id(part)}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="{path}" stroke="#fff" stroke-width="1" stroke-linecap="round"/></pattern>'
        for part, path in HATCHES.items()
        if f"url(#{_hatch_id(part)})" in body
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{NAME}" viewBox="0 0 {WIDTH} {high}" role="img" '
        f'width="100%" style="max-width:900px" font-family="system-ui, sans-serif" font-size="12">'
        f"<title>{escape(title)}</title><desc>{escape(f'{told(title)}. {told(said)}')}</desc><style>{_CSS}</style>"
        f"<defs>{patterns}{_HEAD * bool('-head)' in body)}</defs>"
        f'<rect class="ground" width="{WIDTH}" height="{high}" fill="#fff"/>{body}</svg>'
    )


def _scale_of(largest: float, unit: Unit) -> tuple[float, str]:
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
    return {"share": f"{100 * size:.0f} %", "exponent": f"{size:.0f} powers of ten"}.get(unit, three_digits(size))


def ticks_of(start: float, stop: float, most: int) -> list[float]:
    """Round numbers on a linear axis, at most so many and one."""
    rough = (stop - start) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * (1 - 1e-9))
    return [step * place for place in range(math.ceil(start / step), math.floor(stop / step * (1 + 1e-9)) + 1)]


def _width(words: str, size: float = 12) -> float:
    return 0.6 * size * sum(1.6 if "가" <= letter <= "힣" else 1 for letter in told(words))


def _look(name: str) -> str:
    """A class for the theme, and its light colour where styles are taken out."""
    return f' class="{name}" {"stroke" if name in ("grid", "rule") else "fill"}="{_PLAIN[name]}"'


def _text(x: float, y: float, words: str, anchor: str = "start", ink: str = "ink", size: float = 12, bold=False) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"' + ' font-weight="bold"' * bold
    return f"<text {at}{_look(ink)}>{escape(words)}</text>" * bool(words)


def _line(x1: float, y1: float, x2: float, y2: float, name: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' * bool(dashes)
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{dashed}{_look(name)}/>'


def _box(place: tuple[float, float, float, float], part: str, words="", says="", shade=0.0) -> list[str]:
    """A filled box (x, y, width, height) with its words where they fit; nothing where it is too thin to be seen."""
    x, y, wide, high = place
    if min(wide, high) < 0.05:
        return []
    color = mix(COLORS[part], "#FFFFFF", shade) if shade else COLORS[part]
    at = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    edge = ' class="edge" stroke="#fff" stroke-width="0.6"' * (min(wide, high) > 3)
    found = [f'<rect {at} fill="{color}"{edge}><title>{escape(says)}</title></rect>']
    if part in HATCHES:
        found.append(f'<rect {at} fill="url(#{_hatch_id(part)})" pointer-events="none"/>')
    if words and wide > _width(words, 11) + 2:
        ground = f'stroke="{color}" stroke-width="3" paint-order="stroke" ' * (part in HATCHES)
        at = f'x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle" font-size="11"'
        found.append(f'<text {at} fill="{text_on(color)}" {ground}pointer-events="none">{escape(words)}</text>')
    return found


def _hatch_id(part: str) -> str:
    return f"{NAME}-{part.replace(' ', '-')}"


def _legend(parts: Iterable[str], top: float) -> tuple[list[str], float]:
    """A square and a name for each part, in lines that fit; none for one part alone."""
    found, x, y, names = [], 14.0, top + 4, list(dict.fromkeys(parts))
    if len(names) < 2:
        return [], top + 8
    for name in names:
        if x + 18 + _width(name, 11) > WIDTH - 10:
            x, y = 14.0, y + 17
        found += [*_box((x, y, 12, 12), name), _text(x + 17, y + 10, name, size=11)]
        x += 30 + _width(name, 11)
    return found, y + 26
