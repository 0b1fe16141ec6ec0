"""A worker's link to record and control of its run, which are here."""

import pytest
import ray

from tests.worker.fakes import FakeRun
from vit_ray.outcomes import EventKind
from vit_ray.tracking.run_state import Orders
from vit_ray.worker.run_link import DELIVERY_S, RunLink


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
