"""Writes the records of a metrics log into one MLflow run, each point once.

Everything here may raise MLflow's errors; `tracker` handles them. A point is dropped if MLflow has
that step or a later one of the same metric. So no step is logged twice when workers repeat steps
after a restart, or a log is replayed. Records with `again` are the exception: the newest value
counts.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from vit_ray.metric_names import EVAL_GROUP, STARTUP_FIRST_STEP_S
from vit_ray.mlflow_internals import latest_points
from vit_ray.outcomes import CHANGED_PARAMS, KIND, PARENT_TAG, RUN_FOLDER
from vit_ray.tracking.metrics_log import (
    FAILURE,
    MAX_METRICS,
    MetricsLog,
    Record,
    metrics_log_path,
)
from vit_ray.tracking.mlflow_client import (
    Dataset,
    DatasetInput,
    InputTag,
    Metric,
    MlflowException,
    Param,
    Run,
    RunTag,
    experiment_id,
    found_runs,
    open_client,
    page_hint,
    share_view,
)

MAX_PARAMS: Final = 100  # per log_batch call: limits of MLflow's REST API
MAX_PARAM_CHARS: Final = 6000
MAX_TAG_CHARS: Final = 5000
ORIGIN: Final = "vit_ray.log"  # finds the run of a log again
NONFINITE: Final = "_nonfinite"


class RunWriter:
    """One MLflow run.

    Attributes:
        hint: the command or link that opens MLflow's page.
    """

    def __init__(self, uri: str, log: MetricsLog, *, needs_parent: bool) -> None:
        """Find the run, or create it.

        Args:
            uri: tracking server or absolute SQLite address.
            log: with a start record; files outside its folder are never sent.
            needs_parent: raise an error if MLflow does not have the sweep or study that the run is
                part of.

        Raises:
            RuntimeError: see `needs_parent`.
            ValueError: the experiment has been deleted.
        """
        self._log, self._folder = log, log.path.parent.resolve()
        starts = list(log.records("start"))
        self.opening = starts[0]  # the start record of the next records to send
        self._newest = starts[-1]
        self._run_folder = str(self._newest["tags"].get(RUN_FOLDER, ""))
        self._last: dict[str, Metric] | None = None  # the latest point of each key
        self.client = open_client(uri)
        parent = self._find_parent(needs_parent=needs_parent)
        tags = {RUN_FOLDER: self._run_folder, PARENT_TAG: parent}
        self._location_tags = {key: value for key, value in tags.items() if value}
        run_id = log.read_sent().run_id or self._newest["run_id"]
        runs = (run for run in self._candidates(run_id) if not self._is_originals(run))
        run = next(runs, None) or self.client.create_run(
            experiment_id(self.client, uri, self.opening["experiment"]),
            start_time=self.opening["time_ms"],
            tags={ORIGIN: run_id or self.opening["opening"], **self._location_tags},
            run_name=self.opening["run_name"],
        )
        experiment, kind = str(run.info.experiment_id), str(self._newest["tags"].get(KIND, ""))
        self.hint = page_hint(uri, experiment, share_view(self.client, experiment, kind))
        self.run_id: str = run.info.run_id

    def _find_parent(self, *, needs_parent: bool) -> str | None:
        """MLflow's id of the sweep or study that the run is part of, if MLflow has it.

        The id is read next to that run's log, where it is written as soon as MLflow has the run: so
        a child that starts while MLflow is away still gets its parent. Until MLflow has the log's
        last start record, the id in a copied folder may be that of the original.
        """
        if not self._newest["parent_log"]:
            return None
        log = MetricsLog(Path(self._newest["parent_log"]))
        sent = log.read_sent()
        parent = None if any(log.records("start", offset=sent.points)) else sent.run_id
        if parent and self.active(parent):
            return parent
        if needs_parent:
            raise RuntimeError("the run that it is part of is not there yet")
        return None

    def _candidates(self, run_id: str | None) -> Iterator[Run]:
        """The run of this id, then runs that were created for this log or in place of that run."""
        if run_id and (run := self.active(run_id)):
            yield run
        newest, experiment = self._newest, self.opening["experiment"]
        for origin in filter(None, (run_id, self.opening["opening"])):
            yield from found_runs(self.client, experiment, f"tags.`{ORIGIN}` = '{origin}'")
        if newest["continues"]:
            query = f"attributes.run_name = '{newest['run_name']}'"
            wanted = {key: newest["tags"].get(key) for key in (RUN_FOLDER, KIND)}
            for run in found_runs(self.client, experiment, query):
                if wanted == {key: run.data.tags.get(key) for key in wanted}:
                    yield run

    def active(self, run_id: str) -> Run | None:
        """The run; None if MLflow does not have it, or it has been deleted."""
        try:
            run = self.client.get_run(run_id)
        except MlflowException as error:
            # A server with log-ins answers PERMISSION_DENIED for runs that it does not have.
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"):
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _is_originals(self, run: Run) -> bool:
        """Whether this run's folder is a copy, and `run` belongs to the original folder.

        A folder that was moved keeps its run: its former path has no log of that run.
        """
        folder = run.data.tags.get(RUN_FOLDER)
        if not folder or not self._run_folder or folder == self._run_folder:
            return False
        log = metrics_log_path(folder)
        is_this_folder = log.parent.resolve() == self._folder
        return not is_this_folder and MetricsLog(log).read_sent().run_id == run.info.run_id

    def send(self, records: Sequence[Record]) -> int:
        """Record metrics in their order, or a single record of another kind.

        Returns:
            The number of new metric points.
        """
        record = records[0]
        match record["kind"]:
            case "metrics":
                return self._send_metrics(records)
            case "start":
                self._send_start(record)
            case "tag":
                self._tag({record["key"]: record["value"]})
            case "text":
                self.client.log_text(self.run_id, record["text"], record["name"])
            case "artifact":
                self._send_artifact(record)
            case "event":
                self._send_history()
            case "finish":
                self.client.set_terminated(self.run_id, record["status"], record["time_ms"])
        return 0

    def _send_start(self, record: Record) -> None:
        run = self.client.get_run(self.run_id)
        self.opening, self._last = record, None
        self.client.update_run(self.run_id, status="RUNNING")
        if FAILURE in run.data.tags:  # of an earlier attempt
            self.client.delete_tag(self.run_id, FAILURE)
        # MLflow never changes a parameter, so a value that a restart changed becomes a tag.
        old_params, old_tags = run.data.params, run.data.tags
        params = {key: value[:MAX_PARAM_CHARS] for key, value in record["params"].items()}
        new = [Param(key, value) for key, value in params.items() if key not in old_params]
        for first in range(0, len(new), MAX_PARAMS):
            self.client.log_batch(self.run_id, params=new[first : first + MAX_PARAMS])
        tags = dict(record["tags"])
        changed = {k: v for k, v in params.items() if k in old_params and old_params[k] != v}
        if changed or (params and CHANGED_PARAMS in old_tags):
            tags[CHANGED_PARAMS] = json.dumps(changed)
        if record["datasets"]:
            self.client.log_inputs(self.run_id, list(map(_dataset, record["datasets"])))
        awaited = record["awaited_metric"]
        if awaited and awaited not in run.data.metrics:
            self.client.log_metric(self.run_id, awaited, math.nan, record["time_ms"], 0)
        tags |= self._location_tags  # the folder may have been moved, or be a copy
        if "vit_ray.git_commit" in tags:
            tags["mlflow.source.git.commit"] = tags["vit_ray.git_commit"]
        self._tag(tags)
        # Last, since MLflow may refuse a tag of the user's.
        self._tag(record["user_tags"])

    def _tag(self, tags: dict[str, Any]) -> None:
        stored = [RunTag(k, str(v)[:MAX_TAG_CHARS]) for k, v in tags.items()]
        self.client.log_batch(self.run_id, tags=stored)

    def _send_metrics(self, records: Sequence[Record]) -> int:
        if self._last is None:
            latest = latest_points(self.client.get_run(self.run_id))
            self._last = {point.key: point for point in latest}
        last, points = dict(self._last), list[Metric]()
        for record in records:
            for key, value in record["values"].items():
                if key.startswith(EVAL_GROUP):  # or `dev/`, for a split that selects the model
                    key = f"{self.opening['measured_on']}/{key.removeprefix(EVAL_GROUP)}"
                # MLflow would store inf as 1.8e308, which ruins every chart: count such values.
                if not math.isfinite(value):
                    key += NONFINITE
                    value = last[key].value + 1.0 if key in last else 1.0
                point = Metric(key, value, record["time_ms"], record["step"])
                if key not in last or self._is_newer(point, last[key], record):
                    last[key] = point
                    points.append(point)
        for first in range(0, len(points), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=points[first : first + MAX_METRICS])
        self._last = last  # only now: after an error all of the records are sent again
        return len(points)

    def _is_newer(self, point: Metric, last: Metric, record: Record) -> bool:
        if point.key == STARTUP_FIRST_STEP_S:  # only of the first attempt of an opening
            return last.timestamp < self.opening["time_ms"]
        if math.isnan(last.value):  # the awaited metric has no value so far
            return True
        is_result = bool(record.get("again")) and point.timestamp > last.timestamp
        return is_result or point.step > last.step

    def _send_artifact(self, record: Record) -> None:
        """Log a file or folder.

        Raises:
            FileNotFoundError: the path no longer exists, or a file in it, with links resolved, is
                outside the run's folder: a log that was tampered with could name any file.
        """
        path = Path(record["path"])
        if not path.exists():
            raise FileNotFoundError(f"{path} no longer exists")
        for file in (path, *(path.rglob("*") if path.is_dir() else ())):
            if not file.resolve().is_relative_to(self._folder):
                raise FileNotFoundError(f"{file} is not in the run's folder {self._folder}")
        send = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        send(self.run_id, str(path), record["folder"] or None)

    def _send_history(self) -> None:
        """Write the log's events as a file, one for each machine on which the run has a log."""
        events = [
            {
                "kind": event["event"],
                "text": event["text"],
                "step": event["step"],
                "time_s": event["time_ms"] / 1000,
            }
            for event in self._log.records("event")
        ]
        first = next(self._log.records("start"))["opening"]
        self.client.log_text(self.run_id, json.dumps(events, indent=1), f"history/{first}.json")


def _dataset(dataset: dict[str, Any]) -> DatasetInput:
    return DatasetInput(
        Dataset(
            name=dataset["name"],
            digest=dataset["digest"],
            source_type="vit_ray",
            source=json.dumps({"uri": dataset["source"]}),
            profile=json.dumps(dataset["profile"]),
        ),
        [InputTag("mlflow.data.context", dataset["context"])],
    )
