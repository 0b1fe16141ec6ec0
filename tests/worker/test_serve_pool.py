"""When a worker takes its training again, and when its error ends its process; no Ray."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from vit_ray.worker import worker
from vit_ray.worker.job import UnrecoverableError
from vit_ray.worker.pool_link import GroupBrokenError

BY_PEER = RuntimeError("Connection closed by peer [10.0.0.2]")


class Pool:
    """Two assignments, of whom the second is the first one again."""

    def __init__(self, *, is_reassigned: bool = True) -> None:
        self.ended: list[int] = []
        self._is_reassigned = is_reassigned
        self.asked: list[int] = []

    def assignments(self) -> Iterator[int]:
        yield from (0, 1)

    def is_reassigned(self, assignment: int, wait_s: float) -> bool:
        assert wait_s > 0
        self.asked.append(assignment)
        return self._is_reassigned

    def end(self, assignment: int) -> None:
        self.ended.append(assignment)


def serve(
    monkeypatch: pytest.MonkeyPatch,
    pool: Pool,
    error: Exception,
    *,
    replaces: bool = True,
    writes: bool = False,
) -> list[str]:
    """What the worker did, in its order; the first training ends with the error."""
    done: list[str] = []

    def train(assignment: int, *_: Any, replaces: bool) -> None:
        done.append(f"train {assignment}")
        if assignment == 0:
            raise error

    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(worker, "PoolLink", lambda *_: pool)
    monkeypatch.setattr(worker, "quiet_libraries", lambda: None)
    monkeypatch.setattr(worker, "warm_up_process", lambda: None)
    monkeypatch.setattr(worker, "_train", train)
    monkeypatch.setattr(worker, "writers_have_ended", lambda: not writes)
    monkeypatch.setattr(
        worker, "leave_process_group", lambda *, keeps_compiled: done.append("leave")
    )
    worker.serve_pool({"server": None, "replaces": replaces})
    return done


@pytest.mark.parametrize("error", [BY_PEER, GroupBrokenError("another worker has died")])
def test_a_training_that_another_rank_broke_is_taken_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool()
    assert serve(monkeypatch, pool, error) == ["train 0", "leave", "train 1"]
    assert pool.ended == [1]


def test_an_error_that_no_other_rank_explains_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(is_reassigned=False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        serve(monkeypatch, pool, BY_PEER)
    assert (pool.asked, pool.ended) == ([0], [])


@pytest.mark.parametrize(
    "error",
    [
        UnrecoverableError("too many bad images", is_agreed=False),
        RuntimeError("CUDA out of memory"),
        ValueError("a bug"),
        ray.exceptions.RayTaskError("read", "", ValueError("a bug")),
    ],
)
def test_a_workers_own_error_is_not_waited_with(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool()
    with pytest.raises(type(error)):
        serve(monkeypatch, pool, error)
    assert pool.asked == []


def test_where_all_workers_start_again_every_error_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool()
    with pytest.raises(RuntimeError, match="closed by peer"):
        serve(monkeypatch, pool, BY_PEER, replaces=False)
    assert pool.asked == []


def test_a_process_that_still_writes_a_checkpoint_takes_no_training_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next attempt would write the same files."""
    pool = Pool()
    with pytest.raises(RuntimeError, match="closed by peer"):
        serve(monkeypatch, pool, BY_PEER, writes=True)
    assert pool.asked == []
