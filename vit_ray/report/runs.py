"""Runs as MLflow has them: the only source of every report."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vit_ray.config.decisive import TAGGED
from vit_ray.config.model_family import model_family

RUN_ID = re.compile(r"[0-9a-f]{32}")
PARENT_TAG = "mlflow.parentRunId"
MAX_POINTS = 300  # of a curve on the page; longer ones are averaged

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class RecordedRun:
    """One MLflow run, read once."""

    run: Run

    @property
    def run_id(self) -> str:
        """MLflow's id."""
        return str(self.run.info.run_id)

    @property
    def name(self) -> str:
        """MLflow's run name."""
        return str(self.run.info.run_name or self.run_id)

    @property
    def status(self) -> str:
        """`FINISHED`, `RUNNING`, `FAILED`, `KILLED` or `SCHEDULED`."""
        return str(self.run.info.status)

    @property
    def params(self) -> dict[str, str]:
        """The recipe, dotted keys, as far as it decides; paths and what is measured are tags."""
        tags = {key: value for key, value in self.tags.items() if key in TAGGED}
        return {**tags, **self.run.data.params}

    @property
    def tags(self) -> dict[str, str]:
        """All tags."""
        return dict(self.run.data.tags)

    @property
    def metrics(self) -> dict[str, float]:
        """Last value of every key that has one; `dev/...` as `eval/...`, see `measured_on`."""
        return {
            re.sub("^dev/", "eval/", key): value
            for key, value in self.run.data.metrics.items()
            if math.isfinite(value)
        }

    @property
    def kind(self) -> str:
        """What made the run, such as `study_cell`; empty if it was none of our jobs."""
        return self.tags.get("vit_ray.kind", "")

    @property
    def parent_id(self) -> str | None:
        """Run that it is recorded under."""
        return self.tags.get(PARENT_TAG)

    @property
    def label(self) -> str:
        """Row name in a study; the model's or the run's name elsewhere."""
        return self.tags.get("vit_ray.study_label") or self.params.get("model.name") or self.name

    @property
    def elapsed_s(self) -> float | None:
        """Seconds from start to end; None while it runs."""
        start_ms, end_ms = self.run.info.start_time, self.run.info.end_time
        return (end_ms - start_ms) / 1000 if start_ms and end_ms else None

    @cached_property
    def family(self) -> str:
        """`ViT`, `Hybrid`, `ResNet`, `Axial` or `Other`, by the model's name."""
        return model_family(self.params.get("model.name", ""))


class Archive:
    """The runs that a report is about."""

    def __init__(self, uri: str, selection: str) -> None:
        """
        Args:
            uri: tracking server or SQLite address; nothing is written to it.
            selection: experiment name, or id of a run that is taken with its children.

        Raises:
            ValueError: there is no such experiment or run, or it is empty.
        """
        require_store(uri)
        self._client = MlflowClient(uri)
        self.selection = selection
        self.parent: RecordedRun | None = None
        if RUN_ID.fullmatch(selection):
            self.parent = self._run(selection)
            experiment_id = self.parent.run.info.experiment_id
        else:
            experiment_id = self._experiment(selection)
        self.experiment = str(self._client.get_experiment(experiment_id).name)
        everything = self._all_runs(experiment_id)
        self.runs = _family_of(selection, everything) if self.parent else everything
        if not self.runs:
            raise ValueError(f"report: experiment {selection!r} holds no runs yet")

    def curve(self, run: RecordedRun, key: str) -> Curve:
        """Steps and values in order; more than `MAX_POINTS` become means of equal parts."""
        if key not in run.run.data.metrics:
            key = re.sub("^eval/", "dev/", key)
        points = self._client.get_metric_history(run.run_id, key)
        shown = [(float(p.step), float(p.value)) for p in points if math.isfinite(p.value)]
        return thinned(sorted(shown))

    def _run(self, run_id: str) -> RecordedRun:
        try:
            return RecordedRun(self._client.get_run(run_id))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise ValueError(f"report: MLflow has no run {run_id}") from None

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            known = sorted(e.name for e in self._client.search_experiments())
            raise ValueError(
                f"report: MLflow has no experiment {name!r}; it has {', '.join(known)} "
                "(give one of these, or a run id)"
            )
        return str(found.experiment_id)

    def _all_runs(self, experiment_id: str) -> list[RecordedRun]:
        found: list[RecordedRun] = []
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [experiment_id], order_by=["attributes.start_time ASC"], page_token=token
            )
            found += [RecordedRun(run) for run in page]
            token = page.token
            if not token:
                return found


def thinned(points: Sequence[tuple[float, float]]) -> Curve:
    """At most `MAX_POINTS` points; each stands for the mean of a run of neighbours."""
    if len(points) <= MAX_POINTS:
        return list(points)
    parts = [
        points[len(points) * i // MAX_POINTS : len(points) * (i + 1) // MAX_POINTS]
        for i in range(MAX_POINTS)
    ]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


def _family_of(root_id: str, runs: list[RecordedRun]) -> list[RecordedRun]:
    """The root and everything recorded under it, at any depth."""
    kept = {root_id}
    while True:
        more = {run.run_id for run in runs if run.parent_id in kept} - kept
        if not more:
            return [run for run in runs if run.run_id in kept]
        kept |= more


def require_store(uri: str) -> None:
    """A report reads; it must not leave an empty database where a path was mistyped.

    Raises:
        ValueError: the address is of a SQLite file that does not exist.
    """
    path = uri.removeprefix("sqlite:///")
    if path != uri and not Path(path).is_file():
        raise ValueError(
            f"tracking.uri={uri}: no such file; give the MLflow database of the runs, "
            "such as sqlite:///mlflow.db, or the address of a server"
        )
