"""Writes the records of a metrics log into one MLflow run, each point once.

Everything here may raise MLflow's errors; `tracker` handles them. A step that a key already has is
dropped, so no step is logged twice, whether workers repeat steps after a restart, or a job or a
replay does. The exception is a metric that is recorded again: the newest value counts.
"""

import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from vit_ray.config.recorded_recipe import (
    CHANGED_PARAMS,
    PARENT_TAG,
    RUN_FOLDER,
    stored_tag,
    tags_of,
)
from vit_ray.metric_names import EVAL_GROUP, STARTUP_FIRST_STEP_S, SYSTEM_GROUP
from vit_ray.mlflow_internals import latest_points
from vit_ray.tracking.metrics_log import (
    CARD,
    FAILURE,
    REQUIREMENTS,
    MetricsLog,
    Record,
    metrics_log_path,
    parent_run_of,
)
from vit_ray.tracking.mlflow_api import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelOutput,
    Metric,
    MlflowException,
    Param,
    Run,
    RunTag,
)
from vit_ray.tracking.mlflow_client import experiment_id, open_client, share_view
from vit_ray.tracking.own_wheel import write_wheel

MAX_METRICS: Final = 1000  # per log_batch call: limits of MLflow's REST API
MAX_PARAMS: Final = 100
MAX_PARAM_CHARS: Final = 6000
MAX_TAG_CHARS: Final = 5000
_OLD_ORIGIN: Final = "vit_ray.spool"  # of earlier versions
ORIGIN: Final = stored_tag(_OLD_ORIGIN)  # finds the run of a log again
STEP_TAG: Final = "vit_ray.step"
"""Tag that finds a run's model at a step, which an interrupted attempt has begun to log."""
NONFINITE: Final = "_nonfinite"
_NOTE: Final = "mlflow.note.content"
_CONTEXTS: Final = {
    "eval": "evaluation",
    "dev": "held-out evaluation",
    "few_shot": "few-shot evaluation",
}
"""Group of metrics -> use of the data set that they are measured on."""
_NOT_IN_MODEL_NAMES: Final = re.compile(r"[/:.%\"']")

logger = logging.getLogger(__name__)


class ForeignFileError(ValueError):
    """A record names a file outside the run's folder."""


class RunWriter:
    """One MLflow run."""

    def __init__(
        self, uri: str, first: Record, folder: Path, run_id: str | None, opening: Record
    ) -> None:
        """Find the run, or create it.

        Args:
            uri: tracking server or absolute SQLite address.
            first: the record that opened the log: run name, experiment, parent.
            folder: the run's own; files outside of it are never sent.
            run_id: the run to continue, if known.
            opening: the start record of what is sent next: which group `eval/` is, and since when.
        """
        self.opening = opening
        self._folder = folder.resolve()
        self._first, self._run_folder = first, str(opening["tags"].get(RUN_FOLDER, ""))
        self._seen: dict[str, SeenSteps] | None = None
        self._latest_ms: dict[str, int] = {}
        self._num_nonfinite: dict[str, float] = {}
        self.client = open_client(uri)
        run = self._find(first, run_id)
        if run is None:
            tags = {ORIGIN: run_id or first["opening"]}
            if self._run_folder:
                tags[RUN_FOLDER] = self._run_folder
            if parent := parent_run_of(first):
                tags[PARENT_TAG] = parent
            run = self.client.create_run(
                experiment_id(self.client, uri, first["experiment"]),
                start_time=first["time_ms"],
                tags=tags,
                run_name=first["run_name"],
            )
        self.experiment_id = str(run.info.experiment_id)
        self.has_view = share_view(self.client, self.experiment_id)
        self.run_id: str = run.info.run_id

    def _find(self, first: Record, run_id: str | None) -> Run | None:
        run = self._active(run_id) if run_id else None
        if run is not None and not self._is_originals(run):
            return run
        experiment = self.client.get_experiment_by_name(first["experiment"])
        if experiment is None:
            return None
        for origin in filter(None, (run_id, first["opening"])):
            for tag in (ORIGIN, _OLD_ORIGIN):
                found = self.client.search_runs(
                    [experiment.experiment_id], f"tags.`{tag}` = '{origin}'"
                )
                for run in found:
                    if not self._is_originals(run):
                        return self.client.get_run(run.info.run_id)
        return None

    def _active(self, run_id: str) -> Run | None:
        try:
            run = self.client.get_run(run_id)
        except MlflowException as error:
            # A server with log-ins refuses requests for runs that it does not have.
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"):
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _is_originals(self, run: Run) -> bool:
        """Whether it is the run of another folder, of which this run's folder is a copy.

        A folder that was moved keeps its run: no log in its former place is sent to it.
        """
        other = run.data.tags.get(RUN_FOLDER)
        if not other or not self._run_folder or other == self._run_folder:
            return False
        log = metrics_log_path(other)
        is_here = log.parent.resolve() == self._folder
        return not is_here and MetricsLog(log).read_sent().run_id == run.info.run_id

    def is_deleted(self) -> bool:
        """Whether MLflow no longer has the run."""
        return self._active(self.run_id) is None

    def log_history(self, events: Sequence[Record]) -> None:
        """Write the events of a log as a file, and count those of all logs of the run in tags."""
        found = [
            {
                **{"kind": one["event"], "text": one["text"], "step": one["step"]},
                "time_s": one["time_ms"] / 1000,
            }
            for one in events
        ]
        own = f"history/{self._first['opening']}.json"
        self.client.log_text(self.run_id, json.dumps(found, indent=1), own)
        # A run that was continued on another machine has a log there.
        for file in self.client.list_artifacts(self.run_id, "history"):
            if file.path != own:
                with TemporaryDirectory() as folder:
                    path = self.client.download_artifacts(self.run_id, file.path, folder)
                    found += json.loads(Path(path).read_text())
        counts = Counter(str(one["kind"]).replace(" ", "_") for one in found)
        tags = [
            RunTag(stored_tag(f"vit_ray.events.{kind}"), str(count))
            for kind, count in counts.items()
        ]
        self.client.log_batch(self.run_id, tags=tags)

    def takes_writes(self) -> bool:
        """Whether MLflow accepts tags, and a point that it has; writing them changes nothing."""
        try:
            run = self.client.get_run(self.run_id)
            points = itertools.islice(latest_points(run), 1)
            known = [Metric(p.key, p.value, p.timestamp, p.step) for p in points]
            origin = RunTag(ORIGIN, run.data.tags.get(ORIGIN, self.run_id))
            self.client.log_batch(self.run_id, metrics=known, tags=[origin])
        except Exception:
            return False
        return True

    def send(self, records: Sequence[Record]) -> int:
        """Record them in order: metrics in one batch, or a single record of another kind.

        Returns:
            Returns the number of new metric points.
        """
        if records and records[0]["kind"] == "metrics":
            return self._send_metrics(records)
        for record in records:
            match record["kind"]:
                case "start":
                    self._send_start(record)
                case "tag":
                    self._tag(record["key"], record["value"])
                case "text":
                    self.client.log_text(self.run_id, record["text"], record["name"])
                case "artifact":
                    self._send_artifact(record)
                case "model":
                    self._send_model(record)
                case "finish":
                    self.client.set_terminated(self.run_id, record["status"])
        return 0

    def _send_start(self, record: Record) -> None:
        run = self.client.get_run(self.run_id)
        self.opening = record
        self._seen = self._steps_of(run, record["resume_step"])
        if run.info.status != "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
        if FAILURE in run.data.tags:  # of an attempt that this one continues
            self.client.delete_tag(self.run_id, FAILURE)
        # MLflow never changes a parameter, so a value that a restart changed becomes a tag.
        known = run.data.params
        params = {key: str(value)[:MAX_PARAM_CHARS] for key, value in record["params"].items()}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for first in range(0, len(new), MAX_PARAMS):
            self.client.log_batch(self.run_id, params=new[first : first + MAX_PARAMS])
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        before = tags_of(run.data.tags)
        if changed or (params and CHANGED_PARAMS in before):
            self._tag(CHANGED_PARAMS, json.dumps(changed))
        if datasets := record.get("datasets"):
            inputs = [
                DatasetInput(
                    Dataset(
                        name=one["name"],
                        digest=one["digest"],
                        source_type="vit_ray",
                        source=json.dumps({"uri": one["source"]}),
                        profile=json.dumps(one["profile"]),
                    ),
                    [InputTag("mlflow.data.context", one["context"])],
                )
                for one in datasets
            ]
            self.client.log_inputs(self.run_id, inputs)
        awaited = record.get("awaited_metric")
        if awaited and awaited not in run.data.metrics:
            self.client.log_metric(self.run_id, awaited, math.nan, record["time_ms"], 0)
        tags = dict(record["tags"])
        if parent := parent_run_of(record):
            tags[PARENT_TAG] = parent
        if self._run_folder:  # the folder may have been moved, or be a copy
            tags[RUN_FOLDER] = self._run_folder
        if record["resume_step"] is not None:
            steps = [
                *before.get("vit_ray.resumed_at_steps", "").split(),
                str(record["resume_step"]),
            ]
            tags["vit_ray.resumed_at_steps"] = " ".join(dict.fromkeys(steps))
        if "vit_ray.git_commit" in tags:
            tags["mlflow.source.git.commit"] = tags["vit_ray.git_commit"]
        self.client.log_batch(
            self.run_id,
            tags=[RunTag(stored_tag(k), str(v)[:MAX_TAG_CHARS]) for k, v in tags.items()],
        )
        # Last, since MLflow may refuse one of the user's own.
        users = [RunTag(k, v[:MAX_TAG_CHARS]) for k, v in record.get("user_tags", {}).items()]
        if users:
            self.client.log_batch(self.run_id, tags=users)

    def _steps_of(self, run: Run, resume_step: int | None = None) -> "dict[str, SeenSteps]":
        """What a run has, by key.

        The steps after `resume_step` are repeated, and are read one by one: points come from
        several threads, so a killed attempt may have lost some of them before its last.
        """
        found: dict[str, SeenSteps] = {}
        for latest in latest_points(run):
            if latest.key.startswith(SYSTEM_GROUP):  # of MLflow's own sampler
                continue
            if latest.key.endswith(NONFINITE):
                self._num_nonfinite[latest.key] = latest.value
            self._latest_ms[latest.key] = latest.timestamp
            if resume_step is not None and latest.step <= resume_step:
                found[latest.key] = SeenSteps(latest.step)
            else:
                history = self.client.get_metric_history(run.info.run_id, latest.key)
                found[latest.key] = SeenSteps()
                found[latest.key].add(point.step for point in history)
        return found

    def _send_metrics(self, records: Sequence[Record]) -> int:
        if self._seen is None:  # the log is continued in the middle of an attempt
            self._seen = self._steps_of(self.client.get_run(self.run_id))
        group = f"{self.opening.get('measured_on', 'eval')}/"
        new: dict[str, set[int]] = {}
        counts = dict(self._num_nonfinite)
        points: list[Metric] = []
        for record in records:
            step, time_ms = record["step"], record["time_ms"]
            for key, value in record["values"].items():
                if key.startswith(EVAL_GROUP):
                    key = group + key.removeprefix(EVAL_GROUP)
                # MLflow would store inf as 1.8e308, which ruins every chart; a count is correct.
                is_finite = math.isfinite(value)
                key = key if is_finite else key + NONFINITE
                latest_ms = self._latest_ms.get(key, 0)
                is_newer = record.get("again") and time_ms > latest_ms
                is_known = step in new.get(key, ()) or step in self._seen.get(key, ())
                if key == STARTUP_FIRST_STEP_S:  # of the first attempt
                    is_known |= key in new or latest_ms >= self.opening["time_ms"]
                if is_known and not is_newer:
                    continue
                new.setdefault(key, set()).add(step)
                if not is_finite:
                    value = counts[key] = counts.get(key, 0.0) + 1.0
                points.append(Metric(key, value, time_ms, step))
        for first in range(0, len(points), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=points[first : first + MAX_METRICS])
        # Only now: a batch that failed must be sent again in full.
        self._num_nonfinite = counts
        for point in points:
            self._latest_ms[point.key] = max(point.timestamp, self._latest_ms.get(point.key, 0))
        for key, steps in new.items():
            self._seen.setdefault(key, SeenSteps()).add(steps)
        return len(points)

    def _send_artifact(self, record: Record) -> None:
        """Log a file or folder.

        Raises:
            FileNotFoundError: it no longer exists.
            ForeignFileError: some of it, links resolved, is not in the run's folder; a log that was
                tampered with could name any file.
        """
        path = Path(record["path"])
        if not path.exists():
            raise FileNotFoundError(f"{path} no longer exists")
        for file in (path, *(path.rglob("*") if path.is_dir() else ())):
            if not file.resolve().is_relative_to(self._folder):
                raise ForeignFileError(f"{file} is not in the run's folder {self._folder}")
        send = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        send(self.run_id, str(path), record["folder"] or None)

    def _send_model(self, record: Record) -> None:
        """Log files in MLflow's model format; does not repeat what an earlier attempt did."""
        client, run, step = self.client, self.client.get_run(self.run_id), record["step"]
        card = record["files"].get(CARD, "")[:MAX_TAG_CHARS]
        found = client.search_logged_models(
            [run.info.experiment_id],
            f"source_run_id = '{self.run_id}' AND tags.`{STEP_TAG}` = '{step}'",
            max_results=1,
        )
        model: LoggedModel = (
            found[0]
            if found
            else client.create_logged_model(
                run.info.experiment_id,
                name=_NOT_IN_MODEL_NAMES.sub("_", record["name"]),
                source_run_id=self.run_id,
                tags={STEP_TAG: str(step), **({_NOTE: card} if card else {})},
                params=record["params"],
            )
        )
        if model.status != "READY":
            with TemporaryDirectory() as folder:
                for name, text in record["files"].items():
                    (Path(folder) / Path(name).name).write_text(text)
                if wheel := write_wheel(Path(folder) / "wheels"):
                    with open(Path(folder) / REQUIREMENTS, "a") as requirements:
                        requirements.write(f"wheels/{wheel.name}\n")
                self._log_model_metrics(model.model_id, run, record)
                client.log_model_artifacts(model.model_id, folder)
            model = client.finalize_logged_model(model.model_id, "READY")
        outputs = run.outputs.model_outputs if run.outputs else ()
        if model.model_id not in [output.model_id for output in outputs]:
            client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step)])
        if name := record.get("register_as"):
            try:
                client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            # Not `models:/ID`, which a SQLite store looks up in MLflow's global store.
            source = model.artifact_location
            known = client.search_model_versions(f"name = '{name}' AND run_id = '{self.run_id}'")
            if source not in [version.source for version in known]:
                client.create_model_version(name, source, self.run_id, model_id=model.model_id)

    def _log_model_metrics(self, model_id: str, run: Run, record: Record) -> None:
        """Give a model its run's measurements, with the data sets that they were measured on."""
        group = f"{self.opening.get('measured_on', 'eval')}/"
        points = {point.key: point for point in latest_points(run)}
        contexts = {one["context"]: one for one in self.opening.get("datasets", ())}
        for key, value in record.get("metrics", {}).items():
            if not math.isfinite(value):
                continue
            if key.startswith(EVAL_GROUP):
                key = group + key.removeprefix(EVAL_GROUP)
            # The run's own point, which is not logged again; possibly of the best evaluation.
            point = points.get(key)
            if point is not None and point.value != value:
                history = self.client.get_metric_history(self.run_id, key)
                point = next((one for one in reversed(history) if one.value == value), None)
                if point is None:
                    continue
            context = _CONTEXTS.get(key.partition("/")[0], "evaluation")
            data = contexts.get(context) or contexts.get(_CONTEXTS["eval"])
            self.client.log_metric(
                self.run_id,
                key,
                value,
                point.timestamp if point else record["time_ms"],
                point.step if point else record["step"],
                model_id=model_id,
                dataset_name=data and data["name"],
                dataset_digest=data and data["digest"],
            )

    def _tag(self, key: str, value: str) -> None:
        self.client.set_tag(self.run_id, stored_tag(key), value[:MAX_TAG_CHARS])


class SeenSteps:
    """Steps that a key has, in little memory: all up to `low`, and some above it.

    Points may arrive slightly out of order, since they come from several threads.
    """

    NUM_KEPT = 256

    def __init__(self, low: int = -1) -> None:
        self._low, self._above = low, set[int]()

    def __contains__(self, step: int) -> bool:
        return step <= self._low or step in self._above

    def add(self, steps: Iterable[int]) -> None:
        """Remember these steps; if there are too many, the lowest move the bound up."""
        self._above.update(steps)
        if (num_over := len(self._above) - self.NUM_KEPT) > 0:
            lowest = sorted(self._above)[:num_over]
            self._low = max(self._low, lowest[-1])
            self._above.difference_update(lowest)
