"""Charts as SVG text inside the page: points and lines on linear or logarithmic axes.

Colours are CSS variables of the page, so one drawing serves light and dark screens. Series differ
in colour and in marker, and every point has its values as a tooltip and in a table beside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

from vit_ray.report.style import STYLE

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 52
LETTER = 6.0  # width of a letter of a label, in pixels
NUM_COLOURS = 8  # --s0 to --s7 of the page


@dataclass(frozen=True)
class Axis:
    """What is drawn along one side."""

    title: str
    is_log: bool = False
    is_percent: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one name; `labels` are written beside them."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = field(default=())
    has_line: bool = True
    has_markers: bool = True


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels and knows its ticks."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def __call__(self, value: float) -> float:
        low, high, value = self._linear(self.low), self._linear(self.high), self._linear(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _linear(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def ticks(self) -> list[float]:
        """Round values inside the range, about five."""
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Markup:
    """One chart; points that an axis cannot show (a log axis: 0 and less) are left out.

    Returns:
        An `<svg>` element, or a sentence where there is nothing to draw.
    """
    shown = [_drawable(one, x, y) for one in series]
    points = [point for one in shown for point in one.points]
    if not points:
        return Markup('<p class="empty">{}: no values recorded.</p>').format(title)
    across = _scale([px for px, _ in points], x, LEFT, WIDTH - RIGHT)
    up = _scale([py for _, py in points], y, HEIGHT - BOTTOM, TOP)
    parts = [_grid(across, up, x, y)]
    parts += [_series(one, i, across, up, x, y) for i, one in enumerate(shown)]
    parts.append(_labels(shown, across, up))
    label = escape(f"{title}: {y.title} against {x.title}", quote=True)
    # Every text in it has been escaped above.
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
        + _legend(shown)
    )


def number(value: float) -> str:
    """Short and readable: 0.00012 -> 1.2e-4, 1234567 -> 1.23M."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e13:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:.4g}"


def _drawable(one: Series, x: Axis, y: Axis) -> Series:
    kept = [
        i
        for i, (px, py) in enumerate(one.points)
        if math.isfinite(px)
        and math.isfinite(py)
        and (px > 0 or not x.is_log)
        and (py > 0 or not y.is_log)
    ]
    labels = [one.labels[i] for i in kept] if one.labels else []
    return Series(one.name, [one.points[i] for i in kept], labels, one.has_line, one.has_markers)


def _scale(values: Sequence[float], axis: Axis, start: float, end: float) -> Scale:
    low, high = min(values), max(values)
    if axis.is_log:
        low, high = low / 1.4, high * 1.4
    else:
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
        if min(values) >= 0:
            low = max(low, 0.0)
        if axis.is_percent:
            high = min(high, 1.02)
    return Scale(low, high, start, end, axis.is_log)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5)):
        every = -(-len(decades) // 7) if len(multiples) == 1 else 1
        ticks = [m * 10.0**d for d in decades[::every] for m in multiples]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks


def _tick_text(value: float, axis: Axis) -> str:
    return f"{100 * value:.4g}%" if axis.is_percent else number(value)


def _grid(across: Scale, up: Scale, x: Axis, y: Axis) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in up.ticks():
        at = f"{up(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at}" text-anchor="end" dy="0.35em">'
            f"{_tick_text(tick, y)}</text>"
        )
    for tick in across.ticks():
        at = f"{across(tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{_tick_text(tick, x)}</text>'
        )
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        f"{escape(x.title)}</text>"
        f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.title)}</text>"
    )
    return "".join(parts)


def _series(one: Series, index: int, across: Scale, up: Scale, x: Axis, y: Axis) -> str:
    pixels = [(across(px), up(py)) for px, py in one.points]
    parts = []
    if one.has_line and len(pixels) > 1:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in pixels)
        parts.append(f'<polyline class="line" points="{path}"/>')
    for i, (px, py) in enumerate(pixels if one.has_markers else []):
        label = one.labels[i] if one.labels else one.name
        values = f"{_tick_text(one.points[i][0], x)}, {_tick_text(one.points[i][1], y)}"
        parts.append(
            f"<g>{_marker(index, px, py)}<title>{escape(f'{label}: {values}')}</title></g>"
        )
    return f'<g class="c{index % NUM_COLOURS}">{"".join(parts)}</g>'


def _labels(series: Sequence[Series], across: Scale, up: Scale) -> str:
    """A label at every point that has room for one; the others keep their tooltip."""
    points = [
        (across(px), up(py), label)
        for one in series
        for (px, py), label in zip(one.points, one.labels, strict=False)
    ]
    taken = [Box(px - 6, py - 6, px + 6, py + 6) for px, py, _ in points]
    parts = []
    for px, py, label in points:
        for box, anchor in _places(px, py, LETTER * len(label)):
            if box.is_on_chart() and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                at = {"start": box.left, "middle": px, "end": box.right}[anchor]
                parts.append(
                    f'<text class="label" x="{at:.1f}" y="{(box.top + box.bottom) / 2:.1f}" '
                    f'dy="0.35em" text-anchor="{anchor}">{escape(label)}</text>'
                )
                break
    return "".join(parts)


@dataclass(frozen=True)
class Box:
    """A rectangle that is taken, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether they share any pixel."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def is_on_chart(self) -> bool:
        """Whether all of it lies within the axes."""
        return (
            self.left >= LEFT
            and self.right <= WIDTH
            and self.top >= 0
            and (self.bottom <= HEIGHT - BOTTOM)
        )


def _places(px: float, py: float, width: float) -> list[tuple[Box, str]]:
    """Room for a label right of a point, left of it, above, below; with its text anchor."""
    corners = [
        (px + 8, py - 6, "start"),
        (px - 8 - width, py - 6, "end"),
        (px - width / 2, py - 20, "middle"),
        (px - width / 2, py + 8, "middle"),
    ]
    return [(Box(left, top, left + width, top + 12), anchor) for left, top, anchor in corners]


def _marker(index: int, px: float, py: float) -> str:
    shape = index % 4
    if shape == 0:
        return f'<circle class="mark" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>'
    corners = {
        1: [(-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)],
        2: [(0, -5.5), (5.2, 4), (-5.2, 4)],
        3: [(0, -5.8), (5.8, 0), (0, 5.8), (-5.8, 0)],
    }[shape]
    points = " ".join(f"{px + dx:.1f},{py + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="mark" points="{points}"/>'


def alone(drawing: str) -> str:
    """The `<svg>` of a chart as a file, with the page's colours; empty if it has none."""
    found = re.match(r"<svg (.*?)>(.*?)</svg>", drawing, re.DOTALL)
    if found is None:
        return ""
    attributes, content = found.groups()
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--ground)"/>'
    space = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    return f"<svg {space} {attributes}><style>{escape(STYLE)}</style>{ground}{content}</svg>\n"


def _legend(series: Sequence[Series]) -> str:
    items = "".join(
        f'<li><svg class="key c{i % NUM_COLOURS}" viewBox="0 0 14 14" aria-hidden="true">'
        f"{_marker(i, 7, 7)}</svg>{escape(one.name)}</li>"
        for i, one in enumerate(series)
        if one.points
    )
    return f'<ul class="legend">{items}</ul>' if len(series) > 1 else ""
