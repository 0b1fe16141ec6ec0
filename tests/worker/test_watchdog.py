"""The watchdog on a clock of the test's own: no thread, no waiting."""

import threading

from vit_ray.worker import run_link
from vit_ray.worker.run_link import FIRST_STEP_S, SETUP_S, Watchdog, describe_threads


class Watched:
    def __init__(self, timeout_s: float = 60.0) -> None:
        self.now_s, self.hangs, self.ends = 0.0, [], 0
        self.dog = Watchdog(
            timeout_s, lambda step: None, lambda *report: self.hangs.append(report),
            end=self._end, clock=lambda: self.now_s,
        )  # fmt: skip
        self.dog.note_step(5)
        self.dog.expect_long_step()

    def _end(self) -> None:
        assert len(self.hangs) == self.ends + 1, "the reason is reported first"
        self.ends += 1

    def ends_within(self, seconds: float) -> bool:
        before = self.ends
        self.now_s += seconds
        self.dog.check()
        return self.ends > before


def test_a_step_that_hangs_ends_the_process_after_its_reason_is_reported():
    watched = Watched()
    watched.dog.note_step(6)
    assert not watched.ends_within(59)
    assert watched.ends_within(2)
    ((reason, where, threads, step),) = watched.hangs
    assert reason == "no step for 60 s (train.step_timeout_s); restarting"
    assert "test_a_step_that_hangs_ends_the_process" in where  # the thread that made it
    assert threads == describe_threads()
    assert step == 6


def test_a_record_that_hangs_does_not_keep_a_hanging_process(monkeypatch):
    """Neither the report of the hang nor a heartbeat is waited for."""
    monkeypatch.setattr(run_link, "REPORT_S", 0.01)
    monkeypatch.setattr(run_link, "BEAT_S", 0.01)
    ended, hangs = threading.Event(), threading.Event()
    dog = Watchdog(0.0, lambda step: _wait(hangs), lambda *_: _wait(hangs), end=ended.set)
    dog.note_step(6)
    dog.start()
    try:
        assert ended.wait(60)
    finally:
        dog.stop()
        hangs.set()


def _wait(event: threading.Event) -> None:
    event.wait(60)


def test_time_counts_from_each_step_each_part_of_an_evaluation_and_from_resuming():
    watched = Watched()
    for step in range(6, 10):
        watched.dog.note_step(step)
        assert not watched.ends_within(50)
    for _ in range(2):  # which may take as long as the first step
        watched.dog.expect_long_step()
        assert not watched.ends_within(FIRST_STEP_S - 1)
    assert watched.ends_within(2)
    watched.dog.note_step(10)
    with watched.dog.paused():
        assert not watched.ends_within(10_000)
    assert not watched.ends_within(59)
    assert watched.ends_within(2)


def test_it_beats_from_a_thread_until_stopped():
    beats: list[int] = []
    dog = Watchdog(60.0, lambda step: (beats.append(step), dog.stop()), lambda *_: None)
    dog.start()
    dog.join(timeout=30)
    for sending in [one for one in threading.enumerate() if one.name == "heartbeats"]:
        sending.join(30)
    assert beats == [0]


def test_setting_up_may_take_longer_still_and_has_an_end():
    watched = Watched()
    watched.dog = Watchdog(
        60.0, lambda step: None, lambda *report: watched.hangs.append(report),
        end=watched._end, clock=lambda: watched.now_s,
    )  # fmt: skip
    assert not watched.ends_within(SETUP_S - 1)
    assert watched.ends_within(2)
    assert watched.hangs[0][0] == "no step for 3600 s; restarting"


def test_where_each_thread_is_is_told_with_the_innermost_call_first():
    is_there, goes_on = threading.Event(), threading.Event()

    def wait_for_a_collective() -> None:
        is_there.set()
        goes_on.wait(60)

    thread = threading.Thread(target=wait_for_a_collective, name="training")
    thread.start()
    assert is_there.wait(60)
    told = describe_threads()
    goes_on.set()
    thread.join(60)
    (line,) = [line for line in told.splitlines() if line.startswith("  training: ")]
    assert "wait (threading.py:" in line.partition("wait_for_a_collective")[0]
    assert "wait_for_a_collective (test_watchdog.py:" in line
