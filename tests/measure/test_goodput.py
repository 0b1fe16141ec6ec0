"""Where a run's time goes, as arithmetic over marks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_ray.measure.goodput import (
    Account,
    DriverBegan,
    DriverEnded,
    Failed,
    Mark,
    TimeClass,
    WaitedForPlace,
    Work,
    WorkClock,
    account,
    describe_goodput,
)


def work(
    attempt: str, begin_s: float, steps: tuple[int, int], world_size: int = 2, **seconds: float
) -> Work:
    """An attempt whose steps were each done once."""
    first, last = steps
    until_s = begin_s + sum(seconds.values())
    return Work(attempt, begin_s, until_s, seconds, world_size, first, last, last - first)


def spent(found: Account) -> dict[str, float]:
    """Classes that have any time."""
    return {str(kind): pytest.approx(value) for kind, value in found.seconds.items() if value}


def test_an_undisturbed_run_is_all_accounted_for() -> None:
    marks = [
        DriverBegan(100.0),
        WaitedForPlace(103.0, 105.0),
        work("a", 108.0, (0, 50), starting=4.0, training=60.0, data_wait=6.0, checkpoint=2.0,
             evaluation=8.0),
    ]  # fmt: skip
    found = account(marks, now_s=190.0)
    assert spent(found) == {
        "starting": 3 + 3 + 4, "place_wait": 2, "training": 60, "data_wait": 6, "checkpoint": 2,
        "evaluation": 8, "ending": 2,
    }  # fmt: skip
    assert found.wall_s == pytest.approx(90)
    assert found.goodput == pytest.approx(60 / 90)
    assert found.core_days == pytest.approx(2 * 66 / 86_400)


def test_a_killed_worker_costs_what_was_lost_the_restart_and_the_repeated_steps() -> None:
    """Ten seconds a step: killed in step 8, noticed 3 s later; resumed from the save of step 5."""
    marks = [
        DriverBegan(0.0),
        work("a", 0.0, (0, 7), training=70.0),
        Failed(78.0),
        work("b", 90.0, (5, 10), starting=4.0, restoring=1.0, training=50.0),
        DriverEnded(146.0),
    ]
    found = account(marks)
    assert spent(found) == {
        "training": 70 + 30, "lost": 8, "starting": 12 + 4, "restoring": 1, "repeated": 20,
        "ending": 1,
    }  # fmt: skip
    assert found.wall_s == pytest.approx(146)
    assert found.core_days == pytest.approx(2 * 120 / 86_400)


def test_the_time_between_two_drivers_is_no_part_of_the_goodput() -> None:
    stopped = [DriverBegan(0.0), work("a", 10.0, (0, 9), training=90.0), DriverEnded(101.0)]
    resumed = [DriverBegan(1000.0), work("b", 1020.0, (9, 19), training=80.0), DriverEnded(1100.0)]
    found = account([*stopped, *resumed])
    assert spent(found) == {"starting": 30, "training": 170, "ending": 1, "stopped": 899}
    assert found.goodput == pytest.approx(170 / 201)
    # A driver that was killed has no end: its last sign is the last step that is known of it.
    found = account([*stopped[:2], *resumed])
    assert spent(found) == {"starting": 30, "training": 170, "stopped": 900}


def test_a_group_that_changes_its_size_starts_again_and_each_size_has_its_core_days() -> None:
    marks = [
        DriverBegan(0.0),
        work("a", 5.0, (0, 10), world_size=4, training=20.0),
        work("b", 35.0, (10, 20), world_size=2, training=40.0),
    ]
    found = account(marks, now_s=75.0)
    assert spent(found) == {"starting": 15, "training": 60}
    assert found.core_days == pytest.approx((4 * 20 + 2 * 40) / 86_400)


def test_gpu_hours_are_of_the_workers_that_were_there_and_no_wait_for_a_place() -> None:
    marks = [
        DriverBegan(0.0),
        WaitedForPlace(100.0, 900.0),
        work("a", 1000.0, (0, 10), world_size=4, training=3000.0, checkpoint=100.0),
        Failed(4200.0),
        work("b", 4300.0, (10, 20), world_size=2, training=1000.0),
        DriverEnded(5400.0),
        DriverBegan(9000.0),
        work("c", 9100.0, (20, 30), world_size=8, training=500.0),
    ]
    found = account(marks)
    # Four workers for 200 s of starting, 3,100 of work and 100 lost; two for 100, 1,000, 100 of
    # ending; eight for 100 of starting and 500.
    metrics = found.metrics(use_gpu=True)
    assert metrics["cost/gpu_hours"] == pytest.approx((4 * 3400 + 2 * 1200 + 8 * 600) / 3600)
    assert not [key for key in found.metrics() if "cost" in key]


def test_of_an_attempt_the_last_word_counts_and_what_no_class_has_is_unknown() -> None:
    early = work("a", 0.0, (0, 2), training=20.0)
    late = replace(work("a", 0.0, (0, 4), training=40.0), until_s=41.0)
    found = account([early, late, DriverBegan(0.0)], now_s=41.0)
    assert spent(found) == {"training": 40, "unknown": 1}


def test_a_run_without_any_mark_has_no_goodput() -> None:
    found = account([], now_s=1.0)
    assert (found.wall_s, found.goodput, describe_goodput(found.metrics())) == (0.0, 0.0, "")


TIMES = st.floats(0, 1e6)
WORKS = st.builds(
    lambda begin, parts, first, num: replace(
        work(f"{begin}", begin, (first, first + num), **parts), num_steps=num + 2
    ),
    TIMES,
    st.dictionaries(st.sampled_from([str(kind) for kind in TimeClass]), st.floats(0, 1e4)),
    st.integers(0, 100), st.integers(0, 100),
)  # fmt: skip
MARKS = st.one_of(
    st.builds(DriverBegan, TIMES), st.builds(Failed, TIMES), st.builds(DriverEnded, TIMES), WORKS,
    st.builds(lambda begin, wait: WaitedForPlace(begin, begin + wait), TIMES, st.floats(0, 1e3)),
)  # fmt: skip


@given(st.lists(MARKS, min_size=1, max_size=12))
def test_the_classes_sum_to_the_time_from_the_first_mark_to_the_last(marks: Sequence[Mark]) -> None:
    found = account(marks)
    begins = [getattr(m, "time_s", None) or getattr(m, "begin_s", 0.0) for m in marks]
    assert all(value >= 0 for value in found.seconds.values())
    assert sum(found.seconds.values()) >= max(begins) - min(begins) - 1e-3
    assert 0 <= found.goodput <= 1


class Clock:
    """Of which the test turns the hands."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_every_moment_of_an_attempt_is_of_one_class() -> None:
    now = Clock()
    clock = WorkClock(2, now)

    def stream() -> object:
        for _ in range(3):
            now.now_s += 0.5  # the wait for a batch
            yield "batch"

    now.now_s += 7  # engine
    with clock.within(TimeClass.RESTORING):
        now.now_s += 2
    for step, _ in enumerate(clock.waits_for(stream()), start=11):
        now.now_s += 1.5
        clock.note_step(step)
        if step == 12:
            with clock.within(TimeClass.EVALUATION):
                now.now_s += 4
                with clock.within(TimeClass.CHECKPOINT):
                    now.now_s += 1
    found = clock.work
    assert found.seconds == pytest.approx(
        {"starting": 9, "restoring": 2, "data_wait": 1, "training": 3, "evaluation": 4,
         "checkpoint": 1}
    )  # fmt: skip
    assert (found.first_step, found.last_step, found.num_steps) == (10, 13, 3)
    assert found.first_s == pytest.approx(2)
    assert found.step_s == pytest.approx(2 + 2 * 2)
    assert found.until_s - found.begin_s == pytest.approx(sum(found.seconds.values()))
    # A step that hangs is not completed: it adds nothing.
    now.now_s += 60
    assert clock.work == found


@pytest.mark.parametrize(("paused_s", "usual_s", "lost_s"), [
    (38.0, 0.5, 37.5), (9.0, 0.5, 0.0), (38.0, 5.0, 0.0),
])  # fmt: skip
def test_what_a_paused_step_takes_beyond_the_usual_is_lost(
    paused_s: float, usual_s: float, lost_s: float
) -> None:
    now = Clock()
    clock = WorkClock(2, now)
    for step, _ in enumerate(clock.waits_for(range(41)), start=1):
        now.now_s += paused_s if step == 30 else usual_s
        clock.note_step(step)
    found = clock.work
    assert found.seconds.get("lost", 0.0) == pytest.approx(lost_s)
    assert found.seconds["training"] == pytest.approx(39 * usual_s + paused_s - lost_s)
    assert found.until_s - found.begin_s == pytest.approx(sum(found.seconds.values()))
    # The first steps tell nothing: what is usual is not known yet.
    clock = WorkClock(2, now)
    for step, _ in enumerate(clock.waits_for(range(5)), start=1):
        now.now_s += paused_s if step == 4 else usual_s
        clock.note_step(step)
    assert "lost" not in clock.work.seconds


def test_one_line_has_the_shares_that_are_not_nothing() -> None:
    marks = [DriverBegan(0.0), work("a", 30.0, (0, 90), training=3690.0, data_wait=1.0)]
    metrics = account(marks, now_s=3721.0).metrics()
    assert describe_goodput(metrics) == ("goodput 99.2% of 1:02:01: training 99.2%, starting 0.8%")
