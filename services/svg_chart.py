"""Small line charts as SVG: several panels, both axes logarithmic, readable on light and dark pages.

No dependency and no state: numbers in, text out. Units are pixels of the drawing unless a name says
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, PANEL_HEIGHT = 450, 370
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 78, 60
LEGEND_COLUMNS = 3
COLUMNS = 2
TITLE_HEIGHT = 58
COLOURS = ("#3b82f6", "#e0801a", "#2e9e57", "#a163e0", "#e0504a", "#8a8f98")
"""Each has enough contrast on white and on near-black."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.title { font-weight: 600; font-size: 15px; }
.note { font-size: 12px; fill: #57606a; }
.tick { font-size: 12px; }
.grid { stroke: #8a8f98; stroke-opacity: 0.25; }
.axis { stroke: #8a8f98; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .note { fill: #9da7b1; } }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One series; ``is_dashed`` sets it apart, ``has_path`` joins its points."""

    label: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False
    has_path: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. All values are positive."""

    title: str
    x_label: str
    y_label: str
    x_ticks: Sequence[float]
    lines: Sequence[Line]


def nice_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten that enclose ``[low, high]``; both positive."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    first = max(i for i, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    last = min(i for i, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return ticks[first : max(last, first + 1) + 1]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps ``[low, high]`` to ``[start, end]`` logarithmically."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(panel: Panel, x: _Scale, y: _Scale, y_ticks: Sequence[float]) -> Iterator[str]:
    for tick in panel.x_ticks:
        at = x.at(tick)
        yield f'<line x1="{at}" y1="{y.end}" x2="{at}" y2="{y.start}" class="grid"/>'
        yield _text(at, y.start + 18, f"{tick:g}", "tick", "middle")
    for tick in y_ticks:
        at = y.at(tick)
        yield f'<line x1="{x.start}" y1="{at}" x2="{x.end}" y2="{at}" class="grid"/>'
        yield _text(x.start - 8, at + 4, f"{tick:g}", "tick", "end")
    yield f'<line x1="{x.start}" y1="{y.start}" x2="{x.end}" y2="{y.start}" class="axis"/>'
    yield f'<line x1="{x.start}" y1="{y.end}" x2="{x.start}" y2="{y.start}" class="axis"/>'
    middle = (x.start + x.end) / 2
    yield _text(middle, y.start + 38, panel.x_label, "note", "middle")
    yield _text(x.end, y.end - 8, panel.y_label, "note", "end")


def _line(line: Line, colour: str, x: _Scale, y: _Scale) -> Iterator[str]:
    places = [(x.at(a), y.at(b)) for a, b in sorted(line.points)]
    if line.has_path:
        path = " ".join(f"{a},{b}" for a, b in places)
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    fill = "none" if line.is_dashed else colour
    for a, b in places:
        yield f'<circle cx="{a}" cy="{b}" r="3" fill="{fill}" stroke="{colour}"/>'


def _legend(lines: Sequence[Line], left: float, top: float) -> Iterator[str]:
    for i, line in enumerate(lines):
        row, column = divmod(i, LEGEND_COLUMNS)
        x, y, colour = left + 128 * column, top + 17 * row, COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        yield (
            f'<line x1="{x}" y1="{y}" x2="{x + 18}" y2="{y}" stroke="{colour}" '
            f'stroke-width="2"{dash}/>'
        )
        yield _text(x + 23, y + 4, line.label, "tick")


def _panel(panel: Panel, left: float, top: float) -> Iterator[str]:
    values = [y for line in panel.lines for _, y in line.points]
    y_ticks = nice_ticks(min(values), max(values))
    x = _Scale(min(panel.x_ticks), max(panel.x_ticks), left + LEFT, left + PANEL_WIDTH - RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], top + PANEL_HEIGHT - BOTTOM, top + TOP)
    yield _text(left + 26, top + 14, panel.title, "title")
    yield from _axes(panel, x, y, y_ticks)
    for i, line in enumerate(panel.lines):
        yield from _line(line, COLOURS[i % len(COLOURS)], x, y)
    yield from _legend(panel.lines, left + 26, top + 34)


def draw(title: str, note: str, panels: Sequence[Panel]) -> str:
    """Return a complete SVG document.

    Raises:
        ValueError: a panel has no points, or a value is not positive.
    """
    for panel in panels:
        values = [value for line in panel.lines for point in line.points for value in point]
        if not values or min(values) <= 0:
            raise ValueError(f"{panel.title}: a logarithmic chart needs positive values")
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * PANEL_WIDTH + 10, TITLE_HEIGHT + rows * PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        _text(12, 22, title, "title"),
        _text(12, 41, note, "note"),
    ]
    for i, panel in enumerate(panels):
        row, column = divmod(i, COLUMNS)
        parts += _panel(panel, column * PANEL_WIDTH, TITLE_HEIGHT + row * PANEL_HEIGHT)
    return "\n".join([*parts, "</svg>\n"])
