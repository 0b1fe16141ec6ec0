"""A worker's link to its run's record, and its watchdog on a clock of the test's own."""

import threading
from unittest.mock import Mock

import pytest
import ray

from tests.worker.fakes import FakeRun
from vit_ray.outcomes import EventKind
from vit_ray.worker import run_link
from vit_ray.worker.run_link import DELIVERY_S, FIRST_STEP_S, SETUP_S, RunLink, Watchdog


@pytest.fixture
def actor() -> FakeRun:
    return FakeRun()


@pytest.mark.parametrize(
    "error", [ray.exceptions.ActorDiedError(), RuntimeError("has not answered in 30 s")]
)
def test_a_host_that_is_gone_does_not_end_training(error):
    calls = dict.fromkeys(("heartbeat", "hanging", "event", "run_id"), Mock(side_effect=error))
    link = RunLink(Mock(**calls), 0)
    link.beat(1)
    link.note_hang("no step", "calls", "threads", 1)
    assert link.tracking_run_id() is None
    assert link.stop_reason is None


def test_what_all_ranks_know_is_sent_by_rank_0(actor):
    for rank in (0, 1):
        link = RunLink(actor, rank)
        link.log(1, {"train/loss": 1.0})
        link.note(EventKind.RESUMED, "text", rank)
        link.note(EventKind.STOPPED, "text", rank, DELIVERY_S)
    assert actor.logged == [(1, {"train/loss": 1.0})]
    assert [(kind, rank) for kind, _, rank in actor.events] == [
        ("resumed", 0), ("stopped", 0),
    ]  # fmt: skip


def test_a_record_that_hangs_does_not_keep_a_hanging_process(monkeypatch):
    """Neither the report of the hang nor a heartbeat is waited for."""
    monkeypatch.setattr(run_link, "REPORT_S", 0.01)
    monkeypatch.setattr(run_link, "BEAT_S", 0.01)
    ended, hangs = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.wait(60)

    dog = Watchdog(Mock(beat=hang, note_hang=hang), 0.0, end=ended.set)
    dog.note_step(6)
    dog.start()
    try:
        assert ended.wait(60)
    finally:
        dog.stop()
        hangs.set()


def test_time_counts_from_each_step_each_part_of_an_evaluation_and_from_resuming():
    now_s, hangs, ends = 0.0, [], []
    dog = Watchdog(
        Mock(note_hang=lambda *report: hangs.append(report)), 60.0,
        end=lambda: ends.append(len(hangs)), clock=lambda: now_s,
    )  # fmt: skip

    def ends_within(seconds: float) -> bool:
        nonlocal now_s
        before = len(ends)
        now_s += seconds
        dog.check()
        return len(ends) > before

    assert not ends_within(SETUP_S - 1)
    assert ends_within(2)
    for step in range(6, 10):
        dog.note_step(step)
        assert not ends_within(50)
    assert ends_within(11)
    for _ in range(2):  # which may take as long as the first step
        dog.expect_long_step()
        assert not ends_within(FIRST_STEP_S - 1)
    assert ends_within(2)
    dog.note_step(10)
    with dog.paused():
        assert not ends_within(10_000)
    assert not ends_within(59)
    assert ends_within(2)
    longer = Watchdog(Mock(), 2 * SETUP_S)  # than any of these
    for expect in (lambda: None, longer.expect_long_step):
        expect()
        assert longer._limit_s == 2 * SETUP_S
    assert ends == [1, 2, 3, 4]  # the reason is reported first
    assert hangs[0][0] == "no step for 3600 s; restarting"
    reason, where, _, step = hangs[-1]
    assert (reason, step) == ("no step for 60 s (train.step_timeout_s); restarting", 10)
    assert "test_time_counts_from_each_step" in where  # the thread that made it
