"""When something is due."""

import pytest

from vit_ray.config.cadence import Cadence


@pytest.mark.parametrize(
    ("cadence", "due"),
    [
        (Cadence(), []),
        (Cadence(3), [3, 6, 9]),
        (Cadence(1), list(range(1, 10))),
        (Cadence(4, at_steps=(5,)), [4, 5, 8]),
    ],
)
def test_steps_at_which_it_is_due(cadence: Cadence, due: list[int]) -> None:
    assert [step for step in range(1, 10) if cadence.is_due_at(step)] == due


def test_by_the_clock_it_is_due_from_its_minutes_on() -> None:
    cadence = Cadence(every_minutes=0.5)
    assert [cadence.is_due_after(s) for s in (0.0, 29.9, 30.0, 100.0)] == [False, False, True, True]
    assert not Cadence(every_steps=1).is_due_after(1e9)
