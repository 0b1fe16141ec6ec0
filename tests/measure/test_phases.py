"""Where a run's time goes: an attempt's clock, and runs of several attempts."""

import pytest

from vit_ray.measure.phases import Phase, PhaseClock, describe_phases, phase_metrics


class Now:
    """A clock that the test sets."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def train(clock: PhaseClock, now: Now, num_steps: int, wait_s: float = 0.5) -> None:
    """Steps of 2 s, each after a wait."""
    for _ in range(num_steps):
        now.now_s += wait_s + 2.0
        clock.note_step(wait_s)


def spent(clock: PhaseClock) -> dict[str, float]:
    return {phase: value for phase, value in clock.spent()[0].items() if value}


def test_every_second_of_an_attempt_is_of_one_phase():
    now = Now(108.0)
    clock = PhaseClock(now)
    clock.resume({}, 0.0, driver_s=100.0, place_wait_s=3.0)
    now.now_s += 4.0
    train(clock, now, 11)
    with clock.within(Phase.EVALUATION):
        now.now_s += 8.0
        with clock.within(Phase.CHECKPOINT):
            now.now_s += 1.0
    now.now_s += 0.25
    assert spent(clock) == {
        "place_wait": 3.0, "starting": 5.0 + 4.0 + 2.5, "training": 20.25, "data_wait": 5.0,
        "evaluation": 8.0, "checkpoint": 1.0,
    }  # fmt: skip
    assert clock.spent()[1] == now.now_s
    assert sum(clock.spent()[0].values()) == pytest.approx(now.now_s - 100.0)


def test_what_was_done_after_the_last_checkpoint_is_lost_and_counts_once():
    now = Now(0.0)
    clock = PhaseClock(now)
    clock.resume({}, 0.0, driver_s=0.0, place_wait_s=0.0)
    train(clock, now, 5, 0.0)
    saved, saved_s = clock.spent()
    train(clock, now, 3, 0.0)
    now.now_s += 20.0  # it hangs, and its group waits for a place for 12 s of these
    again = PhaseClock(now)
    again.resume(saved, saved_s, driver_s=0.0, place_wait_s=12.0)
    now.now_s += 1.0
    train(again, now, 4, 0.0)
    assert spent(again) == {
        "starting": 2.0 + 1.0 + 2.0, "training": 8.0 + 6.0, "lost": 6.0 + 8.0, "place_wait": 12.0
    }  # fmt: skip
    assert sum(again.spent()[0].values()) == now.now_s


@pytest.mark.parametrize(
    ("now_s", "driver_s", "expected"),
    [
        (1000.0, 990.0, {"training": 60.0, "starting": 10.0}),  # 890 s without a driver
        (50.0, 0.0, {"training": 60.0}),  # the machine's clock was set back
    ],
)
def test_time_without_a_driver_does_not_count(now_s, driver_s, expected):
    clock = PhaseClock(Now(now_s))
    clock.resume({"training": 60.0}, 100.0, driver_s=driver_s, place_wait_s=0.0)
    assert spent(clock) == expected


def test_figures_and_their_line():
    seconds = dict.fromkeys(Phase, 0.0)
    seconds |= {Phase.TRAINING: 3690.0, Phase.DATA: 1.0, Phase.STARTING: 30.0}
    metrics = phase_metrics(seconds)
    assert metrics["run/wall_s"] == 3721.0
    assert metrics["run/goodput"] == pytest.approx(3690 / 3721)
    assert describe_phases(metrics) == "goodput 99.2% of 1:02:01: training 99.2%, starting 0.8%"
    short = phase_metrics({Phase.TRAINING: 0.7, Phase.STARTING: 0.7})
    assert describe_phases(short) == "goodput 50.0% of 0:00:01: training 50.0%, starting 50.0%"
