"""Ray Tune decides which trial is next; this driver trains it, in a pool that is already there.

A trial's own process asks for its training and waits. So it imports Ray Tune and nothing else, and
what costs seconds to start (workers, streams, MLflow) serves one trial after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import ray
from ray import tune
from ray.tune.schedulers import TrialScheduler

from vit_ray.launch.actor_calls import PROCESS_DIED
from vit_ray.outcomes import TrialState

Outcome = dict[str, Any]
"""What a trial reports to Ray Tune: `state` as if it ended here, `is_over` if it does, and more."""

ANSWER_S: Final = 5.0
"""Longest time that a call waits before it answers that nothing has changed."""


class TrialDesk:
    """Runs as an actor: takes the trials' requests, and the driver's answers."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Outcome]] = {}

    async def train(self, index: int, rung: int) -> Outcome:
        """For a trial: the outcome of its training up to a rung."""
        self._answers[index] = asyncio.get_running_loop().create_future()
        await self._requests.put((index, rung))
        return await self._answers[index]

    async def next_request(self) -> tuple[int, int] | None:
        """For the driver: index of a trial to train, and rung; None: none came for some seconds."""
        try:
            return await asyncio.wait_for(self._requests.get(), ANSWER_S)
        except TimeoutError:
            return None

    async def answer(self, index: int, outcome: Outcome) -> None:
        """Store the outcome of a training."""
        self._answers[index].set_result(outcome)


def run_trials(
    count: int,
    train: Callable[[int, int], Outcome],
    *,
    max_concurrent: int,
    name: str,
    storage_path: str,
    scheduler: TrialScheduler | None = None,
) -> list[Outcome | None]:
    """The last outcome of each by index; None for a trial that did not come to its end.

    Args:
        train: trains the trial of an index up to its rung of a number, from 0 on, until its outcome
            says `is_over`. Called in threads of this process, `max_concurrent` at a time; an error
            becomes an outcome that has failed, with its text as `error`.
        name, storage_path: where Ray Tune keeps its own state.
        scheduler: of Ray Tune, which may stop a trial at each outcome; None: none is stopped.
    """
    desk: Any = ray.remote(TrialDesk).options(num_cpus=0, max_concurrency=1000).remote()

    def trial(config: dict[str, Any]) -> None:
        for rung in itertools.count():
            # no limit: train.step_timeout_s ends a training that hangs
            outcome = ray.get(desk.train.remote(config["index"], rung))
            tune.report(outcome)  # does not return if the scheduler stops the trial
            if outcome["is_over"]:
                return

    ended = threading.Event()
    threads = [
        # In a copy of the context each, so that they share the pools that are kept.
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(_serve, desk, train, ended),
            name=f"trials-{k}",
            daemon=True,
        )
        for k in range(min(max_concurrent, count))
    ]
    for thread in threads:
        thread.start()
    try:
        # no limit: as above
        grid = _tuner(trial, count, max_concurrent, name, storage_path, scheduler).fit()
    finally:
        ended.set()
        ray.kill(desk)  # those that wait for a request stop waiting
        for thread in threads:
            thread.join(2 * ANSWER_S)
    outcomes: list[Outcome | None] = [None] * count
    for found in (grid[k] for k in range(len(grid))):
        if found.config and found.metrics and found.error is None:
            outcomes[found.config["index"]] = found.metrics
    return outcomes


def _tuner(
    trial: Callable[[dict[str, Any]], None],
    count: int,
    max_concurrent: int,
    name: str,
    storage_path: str,
    scheduler: TrialScheduler | None,
) -> tune.Tuner:
    # The driver handles Ctrl-C: Tune's own handler would end the trials without checkpoints.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    # Trials only wait; what their workers take is reserved by Ray Train.
    return tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.01}),
        param_space={"index": tune.grid_search(list(range(count)))},
        tune_config=tune.TuneConfig(
            max_concurrent_trials=max_concurrent, reuse_actors=True, scheduler=scheduler
        ),
        run_config=tune.RunConfig(name=name, storage_path=storage_path, verbose=0),
    )


def _serve(desk: Any, train: Callable[[int, int], Outcome], ended: threading.Event) -> None:
    with contextlib.suppress(*PROCESS_DIED):  # the desk is closed at the end
        while not ended.is_set():
            # no limit: the desk answers within ANSWER_S
            request = ray.get(desk.next_request.remote())
            if request is not None:
                # no limit: the desk only keeps it; its death ends the wait
                ray.get(desk.answer.remote(request[0], _outcome_of(train, *request)))


def _outcome_of(train: Callable[[int, int], Outcome], index: int, rung: int) -> Outcome:
    try:
        return train(index, rung)
    except BaseException as error:  # without an answer the trial would wait for ever
        return {
            "state": TrialState.FAILED,
            "error": str(error) or repr(error),
            "is_over": True,
        }
