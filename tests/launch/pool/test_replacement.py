"""Which failures of workers leave the others their processes; Ray's own values, no cluster."""

import math
import os
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2.api.exceptions import ControllerError

from vit_ray.launch.pool import replacement
from vit_ray.launch.pool.failing_nodes import FAILING_NODES
from vit_ray.launch.pool.replacement import REPLACEMENT, ReplaceWorkers, WatchPreemption
from vit_ray.outcomes import WorkerPlace

DIED = WorkerHealthCheckFailedError("failed", ray.exceptions.ActorDiedError())
UNREACHABLE = WorkerHealthCheckFailedError(
    "failed", ray.exceptions.ActorUnavailableError("Connection reset by peer", None)
)
PLACES = {rank: WorkerPlace("10.0.0.1", "ab"[rank % 2], "pid 1", 5) for rank in range(20)}


class Server:
    """The pool's, which has every training assigned again, or does not."""

    def __init__(self) -> None:
        self.alone: list[bool] = []
        self.answers = True
        self.reassign = SimpleNamespace(remote=self._reassign)

    def _reassign(self, *, alone: bool) -> bool:
        self.alone.append(alone)
        return self.answers


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": n, "Alive": n != "b"} for n in "abc"])
    monkeypatch.setattr(replacement, "answer", lambda reference, *_: reference)
    return Server()


def status_of(errors: dict[int, Exception], count: int = 4) -> WorkerGroupPollStatus:
    """Every worker is a group of replicas, as Ray has it for our backend."""
    statuses = {r: WorkerStatus(r not in errors, errors.get(r)) for r in range(count)}
    return WorkerGroupPollStatus(statuses, {rank: rank for rank in range(count)})


def replaced(server: Any, errors: dict[int, Exception], *, size: int = 4, now: int = 4) -> set[int]:
    """The workers that Ray replaces alone; empty if it starts all again."""
    callback, status = ReplaceWorkers(server), status_of(errors, now)
    callback.after_worker_group_poll_status(status)
    REPLACEMENT.judge(status.get_worker_group_error(), PLACES)
    callback.before_controller_execute_resize_decision(ResizeDecision(size, {}))
    callback.after_controller_state_update(RunningState(), RunningState())
    assert not REPLACEMENT.is_allowed
    return status.failing_replica_group_indices


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({2: DIED}, {2}),
        ({0: DIED, 2: DIED}, {0, 2}),
        ({1: DIED}, set()),  # its node is gone
        ({2: UNREACHABLE}, set()),  # its node may be
        ({0: DIED, 2: UNREACHABLE}, set()),
        ({2: RuntimeError("CUDA error")}, set()),
        ({0: DIED, 2: RuntimeError("Connection closed by peer")}, set()),
    ],
)
def test_workers_whose_process_has_died_on_a_living_node_are_replaced_alone(
    server: Server, errors: dict[int, Exception], expected: set[int]
) -> None:
    assert replaced(server, errors) == expected
    assert server.alone == [True] * bool(expected)


def test_all_start_again_where_the_group_changes_its_size_or_all_have_died(server: Server) -> None:
    assert replaced(server, {2: DIED}, size=2) == set()
    assert replaced(server, {0: DIED, 2: DIED, 4: DIED}, size=5, now=5) == {0, 2, 4}
    many = {2 * rank: DIED for rank in range(9)}
    assert replaced(server, many, size=20, now=20) == set()
    assert server.alone == [True]


def test_all_start_again_where_the_node_is_to_be_left_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FAILING_NODES, "_left", {"a": ("10.0.0.1", math.inf)})
    assert replaced(server, {2: DIED}) == set()


def test_all_start_again_where_the_others_hang(server: Server) -> None:
    server.answers = False
    assert replaced(server, {2: DIED}) == set()


def test_a_group_of_new_workers_has_the_training_assigned_again(server: Server) -> None:
    callback = ReplaceWorkers(server)
    assert callback.on_controller_start_worker_group(scaling_config=None, num_workers=2) is None
    assert server.alone == [False]


def test_a_failure_of_the_controller_lets_no_worker_stay(server: Server) -> None:
    REPLACEMENT.is_allowed = True
    REPLACEMENT.judge(ControllerError(RuntimeError("no place")), PLACES)
    assert not REPLACEMENT.is_allowed


@pytest.mark.parametrize("starts", [False, True])
def test_the_controller_ends_where_a_new_worker_does_not_start(
    starts: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray waits for a replaced worker without a limit."""
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(replacement, "PLACED_S", 600.0 if starts else 0.05)
    monkeypatch.setattr(os, "_exit", ended.put)
    callback, status = ReplaceWorkers(server), status_of({2: DIED})
    callback.after_worker_group_poll_status(status)
    REPLACEMENT.judge(status.get_worker_group_error(), PLACES)
    before = set(threading.enumerate())
    callback.before_controller_execute_resize_decision(ResizeDecision(4, {}))
    if starts:
        (waiting,) = set(threading.enumerate()) - before
        callback.after_controller_state_update(RunningState(), RunningState())
        waiting.join(30)
        assert ended.empty()
        assert not waiting.is_alive()
    else:
        assert ended.get(timeout=30) == 1


def test_the_watch_for_preempted_nodes_learns_of_a_replaced_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched: list[list[Any]] = []

    def remote(**_: Any) -> Any:
        return lambda _: SimpleNamespace(
            remote=lambda **given: watched.append(list(given["worker_actors_by_rank"].values()))
        )

    def worker(rank: int, actor: str) -> Any:
        context, metadata = SimpleNamespace(world_rank=rank), SimpleNamespace(node_id="a")
        return SimpleNamespace(distributed_context=context, metadata=metadata, actor=actor)

    monkeypatch.setattr(ray, "remote", remote)
    workers = [worker(0, "first"), worker(1, "second")]
    group = SimpleNamespace(get_workers=lambda: workers)
    callback = WatchPreemption()
    callback.after_worker_group_start(group)
    workers[1] = worker(1, "third")
    callback.after_replica_group_start(SimpleNamespace())
    assert watched == [["first", "second"], ["first", "third"]]
