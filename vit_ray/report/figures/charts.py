"""The module that makes charts: Vega-Lite, drawn into SVG.

A chart is plain data until it is drawn. Colour and shape only show the model's family; the chart
defines the dash of its lines. vl-convert draws without a browser or the network.
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Final

import vl_convert

from vit_ray.report.tables import Column, Table, file_name, number, percent

WIDTH, HEIGHT = 640, 340
"""Size of a chart in pixels."""
TITLE_LETTERS: Final = 64
"""Most letters of a title's line."""
LONGEST_TABLE: Final = 200
"""Up to this many points, a chart is also shown as a table."""
MOST_LABELS: Final = 8
"""Up to this many lines, a chart has their names at the ends."""

# Okabe and Ito's palette (2008), which colour-blind readers can distinguish; the shapes of the
# markers differ, too. Reddish purple is darkened for thin lines on a light background.
COLOURS: Final = {
    "vit": "#0072b2", "resnet": "#008f68", "hybrid": "#d55e00", "axial": "#b0508a",
    "other": "#555c66", "ground": "#ffffff", "panel": "#f6f7f9", "text": "#1b1f24",
    "faint": "#545d68", "rule": "#d9dee4", "notice": "#fff6dd", "mark": "#c98a00",
}  # fmt: skip
FAMILIES: Final = {
    "ViT": "circle", "ResNet": "square", "Hybrid": "triangle-up", "Axial": "diamond",
    "Other": "triangle-down",
}  # fmt: skip
"""Shape of each family's marks."""
DASHES: Final = ((1, 0), (6, 4), (2, 3), (9, 3, 2, 3))
_RING: Final = "M-1,0A1,1,0,1,1,1,0A1,1,0,1,1,-1,0Z"
BEST: Final = "best evaluation"
"""State of the point of a curve whose weights and accuracy are the run's result."""
STATES: Final = {
    "dev split": ("\u25cb", _RING),
    "failed": ("\u2715", "M-0.9,-0.9L0.9,0.9M0.9,-0.9L-0.9,0.9"),
    "killed": ("\u2298", f"{_RING}M-0.7,0.7L0.7,-0.7"),
    "running": ("\u25b7", "M-0.8,-1L1,0L-0.8,1Z"),
    "scheduled": ("\u25a1", "M-0.8,-0.8L0.8,-0.8L0.8,0.8L-0.8,0.8Z"),
    BEST: (
        "\u2606",
        "M0,-1.2L0.35,-0.4L1.2,-0.35L0.5,0.2L0.75,1L0,0.5L-0.75,1L-0.5,0.2L-1.2,-0.35L-0.35,-0.4Z",
    ),
    "stopped early": ("\u2296", f"{_RING}M-0.7,0L0.7,0"),
}
"""For points that are not results on a test set: a character, and the mark as an SVG path."""


@dataclass(frozen=True)
class Axis:
    """What an axis shows."""

    title: str
    is_log: bool = False
    is_percent: bool = False

    def holds(self, value: float) -> bool:
        """Whether it can show the value: a log axis cannot show 0 and less."""
        return math.isfinite(value) and (value > 0 or not self.is_log)

    def range_of(self, values: Sequence[float]) -> tuple[float, float]:
        """The range of the values with 5 % on either side; on a log axis, of their logarithms."""
        known = [math.log10(v) if self.is_log else v for v in values if self.holds(v)] or [0.0]
        low, high = min(known), max(known)
        pad = 0.05 * (high - low) or (0.2 if self.is_log else 0.05 * abs(low) or 0.5)
        low, high = low - pad, high + pad
        if self.is_percent:
            low, high = max(low, 0.0), min(high, 1.0)
        return (10**low, 10**high) if self.is_log else (low, high)

    def part(self, value: float, ends: tuple[float, float]) -> float:
        """Position between the ends of the axis, from 0 to 1."""
        value, low, high = (math.log(v) if self.is_log else v for v in (value, *ends))
        return (value - low) / (high - low)

    def value(self, part: float, ends: tuple[float, float]) -> float:
        low, high = ends
        return low * (high / low) ** part if self.is_log else low + (high - low) * part

    def encoding(self, name: str, ends: tuple[float, float]) -> dict[str, Any]:
        marks: dict[str, Any] = {"tickCount": 6, "labelOverlap": "greedy"}
        if self.is_percent:
            marks["format"] = "~%"
        elif self.is_log:
            ticks = _log_ticks(*ends)
            texts = json.dumps({str(i): text for i, text in enumerate(ticks.values())})
            at = f"indexof({[*ticks]}, datum.value)"
            marks |= {"values": [*ticks], "labelExpr": f"{texts}[toString({at})] || ''"}
        kind = {"type": "log"} if self.is_log else {"type": "linear", "zero": False}
        scale = {**kind, "domain": [*ends], "nice": False}
        titled = {"title": self.title, "scale": scale, "axis": marks}
        return {"field": name, "type": "quantitative", **titled}


def _log_ticks(low: float, high: float) -> dict[float, str]:
    """Values and texts: powers of ten, and also 2 and 5 or 3 times them if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for parts in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        all_ticks = [float(f"{p}e{e}") for e in range(first, last + 1) for p in parts]
        ticks = [tick for tick in all_ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    step = max(1, len(ticks) // 8) if parts == (1,) else 1
    is_plain = low > 5e-4 and high < 2e4
    raised = str.maketrans(
        "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
    )

    def text(tick: float) -> str:
        mantissa, _, exponent = f"{tick:e}".partition("e")
        power = f"10{str(int(exponent)).translate(raised)}"
        if is_plain:
            return f"{tick:g}"
        return power if float(mantissa) == 1 else f"{float(mantissa):g}\u00b7{power}"

    return {tick: text(tick) for tick in ticks[::step]}


@dataclass(frozen=True)
class Point:
    """One value, with facts about it."""

    x: float
    y: float
    label: str = ""
    """Its name, such as the run's; the series' name if it has none."""
    low: float | None = None
    """With `high` an interval of y: a bar at a marked point, else a band along the line."""
    high: float | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    """Further columns of the table of values, by name."""
    state: str = ""
    """One of `STATES`, whose mark it has; empty for a result."""
    size: float | None = None
    """Size of its mark, from 0 to 1: the size of the model among those of its chart."""
    seeds: Mapping[str, float] = field(default_factory=dict)
    """For a mean, the value of each seed, which has a small mark."""


@dataclass(frozen=True)
class Series:
    """Points with a common name."""

    name: str
    points: Sequence[Point]
    family: str = "Other"
    """One of `FAMILIES`: its colour and shape."""
    dash: int = 0
    """One of `DASHES`."""
    is_faint: bool = False
    """Drawn behind the others."""
    has_line: bool = True
    has_markers: bool = True


@dataclass(frozen=True)
class Chart:
    """A figure with the text below it."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    is_folded: bool = False
    """Shown when a reader opens it, like the paper's own figure."""
    number: int = 1
    """Number among charts of one page whose titles give the same name."""

    @property
    def name(self) -> str:
        """Name of its files, and of its place in the page."""
        return file_name(self.title, self.number)

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every point that the axes can show, each followed by its seeds."""
        return [
            _row(line, each) | seed
            for line, one in enumerate(self.series)
            for point in one.points
            for each, seed in _with_seeds(point)
            if self.x.holds(each.x) and self.y.holds(each.y)
        ]

    @property
    def values(self) -> Table:
        """The same as a table."""
        forms = [percent if axis.is_percent else number for axis in (self.x, self.y)]
        units = [" %" if axis.is_percent else "" for axis in (self.x, self.y)]
        points = [(s, p) for s in self.series for one in s.points for p, _ in _with_seeds(one)]
        details = dict.fromkeys(key for _, p in points for key in p.details)
        columns = [
            Column("name"), Column("series"), Column(f"{self.x.title}{units[0]}", forms[0]),
            Column(f"{self.y.title}{units[1]}", forms[1]), Column(f"low{units[1]}", forms[1]),
            Column(f"high{units[1]}", forms[1]), Column("state"), *map(Column, details),
        ]  # fmt: skip
        rows = [
            [
                p.label or s.name,
                s.name,
                p.x,
                p.y,
                p.low,
                p.high,
                p.state,
                *map(p.details.get, details),
            ]
            for s, p in points
        ]
        return Table(self.title, columns, rows).used()

    @property
    def is_short(self) -> bool:
        """Whether its values can be read as a table."""
        return sum(len(one.points) for one in self.series) <= LONGEST_TABLE

    @property
    def has_seeds(self) -> bool:
        """Whether means have the marks of their seeds."""
        return any("seed" in row for row in self.rows)

    @property
    def families(self) -> list[str]:
        """Families that have points."""
        shown = {self.series[row["line"]].family for row in self.rows}
        return [family for family in FAMILIES if family in shown]

    @property
    def states(self) -> dict[str, str]:
        """Character of each state that points have."""
        shown = {row.get("state") for row in self.rows}
        return {word: glyph for word, (glyph, _) in STATES.items() if word in shown}

    def spec(self) -> dict[str, Any]:
        """The chart for Vega-Lite."""
        ends = self.x.range_of([row["x"] for row in self.rows])
        sides = self.y.range_of(
            [row[k] for row in self.rows for k in ("y", "low", "high") if k in row]
        )
        keys = self.families
        legend: dict[str, Any] | None = {} if len(keys) > 1 else None
        colour = {"field": "family", "type": "nominal", "title": None, "legend": legend}
        colours = [COLOURS[key.lower()] for key in keys]
        shapes = [FAMILIES[key] for key in keys]
        labels = self._end_labels(ends, sides)
        lines = [
            {"line": line, "family": self.series[line].family}
            for line in sorted({row["line"] for row in self.rows})
        ]
        words = [f"{glyph} {word}" for word, glyph in self.states.items()]
        longest = max((len(one["text"]) for one in labels if one["is_late"]), default=0)
        return {
            "title": {"text": wrap(self.title, TITLE_LETTERS), "subtitle": "; ".join(words)},
            "description": f"{self.title}: {self.y.title} against {self.x.title}",
            "width": WIDTH,
            "height": HEIGHT,
            "autosize": {"type": "fit", "contains": "padding"},
            "padding": {"left": 5, "top": 8, "bottom": 5, "right": 5 + 7 * min(longest, 24)},
            "data": {"values": self.rows},
            "transform": [
                {
                    "lookup": "line",
                    "from": {"data": {"values": lines}, "key": "line", "fields": ["family"]},
                }
            ],
            "encoding": {
                "x": self.x.encoding("x", ends),
                "y": self.y.encoding("y", sides),
                "color": {**colour, "scale": {"domain": keys, "range": colours}},
                "detail": {"field": "line"},
            },
            "layer": [
                *self._intervals(self.y.encoding("low", sides)),
                *self._lines(),
                *self._markers({**colour, "scale": {"domain": keys, "range": shapes}}),
                *_end_layers(labels),
            ],
            "config": _CONFIG,
        }

    def _end_labels(
        self, ends: tuple[float, float], sides: tuple[float, float]
    ) -> list[dict[str, Any]]:
        """Names at the ends of lines, moved up or down until they do not overlap."""
        rows: dict[int, list[dict[str, Any]]] = {}
        for row in self.rows:
            if self.series[row["line"]].has_line and "seed" not in row:
                rows.setdefault(row["line"], []).append(row)
        last = {line: held[-1] for line, held in rows.items() if len(held) > 1}
        if not 1 < len(last) <= MOST_LABELS:
            return []
        places, floor = {}, -math.inf
        for line, row in sorted(last.items(), key=lambda pair: float(pair[1]["y"])):
            floor = max(self.y.part(row["y"], sides), floor + 15 / (0.7 * HEIGHT))  # less titles
            places[line] = floor
        over = max(0.0, floor - 1)
        return [
            {
                "x": last[line]["x"],
                "y": self.y.value(place - over, sides),
                "text": self.series[line].name,
                "family": self.series[line].family,
                "is_late": self.x.part(last[line]["x"], ends) > 0.6,
            }
            for line, place in places.items()
        ]

    def _intervals(self, low: dict[str, Any]) -> Iterator[dict[str, Any]]:
        ends = {"y": low, "y2": {"field": "high"}}
        for has_markers, mark in (
            (False, {"type": "area", "opacity": 0.18, "line": False}),
            (True, {"type": "rule", "opacity": 0.7}),
        ):
            lines = [i for i, one in enumerate(self.series) if one.has_markers is has_markers]
            if any(point.low is not None for i in lines for point in self.series[i].points):
                wanted = f"indexof({lines}, datum.line) >= 0 && isValid(datum.low)"
                yield {"mark": mark, "transform": [{"filter": wanted}], "encoding": ends}

    def _lines(self) -> Iterator[dict[str, Any]]:
        lines = [i for i, one in enumerate(self.series) if one.has_line]
        if not lines:
            return
        dashed: dict[int, list[int]] = {}
        for i in lines:
            if self.series[i].dash:
                dashed.setdefault(self.series[i].dash, []).append(i)
        tests = [
            {"test": f"indexof({some}, datum.line) >= 0", "value": [*DASHES[dash % len(DASHES)]]}
            for dash, some in dashed.items()
        ]
        faint = [i for i in lines if self.series[i].is_faint]
        is_faint = f"indexof({faint}, datum.line) >= 0"
        yield {
            "mark": {"type": "line", "strokeJoin": "round"},
            "transform": [{"filter": f"indexof({lines}, datum.line) >= 0 && !datum.seed"}],
            "encoding": {
                **({"strokeDash": {"condition": tests, "value": [1, 0]}} if tests else {}),
                "strokeWidth": {
                    "condition": {"test": is_faint, "value": 2},
                    "value": 3.5 if faint else 2,
                },
                "opacity": {"condition": {"test": is_faint, "value": 0.3}, "value": 1},
            },
        }

    def _markers(self, shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
        marked = [i for i, one in enumerate(self.series) if one.has_markers]
        seen = f"indexof({marked}, datum.line) >= 0"
        size = {"size": {"field": "size", "type": "quantitative", "legend": None,
                         "scale": {"domain": [0, 1], "range": [90, 380]}}}  # fmt: skip
        mark = {"type": "point", "filled": False, "strokeWidth": 2, "opacity": 1, "size": 75}
        for word in self.states:
            yield {
                "mark": {**mark, "size": 90, "shape": STATES[word][1], "fill": COLOURS["ground"]},
                "transform": [{"filter": f"datum.state === '{word}'"}],
            }
        if self.has_seeds:
            yield {
                "mark": {**mark, "filled": True, "size": 16, "strokeWidth": 0, "opacity": 0.7},
                "transform": [{"filter": "isValid(datum.seed)"}],
                "encoding": {"shape": shape},
            }
        sized = size if any("size" in row for row in self.rows) else {}
        yield {
            "mark": {**mark, "filled": True, "stroke": COLOURS["ground"], "strokeWidth": 1},
            "transform": [{"filter": f"{seen} && !datum.state && !datum.seed"}],
            "encoding": {"shape": shape, **sized},
        }


def _end_layers(labels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Texts with an outline in the background colour, readable on top of lines."""
    text = {"type": "text", "align": "left", "dx": 7, "fontSize": 12, "limit": 175, "aria": False}
    rim = {**text, "stroke": COLOURS["ground"], "strokeWidth": 4, "strokeJoin": "round"}
    for mark in (rim, text) if labels else ():
        yield {
            "mark": mark,
            "data": {"values": labels},
            "encoding": {"text": {"field": "text", "type": "nominal"}},
        }


_CONFIG: Final[dict[str, Any]] = {
    "background": COLOURS["ground"],
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "title": {
        "color": COLOURS["text"], "subtitleColor": COLOURS["faint"], "anchor": "start",
        "offset": 12,
        "fontSize": 15, "subtitleFontSize": 12, "subtitleFontWeight": "normal",
    },
    "axis": {
        "labelColor": COLOURS["faint"], "titleColor": COLOURS["text"], "gridColor": COLOURS["rule"],
        "domainColor": COLOURS["rule"], "tickColor": COLOURS["rule"], "labelFontSize": 12,
        "titleFontSize": 12, "titleFontWeight": 500, "titlePadding": 8,
    },
    "legend": {
        "orient": "bottom", "columns": 4, "labelColor": COLOURS["text"], "labelFontSize": 12,
        "labelLimit": 240, "symbolSize": 75, "symbolOpacity": 1,
    },
}  # fmt: skip


def _with_seeds(point: Point) -> Iterator[tuple[Point, dict[str, str]]]:
    """The point, then each of its seeds, marked as a seed."""
    yield point, {}
    for seed, value in point.seeds.items():
        details = {"run": point.label, "seed": seed}
        yield Point(point.x, value, point.label, details=details), {"seed": seed}


def _row(line: int, point: Point) -> dict[str, Any]:
    def rounded(value: float) -> float:
        """Counts are kept; other values have seven digits, more than is ever measured."""
        return float(value) if float(value).is_integer() else float(f"{value:.7g}")

    row: dict[str, Any] = {"x": rounded(point.x), "y": rounded(point.y), "line": line}
    if point.low is not None and point.high is not None:
        row |= {"low": rounded(point.low), "high": rounded(point.high)}
    if point.size is not None:
        row["size"] = rounded(point.size)
    if point.state:
        row["state"] = point.state
    return row


def svg(chart: Chart) -> str:
    """The chart as SVG; coordinates in hundredths of a pixel: more digits only take space.

    Groups of marks have no role of their own, which would need a text that only the marks have.
    """
    drawing = str(vl_convert.vegalite_to_svg(json.dumps(chart.spec()), allowed_base_urls=[]))
    groups = re.compile(r'(<g [^>]*) role="graphics-symbol" aria-roledescription="[^"]* container"')
    drawing = groups.sub(r"\1", drawing)
    places = re.compile(r' (?:d|transform)="[^"]*"')
    return places.sub(lambda one: re.sub(r"(\.\d\d)\d+", r"\1", one[0]), drawing)
