"""What a person sees of a run that works."""

import pytest

from vit_ray.launch import progress_display as progress
from vit_ray.launch.progress_display import Pace, time_left
from vit_ray.tracking.run_state import RunStatus


@pytest.mark.parametrize(
    ("step", "start_step", "elapsed_s", "left"),
    [
        (150, 100, 25.0, "0:07:05"),  # 0.5 s a step, of 1,000 steps
        (200, 0, 7200.0, "8:00:00"),
        (100, 100, 3.0, "--:--"),  # after a restart nothing is known yet
        (1000, 0, 10.0, "0:00:00"),
    ],
)
def test_the_time_left_is_reckoned_from_the_steps_of_this_attempt(
    step: int, start_step: int, elapsed_s: float, left: str
) -> None:
    assert time_left(step, start_step, 1000, elapsed_s) == left


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the display reads, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_of_a_sweep_counts_the_starts_of_its_trials_and_falls(
    clock: list[float],
) -> None:
    # Four trials of 100 steps: each takes 30 s to start and 10 s to train.
    pace, left = Pace(400), []
    for trial in range(4):
        for step in (0, 100):
            clock[0] = 100.0 + trial * 40 + (30 if step == 0 else 40)
            left.append(pace.left(RunStatus(step=trial * 100 + step, has_children=True)))
    assert left[0] == "ETA --:--"
    assert left[1::2] == ["ETA 0:02:00", "ETA 0:01:20", "ETA 0:00:40", "ETA 0:00:00"]


def test_a_run_without_a_step_says_so_and_has_no_pace(clock: list[float]) -> None:
    pace = Pace(100)
    assert pace.left(RunStatus()) == "ETA --:--"
    clock[0] += 600
    assert pace.left(RunStatus()) == "ETA --:--"  # it is starting
    pace.left(RunStatus(step=10))
    for step, waited_s, said in (
        (20, 10, "ETA 0:01:20"),
        (20, 15, "ETA 0:03:20"),
        (20, 50, "no step for 0:01:05"),
        (21, 1, "ETA 0:09:06"),  # 76 s for 11 steps
    ):
        clock[0] += waited_s
        assert pace.left(RunStatus(step=step)) == said
