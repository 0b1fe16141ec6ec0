"""Who gets which training, and when it has ended: no Ray."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util

from tests.worker.fakes import make_job
from vit_ray.data.stream import stream_server
from vit_ray.launch.pool import pool_server as pool_server
from vit_ray.launch.pool.pool_server import PoolServer
from vit_ray.worker.job import TrainJob
from vit_ray.worker.pool_link import GroupBrokenError, Member


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> PoolServer:
    monkeypatch.setattr(pool_server, "ANSWER_S", 0.01)
    monkeypatch.setattr(stream_server, "_own_resources", lambda: {})  # asks Ray for its store
    return PoolServer()


def assign(server: PoolServer, folder: Path) -> TrainJob:
    job, streams = make_job(folder), object()
    server.assign(job, False, streams)  # type: ignore[arg-type]
    return job


def ended(server: PoolServer) -> bool:
    return server.wait_until_ended(timeout_s=0.0)


def test_workers_get_each_training_once_and_then_wait(server: PoolServer, tmp_path: Path) -> None:
    assert server.next_assignment(-1) == (True, None)
    job = assign(server, tmp_path)
    is_open, first = server.next_assignment(-1)
    assert is_open
    assert first is not None
    assert (first.number, first.job) == (0, job)
    assert server.next_assignment(0) == (True, None)
    assert server.current_job() is job
    for rank in range(2):
        assert not ended(server)
        server.end_rank(0, rank, 2)
    assert ended(server)
    assert server.next_assignment(-1) == (True, None)  # a group that starts now has missed nothing
    assign(server, tmp_path)
    assert not ended(server)
    is_open, found = server.next_assignment(0)
    assert is_open
    assert found is not None
    assert found.number == 1


def test_a_training_whose_group_died_is_given_to_the_next_group(
    server: PoolServer, tmp_path: Path
) -> None:
    job = assign(server, tmp_path)
    server.end_rank(0, 0, 2)  # the other rank dies
    assert server.reassign(alone=False)
    found = server.next_assignment(-1)[1]
    assert found is not None
    assert (found.number, found.job) == (1, job)
    server.end_rank(1, 1, 3)  # of three now
    server.end_rank(1, 2, 3)
    assert not ended(server)
    server.end_rank(1, 0, 3)
    assert ended(server)
    server.reassign(alone=False)  # a worker dies that waits for the next training
    assert ended(server)


def member(pid: int) -> Member:
    return Member("10.0.0.1", "node", pid, "")


def test_ranks_meet_and_meet_again_with_the_one_that_was_replaced(
    server: PoolServer, tmp_path: Path
) -> None:
    server.reassign(alone=False)
    assign(server, tmp_path)
    assert server.meet(0, 1, 2, member(11)) is None
    first = server.meet(0, 0, 2, member(10))
    assert first is not None
    assert server.meet(0, 1, 2, member(11)) == first
    assert first.members == (member(10), member(11))
    assert not server.is_reassigned(0, 0.01)
    assert server.reassign(alone=True)  # rank 1 has died
    assert server.is_reassigned(0, 0.0)
    server.end_rank(0, 0, 2)  # of the group before
    with pytest.raises(GroupBrokenError):
        server.meet(0, 0, 2, member(10))
    assert server.meet(1, 0, 2, member(10)) is None
    second = server.meet(1, 1, 2, member(12))
    assert second is not None
    assert second.members == (member(10), member(12))
    # Servers of streams stay, and the streams are others.
    assert second.group.partition(" ")[0] == first.group.partition(" ")[0]
    assert second.group != first.group
    server.reassign(alone=False)
    server.meet(2, 0, 2, member(13))
    third = server.meet(2, 1, 2, member(14))
    assert third is not None
    assert third.group.partition(" ")[0] != first.group.partition(" ")[0]


def test_a_worker_that_was_done_comes_back_where_another_died_before_its_end(
    server: PoolServer, tmp_path: Path
) -> None:
    assign(server, tmp_path)
    server.end_rank(0, 0, 2)
    assert server.next_assignment(0) == (True, None)
    server.reassign(alone=True)
    found = server.next_assignment(0)[1]
    assert found is not None
    assert found.number == 1


def test_a_silent_process_is_ended_once_and_a_group_without_one_starts_again(
    server: PoolServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_pids: list[int] = []
    task = SimpleNamespace(remote=ended_pids.append)
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=lambda **_: task))
    assign(server, tmp_path)
    for rank in range(2):
        server.meet(0, rank, 2, member(10 + rank))
    assert server.end_silent(0, [1])
    assert server.end_silent(0, [1])  # another rank that waited for it
    assert ended_pids == [11]
    assert server.reassign(alone=True)
    assert server.end_silent(0, [0])  # too late: the group is another one
    assert ended_pids == [11]
    assert not server.end_silent(1, [])
    assert not server.reassign(alone=True)
    assert server.reassign(alone=False)
    assert server.reassign(alone=True)


def test_a_process_whose_end_does_not_help_is_not_waited_for(
    server: PoolServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SimpleNamespace(remote=lambda _: None)
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=lambda **_: task))
    monkeypatch.setattr(pool_server, "ENDED_S", 0.0)
    assign(server, tmp_path)
    server.meet(0, 1, 2, member(11))
    assert not server.end_silent(0, [1])


def test_a_worker_that_ends_an_old_training_late_does_not_end_the_next(
    server: PoolServer, tmp_path: Path
) -> None:
    assign(server, tmp_path)
    server.end_rank(0, 0, 1)
    assign(server, tmp_path)
    server.end_rank(0, 0, 1)
    assert not ended(server)


def test_a_closed_pool_lets_its_workers_end(server: PoolServer, tmp_path: Path) -> None:
    assign(server, tmp_path)
    assert server.closed() == (False, None)
    error = OSError("the group is gone")
    server.close((error,))
    server.close()  # by its owner, who knows of no error
    assert server.closed() == (True, error)
    assert server.next_assignment(0) == (False, None)
    assert not ended(server)  # the training has not ended; who waits for it looks at the pool


def test_it_knows_from_the_controller_whether_the_workers_have_their_place(
    server: PoolServer,
) -> None:
    assert not server.is_placed()
    server.note_placement(True)
    assert server.is_placed()
    server.note_placement(False)
    assert not server.is_placed()


def test_each_host_has_one_server_for_each_start_of_the_workers(
    server: PoolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    class Actor:
        def options(self, **options: Any) -> Any:
            def remote(**how: Any) -> object:
                started.append({**options, **how})
                return object()

            return SimpleNamespace(remote=remote)

    monkeypatch.setattr(ray, "remote", lambda _: Actor())
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    assert server.stream_server("a 0", "10.0.0.1", "n1", range(8)) is None
    second = server.stream_server("a 0", "10.0.0.2", "n2", range(8, 16))
    third = server.stream_server("a 0", "10.0.0.3", "n3", range(16, 20))
    assert second is not third
    assert server.stream_server("a 1", "10.0.0.2", "n2", range(8, 16)) is second
    assert server.stream_server("b 1", "10.0.0.2", "n4", range(8, 16)) is not second
    places = [(s["label_selector"]["ray.io/node-id"], s["max_concurrency"]) for s in started]
    assert places == [("n2", 18), ("n3", 10), ("n4", 18)]
    assert all(s["warms_up"] for s in started)
