"""A worker's link to the run's actor, with the actor's answers in place of Ray's."""

import threading
from typing import Any

import pytest
import ray

from tests.train.fakes import FakeActor
from vit_ray.train import run_link
from vit_ray.train.run_link import RunLink
from vit_ray.train.watchdog import Watchdog


class Handle:
    """As Ray's handle of an actor: `handle.method.remote(...)` gives what `ray.get` resolves."""

    def __init__(self, actor: FakeActor) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return type("Method", (), {"remote": staticmethod(lambda *a: lambda: method(*a))})


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> FakeActor:
    monkeypatch.setattr(run_link.ray, "get", lambda call, timeout=None: call())
    return FakeActor()


def link_of(actor: FakeActor, rank: int = 0) -> RunLink:
    return RunLink(Handle(actor), rank)


def test_a_heartbeat_brings_back_why_to_stop(actor: FakeActor) -> None:
    link = link_of(actor, rank=3)
    link.beat(7)
    assert link.stop_reason is None
    actor.stop = "SIGTERM"
    link.beat(8)
    assert link.stop_reason == "SIGTERM"
    assert actor.beats == [(3, 7), (3, 8)]


def test_a_save_request_is_taken_once_and_those_of_earlier_attempts_never(
    actor: FakeActor,
) -> None:
    link = link_of(actor)
    actor.saves = 2
    assert not link.take_save_request()
    link.beat(1)
    assert not link.take_save_request()
    actor.saves = 3
    link.beat(2)
    assert [link.take_save_request() for _ in range(3)] == [True, False, False]


def test_only_rank_0_takes_a_save_request(actor: FakeActor) -> None:
    link = link_of(actor, rank=1)
    link.beat(1)
    actor.saves = 1
    link.beat(2)
    assert not link.take_save_request()


def test_an_actor_that_is_gone_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(call: Any, timeout: float | None = None) -> Any:
        assert timeout is not None, "it would wait for ever"
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(run_link.ray, "get", gone)
    link = link_of(FakeActor())
    link.beat(1)
    link.note_hang("no step", 1)
    assert link.tracking_run_id() is None
    assert link.stop_reason is None


def test_every_rank_that_hangs_tells_the_run_where_its_threads_are(actor: FakeActor) -> None:
    now_s, ended = [0.0], []
    for rank in (0, 1):
        link = link_of(actor, rank)
        watchdog = Watchdog(
            5, 60.0, link.beat, link.note_hang,
            end=lambda: ended.append(now_s[0]), clock=lambda: now_s[0],
        )  # fmt: skip
        watchdog.begin_steps(5)
        watchdog.note_step(6)
        now_s[0] += 61.0
        watching = threading.Thread(target=watchdog.check)
        watching.start()
        watching.join(60)
    assert ended == [61.0, 122.0]
    assert [(kind, text[:9], step) for kind, text, step in actor.events] == [
        ("hung", "worker 0:", 6), ("hung", "worker 1:", 6),
    ]  # fmt: skip
    here = "test_every_rank_that_hangs_tells_the_run_where_its_threads_are (test_run_link.py:"
    assert all("MainThread: " in text and here in text for _, text, _ in actor.events)


def test_the_run_id_is_asked_for_on_rank_0(actor: FakeActor) -> None:
    assert link_of(actor).tracking_run_id() == "run-id"
    assert link_of(actor, rank=1).tracking_run_id() is None


def test_what_all_ranks_know_is_sent_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, str]] = []

    class Sink:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __getattr__(self, name: str) -> Any:
            remote = staticmethod(lambda *_: sent.append((self.rank, name)))
            return type("Method", (), {"remote": remote})

    monkeypatch.setattr(run_link.ray, "get", lambda call, timeout: call)
    for rank in (0, 1):
        link = RunLink(Sink(rank), rank)
        link.log(1, {"train/loss": 1.0})
        link.log(1, {})
        link.note("resumed", "text", 1)
        link.note_last("stopped", "text", 1)
        link.note_own("preemption", "text", 1)
    assert sent == [(0, "metrics"), (0, "event"), (0, "event"), (0, "event"), (1, "event")]
