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
from collections.abc import Callable, Mapping
from typing import Any, Final

import ray
from ray import tune
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import BasicVariantGenerator

from vit_ray.config.validation import value_text
from vit_ray.launch.actor_calls import PROCESS_DIED
from vit_ray.outcomes import TrialState

Outcome = dict[str, Any]
"""What a trial reports to Ray Tune: `state` as if it ended here, `is_over` if it does, and more."""

ANSWER_S: Final = 5.0
"""Longest time that a call waits before it answers that nothing has changed."""


TRIAL: Final = "trial"
"""Key of a trial's name in its configuration."""
MOST_RESTARTS: Final = 3
"""Of a trial whose process dies; its training goes on meanwhile."""


class TrialDesk:
    """Runs as an actor: takes the trials' requests, and the driver's answers."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self._answers: dict[tuple[str, int], asyncio.Future[Outcome]] = {}

    async def train(self, name: str, rung: int) -> Outcome:
        """For a trial: the outcome of its training up to a rung.

        A trial whose process has died asks again from its first rung on; what it has asked for is
        trained once.
        """
        key = (name, rung)
        if key not in self._answers:
            self._answers[key] = asyncio.get_running_loop().create_future()
            await self._requests.put(key)
        return await asyncio.shield(self._answers[key])

    async def next_request(self) -> tuple[str, int] | None:
        """For the driver: a trial to train, and its rung; None: none came for some seconds."""
        try:
            return await asyncio.wait_for(self._requests.get(), ANSWER_S)
        except TimeoutError:
            return None

    async def answer(self, name: str, rung: int, outcome: Outcome) -> None:
        """Store the outcome of a training."""
        self._answers[name, rung].set_result(outcome)


def run_trials(
    configurations: Mapping[str, Mapping[str, Any]],
    train: Callable[[int, int], Outcome],
    *,
    max_concurrent: int,
    name: str,
    storage_path: str,
    scheduler: TrialScheduler | None = None,
) -> list[Outcome | None]:
    """The last outcome of each in their order; None for a trial that did not come to its end.

    Args:
        configurations: what varies of each trial, by its name: what Ray Tune's tables, callbacks
            and schedulers see.
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
            outcome = ray.get(desk.train.remote(config[TRIAL], rung))
            tune.report(outcome)  # does not return if the scheduler stops the trial
            if outcome["is_over"]:
                return

    ended = threading.Event()
    indices = {name: index for index, name in enumerate(configurations)}
    threads = [
        # In a copy of the context each, so that they share the pools that are kept.
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(_serve, desk, train, indices, ended),
            name=f"trials-{k}",
            daemon=True,
        )
        for k in range(min(max_concurrent, len(indices)))
    ]
    for thread in threads:
        thread.start()
    join_s: float | None = 2 * ANSWER_S
    try:
        # no limit: as above
        grid = _tuner(trial, configurations, max_concurrent, name, storage_path, scheduler).fit()
        join_s = None  # a training whose trial was lost holds its lock until it has ended
    finally:
        ended.set()
        ray.kill(desk)  # those that wait for a request stop waiting
        for thread in threads:
            thread.join(join_s)
    outcomes: list[Outcome | None] = [None] * len(indices)
    for found in (grid[k] for k in range(len(grid))):
        if found.config and found.metrics and found.error is None:
            outcomes[indices[found.config[TRIAL]]] = found.metrics
    return outcomes


def _tuner(
    trial: Callable[[dict[str, Any]], None],
    configurations: Mapping[str, Mapping[str, Any]],
    max_concurrent: int,
    name: str,
    storage_path: str,
    scheduler: TrialScheduler | None,
) -> tune.Tuner:
    # The driver handles Ctrl-C: Tune's own handler would end the trials without checkpoints.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    points = [{TRIAL: label, **_flat(one)} for label, one in configurations.items()]
    # Trials only wait; what their workers take is reserved by Ray Train.
    return tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.01}),
        param_space=dict.fromkeys(points[0]),
        tune_config=tune.TuneConfig(
            num_samples=len(points),
            search_alg=BasicVariantGenerator(
                points_to_evaluate=points, max_concurrent=max_concurrent
            ),
            reuse_actors=True,
            scheduler=scheduler,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=storage_path,
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=MOST_RESTARTS),
        ),
    )


def _flat(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """With lists and dicts as text: Ray Tune would take their items for dimensions."""
    return {
        key: value if value is None or isinstance(value, (int, float, str)) else value_text(value)
        for key, value in configuration.items()
    }


def _serve(
    desk: Any,
    train: Callable[[int, int], Outcome],
    indices: Mapping[str, int],
    ended: threading.Event,
) -> None:
    with contextlib.suppress(*PROCESS_DIED):  # the desk is closed at the end
        while not ended.is_set():
            # no limit: the desk answers within ANSWER_S
            request = ray.get(desk.next_request.remote())
            if request is not None:
                name, rung = request
                outcome = _outcome_of(train, indices[name], rung)
                # no limit: the desk only keeps it; its death ends the wait
                ray.get(desk.answer.remote(name, rung, outcome))


def _outcome_of(train: Callable[[int, int], Outcome], index: int, rung: int) -> Outcome:
    try:
        return train(index, rung)
    except BaseException as error:  # without an answer the trial would wait for ever
        return {
            "state": TrialState.FAILED,
            "error": str(error) or repr(error),
            "is_over": True,
        }
