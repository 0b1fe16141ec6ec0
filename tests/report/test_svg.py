"""Axes and numbers of the charts."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_ray.report.svg import Axis, Scale, Series, chart, number


@given(
    low=st.floats(1e-9, 1e9),
    ratio=st.floats(1.01, 1e9),
    is_log=st.booleans(),
)
def test_ticks_lie_inside_the_range_in_order_and_are_few(low, ratio, is_log):
    scale = Scale(low, low * ratio, 0.0, 100.0, is_log)
    ticks = scale.ticks()
    assert ticks == sorted(set(ticks))
    assert all(low * (1 - 1e-9) <= tick <= low * ratio * (1 + 1e-9) for tick in ticks)
    assert len(ticks) <= 12
    if ratio > 1.3 and not is_log:
        assert len(ticks) >= 2
    if ratio > 20:
        assert len(ticks) >= 2


def test_a_log_axis_gives_equal_room_to_equal_ratios():
    scale = Scale(1.0, 1000.0, 0.0, 300.0, True)
    assert [scale(10.0**d) for d in range(4)] == pytest.approx([0, 100, 200, 300])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00012, "1.2e-4"),
        (0.25, "0.25"),
        (1234.5, "1234"),
        (20000, "20k"),
        (1234567, "1.23M"),
        (3.03e8, "303M"),
        (4.2e9, "4.2G"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_points_that_a_log_axis_cannot_show_are_left_out():
    drawn = chart("t", Axis("x", is_log=True), Axis("y"), [Series("s", [(0, 1), (10, 2), (1, 3)])])
    svg = ET.fromstring(re.match(r"<svg.*?</svg>", drawn).group(0))
    assert len(list(svg.iter("circle"))) == 2


def test_values_that_are_not_finite_are_left_out():
    drawn = chart("t", Axis("x"), Axis("y"), [Series("s", [(1, float("nan")), (2, 5.0)])])
    assert drawn.count("<circle") == 1
    assert "nan" not in drawn


def test_one_point_and_no_point():
    assert "<circle" in chart("t", Axis("x"), Axis("y"), [Series("s", [(0, 0)])])
    assert "no values recorded" in chart("t", Axis("x"), Axis("y"), [Series("s", [])])


def test_labels_never_cover_each_other_and_isolated_points_always_have_one():
    crowd = [(1.0 + 0.001 * i, 1.0) for i in range(20)]
    drawn = chart(
        "t",
        Axis("x"),
        Axis("y"),
        [Series("s", [*crowd, (5.0, 3.0)], [*(f"crowded {i}" for i in range(20)), "alone"])],
    )
    svg = ET.fromstring(re.match(r"<svg.*?</svg>", drawn).group(0))
    labels = [text for text in svg.iter("text") if text.get("class") == "label"]
    assert "alone" in [text.text for text in labels]
    share = {"start": 0.0, "middle": 0.5, "end": 1.0}
    boxes = []
    for text in labels:
        width = 6.0 * len(text.text)
        left = float(text.get("x")) - width * share[text.get("text-anchor")]
        boxes.append((left, float(text.get("y")), width))
    for i, (x1, y1, width) in enumerate(boxes):
        for x2, y2, other in boxes[:i]:
            assert abs(y1 - y2) >= 12 or x1 + width <= x2 or x2 + other <= x1
