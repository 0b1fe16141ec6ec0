"""Trainings as trials of Ray Tune, and the parent run of a sweep or study.

A trial is a process with a thread that trains. A training resumes from the newest checkpoint of the
run folder, and returns at once if it has finished. So Tune keeps no checkpoints, and a trial that
starts again repeats nothing.
"""

import contextlib
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import ray
import ray.util
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator

from vit_ray.config import Recipe
from vit_ray.config.schema import errors_of
from vit_ray.launch.cluster_checks import check_cluster, check_shared, paths_of
from vit_ray.launch.connection import ClusterShape, connect, mark_private
from vit_ray.launch.resolved_run import Kind, ResolvedRun
from vit_ray.launch.run import Following, top1_of, train
from vit_ray.launch.run_record import NOTE, OpenRun, description, open_record
from vit_ray.launch.terminal import shown_progress, stopping_on_signals
from vit_ray.lock import hold_lock
from vit_ray.outcomes import RunStoppedError
from vit_ray.ray_internals import start_data_actors
from vit_ray.storage import locate
from vit_ray.tracking.store_requests import redact_uri

if TYPE_CHECKING:
    from vit_ray.report.page import Written

# Key of the deciding accuracy in a trial's results: with averaged weights if the recipe averages.
METRIC: Final = "top1"
STEP: Final = "step"
# Restarts of a trial whose process dies; each continues from the newest checkpoint.
MOST_RESTARTS: Final = 3
# Key in a trial's last result: the training was stopped on request, and has ended.
STOPPED: Final = "stopped"
# Time between two steps of a trial whose training was stopped, until Tune ends the trial.
STOPPED_S: Final = 1.0
# Limit for the checkpoints of trials that ASHA stops, at the end of Tune's loop.
CLEANUP_S: Final = 600.0
# Longest wait until MLflow has the metrics that the page shows.
FLUSH_S: Final = 20.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a training ended; the last result of its trial in Ray Tune has the same fields.

    Attributes:
        top1: with averaged weights if the recipe averages; NaN if there is none.
        error: the first line of what ended it; empty if nothing failed.
        was_finished: the training had finished at an earlier start; nothing was trained now.
        is_stopped_early: by Ray Tune, because other trials are better.
    """

    top1: float = math.nan
    step: int = 0
    run_id: str | None = None
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    was_finished: bool = False
    is_stopped_early: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether the training reached its end, and has an accuracy to compare."""
        return not (self.error or self.is_stopped_early or math.isnan(self.top1))

    @classmethod
    def of_result(cls, result: Mapping[str, Any]) -> "Outcome":
        """From the last result of a trial; without an `error` it is that of an evaluation."""
        values = {f.name: result[f.name] for f in fields(cls) if f.name in result}
        return cls(**{"is_stopped_early": "error" not in result, **values})


def first_line(error: Exception) -> str:
    """What an error says; the lines below are for the run's own history."""
    return (str(error).strip() or repr(error)).splitlines()[0]


@dataclass(frozen=True)
class Published:
    """Where the results of a sweep or study are shown.

    Attributes:
        run_id: MLflow run; None while its server does not answer.
        hint: how to open MLflow's page.
        page: None if there is none, as while MLflow is away: `vit-ray report` can write it later.
        is_complete: whether the same command has nothing left to do.
    """

    run_id: str | None = None
    hint: str = ""
    page: Path | None = None
    is_complete: bool = True


@dataclass(frozen=True)
class OpenParent:
    """The open run of a sweep or study; its trainings are child runs.

    Attributes:
        resolved: describes the run.
        has_begun: some training had begun at an earlier start.
        is_part: the run is part of a study or of VTAB, whose page shows it.
    """

    recipe: Recipe
    run: OpenRun
    cluster: ClusterShape
    resolved: ResolvedRun
    has_begun: bool = False
    is_part: bool = False

    def conclude(
        self,
        sentence: str,
        metrics: Mapping[str, float],
        *,
        is_complete: bool = True,
        step: int = 0,
    ) -> Published:
        """Record the results at a step, and write the page, unless another run's page shows them.

        Args:
            sentence: the result; it comes first in MLflow's description of the run, and below it
                what the page says first.
            is_complete: as in `Published`.
        """
        record = self.run.record
        record.results(step, metrics)
        self.run.is_complete = is_complete
        run_id = record.run_id()
        written = None if self.is_part or run_id is None else page_of(self, run_id)
        result = "\n\n".join([sentence, *(written.lead if written else ())])
        record.tag(NOTE, description(self.recipe, self.resolved, record.command, result))
        page = written.page if written else None
        return Published(run_id, record.hint(), page, is_complete)


def train_child(
    following: Following,
    recipe: Recipe,
    kind: Kind,
    tags: Mapping[str, str],
    evaluate_at: tuple[int, ...] = (),
) -> Outcome:
    """Train a child run to the end; a failure is an outcome.

    Raises:
        RunStoppedError: the training was stopped before the end.
    """
    if following.stop.is_set() or following.parent.record.stop_reason():
        raise RunStoppedError("stopped on request")
    following = replace(following, evaluate_at=evaluate_at)
    try:
        result = train(recipe, kind=kind, tags=dict(tags), following=following)
    except Exception as error:
        return Outcome(error=first_line(error))
    if not result.is_complete:
        raise RunStoppedError("stopped on request")
    return Outcome(
        result.top1,
        result.steps,
        result.run_id,
        metrics=result.metrics,
        was_finished=result.already_complete,
    )


# Trains what a trial's configuration names, and returns the trial's last result. Evaluations of the
# training that it passes its `Following` to are reported to Tune.
Work = Callable[[dict[str, Any], Following], dict[str, Any]]


class Trial(tune.Trainable):
    """A small driver: a thread trains, each step waits for an evaluation, the end is a checkpoint.

    Tune would kill a trainable function in the middle, and leave its placement groups reserved.
    """

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], work: Work, parent: OpenRun, is_private: bool
    ) -> None:
        """`is_private`: no other driver uses the cluster."""
        if is_private:
            mark_private()
        self._work, self._parent = work, parent
        self._thread = ThreadPoolExecutor(1)
        self._warnings = BufferingHandler(sys.maxsize)  # a trial's process shows no output
        self._warnings.setLevel(logging.WARNING)
        logging.getLogger("vit_ray").addHandler(self._warnings)
        self._prepare()

    def _prepare(self) -> None:
        """Prepare a training, which the first step starts: then Tune knows that its trial runs."""
        self._warnings.flush()
        # Results of evaluations; None after the end of the training.
        self._reports: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._last: dict[str, Any] = {STEP: 0, METRIC: math.nan}
        self._stop = threading.Event()
        self._training: Future[dict[str, Any]] | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Use the process for another trial, which saves its start."""
        self.cleanup()
        self._prepare()
        return True

    def step(self) -> dict[str, Any]:
        """Step and deciding metric of the next evaluation, or the last result.

        A trial that was stopped on request repeats the last result, marked `STOPPED`, so that Tune
        does not take the trial for ended.
        """
        if self._training is None:
            following = Following(self._parent, self._stop, self._report)
            self._training = self._thread.submit(self._work, self.config, following)
            self._training.add_done_callback(lambda _: self._reports.put(None))
        report = self._reports.get()  # no limit: train.step_timeout_s ends a training that hangs
        if report is not None:
            self._last = report
        elif isinstance(self._training.exception(), RunStoppedError):
            self._reports.put(None)
            time.sleep(STOPPED_S)
            self._last[STOPPED] = True
        else:
            warnings = "\n".join(record.getMessage() for record in self._warnings.buffer)
            self._last = {**self._training.result(), "warnings": warnings, "done": True}
        return dict(self._last)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._reports.put({STEP: step, METRIC: top1_of(metrics)})

    def cleanup(self) -> None:
        """Stop the training, which writes a checkpoint, and wait for the end of the thread."""
        self._stop.set()
        # no limit: Tune kills the process after 600 s, and after `CLEANUP_S` at the end.
        wait([self._training] if self._training else [])


class TrialCallbacks(tune.Callback):
    """Give trials that are stopped the time for a checkpoint.

    Tune kills a trial that has not ended 10 s after the end of its loop. So the last step of the
    loop waits for trials that ASHA has stopped. When the driver was asked to stop, SIGUSR1 makes
    Tune write its state before it ends the trials, so they are unfinished in that state. (Tune's
    handler for Ctrl-C would not react to SIGTERM and SIGHUP.) The signal is raised only after every
    running training has ended; trainings see the request themselves, and `train.step_timeout_s`
    ends a training that hangs.
    """

    # On the class, for this process: Tune keeps copies of callbacks on disk.
    is_requested: ClassVar[threading.Event] = threading.Event()

    def __init__(self) -> None:
        self._ending: list[ray.ObjectRef[None]] = []

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        trial.last_result.pop(STOPPED, None)  # from an earlier driver, or a process that died

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if (actor := trial.temporary_state.ray_actor) is not None:
            self._ending.append(actor.cleanup.remote())

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self.is_requested.is_set() and callable(signal.getsignal(signal.SIGUSR1)):
            running = [trial for trial in trials if trial.status == "RUNNING"]
            if all(STOPPED in trial.last_result for trial in running):
                self._wait()
                signal.raise_signal(signal.SIGUSR1)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if all(trial.is_finished() for trial in trials):
            self._wait()

    def _wait(self) -> None:
        if self._ending:
            ray.wait(self._ending, num_returns=len(self._ending), timeout=CLEANUP_S)
            self._ending.clear()


def run_trials(
    work: Work,
    parent: OpenParent,
    stage: str,
    recipes: Iterable[Recipe],
    configs: Sequence[dict[str, Any]],
    *,
    max_concurrent: int | None = None,
    scheduler: Any = None,
    space: dict[str, Any] | None = None,
    searcher: Any = None,
) -> list[dict[str, Any]]:
    """Run one experiment of Ray Tune; finished trainings return at once.

    Args:
        stage: part of the name of the folder with Tune's own files.
        recipes: what the trials train.
        configs: of the trials.
        max_concurrent: unset = as many as fit.
        space: in which `searcher` proposes as many other configurations. It learns from trials, so
            the state that an interrupted driver has left in the folder is restored.

    Returns:
        The last result of each trial with its configuration as `config`, in the order of `configs`
        or of the proposals. A trial whose process died has the fields of a failed `Outcome`.

    Raises:
        RunStoppedError: the driver was asked to stop; each training that had begun has written a
            checkpoint.
    """
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    # On the driver's node, because trials write its files; workers have their own resources.
    driver_node = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
    is_private = parent.cluster.is_private
    trainable = tune.with_resources(
        tune.with_parameters(Trial, work=work, parent=parent.run, is_private=is_private),
        {"CPU": 0, driver_node: 0.001},
    )
    recipe, limit = parent.recipe, max_concurrent or num_fitting(recipes, parent.cluster)
    folder = locate(recipe.output).child("tune").child(f"{recipe.name}-{stage}")
    files = None if folder.is_local else PyFileSystem(FSSpecHandler(folder.filesystem))
    if searcher and tune.Tuner.can_restore(folder.path, storage_filesystem=files):
        tuner = tune.Tuner.restore(
            folder.path, trainable, restart_errored=True, storage_filesystem=files
        )
    else:
        storage_path, _, name = folder.path.rpartition("/")
        listed = {key: tune.choice([config[key] for config in configs]) for key in configs[0]}
        in_order = BasicVariantGenerator(points_to_evaluate=[*configs], max_concurrent=limit)
        tuner = tune.Tuner(
            trainable,
            param_space=space or listed,
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode="max",
                num_samples=len(configs),
                search_alg=searcher or in_order,
                scheduler=scheduler,
                max_concurrent_trials=limit if searcher else None,
                reuse_actors=scheduler is None,  # ASHA stops trials while they train
            ),
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage_path,
                storage_filesystem=files,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=MOST_RESTARTS),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[TrialCallbacks()],
            ),
        )
    grid = tuner.fit()  # no limit: train.step_timeout_s ends a training that hangs
    if TrialCallbacks.is_requested.is_set():
        raise RunStoppedError(
            "stopped on request; the same command resumes its runs from their checkpoints"
        )
    results, lost = _results(grid)
    if searcher:
        return results + [{**lost, "config": {}}] * (len(configs) - len(results))
    return [
        next(
            (result for result in results if {**result["config"], **config} == result["config"]),
            {**lost, "config": config},
        )
        for config in configs
    ]


def _results(grid: tune.ResultGrid) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The last result of each trial without an error, and what each other trial has instead.

    Logs the warnings and errors of the trials.
    """
    trials = [grid[index] for index in range(len(grid))]
    reported = [trial.metrics or {} for trial in trials if trial.error is None]
    results = [metrics for metrics in reported if "config" in metrics]
    for metrics in results:
        for text in filter(None, metrics.get("warnings", "").split("\n")):
            logger.warning("%s", text)
    died = (
        f"the process of the trial died, or could not be started again (at most {MOST_RESTARTS} "
        "restarts)"
    )
    errors = [str(error).strip().splitlines()[-1] for error in grid.errors]
    for text in errors:
        logger.warning("%s: %s", died, text)
    lost = Outcome(error="; ".join([died, *dict.fromkeys(errors)]))
    return results, asdict(lost)


def num_fitting(recipes: Iterable[Recipe], cluster: ClusterShape) -> int:
    """How many of the trainings fit on the nodes that are up, whichever trainings they are.

    So worker groups that are half started never wait for each other.
    """
    gpus, cpus = list[float](), list[float]()
    for recipe in recipes:
        size, uses_gpus = recipe.group_sizes[0], recipe.workers.use_gpu
        uses_gpus = cluster.num_gpus > 0 if uses_gpus == "auto" else uses_gpus
        gpus.append(float(size) if uses_gpus else 0.0)
        cpus.append(size * recipe.workers.cpus_per_worker + recipe.data.cpus_per_task)
    fitting = (
        sum(total <= limit for total in accumulate(sorted(needs, reverse=True)))
        for needs, limit in ((gpus, cluster.num_gpus), (cpus, cluster.num_cpus))
    )
    return max(1, min(fitting))


@contextlib.contextmanager
def open_parent(
    recipe: Recipe,
    kind: str,
    resolved: ResolvedRun,
    total_steps: int,
    trainings: Sequence[Recipe],
    *,
    under: OpenRun | None = None,
    tags: dict[str, str] | None = None,
    varied: Collection[str] = (),
) -> Iterator[OpenParent]:
    """Lock a parent run's folder, record the run, and show its children's progress, in this block.

    If some training has begun at an earlier start, that start's run is continued.

    Args:
        resolved: describes the run: the recipe's training, or the first of a grid.
        total_steps: of all children.
        trainings: all that may be children.
        under: the study that this run is part of. The study has checked the cluster and the files,
            shows the progress and forwards signals.
        tags: of the run, in addition to those that every run has.
        varied: as for `open_record`.

    Raises:
        ValueError: the cluster cannot hold the workers of a training, nodes do not see the files of
            a training, or another process holds the folder; nothing was started.
    """
    cluster = connect(recipe, *trainings)
    if under is None:
        for training in trainings:
            with errors_of(training.name):
                check_cluster(training, cluster)
        check_shared(cluster, {path: None for child in trainings for path in paths_of(child)})
        if not cluster.is_private:  # or they would end with the trial that needs them first
            start_data_actors()
    has_begun = any(locate(training.run_folder).list_folders() for training in trainings)
    TrialCallbacks.is_requested.clear()

    def stop(reason: str) -> None:
        run.record.request_stop(reason)
        TrialCallbacks.is_requested.set()

    with (
        hold_lock(locate(recipe.run_folder)),
        open_record(
            recipe, kind, resolved, cluster, under, continues=has_begun, tags=tags, varied=varied
        ) as run,
        contextlib.nullcontext() if under else shown_progress(run.record, recipe.name, total_steps),
        contextlib.nullcontext() if under else stopping_on_signals(stop),
    ):
        yield OpenParent(recipe, run, cluster, resolved, has_begun, is_part=under is not None)


def page_of(parent: OpenParent, run_id: str) -> "Written | None":
    """Write the page at the end of a long job, and store it with the parent run.

    None, with a warning, after an error: a page must not fail the job.
    """
    recipe = parent.recipe
    try:
        # Here: the processes of trials import this module, and need neither MLflow nor charts.
        from vit_ray.report.page import keep_page, write_page
        from vit_ray.tracking.mlflow_client import asking

        parent.run.record.flush(FLUSH_S)
        with asking(recipe.tracking.uri) as client:
            written = write_page(recipe, run_id)
            keep_page(client, run_id, written)
        return written
    except Exception as error:
        reason = redact_uri(first_line(error), recipe.tracking.uri)
        logger.warning("no report of %s: %s; `vit-ray report` can write it", recipe.name, reason)
        return None
