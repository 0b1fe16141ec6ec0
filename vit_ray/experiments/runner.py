"""Runs the trainings of an experiment as trials of Ray Tune, as many in parallel as fit.

An experiment is a flow: a generator that yields work, receives the outcomes, and returns its
result. A flow receives the result of a flow inside it in the same way as that of a training. So a
study is a flow of cells, each a flow of a training and its transfers, each a sweep.
"""

import bisect
import contextlib
import heapq
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

import ray
import ray.util
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator, Searcher

from vit_ray.config import Recipe
from vit_ray.config.validation import value_text
from vit_ray.experiments.training import (
    OUTCOME,
    TRIAL,
    HeldTraining,
    Outcome,
    Training,
    trial_of,
)
from vit_ray.launch.cluster.connection import shape
from vit_ray.launch.pool.pool_keeper import keeper
from vit_ray.launch.stopping import RunStoppedError
from vit_ray.outcomes import TrialState

T = TypeVar("T")

LOOK_S: Final = 5.0
"""Seconds between queries of the cluster's resources."""
GATHER_SHARE: Final = 0.05
"""How long a free place waits for another one, as a share of the last training's time."""
GATHER_S: Final = 20.0
"""Longest such wait."""
TOGETHER_S: Final = 5.0
"""Trainings that start within this time count as started together."""
MOST_RESTARTS: Final = 3
"""Restarts of a trial whose process dies; each continues from the newest checkpoint."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """What a training takes of the cluster, or what the cluster has."""

    gpus: float
    cpus: float
    runs: float = math.inf
    """Of a cluster: trainings in parallel."""

    def holds(self, need: "Room", taken: "Iterable[Room]") -> bool:
        """Whether a training fits next to those that run; a single one always does."""
        whole = [need, *taken]
        return len(whole) == 1 or (
            sum(one.gpus for one in whole) <= self.gpus + 1e-6
            and sum(one.cpus for one in whole) <= self.cpus + 1e-6
            and len(whole) <= self.runs
        )


def room_of(recipe: Recipe, cluster: Room) -> Room:
    """What a training takes: at least its workers, and one task that reads their data."""
    workers, size = recipe.workers, recipe.group_sizes[0]
    uses_gpus = cluster.gpus > 0 if workers.use_gpu == "auto" else workers.use_gpu
    cpus = size * workers.cpus_per_worker + recipe.data.cpus_per_task
    return Room(float(size) if uses_gpus else 0.0, cpus)


def cluster_room(max_runs: int | None = None, max_gpus: int | None = None) -> Room:
    """What trainings may take together, of the cluster as it is now.

    Args:
        max_runs, max_gpus: the recipe's limits; None: no limit.
    """
    now = shape(time.time())
    return Room(min(now.num_gpus, max_gpus or math.inf), now.num_cpus, max_runs or math.inf)


@dataclass(eq=False)
class Work:
    """A training of a flow, and what the flow does with its outcomes."""

    training: Training
    draw: Callable[[], Training] | None = None
    """Called when it starts; returns the training of the same size to train instead."""
    goes_on: Callable[[Training, Outcome], bool] = lambda *_: True
    """Whether it continues after an outcome at a rung."""
    on_end: Callable[[Training, Outcome], None] = lambda *_: None
    takes: Room | None = None
    """Resources it takes if it is only planned; None: by its recipe."""
    hours: float = 0.0

    @property
    def reads(self) -> str | None:
        """Trainings with equal text can share a stream; None if it is only planned."""
        return self.training.reads if self.takes is None else None

    def need(self, room: Room) -> Room:
        return self.takes or room_of(self.training.recipe, room)


Flow = Generator[Sequence["Work | Flow[Any]"], list[Any], T]


def in_parallel(parts: Sequence[Work | Flow[Any]]) -> Flow[list[Any]]:
    """A flow of only these parts; returns what they do."""
    return (yield parts)


@dataclass(eq=False)
class _Node:
    """A flow in progress."""

    flow: Flow[Any]
    place: tuple[int, ...]
    """Its index among the parts of its flow, that flow's index in its own flow, and so on."""
    results: list[Any] = field(default_factory=list)
    num_missing: int = 0


class _Run(NamedTuple):
    place: tuple[int, ...]
    """As in `_Node`."""
    need: Room
    started_s: float


class Runner:
    """Decides what runs next: waiting work starts in order, as it fits.

    The same rule decides what runs and what `--dry-run` shows, except for the seconds in which
    trainings that read the same data wait for each other.
    """

    def __init__(
        self,
        flow: Flow[Any],
        room: Callable[[], Room],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            room: what the cluster has now; asked while work waits, because nodes come and go.
            is_stopped: nothing new starts.
        """
        self._look, self._is_stopped = room, is_stopped
        self._room, self._looked_s = room(), time.monotonic()
        self._waiting: list[tuple[tuple[int, ...], Work]] = []
        self._running: dict[Work, _Run] = {}
        self._gathers_until_s: dict[str | None, float] = {}
        """For each stream: until when a free place waits for another one."""
        self._nodes: dict[tuple[int, ...], _Node] = {}
        self.error: BaseException | None = None
        self.result: Any = None
        self._advance(_Node(flow, ()), None)

    @property
    def is_over(self) -> bool:
        """Whether nothing runs, and nothing will start."""
        return not self._running and (not self._waiting or self._ends())

    def next(self) -> Work | None:
        """What starts now; None if there is nothing, or no room."""
        if not self._waiting or self._ends():
            return None
        room, taken = self._room_now(), [one.need for one in self._running.values()]
        held: set[str | None] = set()
        """Streams of work that waits for another place."""
        for index, (place, work) in enumerate(self._waiting):
            need = work.need(room)
            if not room.holds(need, taken) or (held and work.reads in held):
                continue
            together = self._together(work, room, [*taken, need])
            if self._gathers(work, together):
                taken.append(need)
                held.add(work.reads)
                continue
            del self._waiting[index]
            if work.draw is not None:
                try:
                    work.training = work.draw()
                except Exception as error:
                    self.error = self.error or error
                    return None
            if self._alike(work, [*self._running, *together]):
                num_sharing = 1 + len(self._alike(work, [*self._just_started(), *together]))
                work.training = replace(work.training, num_sharing=num_sharing)
            self._running[work] = _Run(place, need, time.monotonic())
            return work
        return None

    def _together(self, work: Work, room: Room, taken: list[Room]) -> list[Work]:
        """Waiting trainings that still fit if this one starts; empty for planned ones."""
        found: list[Work] = []
        for _, other in self._waiting if work.takes is None else ():
            if other is not work:
                need = other.need(room)
                if room.holds(need, taken):
                    found.append(other)
                    taken.append(need)
        return found

    def _just_started(self) -> list[Work]:
        since_s = time.monotonic() - TOGETHER_S
        return [work for work, one in self._running.items() if one.started_s > since_s]

    def _alike(self, work: Work, others: Iterable[Work]) -> list[Work]:
        """Other trainings with an equal stream; empty for planned ones."""
        if (reads := work.reads) is None:
            return []
        return [one for one in others if one is not work and one.reads == reads]

    def _gathers(self, work: Work, together: list[Work]) -> bool:
        """Whether it waits for another place, to start together with equal streams."""
        if time.monotonic() > self._gathers_until_s.get(work.reads, -math.inf):
            return False
        waiting = self._alike(work, (one for _, one in self._waiting))
        new = self._just_started()
        may_end = self._alike(work, (one for one in self._running if one not in new))
        return bool(may_end) and len(waiting) > len(self._alike(work, together))

    def goes_on(self, work: Work, outcome: Outcome) -> bool:
        try:
            return outcome.is_cut or work.goes_on(work.training, outcome)
        except Exception as error:
            self.error = self.error or error
            return False

    def end(self, work: Work, outcome: Outcome) -> None:
        """It has ended; its flow continues if it was the last that the flow waits for."""
        run = self._running.pop(work)
        self._looked_s, now_s = -math.inf, time.monotonic()
        took_s = now_s - run.started_s
        if work.reads and now_s > self._gathers_until_s.get(work.reads, -math.inf):
            self._gathers_until_s[work.reads] = now_s + min(GATHER_S, GATHER_SHARE * took_s)
        for text in outcome.warnings:
            logger.warning("%s", text)
        if not outcome.is_cut:
            outcome = replace(outcome, point=work.training.point, warnings=())
            try:
                work.on_end(work.training, outcome)
            except Exception as error:
                self.error = self.error or error
            self._deliver(run.place, outcome)

    def close(self) -> None:
        """Tell unfinished flows that they were stopped."""
        for place in sorted(self._nodes, key=len, reverse=True):
            with contextlib.suppress(RunStoppedError, StopIteration):
                self._nodes.pop(place).flow.throw(RunStoppedError("stopped on request"))

    def _ends(self) -> bool:
        return self.error is not None or self._is_stopped()

    def _room_now(self) -> Room:
        if time.monotonic() - self._looked_s > LOOK_S:
            try:
                self._room, self._looked_s = self._look(), time.monotonic()
            except Exception as error:  # of a cluster that does not answer for now
                text = "the resources of the cluster are not known, trainings start as before: %s"
                logger.warning(text, error)
        return self._room

    def _advance(self, node: _Node, results: list[Any] | None) -> None:
        self._nodes[node.place] = node
        try:
            parts = node.flow.send(results)  # type: ignore[arg-type]
        except StopIteration as end:
            del self._nodes[node.place]
            if node.place:
                self._deliver(node.place, end.value)
            else:
                self.result = end.value
            return
        except Exception as error:
            del self._nodes[node.place]
            self.error = self.error or error
            return
        node.results, node.num_missing = [None] * len(parts), len(parts)
        if not parts:
            self._advance(node, [])
        for index, part in enumerate(parts):
            place = (*node.place, index)
            if isinstance(part, Work):
                bisect.insort(self._waiting, (place, part), key=lambda one: one[0])
            else:
                self._advance(_Node(part, place), None)

    def _deliver(self, place: tuple[int, ...], result: Any) -> None:
        node = self._nodes[place[:-1]]
        node.results[place[-1]] = result
        node.num_missing -= 1
        if node.num_missing == 0:
            self._advance(node, node.results)


def makespan(flow: Flow[Any], room: Room) -> float:
    """Hours until a flow of planned work ends, if all of it succeeds."""
    runner, now, number = Runner(flow, lambda: room), 0.0, itertools.count()
    ends: list[tuple[float, int, Work]] = []
    while not runner.is_over:
        while (work := runner.next()) is not None:
            heapq.heappush(ends, (now + work.hours, next(number), work))
        now, _, work = heapq.heappop(ends)
        runner.end(work, Outcome(TrialState.FINISHED))
    return now


def run_flow(
    flow: Flow[T],
    *,
    room: Callable[[], Room],
    is_stopped: Callable[[], bool],
    name: str,
    storage_path: str,
    is_private: bool,
) -> T | None:
    """What a flow returns; None if it was stopped on request.

    Args:
        room, is_stopped: as for `Runner`.
        name, storage_path: where Ray Tune keeps its own state, which is not used to resume.
        is_private: only this driver uses the cluster.

    Raises:
        Exception: raised by the flow, after the running trainings have ended.
    """
    runner = Runner(flow, room, is_stopped)
    try:
        if not runner.is_over:
            # The driver handles Ctrl-C: Tune's handler would end the trials without checkpoints.
            os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
            works: dict[str, Work] = {}
            # On the driver's node, because trials write its files; workers have their own places.
            place = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
            tuner = tune.Tuner(
                tune.with_resources(
                    trial_of(keeper(), is_private=is_private), {"CPU": 0, place: 0.001}
                ),
                tune_config=tune.TuneConfig(
                    num_samples=-1,
                    search_alg=_Searcher(runner, works),
                    scheduler=_Scheduler(runner, works),
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    name=name,
                    storage_path=storage_path,
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=MOST_RESTARTS),
                ),
            )
            # no limit: train.step_timeout_s ends a training that hangs
            tuner.fit()
    finally:
        runner.close()
    if runner.error is not None:
        raise runner.error
    return runner.result


class _Searcher(Searcher):
    """Gives Ray Tune the trainings of a runner as trials."""

    def __init__(self, runner: Runner, works: dict[str, Work]) -> None:
        super().__init__()
        self._runner, self._works = runner, works

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Ray Tune keeps its configuration on disk, but nothing is restored from it."""
        return BasicVariantGenerator, ()

    def suggest(self, trial_id: str) -> Any:
        """The configuration of the trial that starts now: what varies in its recipe."""
        work = self._runner.next()
        if work is None:
            return Searcher.FINISHED if self._runner.is_over else None
        self._works[trial_id] = work
        held = HeldTraining(str(work.training), ray.put(work.training))
        # Lists and dicts as text: Ray Tune would take their items for dimensions.
        return {TRIAL: held} | {
            key: value
            if value is None or isinstance(value, (int, float, str))
            else value_text(value)
            for key, value in work.training.point.items()
        }

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        lost = f"the process of the trial has died {MOST_RESTARTS + 1} times"
        found = (result or {}).get(OUTCOME) or Outcome(TrialState.FAILED, error=lost)
        self._runner.end(self._works[trial_id], found)


class _Scheduler(FIFOScheduler):
    """Stops trials as their flows decide."""

    def __init__(self, runner: Runner, works: dict[str, Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runner, self._works = runner, works

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """As for `_Searcher`."""
        return FIFOScheduler, ()

    def on_trial_result(self, _: Any, trial: Any, result: dict[str, Any]) -> str:
        goes_on = self._runner.goes_on(self._works[trial.trial_id], result[OUTCOME])
        return TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP
