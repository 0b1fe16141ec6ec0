"""Which trainings run side by side: the schedule as arithmetic, and on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import pytest

from vit_ray.experiments import side_by_side
from vit_ray.experiments.side_by_side import Room, makespan, run_side_by_side, starting_now

Result = TypeVar("Result")


def never() -> bool:
    return False


def run_all(
    work: Callable[[int], Result],
    needs: list[Room],
    room: Callable[[], Room],
    is_stopped: Callable[[], bool] = never,
) -> dict[int, Result]:
    """Trainings that take the same of any cluster."""
    return run_side_by_side(work, lambda _: needs, room, count=len(needs), is_stopped=is_stopped)


def on_gpus(*counts: int) -> list[Room]:
    return [Room(count, 1.0) for count in counts]


def test_those_start_in_their_order_that_find_room_beside_those_that_run() -> None:
    needs, room = on_gpus(4, 8, 2, 4, 1), Room(8, 16)
    assert starting_now(range(5), (), needs, room) == [0, 2, 4]  # 4 + 2 + 1 of 8
    assert starting_now([1, 3], [0], needs, room) == [3]
    assert starting_now([1], [4], needs, room) == []
    assert starting_now([1], (), needs, room) == [1]
    assert starting_now(range(3), (), needs, Room(8, 1)) == [0]  # CPUs are counted, too
    assert starting_now(range(5), (), needs, Room(8, 16, runs=2)) == [0, 2]


def test_what_is_wider_than_the_cluster_starts_alone_and_is_refused_where_it_is_placed() -> None:
    assert starting_now([0, 1], (), on_gpus(16, 1), Room(8, 16)) == [0]


def test_shares_of_a_cpu_fill_it() -> None:
    needs = [Room(0.0, 0.6 + 0.4)] * 3
    assert starting_now(range(3), (), needs, Room(0.0, 2.0)) == [0, 1]


def test_the_makespan_is_that_of_grahams_example() -> None:
    # Graham 1969: longest first takes 4m - 1 on m machines, where 3m would do.
    hours = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]
    assert makespan(hours, on_gpus(*[1] * 7), Room(3, 99)) == 11.0
    assert makespan(hours, on_gpus(*[1] * 7), Room(1, 99)) == sum(hours)
    assert makespan(hours, on_gpus(*[1] * 7), Room(7, 99)) == max(hours)
    assert makespan([], [], Room(1, 1)) == 0.0


def test_wide_cells_wait_for_one_another() -> None:
    # 8 and 4 GPUs do not fit 8 at once; the two of 4 do.
    assert makespan([3.0, 2.0, 2.0], on_gpus(8, 4, 4), Room(8, 99)) == 5.0


def test_never_more_run_than_there_is_room_for_and_all_results_come_back() -> None:
    lock, both = threading.Lock(), threading.Barrier(2, timeout=10)
    running, most = 0, 0
    inherited: ContextVar[str] = ContextVar("inherited", default="nothing")
    inherited.set("pools")

    def work(index: int) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if index < 2:
            both.wait()  # the first two are there at the same time
        with lock:
            running -= 1
        return f"{inherited.get()} {index}"

    found = run_all(work, on_gpus(*[1] * 6), lambda: Room(2, 99))
    assert found == {index: f"pools {index}" for index in range(6)}
    assert most == 2


def test_nodes_that_come_are_used_while_others_run_and_those_that_go_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "POLL_S", 0.01)
    room, both = Room(1, 9), threading.Barrier(2, timeout=10)
    lock, running, beside = threading.Lock(), set[int](), dict[int, set[int]]()

    def work(index: int) -> None:
        nonlocal room
        with lock:
            beside[index] = set(running)
            running.add(index)
        if index == 0:
            room = Room(2, 9)
        if index < 2:
            both.wait()
            room = Room(1, 9)
            both.wait()  # neither ends before there is less room
        with lock:
            running.remove(index)

    run_all(work, on_gpus(1, 1, 1, 1), lambda: room)
    assert beside == {0: set(), 1: {0}, 2: set(), 3: set()}


def test_what_takes_gpus_where_there_are_some_takes_them_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first runs on CPUs, as there are no GPUs yet; the next ones have one GPU in turn."""
    monkeypatch.setattr(side_by_side, "POLL_S", 0.01)
    lock, came, third = threading.Lock(), threading.Event(), threading.Event()
    running, beside = set[int](), dict[int, set[int]]()

    def needs(room: Room) -> list[Room]:
        return [Room(min(1.0, room.gpus), 4.0)] * 3

    def work(index: int) -> None:
        with lock:
            beside[index] = set(running)
            running.add(index)
        if index == 0:
            came.wait(10)
        elif index == 1:
            came.set()
            third.wait(0.2)  # which would come beside it
        else:
            third.set()
        with lock:
            running.remove(index)

    rooms = iter([Room(0, 4)])
    run_side_by_side(
        work, needs, lambda: next(rooms, Room(1, 64)), count=3, is_stopped=never
    )  # fmt: skip
    assert beside[0] == set()
    assert beside[1] == {0}
    assert 1 not in beside[2]


def test_nothing_starts_after_a_stop_and_what_runs_comes_to_its_end() -> None:
    stopped = threading.Event()

    def work(index: int) -> int:
        stopped.set()
        return index

    found = run_all(work, on_gpus(1, 1, 1), lambda: Room(1, 9), stopped.is_set)
    assert found == {0: 0}


def test_an_error_is_raised_after_the_others_have_ended() -> None:
    ended = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            raise RuntimeError("the record is gone")
        ended.set()

    with pytest.raises(RuntimeError, match="the record is gone"):
        run_all(work, on_gpus(1, 1), lambda: Room(2, 9))
    assert ended.is_set()
