"""Trainings as trials of Ray Tune, and the run of a sweep or study whose child runs they are.

A trial is a training in a thread of its own process. The training continues from its own
checkpoints and returns at once if it has finished, so Tune keeps no checkpoints: a trial that
starts again repeats nothing.
"""

import contextlib
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import ray
import ray.util
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray import tune

from vit_ray.config import Recipe
from vit_ray.config.schema import errors_of
from vit_ray.launch.cluster_checks import check_cluster, check_shared, paths_of
from vit_ray.launch.connection import ClusterShape, connect, mark_private
from vit_ray.launch.prepared_run import lock_run
from vit_ray.launch.resolved_run import Kind, ResolvedRun
from vit_ray.launch.run import Following, train
from vit_ray.launch.run_record import OpenRun, open_record
from vit_ray.launch.terminal import RunStoppedError, shown_progress, stopping_on_signals
from vit_ray.launch.workers import RunDivergedError
from vit_ray.metric_names import EVAL_AVERAGED_TOP1, EVAL_TOP1
from vit_ray.outcomes import TrialState
from vit_ray.ray_internals import start_data_actors
from vit_ray.storage import locate
from vit_ray.tracking.store_requests import redact_uri

if TYPE_CHECKING:
    from vit_ray.report.page import Written

METRIC: Final = "top1"
"""Decides: the accuracy with averaged weights if the recipe averages."""
STEP: Final = "step"
MOST_RESTARTS: Final = 3
"""Restarts of a trial whose process dies; each continues from the newest checkpoint."""
STOPPED: Final = "stopped"
"""In a trial's last result: its training was stopped on request, and has ended."""
STOPPED_S: Final = 1.0
"""Time between two steps of a trial whose training was stopped, until Tune ends the trial."""
STOPPED_EARLY: Final = "stopped early: other trials are better on the dev split"
FLUSH_S: Final = 20.0
"""Longest wait until MLflow has the metrics that the page shows."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a training ended; the last result of its trial in Ray Tune has the same fields.

    Attributes:
        top1: with averaged weights if the recipe averages; NaN if there is none.
        checkpoint: folder of its last one.
        was_finished: it had ended before; nothing was trained.
    """

    state: TrialState
    top1: float = math.nan
    step: int = 0
    run_id: str | None = None
    checkpoint: str = ""
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    was_finished: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether it reached its end, and has an accuracy to compare."""
        return self.state is TrialState.FINISHED and not math.isnan(self.top1)

    @property
    def first_line(self) -> str:
        """Of its error; empty if there is none."""
        return self.error.partition("\n")[0]

    @classmethod
    def of_result(cls, result: Mapping[str, Any]) -> "Outcome":
        """Of the last result of a trial; Tune has stopped a trial that did not report its end."""
        known = {one.name: result[one.name] for one in fields(cls) if one.name in result}
        return cls(**known | {"state": TrialState(result.get("state", TrialState.STOPPED_EARLY))})


@dataclass(frozen=True)
class OpenParent:
    """The open run of a sweep or study, whose trainings are child runs."""

    recipe: Recipe
    run: OpenRun
    cluster: ClusterShape

    @property
    def run_id(self) -> str | None:
        """Run id in MLflow; None while its server does not answer."""
        return self.run.record.run_id()


@dataclass(frozen=True)
class Context:
    """What a trial's training is given by its trial.

    Attributes:
        parent: the sweep's or study's run.
        stop: set when the trial ends: the training writes a checkpoint and ends.
        report: takes step and deciding metric of an evaluation before the end.
    """

    parent: OpenRun
    stop: threading.Event
    report: Callable[[int, float], None] = lambda step, top1: None

    @property
    def alone(self) -> "Context":
        """For a training whose evaluations do not stand for the trial."""
        return Context(self.parent, self.stop)

    def train(
        self,
        recipe: Recipe,
        kind: Kind,
        tags: Mapping[str, str] | None = None,
        evaluate_at: tuple[int, ...] = (),
    ) -> Outcome:
        """Train a child run to its end; a failure is an outcome.

        Raises:
            RunStoppedError: it was stopped before its end.
        """
        if self.stop.is_set() or self.parent.record.stop_reason():
            raise RunStoppedError("stopped on request")

        def note(step: int, metrics: Mapping[str, float]) -> None:
            self.report(step, metrics.get(deciding_metric(recipe), math.nan))

        following = Following(self.stop, note, evaluate_at, STOPPED_EARLY)
        try:
            result = train(
                recipe, kind=kind, tags=dict(tags or {}), parent=self.parent, following=following
            )
        except RunStoppedError:
            raise
        except RunDivergedError as error:
            return Outcome(TrialState.DIVERGED, error=str(error))
        except Exception as error:
            return Outcome(TrialState.FAILED, error=str(error).strip() or repr(error))
        if not result.is_complete:
            raise RunStoppedError("stopped on request")
        return Outcome(
            TrialState.FINISHED,
            result.metrics.get(deciding_metric(recipe), math.nan),
            result.steps,
            result.run_id,
            result.checkpoint,
            metrics=result.metrics,
            was_finished=result.already_complete,
        )


def deciding_metric(recipe: Recipe) -> str:
    """The accuracy that selects a point and is the result."""
    return EVAL_AVERAGED_TOP1 if recipe.train.averaging else EVAL_TOP1


Work = Callable[[dict[str, Any], Context], dict[str, Any]]
"""Trains what a trial's configuration names, and returns the trial's last result."""


class Trial(tune.Trainable):
    """A small driver: its thread trains, its steps are evaluations, its end is a checkpoint.

    A function that Tune runs would be killed in the middle, with its workers' places kept. Its
    process may be used again for another trial, which saves the start of a process.
    """

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], work: Work, parent: OpenRun, is_private: bool
    ) -> None:
        """`is_private`: only this driver uses the cluster."""
        if is_private:
            mark_private()
        self._work, self._parent = work, parent
        self._thread: threading.Thread | None = None
        self._warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)  # the output of a trial's process is not shown
        handler.emit = lambda record: self._warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vit_ray").addHandler(handler)

    def step(self) -> dict[str, Any]:
        """Step and deciding metric of the next evaluation, or the last result.

        The first starts to train: Tune does not start a trial again whose process dies while it is
        reset. A trial that was stopped on request repeats its last result, as `STOPPED`: Tune must
        not take it for ended.
        """
        if self._thread is None:
            self._warnings.clear()
            self._reports: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue()
            self._last: dict[str, Any] = {STEP: 0, METRIC: math.nan}
            self._stop = threading.Event()
            put = self._reports.put
            context = Context(
                self._parent, self._stop, lambda step, top1: put({STEP: step, METRIC: top1})
            )
            self._thread = threading.Thread(target=self._train, args=(context,))
            self._thread.start()
        report = self._reports.get()  # no limit: train.step_timeout_s ends a training that hangs
        if report is None:
            self._reports.put(None)
            time.sleep(STOPPED_S)
            self._last[STOPPED] = True
        elif isinstance(report, Exception):
            raise report
        else:
            self._last = report
        return dict(self._last)

    def cleanup(self) -> None:
        """Ask the training for a checkpoint, and wait for its end."""
        if self._thread is not None:
            self._stop.set()
            # no limit: Tune kills the process after 600 s, or 10 s at the end of its loop.
            self._thread.join()
            self._thread = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        return True

    def _train(self, context: Context) -> None:
        try:
            result = self._work(self.config, context)
            self._reports.put({**result, "warnings": "\n".join(self._warnings), "done": True})
        except RunStoppedError:
            self._reports.put(None)
        except Exception as error:
            self._reports.put(error)


class EndOnRequest(tune.Callback):
    """Ends Tune's loop in order when the driver was asked to stop.

    Tune then writes its state before it ends its trials, so that they are unfinished in it. By the
    signal of which Tune knows: its own handler for Ctrl-C would not hear SIGTERM and SIGHUP. It
    then leaves a trial 10 s, too few for a checkpoint: every running training hears of the request
    itself, and has ended before. One that hangs ends by `train.step_timeout_s`; one that ASHA has
    just stopped has the 10 s.
    """

    # Of this process: Tune keeps copies of its callbacks on disk.
    is_requested: ClassVar[threading.Event] = threading.Event()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        trial.last_result.pop(STOPPED, None)  # of an earlier driver, or of a process that died

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self.is_requested.is_set() and callable(signal.getsignal(signal.SIGUSR1)):
            running = [trial for trial in trials if trial.status == "RUNNING"]
            if all(STOPPED in trial.last_result for trial in running):
                signal.raise_signal(signal.SIGUSR1)


class Ended(NamedTuple):
    """What the trials of an experiment have reported.

    Attributes:
        results: the last result of each trial that has not ended with an error, with its
            configuration.
        lost: stands for each of the others.
    """

    results: Sequence[Mapping[str, Any]]
    lost: Outcome
    num_lost: int

    @classmethod
    def of_grid(cls, grid: tune.ResultGrid) -> "Ended":
        """Of Tune's results; logs the warnings and errors of the trials."""
        ended = [grid[place] for place in range(len(grid))]
        reported = [result.metrics for result in ended if result.error is None]
        results = [metrics for metrics in reported if metrics and "config" in metrics]
        for metrics in results:
            for text in filter(None, metrics.get("warnings", "").split("\n")):
                logger.warning("%s", text)
        died = (
            f"the process of the trial died, or could not be started again (at most "
            f"{MOST_RESTARTS} restarts)"
        )
        errors = [str(error).strip().splitlines()[-1] for error in grid.errors]
        for text in errors:
            logger.warning("%s: %s", died, text)
        lost = Outcome(TrialState.FAILED, error="; ".join([died, *dict.fromkeys(errors)]))
        return cls(results, lost, len(ended) - len(results))

    def by(self, key: str) -> dict[Any, Outcome]:
        """Outcomes by a key of the configurations."""
        return {one["config"][key]: Outcome.of_result(one) for one in self.results}


def run_trials(
    work: Work,
    parent: OpenParent,
    stage: str,
    recipes: Iterable[Recipe],
    *,
    space: dict[str, Any],
    max_concurrent: int | None = None,
    num_samples: int = 1,
    search_alg: Any = None,
    scheduler: Any = None,
    has_memory: bool = False,
) -> Ended:
    """Run one experiment of Ray Tune; finished trainings return at once.

    Args:
        stage: part of the name of the folder with Tune's own files.
        recipes: what the trials train.
        space: `param_space` of the trials.
        max_concurrent: unset = as many as fit.
        has_memory: the searcher learns: it continues from what an interrupted driver has left in
            the folder.

    Raises:
        RunStoppedError: the driver was asked to stop; each training that had begun has written a
            checkpoint.
    """
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    # On the driver's node, because trials write its files; workers have their own places.
    place = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
    is_private = parent.cluster.is_private
    given = tune.with_parameters(Trial, work=work, parent=parent.run, is_private=is_private)
    trainable = tune.with_resources(given, {"CPU": 0, place: 0.001})
    recipe, files = parent.recipe, None
    folder = locate(recipe.output).child("tune").child(f"{recipe.name}-{stage}")
    if not folder.is_local:
        files = PyFileSystem(FSSpecHandler(folder.filesystem))
    if has_memory and tune.Tuner.can_restore(folder.path, storage_filesystem=files):
        tuner = tune.Tuner.restore(
            folder.path, trainable, restart_errored=True, storage_filesystem=files
        )
    else:
        storage_path, _, name = folder.path.rpartition("/")
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode="max",
                num_samples=num_samples,
                search_alg=search_alg,
                scheduler=scheduler,
                max_concurrent_trials=max_concurrent or num_fitting(recipes, parent.cluster),
                reuse_actors=scheduler is None,  # ASHA stops trials while they train
            ),
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage_path,
                storage_filesystem=files,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=MOST_RESTARTS),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[EndOnRequest()],
            ),
        )
    grid = tuner.fit()  # no limit: train.step_timeout_s ends a training that hangs
    if EndOnRequest.is_requested.is_set():
        raise RunStoppedError("stopped on request")
    return Ended.of_grid(grid)


def num_fitting(recipes: Iterable[Recipe], cluster: ClusterShape) -> int:
    """How many of the trainings fit together on the nodes that are up, whichever they are.

    So worker groups that are half started never wait for each other.
    """
    gpus, cpus = list[float](), list[float]()
    for recipe in recipes:
        size, uses_gpus = recipe.group_sizes[0], recipe.workers.use_gpu
        uses_gpus = cluster.num_gpus > 0 if uses_gpus == "auto" else uses_gpus
        gpus.append(float(size) if uses_gpus else 0.0)
        cpus.append(size * recipe.workers.cpus_per_worker + recipe.data.cpus_per_task)

    def fits(count: int) -> bool:
        most_gpus, most_cpus = (sum(sorted(one, reverse=True)[:count]) for one in (gpus, cpus))
        return most_gpus <= cluster.num_gpus and most_cpus <= cluster.num_cpus

    return max(filter(fits, range(1, len(gpus) + 1)), default=1)


@contextlib.contextmanager
def open_parent(
    recipe: Recipe,
    kind: str,
    resolved: ResolvedRun,
    total_steps: int,
    *,
    continues: bool = False,
    trainings: Sequence[Recipe] = (),
    under: OpenRun | None = None,
    tags: dict[str, str] | None = None,
    varied: Collection[str] = (),
) -> Iterator[OpenParent]:
    """Inside this block hold a parent run's folder, record it, and show its children's progress.

    Args:
        resolved: describes the run: the recipe's own training, or the first of a grid.
        total_steps: of all its children.
        continues: some of its children have begun at an earlier start, whose run it continues.
        trainings: all that may run under it; unset = like the recipe's own.
        under: the study that this run is part of, which has checked its files; it shows this run's
            progress, and forwards signals.
        tags: of the run, in addition to those that every run has.
        varied: as for `open_record`.

    Raises:
        ValueError: the cluster cannot hold the workers of a training, nodes do not see its files,
            or another process holds the folder; nothing was started.
    """
    cluster = connect(recipe, *trainings)
    if under is None:
        for training in trainings or (recipe,):
            is_own = training.workers == recipe.workers
            with contextlib.nullcontext() if is_own else errors_of(training.name):
                check_cluster(training, cluster)
        read = {path: None for one in trainings or (recipe,) for path in paths_of(one)}
        check_shared(cluster, read)
        if not cluster.is_private:  # or they would end with the trial that needs them first
            start_data_actors()
    EndOnRequest.is_requested.clear()

    def stop(reason: str) -> None:
        run.record.request_stop(reason)
        EndOnRequest.is_requested.set()

    with (
        lock_run(locate(recipe.run_folder)),
        open_record(
            recipe, kind, resolved, cluster, under, continues=continues, tags=tags, varied=varied
        ) as run,
        contextlib.nullcontext() if under else shown_progress(run.record, recipe.name, total_steps),
        contextlib.nullcontext() if under else stopping_on_signals(stop),
    ):
        yield OpenParent(recipe, run, cluster)


def page_of(parent: OpenParent) -> "Written | None":
    """Write the page at the end of a long job, and keep it with the parent run; None while MLflow
    is away: the job must not fail because of it, nor because of what draws the page.
    """
    recipe = parent.recipe
    try:
        if (run_id := parent.run_id) is None:
            return None
        # Here: the processes of trials import this module, and need neither MLflow nor charts.
        from vit_ray.experiments.write_page import keep_page, write_page
        from vit_ray.tracking.mlflow_client import asking

        parent.run.record.flush(FLUSH_S)
        with asking(recipe.tracking.uri) as client:
            written = write_page(recipe, run_id)
            keep_page(client, run_id, written)
        return written
    except Exception as error:
        reason = redact_uri(str(error), recipe.tracking.uri).partition("\n")[0]
        logger.warning("no report of %s: %s; `vit-ray report` can write it", recipe.name, reason)
        return None
