"""What a run's control knows of its workers, on a clock of the test's own."""

import pytest

from vit_ray.outcomes import EventKind
from vit_ray.tracking import run_state
from vit_ray.tracking.run_state import RunState


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(run_state.time, "monotonic", lambda: now[0])
    return now


def test_an_event_of_an_unknown_kind_is_read():
    state = RunState()
    state.note({"kind": "event", "event": "of a later version", "text": "why"})
    assert state.status().events == [("of a later version", "why")]


def test_of_512_workers_the_one_that_is_silent_is_named_and_the_others_are_a_number(now_s):
    state = RunState()
    for rank in range(512):
        state.heartbeat(rank, 0, f"host-{rank // 8}")
    state.heartbeat(300, 12)
    now_s[0] += 61
    for rank in range(512):
        if rank != 300:
            state.heartbeat(rank, 12)
    told = [state.hanging(rank, 512, "all_reduce") for rank in range(512) if rank != 300]
    assert told[0] == (
        "worker 300 on host-37 is at step 12, heard 61 s ago; 511 of 512 workers are at step 12"
    )
    assert set(told[1:]) == {""}


def test_a_worker_that_is_behind_or_in_other_calls_or_was_never_there_is_told(now_s):
    state = RunState()
    for rank, step in ((0, 9), (1, 8), (2, 9)):
        state.heartbeat(rank, step, f"host-{rank}")
    assert state.hanging(0, 4, "all_reduce") == (
        "worker 1 on host-1 is at step 8, heard 0 s ago; worker 3 has never been heard from; "
        "2 of 4 workers are at step 9"
    )
    assert state.hanging(2, 4, "all_reduce") == ""
    assert "worker 1 on host-1 is at step 8" in state.hanging(1, 4, "next_batch")


def test_a_group_that_has_shrunk_waits_for_none_of_those_that_left(now_s):
    state = RunState()
    for rank in range(8):
        state.heartbeat(rank, 5)
    now_s[0] += 300
    for rank in range(2):
        state.heartbeat(rank, 6)
    assert state.hanging(0, 2, "all_reduce") == "2 of 2 workers are at step 6"


@pytest.mark.parametrize("kind", [EventKind.RESIZING, EventKind.WORKER_FAILED])
def test_a_group_is_resizing_until_the_next_one_follows(kind):
    """Also if it is asked before its workers have sent a heartbeat."""
    state = RunState()
    state.note({"kind": "resize"})
    for _ in range(2):
        assert state.heartbeat(0, 5).resizes
    state.note({"kind": "event", "event": kind, "text": "", "step": 5, "time_ms": 0})
    assert not state.heartbeat(0, 5).resizes
