"""Trainings side by side, as many as the cluster holds: a list schedule, and its simulation.

The same rule decides what runs and what `--dry-run` foretells: whenever something has ended, or the
cluster has changed, those that wait start in their order, each that finds room beside those that
run.
"""

from __future__ import annotations

import contextvars
import heapq
import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from vit_ray.config import Recipe

Result = TypeVar("Result")

POLL_S = 5.0
"""How often it is asked whether those that wait may still start, and what the cluster has."""


@dataclass(frozen=True)
class Room:
    """What a training takes of the cluster, or what the cluster has."""

    gpus: float
    cpus: float
    runs: float = math.inf
    """Of a cluster: trainings at a time."""

    def holds(self, need: Room, taken: Sequence[Room]) -> bool:
        """Whether there is room beside those that are there; one alone always has it."""
        whole = [need, *taken]
        return not taken or (
            sum(one.gpus for one in whole) <= self.gpus + 1e-6
            and sum(one.cpus for one in whole) <= self.cpus + 1e-6
            and len(whole) <= self.runs
        )


def room_of(recipe: Recipe, cluster: Room) -> Room:
    """What a training takes: its workers, at least, and one task that reads their data."""
    workers, size = recipe.workers, recipe.group_sizes[0]
    uses_gpus = cluster.gpus > 0 if workers.use_gpu == "auto" else workers.use_gpu
    cpus = size * workers.cpus_per_worker + recipe.data.cpus_per_task
    return Room(float(size) if uses_gpus else 0.0, cpus)


def starting_now(
    waiting: Sequence[int], running: Sequence[int], needs: Sequence[Room], room: Room
) -> list[int]:
    """Those that wait and start now, beside those that run."""
    taken = [needs[index] for index in running]
    chosen = []
    for index in waiting:
        if room.holds(needs[index], taken):
            chosen.append(index)
            taken.append(needs[index])
    return chosen


def makespan(hours: Sequence[float], needs: Sequence[Room], room: Room) -> float:
    """Hours until the last has ended, started in the order in which they are given."""
    waiting, now = list(range(len(hours))), 0.0
    ends: list[tuple[float, int]] = []
    while waiting or ends:
        for index in starting_now(waiting, [one for _, one in ends], needs, room):
            waiting.remove(index)
            heapq.heappush(ends, (now + hours[index], index))
        now, _ = heapq.heappop(ends)
    return now


def run_side_by_side(
    work: Callable[[int], Result],
    needs: Callable[[Room], Sequence[Room]],
    room: Callable[[], Room],
    *,
    count: int,
    is_stopped: Callable[[], bool],
) -> dict[int, Result]:
    """Results by index, of those that were started before `is_stopped` said so.

    Args:
        work: called with an index, in a thread with a copy of this context.
        needs: what each takes of a cluster, in the order in which they start.
        room: what the cluster has now; asked while some wait, as nodes come and go.
        count: how many there are.

    Raises:
        Exception: what a `work` raised, after the others that run have ended.
    """
    waiting = list(range(count))
    running: dict[Future[Result], int] = {}
    taken: dict[int, Room] = {}  # by those that run, of the cluster in which they started
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(max(1, count), thread_name_prefix="cell") as threads:
        while True:
            if waiting and is_stopped():
                waiting = []
            if waiting:
                now = room()
                each = [taken.get(index, need) for index, need in enumerate(needs(now))]
                for index in starting_now(waiting, list(running.values()), each, now):
                    waiting.remove(index)
                    taken[index] = each[index]
                    context = contextvars.copy_context()
                    running[threads.submit(context.run, work, index)] = index
            if not running:
                return results
            for future in wait(running, POLL_S, FIRST_COMPLETED).done:
                results[running.pop(future)] = future.result()  # no limit: it is done
