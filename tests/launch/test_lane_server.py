"""Who gets which training, and when it has ended: no Ray."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.fakes import make_job
from vit_ray.data.stream import stream_server
from vit_ray.launch import lane_server
from vit_ray.launch.lane_server import LaneServer
from vit_ray.train.lane_link import Assignment


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> LaneServer:
    monkeypatch.setattr(lane_server, "ANSWER_S", 0.01)
    monkeypatch.setattr(stream_server, "_most_kept_bytes", lambda: 0)  # asks Ray for its store
    return LaneServer()


def assignment(folder: Path, number: int) -> Assignment:
    streams: Any = None
    return Assignment(number, make_job(folder), False, streams)


def ended(server: LaneServer) -> bool:
    return server.wait_until_ended(timeout_s=0.0)


def test_workers_get_each_training_once_and_then_wait(server: LaneServer, tmp_path: Path) -> None:
    assert server.next_assignment(-1) == (True, None)
    first = assignment(tmp_path, 0)
    server.assign(first)
    assert server.next_assignment(-1) == (True, first)
    assert server.next_assignment(0) == (True, None)
    assert server.current_job() is first.job
    for rank in range(2):
        assert not ended(server)
        server.end_rank(0, "group", rank, 2)
    assert ended(server)
    assert server.next_assignment(-1) == (True, None)  # a group that starts now has missed nothing
    server.assign(assignment(tmp_path, 1))
    assert not ended(server)
    is_open, found = server.next_assignment(0)
    assert is_open
    assert found is not None
    assert found.number == 1


def test_a_training_whose_group_died_is_given_to_the_next_group(
    server: LaneServer, tmp_path: Path
) -> None:
    server.assign(assignment(tmp_path, 0))
    server.end_rank(0, "first", 0, 2)  # the other rank dies
    assert server.next_assignment(-1)[1] is not None
    server.end_rank(0, "second", 1, 3)  # of three now
    server.end_rank(0, "second", 2, 3)
    assert not ended(server)
    server.end_rank(0, "second", 0, 3)
    assert ended(server)


def test_a_worker_that_ends_an_old_training_late_does_not_end_the_next(
    server: LaneServer, tmp_path: Path
) -> None:
    server.assign(assignment(tmp_path, 0))
    server.end_rank(0, "group", 0, 1)
    server.assign(assignment(tmp_path, 1))
    server.end_rank(0, "group", 0, 1)
    assert not ended(server)


def test_a_closed_lane_lets_its_workers_end(server: LaneServer, tmp_path: Path) -> None:
    server.assign(assignment(tmp_path, 0))
    server.close()
    assert server.next_assignment(0) == (False, None)
    assert not ended(server)  # the training has not ended; who waits for it looks at the lane


def test_it_knows_from_the_controller_whether_the_workers_have_their_place(
    server: LaneServer,
) -> None:
    assert not server.is_placed()
    server.note_placement(True)
    assert server.is_placed()
    server.note_placement(False)
    assert not server.is_placed()
