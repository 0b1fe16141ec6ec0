"""The one place that makes charts: Vega-Lite, drawn live in the page and into SVG and PNG files.

A chart is plain data until it is drawn. In the page its colours are CSS variables of the page, so
that one drawing serves light and dark screens and paper; in files they are those of light screens.
vl-convert brings the scripts of Vega (BSD-3-Clause) that the page embeds, and draws without a
browser; it asks nothing of the network.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import vl_convert

from vit_ray.report.tables import Column, Table, Value, number, percent

WIDTH, HEIGHT = 640, 340
"""Of a chart in a file, in pixels; in the page it is as wide as its place."""
LONGEST_TABLE: Final = 200
"""Points of a chart that are shown as a table, too."""
OURS: Final = "these runs"
"""Where a series comes from that names no other source."""

# Okabe and Ito's palette (2008), which colour-blind readers can tell apart, darkened on light
# ground where the original is too faint for thin lines; the shape of the markers differs, too.
LIGHT: Final = {
    "s0": "#0072b2", "s1": "#b84900", "s2": "#00805f", "s3": "#b0508a", "s4": "#8a6d00",
    "s5": "#1b7fb5", "s6": "#555c66", "s7": "#a33a00",
    "ground": "#ffffff", "panel": "#f6f7f9", "text": "#1b1f24", "faint": "#545d68",
    "rule": "#d9dee4", "notice": "#fff6dd", "mark": "#c98a00",
}  # fmt: skip
DARK: Final = {
    "s0": "#56b4e9", "s1": "#ff8f3d", "s2": "#2fc79c", "s3": "#e39ac6", "s4": "#f0e442",
    "s5": "#8fd0f5", "s6": "#b6bec9", "s7": "#ffb38a",
    "ground": "#14171b", "panel": "#1d2127", "text": "#e7eaee", "faint": "#a3acb8",
    "rule": "#39414b", "notice": "#332a10", "mark": "#e69f00",
}  # fmt: skip
COLOURS: Final = [f"var(--s{i})" for i in range(8)]
SHAPES: Final = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
GLYPHS: Final = ("\u25cf", "\u25a0", "\u25b2", "\u25c6", "\u271a", "\u25bc")
"""The shapes as characters, for the legend beside the chart."""
_RING: Final = "M-1,0A1,1,0,1,1,1,0A1,1,0,1,1,-1,0Z"
STATES: Final = {
    "dev split": ("\u25c9", f"{_RING}M-0.25,0A0.25,0.25,0,1,1,0.25,0A0.25,0.25,0,1,1,-0.25,0Z"),
    "failed": ("\u2715", "M-0.9,-0.9L0.9,0.9M0.9,-0.9L-0.9,0.9"),
    "killed": ("\u2298", f"{_RING}M-0.7,0.7L0.7,-0.7"),
    "running": ("\u25b7", "M-0.8,-1L1,0L-0.8,1Z"),
    "scheduled": ("\u25a1", "M-0.8,-0.8L0.8,-0.8L0.8,0.8L-0.8,0.8Z"),
}
"""Of points that are no result on a test set: a character, and the mark as a path of SVG."""


@dataclass(frozen=True)
class Axis:
    """What is drawn along one side."""

    title: str
    is_log: bool = False
    is_percent: bool = False

    def encoding(self, name: str) -> dict[str, Any]:
        """Of Vega-Lite."""
        scale: dict[str, Any] = {"type": "log"} if self.is_log else {"zero": False, "nice": True}
        marks: dict[str, Any] = {"tickCount": 6, "labelOverlap": "greedy"}
        if self.is_percent or self.is_log:
            marks["format"] = "~%" if self.is_percent else "~g"
        return {
            "field": name,
            "type": "quantitative",
            "title": self.title,
            "scale": scale,
            "axis": marks,
        }

    def holds(self, value: float) -> bool:
        """Whether it can show the value: a log axis shows nothing of 0 and less."""
        return math.isfinite(value) and (value > 0 or not self.is_log)

    @property
    def short_title(self) -> str:
        """Without what stands in brackets."""
        return self.title.partition(" (")[0]

    def exact(self, name: str) -> str:
        """Expression of the exact value."""
        return f"format(datum.{name}, '.5~%')" if self.is_percent else f"'' + datum.{name}"


@dataclass(frozen=True)
class Point:
    """One value, with what is known of it."""

    x: float
    y: float
    label: str = ""
    """Its name, such as the run's; the series' where it has none."""
    low: float | None = None
    """With `high` an interval of y: a band along a line, a bar at a point without one."""
    high: float | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    """What else is shown to who points at it, by name."""
    state: str = ""
    """One of `STATES`, whose mark it has; empty for a result."""


@dataclass(frozen=True)
class Series:
    """Points of one name."""

    name: str
    points: Sequence[Point]
    group: str = ""
    """What it shares colour, shape and switch with; its own name where it is in none."""
    has_line: bool = True
    has_markers: bool = True
    source: str = OURS
    """Where it is from. What is not `OURS` is hollow or dashed and has a switch of its own."""

    @property
    def key(self) -> str:
        """Name in the legend."""
        return self.group or self.name


@dataclass(frozen=True)
class Chart:
    """A figure with what is said below it."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    order: Sequence[str] = ()
    """Groups that have the same colour in every chart, in the order of the colours."""
    number: int = 1
    """Among charts of one page whose titles make the same name."""

    @property
    def name(self) -> str:
        """Of its files, and of its place in the page."""
        name = re.sub(r"[^a-z0-9]+", "_", self.title.lower()).strip("_")
        return name if self.number == 1 else f"{name}_{self.number}"

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every point that the axes can show."""
        return [
            _row(line, one, point)
            for line, one in enumerate(self.series)
            for point in one.points
            if self.x.holds(point.x) and self.y.holds(point.y)
        ]

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        """What all points of a series have in common, once."""
        shown = {row["line"] for row in self.rows}
        return [
            {"line": line, "name": one.name, "series": one.key, "source": one.source}
            for line, one in enumerate(self.series)
            if line in shown
        ]

    @property
    def values(self) -> Table | None:
        """The same as a table, where it is not too long to be read."""
        rows: list[list[Value]] = [
            [point.label or one.name, one.key, one.source, point.x, point.y, point.low, point.high]
            for one in self.series
            for point in one.points
        ]
        forms = [percent if axis.is_percent else number for axis in (self.x, self.y)]
        columns = [
            Column("name"), Column("series"), Column("from"), Column(self.x.title, forms[0]),
            Column(self.y.title, forms[1]), Column("low", forms[1]), Column("high", forms[1]),
        ]  # fmt: skip
        return Table(self.title, columns, rows).used() if len(rows) <= LONGEST_TABLE else None

    @property
    def has_picker(self) -> bool:
        """Whether one line can be chosen, whose points then show."""
        return sum(one.has_line and not one.has_markers for one in self.series) > 1

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.rows

    @property
    def legend(self) -> list[tuple[str, str, int]]:
        """Name, glyph and number of the colour of each group that has points."""
        shown = {line["series"] for line in self.lines}
        return [
            (key, GLYPHS[i % len(GLYPHS)], i % len(COLOURS))
            for i, key in enumerate(self._groups())
            if key in shown
        ]

    @property
    def states(self) -> list[tuple[str, str]]:
        """Character and word of each state that points are in."""
        shown = {row.get("state") for row in self.rows}
        return [(glyph, word) for word, (glyph, _) in STATES.items() if word in shown]

    @property
    def sources(self) -> list[str]:
        """Where the points are from that are not of these runs."""
        return list(dict.fromkeys(one["source"] for one in self.lines if one["source"] != OURS))

    def _groups(self) -> list[str]:
        return list(dict.fromkeys([*self.order, *(one.key for one in self.series)]))

    def spec(self, *, is_alone: bool = False) -> dict[str, Any]:
        """Of Vega-Lite.

        Args:
            is_alone: with title and legend inside and a width of its own, as a file has them; in
                the page both stand beside the chart.
        """
        colour: dict[str, Any] = {
            "field": "series",
            "type": "nominal",
            "title": None,
            "legend": {} if is_alone and len(self.legend) > 1 else None,
        }
        keys = [key for key, _, _ in self.legend]
        places = [self._groups().index(key) for key in keys]
        colours = [COLOURS[i % len(COLOURS)] for i in places]
        shapes = [SHAPES[i % len(SHAPES)] for i in places]
        return {
            **({"title": {"text": self.title, "subtitle": self._origin}} if is_alone else {}),
            "description": f"{self.title}: {self.y.title} against {self.x.title}",
            "width": WIDTH if is_alone else "container",
            "height": HEIGHT,
            "autosize": {"type": "fit", "contains": "padding"},
            "data": {"values": self.rows},
            "params": [{"name": "hidden", "value": []}, {"name": "picked", "value": None}],
            "transform": [
                {"lookup": "line", "from": {"data": {"values": self.lines}, **_COMMON}},
                {"filter": f"{_IS_SHOWN('series')} && {_IS_SHOWN('source')}"},
                {"calculate": self._tip(), "as": "tip"},
                {"calculate": self._said(), "as": "said"},
            ],
            "encoding": {
                "x": self.x.encoding("x"),
                "y": self.y.encoding("y"),
                "color": {**colour, "scale": {"domain": keys, "range": colours}},
                "detail": {"field": "line"},
            },
            "layer": [
                *self._intervals(),
                *self._lines(),
                *self._markers({**colour, "scale": {"domain": keys, "range": shapes}}),
            ],
            "config": _CONFIG,
        }

    def _tip(self) -> str:
        """Expression of what is shown to who points at a point, with its exact values."""
        parts = [
            "{title: datum.label || datum.name}",
            f"datum.source == '{OURS}' ? {{}} : {{'from': datum.source}}",
            f"{{{json.dumps(self.x.short_title)}: {self.x.exact('x')}}}",
            f"{{{json.dumps(self.y.short_title)}: {self.y.exact('y')}}}",
            f"isValid(datum.low) ? {{'interval': {self.y.exact('low')} + ' to ' + "
            f"{self.y.exact('high')}}} : {{}}",
            "datum.more || {}",
        ]
        return f"merge({', '.join(parts)})"

    def _said(self) -> str:
        """Expression of the same for who listens."""
        return (
            f"datum.tip.title + ': ' + {self.x.exact('x')} + ', ' + {self.y.exact('y')}"
            f" + (datum.source == '{OURS}' ? '' : ', ' + datum.source)"
        )

    @property
    def _origin(self) -> str:
        told = [f"{glyph} {word}" for glyph, word in self.states]
        if self.sources:
            told.append(f"hollow or dashed: {', '.join(self.sources)}")
        return "; ".join(told)

    def _intervals(self) -> Iterator[dict[str, Any]]:
        ends = {"y": {**self.y.encoding("low")}, "y2": {"field": "high"}, "tooltip": None}
        for has_line, mark in (
            (True, {"type": "area", "opacity": 0.18, "line": False}),
            (False, {"type": "rule", "opacity": 0.7}),
        ):
            if lines := [i for i, one in enumerate(self.series) if one.has_line is has_line]:
                wanted = f"indexof({lines}, datum.line) >= 0 && isValid(datum.low)"
                if any(point.low is not None for i in lines for point in self.series[i].points):
                    yield {"mark": mark, "transform": [{"filter": wanted}], "encoding": ends}

    def _lines(self) -> Iterator[dict[str, Any]]:
        if lines := [i for i, one in enumerate(self.series) if one.has_line]:
            dash = {"test": f"datum.source != '{OURS}'", "value": [6, 4]}
            width = {"test": "picked !== null && datum.line === picked", "value": 4}
            faint = {"test": "picked !== null && datum.line !== picked", "value": 0.25}
            yield {
                "mark": {"type": "line", "strokeJoin": "round"},
                "transform": [{"filter": f"indexof({lines}, datum.line) >= 0"}],
                "encoding": {
                    # A PNG with dashes of no gap, which look solid, too, takes twice as long.
                    **(
                        {"strokeDash": {"condition": dash, "value": [1, 0]}} if self.sources else {}
                    ),
                    "strokeWidth": {"condition": width, "value": 2},
                    "opacity": {"condition": faint, "value": 1},
                },
            }

    def _markers(self, shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Of a line without markers those of its points show that somebody has picked."""
        marked = [i for i, one in enumerate(self.series) if one.has_markers]
        seen = f"(indexof({marked}, datum.line) >= 0 || datum.line === picked)"
        tip = {"tooltip": {"field": "tip"}, "description": {"field": "said"}, "shape": shape}
        for _, word in self.states:
            mark = {"type": "point", "filled": False, "size": 90, "strokeWidth": 2, "opacity": 1}
            yield {
                "mark": {**mark, "shape": STATES[word][1], **_HOLLOW},
                "transform": [{"filter": f"datum.state === '{word}'"}],
                "encoding": {key: tip[key] for key in ("tooltip", "description")},
            }
        for is_ours in (True, False):
            relation = "==" if is_ours else "!="
            if is_ours or self.sources:
                wanted = f"{seen} && !datum.state && datum.source {relation} '{OURS}'"
                mark = {"type": "point", "filled": is_ours, "size": 75, "strokeWidth": 2}
                yield {
                    "mark": {
                        **mark,
                        "opacity": 1,
                        **(_EDGE if is_ours else _HOLLOW),
                    },
                    "transform": [{"filter": wanted}],
                    "encoding": tip,
                }


_EDGE: Final = {"stroke": "var(--panel)"}
_HOLLOW: Final = {"fill": "var(--panel)"}  # which can be pointed at, unlike none
_COMMON: Final = {"key": "line", "fields": ["name", "series", "source"]}
_IS_SHOWN: Final = "indexof(hidden, datum.{}) < 0".format
_FONT: Final = "system-ui, sans-serif"
_CONFIG: Final[dict[str, Any]] = {
    "background": "transparent",
    "font": _FONT,
    "view": {"stroke": None},
    "title": {
        "color": "var(--text)", "subtitleColor": "var(--faint)", "anchor": "start", "offset": 12,
        "fontSize": 15, "subtitleFontSize": 12,
    },
    "axis": {
        "labelColor": "var(--faint)", "titleColor": "var(--text)", "gridColor": "var(--rule)",
        "domainColor": "var(--rule)", "tickColor": "var(--rule)", "labelFontSize": 12,
        "titleFontSize": 12, "titleFontWeight": 500, "titlePadding": 8,
    },
    "legend": {
        "orient": "bottom", "columns": 4, "labelColor": "var(--text)", "labelFontSize": 12,
        "labelLimit": 240, "symbolSize": 75, "symbolOpacity": 1,
    },
}  # fmt: skip


def _row(line: int, one: Series, point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {"x": _rounded(point.x), "y": _rounded(point.y), "line": line}
    if point.label and point.label != one.name:
        row["label"] = point.label
    if point.low is not None and point.high is not None:
        row |= {"low": _rounded(point.low), "high": _rounded(point.high)}
    if point.state:
        row["state"] = point.state
    return row | ({"more": dict(point.details)} if point.details else {})


def _rounded(value: float) -> float:
    """Counts are kept; of others seven digits are more than anybody measures, and half as long."""
    return float(value) if float(value).is_integer() else float(f"{value:.7g}")


def svg(chart: Chart) -> str:
    """The chart as a file of its own, in the colours of light screens."""
    return _vega_svg(_in_light(chart.spec(is_alone=True)))


def png(drawing: str, scale: float = 2.0) -> bytes:
    """An SVG drawing as pixels on white ground."""
    return bytes(vl_convert.svg_to_png(drawing, scale=scale))


def still(chart: Chart) -> str:
    """The chart for readers whose browser runs no scripts: SVG in the colours of the page."""
    return _vega_svg(json.dumps({**chart.spec(), "width": WIDTH}))


def _vega_svg(spec: str) -> str:
    return str(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))


def _in_light(spec: dict[str, Any]) -> str:
    ground = {"config": {**_CONFIG, "background": "var(--ground)"}, "padding": 12}
    text = json.dumps({**spec, **ground})
    return re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found.group(1)], text)


@functools.cache
def scripts() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, for a page that stands alone."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
