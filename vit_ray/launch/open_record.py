"""How a command opens and ends the record of a run."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray

from vit_ray.addresses import absolute_uri, redact
from vit_ray.config import Recipe
from vit_ray.config.keys import RUN_FOLDER
from vit_ray.config.loading import write_yaml
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.resolved_run import ResolvedRun
from vit_ray.launch.run_record import (
    command_line,
    data_inputs,
    machine_facts,
    run_facts,
    trained_params,
)
from vit_ray.launch.terminal import RunStoppedError
from vit_ray.tracking.metrics_log import (
    FAILURE,
    MetricsLog,
    RunOpening,
    Status,
    lock_log,
    metrics_log_path,
)
from vit_ray.tracking.recorder import Recorder, start_recorder
from vit_ray.tracking.tracker import Tracker, log_models_later

logger = logging.getLogger(__name__)

# What a run of this kind needs in its recipe, next to the keys of trainings.
_SECTIONS = {
    "sweep": ("sweep",), "study": ("study",), "vtab": ("vtab", "sweep"), "evaluate": ("benchmark",),
}  # fmt: skip


@dataclass
class OpenRun:
    """A run that is recorded and controlled.

    Attributes:
        is_complete: set when the work is complete; a block that ends without it was stopped.
    """

    record: Recorder
    is_complete: bool = False

    @classmethod
    def begin(cls, opening: RunOpening, parent: "OpenRun | None") -> "OpenRun":
        """Open a run; a child run in the recorder of its parent."""
        path, name = opening.log_path, opening.run_name
        if parent is None:
            record = start_recorder(opening.config.uri, path, name, command_line())
        else:
            record = replace(parent.record, log_path=path, run_name=name)
            opening = replace(opening, parent_log=parent.record.log_path)
        record.open(opening)
        return cls(record)

    def finish(self, status: Status) -> None:
        """End the record; if that fails the result is still valid, and a message says so."""
        try:
            problem = self.record.finish(status)
        except (ray.exceptions.RayError, RuntimeError) as error:
            problem = f"MLflow may not have all of it ({redact(str(error))})"
        if problem:
            logger.warning(
                "run %s: %s; then run: vit-ray replay %s URI",
                self.record.run_name,
                problem,
                self.record.log_path,
            )


def _opening(recipe: Recipe, run_id: str | None, **fields: Any) -> RunOpening:
    log_path = metrics_log_path(recipe.run_folder).absolute()
    fields["tags"] = {RUN_FOLDER: recipe.run_folder, **fields.get("tags", {})}
    return RunOpening(recipe.tracking, recipe.name, log_path, run_id, **fields)


@contextmanager
def open_record(
    recipe: Recipe,
    kind: str,
    resolved: ResolvedRun,
    cluster: ClusterShape,
    parent: OpenRun | None = None,
    *,
    run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    varied: Collection[str] = (),
    **opening: Any,
) -> Iterator[OpenRun]:
    """Record inside this block.

    The run ends as FINISHED, as KILLED if it was stopped, and as FAILED after any other error.

    Args:
        resolved: described in the run's metadata.
        parent: the sweep or study that it is part of.
        run_id: the MLflow run to continue; None for a new one.
        tags: in addition to those that every run has.
        varied: keys, or sections, that only its child runs have as parameters or tags.
        opening: other fields of `RunOpening`.
    """

    def own(facts: Mapping[str, str]) -> dict[str, str]:
        return {
            key: value
            for key, value in facts.items()
            if not any(f"{key}.".startswith(f"{one}.") for one in varied)
        }

    command = parent.record.command if parent else command_line()
    facts = own(run_facts(recipe, kind, resolved, cluster, command))
    run = OpenRun.begin(
        _opening(
            recipe,
            run_id,
            params=own(trained_params(recipe)),
            tags={**facts, **(tags or {})},
            datasets=data_inputs(resolved),
            **opening,
        ),
        parent,
    )
    run.record.text("recipe.yaml", write_yaml(recipe.written(*_SECTIONS.get(kind, ()))), wait_s=0.0)
    run.record.text("machine.json", machine_facts(cluster), wait_s=0.0)
    status: Status = "FAILED"
    try:
        yield run
        status = "FINISHED" if run.is_complete else "KILLED"
    except (RunStoppedError, KeyboardInterrupt):
        status = "KILLED"
        raise
    except Exception as error:
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            run.record.tag(FAILURE, str(error))
        raise
    finally:
        run.finish(status)
        if parent is None:
            log_models_later(absolute_uri(recipe.tracking.uri), run.record.log_path)


def add_to_ended(
    recipe: Recipe, run_id: str | None, metrics: Mapping[str, float], parent: OpenRun
) -> None:
    """Add later measurements to the record of a run that has finished."""
    run = OpenRun.begin(_opening(recipe, run_id, params=trained_params(recipe)), parent)
    run.record.results(0, metrics)
    run.finish("FINISHED")


def end_record(
    recipe: Recipe,
    run_id: str | None,
    step: int,
    metrics: Mapping[str, float],
    parent: OpenRun | None = None,
) -> str | None:
    """End the record of a run that trained to its end, but whose own driver died before recording
    it.

    Args:
        run_id: the MLflow run, as the last checkpoint has it.
        step: the run's last.
        metrics: those that its driver would have recorded at its end.
        parent: the sweep or study that it is part of.

    Returns:
        The MLflow run; None if the checkpoint has none and MLflow is away.
    """
    opening = _opening(recipe, run_id, parent_log=parent.record.log_path if parent else None)
    if MetricsLog(opening.log_path).end_is_sent("FINISHED"):
        return run_id
    # Here because it is rare: it imports MLflow, which takes seconds.
    from vit_ray.tracking.mlflow_client import asking

    try:
        # The log may be on another machine, so a run that has ended is not opened again.
        if run_id is not None:
            with asking(recipe.tracking.uri) as client:
                if client.get_run(run_id).info.status == "FINISHED":
                    return run_id
    except (RuntimeError, TimeoutError, ValueError) as error:
        logger.warning("%s", error)
    try:
        lock = lock_log(opening.log_path)
    except RuntimeError as error:
        logger.warning("%s", error)
        return run_id
    with lock:
        tracker = Tracker.begin(opening)
        tracker.log.metrics(step, metrics)
        tracker.finish("FINISHED", timeout_s=10.0)
        return tracker.run_id or run_id
