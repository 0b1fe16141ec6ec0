"""What a person sees of a run that works."""

import io

import pytest
from rich.console import Console

from vit_ray.launch import progress_display as progress
from vit_ray.launch.progress_display import Pace, describe, time_left
from vit_ray.tracking.run_state import RunStatus

METRICS = {
    "train/loss": 2.25, "train/lr": 3e-4, "train/grad_norm": 0.75, "train/images_per_s": 1234.4,
    "perf/model_tflops_per_gpu": 512.4, "perf/mfu": 0.551, "perf/hfu": 0.602,
    "data/wait_fraction": 0.03, "perf/step_ms_median": 310.2, "perf/own_ms_median": 151.0,
    "perf/own_ms_max": 251.0, "perf/slowest_rank": 7.0, "perf/memory_gib": 71.25,
    "eval/top1": 0.8137,
}  # fmt: skip


def test_a_line_has_the_five_figures_that_matter_most() -> None:
    assert describe(RunStatus(metrics=METRICS)) == (
        "loss 2.250, 1234 images/s, data wait 3%, MFU 55.1%, top-1 81.37%"
    )
    on_a_cpu = {key: METRICS[key] for key in METRICS if not key.startswith("perf/")}
    assert describe(RunStatus(metrics=on_a_cpu)) == (
        "loss 2.250, 1234 images/s, data wait 3%, top-1 81.37%, lr 3.00e-04"
    )


def test_both_accuracies_are_told_where_weights_are_averaged() -> None:
    told = describe(RunStatus(metrics={"eval/top1": 0.5, "eval/averaged_top1": 0.625}))
    assert told == "top-1 50.00%, of averaged weights 62.50%"


def test_what_is_not_known_is_left_out() -> None:
    assert describe(RunStatus(metrics={"train/loss": 1.0})) == "loss 1.000"


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


def test_the_time_left_of_one_run_leaves_out_how_long_it_took_to_start(clock: list[float]) -> None:
    pace = Pace(100)
    clock[0] += 60
    pace.left(RunStatus(step=10))
    clock[0] += 10
    assert pace.left(RunStatus(step=20)) == "ETA 0:01:20"


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


def test_a_run_of_long_steps_is_not_waited_for_between_them(clock: list[float]) -> None:
    pace = Pace(100)
    clock[0] += 60
    for step in range(1, 4):
        pace.left(RunStatus(step=step))
        clock[0] += 60
        assert pace.left(RunStatus(step=step)).startswith("ETA")
    clock[0] += 250
    assert pace.left(RunStatus(step=3)) == "no step for 0:05:10"


def test_a_line_before_the_first_figures_ends_with_the_time_left() -> None:
    console = Console(file=io.StringIO())
    with progress._lines(console, "mine", 100) as show:
        show(RunStatus(step=7), "ETA --:--", True)
        show(RunStatus(step=8, metrics={"train/loss": 1.0}), "ETA 0:01:00", True)
    assert console.file.getvalue().splitlines() == [
        "mine: starting workers",
        "mine: step 7/100, ETA --:--",
        "mine: step 8/100, ETA 0:01:00, loss 1.000",
    ]
