"""A worker's link to record and control of its run, which are here, and its watchdog on a clock of
the test's own: no thread, no waiting.
"""

import threading

import pytest
import ray

from tests.worker.fakes import FakeRun
from vit_ray.outcomes import EventKind
from vit_ray.tracking.run_state import Orders
from vit_ray.worker import run_link
from vit_ray.worker.run_link import (
    DELIVERY_S,
    FIRST_STEP_S,
    SETUP_S,
    RunLink,
    Watchdog,
    describe_threads,
)


@pytest.fixture
def actor() -> FakeRun:
    return FakeRun()


def link_of(actor: FakeRun, rank: int = 0) -> RunLink:
    return RunLink(actor, rank)


def test_a_heartbeat_brings_back_why_to_stop(actor):
    link = link_of(actor, rank=3)
    link.beat(7)
    assert link.stop_reason is None
    actor.stop = "SIGTERM"
    link.beat(8)
    assert link.stop_reason == "SIGTERM"
    assert actor.beats == [(3, 7), (3, 8)]
    actor.request_resize()  # of which rank 0 alone hears
    first = link_of(actor)
    for one in (first, link):
        one.beat(9)
    assert (first.is_resizing, link.is_resizing) == (True, False)


def test_1024_ranks_send_at_most_129_heartbeats_a_second(actor):
    links = [RunLink(actor, rank, 1024) for rank in range(1024)]
    for step in range(1, 17):
        actor.beats.clear()
        for link in links:
            link.beat(step)
        assert 128 <= len(actor.beats) <= 129, len(actor.beats)
        assert actor.beats.count((0, step)) == 1


@pytest.mark.parametrize(
    "error", [ray.exceptions.ActorDiedError(), RuntimeError("has not answered in 30 s")]
)
def test_a_host_that_is_gone_does_not_end_training(error):
    class Gone(FakeRun):
        def heartbeat(self, rank: int, step: int, *introduction: str) -> Orders:
            raise error

        def hanging(self, rank: int, world_size: int, where: str, wait_s: float) -> str | None:
            raise error

        def event(self, kind: str, text: str, step: int, wait_s: float = 0.0) -> None:
            raise error

        def run_id(self, wait_s: float) -> str | None:
            raise error

    link = link_of(Gone())
    link.beat(1)
    link.note_hang("no step", "calls", "threads", 1)
    assert link.tracking_run_id() is None
    assert link.stop_reason is None


def test_a_hang_names_who_is_waited_for_and_is_told_once_by_those_in_the_same_calls(actor):
    actor.waited_for = "worker 7 on host-3 is at step 4, heard 61 s ago"
    link_of(actor, 1).note_hang("no step for 60 s", "all_reduce", "  MainThread: all_reduce", 5)
    actor.waited_for = ""
    link_of(actor, 2).note_hang("no step for 60 s", "all_reduce", "  MainThread: all_reduce", 5)
    assert [text for _, text, _ in actor.events] == [
        "worker 1: no step for 60 s. worker 7 on host-3 is at step 4, heard 61 s ago. "
        "Threads of worker 1:\n  MainThread: all_reduce"
    ]


def test_the_run_id_is_asked_for_until_it_is_known(actor):
    answers: list[str | None] = [None, "run-id", "another"]
    actor.run_id = lambda wait_s: answers.pop(0)  # type: ignore[method-assign]
    link = link_of(actor)
    assert [link.tracking_run_id() for _ in range(4)] == [None, *["run-id"] * 3]
    assert answers == ["another"]


def test_what_all_ranks_know_is_sent_by_rank_0(actor):
    for rank in (0, 1):
        link = link_of(actor, rank)
        link.log(1, {"train/loss": 1.0})
        link.note(EventKind.RESUMED, "text", rank)
        link.note(EventKind.STOPPED, "text", rank, DELIVERY_S)
    assert actor.logged == [(1, {"train/loss": 1.0})]
    assert [(kind, rank) for kind, _, rank in actor.events] == [
        ("resumed", 0), ("stopped", 0),
    ]  # fmt: skip


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
    calls = describe_threads()
    goes_on.set()
    thread.join(60)
    (line,) = [line for line in calls.splitlines() if line.startswith("  training: ")]
    assert "wait (threading.py:" in line.partition("wait_for_a_collective")[0]
    assert "wait_for_a_collective (test_run_link.py:" in line
