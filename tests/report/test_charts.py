"""Charts, read back from the SVG that Vega draws of them and from its scene of marks."""

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from vit_ray.report.figures.charts import (
    COLOURS,
    FAMILIES,
    Axis,
    Chart,
    Point,
    Series,
    _log_ticks,
    svg,
)

X, Y = Axis("steps"), Axis("loss")


def chart(*series: Series, x: Axis = X, y: Axis = Y) -> Chart:
    return Chart("A title", x, y, series)


def one(*points: tuple[float, float], **options: Any) -> Series:
    return Series("one", [Point(*point) for point in points], **options)


def drawn(chart: Chart) -> list[tuple[float, float]]:
    """Places of the markers in pixels, from left to right."""
    found = []
    for path in ET.fromstring(svg(chart)).iter("{http://www.w3.org/2000/svg}path"):
        if path.get("aria-roledescription") == "point":
            x, y = re.match(r"translate\((.*?),(.*?)\)", path.get("transform")).groups()
            found.append((float(x), float(y)))
    return sorted(found)


WORDS = {"dev split": "\u25cb", "failed": "\u2715", "killed": "\u2298", "running": "\u25b7"}


def marks(drawing: str) -> list[str]:
    """Shapes of the markers, whatever their places."""
    paths = ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}path")
    return [p.get("d") for p in paths if p.get("aria-roledescription") == "point"]


def test_a_point_that_is_no_result_has_a_mark_and_a_word_of_its_own() -> None:
    whole = [Point(x, 1.0) for x in range(3)]
    assert len({*marks(svg(chart(Series("ViT", whole, has_line=False))))}) == 1
    states = [Point(x + 3.0, 1.0, state=word) for x, word in enumerate(WORDS)]
    one = chart(Series("ViT", [*whole, *states], has_line=False))
    assert len(marks(svg(one))) == 7
    assert len({*marks(svg(one))}) == 5
    for word, glyph in WORDS.items():
        assert f"{glyph} {word}" in svg(one)
    assert one.states == WORDS
    assert chart(Series("ViT", whole)).states == {}


def test_the_end_of_a_line_without_markers_shows_its_state() -> None:
    curve = [Point(0, 1.0), Point(1, 0.5), Point(2, 0.4, state="failed")]
    drawing = svg(chart(Series("run", curve, has_markers=False)))
    assert len(marks(drawing)) == 1


def test_a_log_axis_gives_equal_room_to_equal_ratios() -> None:
    logs = Axis("steps", is_log=True)
    places = drawn(chart(one((1, 1), (10, 2), (100, 3), (1000, 4)), x=logs))
    steps = [right[0] - left[0] for left, right in itertools.pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.01)
    assert steps[0] > 50


def test_points_that_an_axis_cannot_show_are_left_out() -> None:
    logs = Axis("steps", is_log=True)
    points = one((0, 1), (10, 2), (1, 3), (-5, 3), (float("inf"), 1), (2, float("nan")))
    assert len(drawn(chart(points, x=logs))) == 2
    assert chart(one((0, 1)), x=logs).rows == []


@pytest.mark.parametrize("text", ["quotes \" and ' here", "back\\slash", "</script>", "a(b", "{x}"])
def test_any_text_can_be_a_name(text: str) -> None:
    strange = Chart(text, Axis(text), Axis(text), [Series(text, [Point(1, 2, text)])])
    assert len(drawn(strange)) == 1
    titles = [
        node.text for node in ET.fromstring(svg(strange)).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert titles.count(text) == 3  # of the figure and of both axes


def test_colour_and_shape_are_the_family_and_dash_is_what_the_chart_says() -> None:
    lines = [one((1, 1), (2, 2), family="ViT"), one((1, 2), (2, 3), family="ResNet")]
    fills = [
        path.get("fill")
        for path in ET.fromstring(svg(chart(*lines))).iter("{http://www.w3.org/2000/svg}path")
        if path.get("aria-roledescription") == "point"
    ]
    assert fills == [COLOURS["vit"]] * 2 + [COLOURS["resnet"]] * 2
    assert len({*marks(svg(chart(*lines)))}) == 2
    assert "dasharray" not in svg(chart(*lines))
    dashed = one((1, 1), (2, 2), dash=1)
    assert svg(chart(lines[0], dashed)).count('stroke-dasharray="6,4"') == 1


def test_lines_have_their_names_at_their_ends_and_none_covers_another() -> None:
    near = [Series(f"line {i}", [Point(0, 0.0), Point(1, 1 + i / 1000)]) for i in range(5)]
    near.append(Series("far", [Point(0, 0.0), Point(1, 0.1)]))
    root = ET.fromstring(svg(chart(*near)))
    ends = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if text.text and text.text.startswith(("line", "far")):
            ends[text.text] = float(re.match(r"translate\(.*?,(.*?)\)", text.get("transform"))[1])
    assert sorted(ends, key=ends.get, reverse=True) == ["far", *(f"line {i}" for i in range(5))]
    heights = sorted(ends.values())
    assert min(b - a for a, b in itertools.pairwise(heights)) > 11
    many = [Series(f"line {i}", [Point(0, 0.0), Point(1, i)]) for i in range(9)]
    assert "line 3</text>" not in svg(chart(*many))


@pytest.mark.parametrize(
    ("ends", "texts"),
    [
        ((3e-7, 2e-3), ["10\u207b\u2076", "10\u207b\u2075", "10\u207b\u2074", "10\u207b\u00b3"]),
        ((0.0009, 0.2), ["0.001", "0.01", "0.1"]),
        ((0.002, 0.05), ["0.003", "0.01", "0.03"]),
        ((3e4, 4e5), ["3\u00b710\u2074", "10\u2075", "3\u00b710\u2075"]),
    ],
)
def test_a_log_axis_has_powers_or_plain_values(ends: tuple[float, float], texts: list[str]) -> None:
    assert [*_log_ticks(*ends).values()] == texts


def test_the_smallest_and_the_largest_model_have_marks_of_different_sizes() -> None:
    sized = [Point(x, 1.0, size=size) for x, size in enumerate((0.0, 0.5, 1.0))]
    drawing = svg(chart(Series("ViT", sized, has_line=False)))
    assert len({*marks(drawing)}) == 3


def test_axes_end_at_the_data_with_a_twentieth_of_room() -> None:
    assert Axis("x", is_log=True).range_of([1.0, 100.0]) == pytest.approx((10**-0.1, 10**2.1))
    assert Axis("x").range_of([0.0, 10.0]) == (-0.5, 10.5)
    assert Axis("x", is_percent=True).range_of([0.5, 0.99]) == pytest.approx((0.4755, 1.0))


def test_an_interval_is_a_band_along_a_line_and_a_bar_at_a_point() -> None:
    points = [Point(1, 2, low=1, high=3), Point(2, 3, low=2, high=5)]
    band = svg(chart(Series("fit", points, has_markers=False)))
    assert 'aria-roledescription="area mark' in band
    bars = svg(chart(Series("means", points, has_line=False)))
    assert bars.count('aria-roledescription="rule mark"') == 2


def luminance(colour: str) -> float:
    """Of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", ["ground", "panel"])
def test_everything_drawn_can_be_told_from_its_ground(ground: str) -> None:
    for name in ("text", "faint", "vit"):  # vit of links: text, too
        assert contrast(COLOURS[name], COLOURS[ground]) >= 4.5, name
    for family in FAMILIES:
        assert contrast(COLOURS[family.lower()], COLOURS[ground]) >= 3, family


def test_seeds_are_marks_of_their_own():
    """A line goes through the means alone, which end labels stand at."""
    points_of_line = [Point(x, 2.0, seeds={"0": 1.0, "1": 3.0}) for x in (1, 2)]
    lines = [Series(name, points_of_line) for name in ("one", "two")]
    some = chart(*lines)
    assert some.has_seeds
    assert len(drawn(some)) == 2 * 2 * 3
    through = re.findall(r'aria-roledescription="line mark" d="(.*?)"', svg(some))
    assert [len(path.split("L")) for path in through] == [2, 2]
    assert [label["x"] for label in some._end_labels((1, 2), (1, 3))] == [2, 2]
    assert not chart(one((1, 1))).has_seeds
