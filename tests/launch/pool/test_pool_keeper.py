"""Worker pools that are lent: which is taken, started and closed, and how loans end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.conftest import Head
from vit_ray.launch.pool import pool_keeper
from vit_ray.launch.pool.pool_keeper import PoolKeeper

opened: list[FakePool] = []


class FakePool:
    def __init__(self, shape: Any, *, is_private: bool) -> None:
        self.shape, self.is_open, self.ended = shape, True, ""
        self.server, self.fails = f"server {len(opened)}", False
        opened.append(self)

    def close(self) -> None:
        self.is_open, self.ended = False, "close"

    def abandon(self) -> None:
        self.is_open, self.ended = False, "abandon"
        if self.fails:
            raise OSError("no Ray answers")


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> PoolKeeper:
    opened.clear()
    monkeypatch.setattr(pool_keeper, "WorkerPool", FakePool)
    monkeypatch.setattr(pool_keeper, "LOOK_S", 0.01)
    return PoolKeeper({})


def is_open() -> list[Any]:
    return [one.shape for one in opened if one.is_open]


def test_a_pool_that_is_started_has_the_place_of_idle_ones_of_other_shapes(
    keeper: PoolKeeper,
) -> None:
    cell, trial, busy = (object() for _ in range(3))
    kinds: Any = (cell, trial, busy)
    keeper.lend("first", kinds[0], True, None)
    keeper.lend("lent", kinds[2], True, None)
    keeper.take_back("first", "keep")  # idle from here on
    assert keeper.num_started() == 2
    keeper.start(kinds[1], True)
    assert is_open() == [busy, trial]
    keeper.start(kinds[1], True)  # it is there
    assert keeper.lend("taken", kinds[1], True, None) == "server 2"
    assert len(opened) == 3
    keeper.take_back("taken", "keep")
    keeper.close()
    assert is_open() == []
    keeper.take_back("lent", "keep")  # late: its pool has ended with the keeper


@pytest.mark.parametrize("ending", ["close", "abandon"])
def test_a_pool_that_failed_is_lent_no_more(keeper: PoolKeeper, ending: Any) -> None:
    shape: Any = "shape"
    keeper.lend("first", shape, True, None)
    keeper.take_back("first", ending)
    assert opened[0].ended == ending
    keeper.lend("second", shape, True, None)
    assert len(opened) == 2


def test_a_group_that_has_ended_by_itself_is_lent_no_more(keeper: PoolKeeper) -> None:
    shape: Any = "shape"
    for loan in ("first", "second"):
        keeper.lend(loan, shape, True, None)
        keeper.take_back(loan, "keep")
        opened[-1].is_open = False
    assert len(opened) == 2


def test_a_pool_whose_borrower_has_not_waited_for_it_is_lent_to_the_next(
    keeper: PoolKeeper,
) -> None:
    shape: Any = "shape"
    keeper.take_back("given up", "close")
    keeper.lend("given up", shape, True, None)
    assert keeper.lend("next", shape, True, None) == "server 0"


def test_workers_that_wait_for_their_place_get_that_of_idle_pools(keeper: PoolKeeper) -> None:
    shape, other = object(), object()
    kinds: Any = (shape, other)
    assert keeper.lend("waits", kinds[0], True, None) == "server 0"
    keeper.lend("busy", kinds[1], True, None)
    assert keeper.free_place("waits") == (None, True)
    assert is_open() == [shape, other]  # one that trains keeps its place
    keeper.take_back("busy", "keep")
    assert keeper.free_place("waits") == (None, False)
    until(lambda: is_open() == [shape])
    keeper.lend("of its shape", kinds[0], True, None)
    assert keeper.free_place("waits") == (None, True)
    keeper.take_back("of its shape", "keep")
    assert keeper.lend("later", kinds[0], True, None) == "server 3"  # 2 is kept for who waits
    assert keeper.free_place("waits") == ("server 2", True)
    until(lambda: opened[0].ended == "abandon")
    assert keeper.lend("last", kinds[0], True, None) == "server 4"  # nobody waits, none is idle
    keeper.take_back("waits", "keep")
    assert keeper.lend("next", kinds[0], True, None) == "server 2"


def test_two_that_wait_get_a_pool_each_and_none_that_has_not_trained(keeper: PoolKeeper) -> None:
    shape: Any = "shape"
    for loan in ("first", "second", "trains"):
        keeper.lend(loan, shape, True, None)
    keeper.take_back("given up", "close")
    keeper.lend("given up", shape, True, None)  # nobody's, and perhaps without a place
    assert keeper.free_place("first") == keeper.free_place("second") == (None, True)
    keeper.take_back("trains", "keep")
    assert [keeper.free_place(loan)[0] for loan in ("second", "first")] == ["server 2", None]
    assert keeper.free_place("unknown") == (None, False)


def test_what_is_lent_by_a_keeper_that_has_closed_ends(keeper: PoolKeeper) -> None:
    shape: Any = "shape"
    keeper.close()
    keeper.lend("late", shape, True, None)
    assert opened[0].ended == "abandon"


def test_pools_are_closed_at_the_same_time(
    keeper: PoolKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_close = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(FakePool, "close", lambda _: all_close.wait())
    one, other, third = (object() for _ in range(3))
    shapes: Any = {"a": one, "b": other, "c": third, "d": third}
    for name in ("a", "b"):
        keeper.lend(name, shapes[name], True, None)
    for name in ("a", "b"):
        keeper.take_back(name, "keep")
    for name in ("c", "d"):  # the first in the place of both
        keeper.lend(name, shapes[name], True, None)
    assert len(opened) == 4
    keeper.close()


def test_a_host_has_one_stream_server_until_its_node_leaves(
    keeper: PoolKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    left: list[tuple[str, str]] = []

    class Server:
        def __init__(self, name: str) -> None:
            self.name = name
            self.close = SimpleNamespace(remote=lambda loan: left.append((self.name, loan)))

        def __eq__(self, other: object) -> bool:
            return self.name == other

    class Actor:
        def options(self, **options: Any) -> Any:
            started.append(options)
            return self

        def remote(self, **how: Any) -> Any:
            assert how == {"warms_up": True, "cpus_per_rank": 2.0}
            return Server(f"server {len(started)}")

    alive = {"a": True, "b": True, "c": True}
    monkeypatch.setattr(ray, "remote", lambda _: Actor())
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": k, "Alive": v} for k, v in alive.items()])

    def server(host: str, node: str, ranks: int = 2) -> Any:
        how = {"warms_up": False, "cpus_per_rank": 2.0}
        return keeper.stream_server(host, node, (ranks, 4), how)

    assert server("10.0.0.1", "a") == server("10.0.0.1", "b") == "server 1"
    assert server("10.0.0.2", "b") == "server 2"
    alive["a"] = False
    assert server("10.0.0.1", "c") == server("10.0.0.1", "c") == "server 3"
    assert server("10.0.0.2", "b", 4) == "server 4"  # the whole group is there
    assert [one["label_selector"]["ray.io/node-id"] for one in started] == ["a", "b", "c", "b"]
    # A loan that ends, however it does, leaves them all.
    keeper.lend("loan", "shape", True, None)  # type: ignore[arg-type]
    keeper.take_back("loan", "abandon")
    assert sorted(left) == [(f"server {number}", "loan") for number in (2, 3, 4)]
    assert all(one["max_restarts"] == -1 for one in started)  # of a process that dies


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_loan_ends_with_the_process_of_its_borrower_and_with_no_other(
    ray_cluster: Head, keeper: PoolKeeper
) -> None:
    """A trial's actor is busy for hours, and takes one training after another."""

    @ray.remote(num_cpus=0)
    class Borrower:
        def me(self) -> Any:
            return ray.get_runtime_context().current_actor

        def work(self, seconds: float) -> None:
            time.sleep(seconds)

    shape: Any = "shape"
    borrowers: Any = [Borrower.remote() for _ in range(3)]  # type: ignore[attr-defined]
    for number, one in enumerate(borrowers):
        keeper.lend(str(number), shape, False, ray.get(one.me.remote(), timeout=60))
    borrowers[0].work.remote(0.3)
    borrowers[1].work.remote(3600.0)
    time.sleep(1.0)
    assert [one.is_open for one in opened] == [True, True, True]
    opened[2].fails = True  # the watch continues after it
    ray.kill(borrowers[2])
    until(lambda: opened[2].ended == "abandon")
    ray.kill(borrowers[1])
    until(lambda: not opened[1].is_open)
    assert opened[1].ended == "abandon"
    assert opened[0].is_open
    keeper.close()
