"""Lanes that wait between trainings: which is taken, started and closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from vit_ray.launch import lane
from vit_ray.launch.lane import borrowed_lane, kept_lanes, start_kept_lane


@dataclass
class FakeLane:
    shape: Any
    is_private: bool
    is_open: bool = True

    def __post_init__(self) -> None:
        opened.append(self)

    def close(self) -> None:
        self.is_open = False


opened: list[FakeLane] = []


pytestmark = pytest.mark.usefixtures("own_lanes")


def test_a_lane_that_is_started_has_the_place_of_idle_ones_of_other_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "Lane", FakeLane)
    opened.clear()
    cell, trial, busy = (object() for _ in range(3))
    kinds: Any = (cell, trial, busy)
    with kept_lanes():
        with borrowed_lane(kinds[0], is_private=True), borrowed_lane(kinds[2], is_private=True):
            pass  # the one is idle from here on
        with borrowed_lane(kinds[2], is_private=True) as running:
            start_kept_lane(kinds[1], is_private=True)
            assert [one.shape for one in opened if one.is_open] == [busy, trial]
            start_kept_lane(kinds[1], is_private=True)  # it is there
            with borrowed_lane(kinds[1], is_private=True) as taken:
                assert taken.shape is trial
            assert running.is_open
        assert len(opened) == 3
    assert not any(one.is_open for one in opened)
