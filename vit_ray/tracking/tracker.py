"""The one writer of a training's MLflow run; training never waits for MLflow, nor dies with it.

What is recorded goes to a log on disk; a thread brings it to MLflow in batches, keeps trying
while MLflow is away, and catches up when it returns, with the original times. `Tracker` knows
nothing of Ray: the driver puts it into an actor beside itself.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking.metrics_log import MetricsLog, Record, Sent
from vit_ray.tracking.mlflow_api import MlflowException
from vit_ray.tracking.mlflow_client import absolute_uri, page_hint, redact_uri, safe_uri
from vit_ray.tracking.mlflow_writer import MAX_METRICS, RunWriter

Status = Literal["FINISHED", "FAILED", "KILLED"]

BATCH_INTERVAL_S = 1.0  # metrics are gathered this long before they are sent
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
# The request itself is wrong, so trying again does not help.
_REJECTIONS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST")

logger = logging.getLogger(__name__)


class Tracker:
    """Records one run. No method raises, and only `flush` and `finish` wait."""

    def __init__(self, uri: str, log: MetricsLog, writer: RunWriter, offset: int) -> None:
        self._uri = uri
        self._log = log
        self._writer = writer
        self._offset = offset
        self._backoff_s = 0.0
        self._is_away = False
        self._has_rejected = False
        self._ends = False
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._num_tries = 0
        self._thread = threading.Thread(target=self._work, name="mlflow-writer", daemon=True)

    @classmethod
    def start(
        cls,
        config: TrackingConfig,
        run_name: str,
        log_path: Path,
        *,
        run_id: str | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        resume_step: int | None = None,
        wait_s: float = 10.0,
    ) -> Tracker:
        """Open the run and start writing.

        Args:
            config: where; a relative SQLite file is taken from the current folder.
            run_name: name in MLflow.
            log_path: local file that holds what is recorded; the log of an earlier attempt is
                continued, together with its run. A log belongs to one run.
            run_id: run to continue, such as one kept in a checkpoint.
            params: recipe; a key that a continued run has keeps its old value, and the new one
                is shown in the tag `vit_ray.changed_params`.
            tags: run tags.
            resume_step: last step of the checkpoint that training goes on from, for the history.
            wait_s: how long to wait for the run to exist, so that `run_id` is known.
        """
        uri = absolute_uri(config.uri)
        file = MetricsLog(log_path)
        sent = file.sent()
        if run_id and sent.run_id and run_id != sent.run_id:
            _set_aside(file, sent.run_id)
            sent = Sent()
        record = _start_record(config, uri, run_name, params or {}, tags or {}, resume_step)
        first = file.first_start() or record
        file.append(record)
        writer = RunWriter(uri, first, run_id or sent.run_id, sent.attempt_ms)
        tracker = cls(uri, file, writer, sent.offset)
        tracker._thread.start()
        tracker._wait_for_first_try(wait_s)
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None until MLflow could be reached for the first time."""
        return self._writer.run_id

    @property
    def hint(self) -> str:
        """The command or link that opens MLflow's page."""
        return page_hint(self._uri, self.run_id)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; a value that is not finite counts up `<key>_nonfinite`."""
        plain = {key: float(value) for key, value in values.items()}
        self._record({"kind": "metrics", "step": int(step), "values": plain})

    def tag(self, key: str, value: str) -> None:
        """Set a tag of the run."""
        self._record({"kind": "tag", "key": key, "value": redact_uri(str(value), self._uri)})

    def artifact_text(self, name: str, text: str) -> None:
        """Keep a text as a file of the run, such as `recipe.yaml`."""
        self._record({"kind": "text", "name": name, "text": redact_uri(text, self._uri)})

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """Keep a local file or folder with the run; it must stay where it is until it is sent."""
        self._record({"kind": "artifact", "path": str(Path(path).resolve()), "folder": folder})

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False when it does not in time."""
        goal, deadline = self._log.size, time.monotonic() + timeout_s
        with self._progress:
            while self._offset < goal and (left_s := deadline - time.monotonic()) > 0:
                self._wake.set()
                self._progress.wait(min(left_s, 0.5))
        return self._offset >= goal

    def finish(self, status: Status = "FINISHED", timeout_s: float = 30.0) -> bool:
        """End the run; says how to send what MLflow could not take in time."""
        self._record({"kind": "finish", "status": status})
        is_sent = self.flush(timeout_s)
        self._ends = True
        self._wake.set()
        self._thread.join(timeout_s if is_sent else 0.0)
        if not is_sent:
            logger.warning(
                "MLflow at %s does not have all of run %s; when it is back: "
                "python jobs/replay.py %s URI",
                safe_uri(self._uri),
                self.run_id,
                self._log.path,
            )
        return is_sent

    def _record(self, record: Record) -> None:
        self._log.append({**record, "time_ms": round(time.time() * 1000)})

    def _wait_for_first_try(self, wait_s: float) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._num_tries > 0, wait_s)

    def _work(self) -> None:
        while not self._ends:
            self._advance()
            self._wake.wait(self._backoff_s or BATCH_INTERVAL_S)
            self._wake.clear()

    def _advance(self) -> None:
        """Send what there is; an error of whatever kind means: away, try again later."""
        try:
            if self.run_id is None:
                self._writer.connect()
                self._moved_to(self._offset)
            while batch := _next_batch(self._log, self._offset):
                self._send([record for record, _ in batch])
                self._moved_to(batch[-1][1])
            self._note_back()
        except Exception as error:
            self._note_away(error)
        with self._progress:
            self._num_tries += 1
            self._progress.notify_all()

    def _send(self, records: list[Record]) -> None:
        try:
            self._writer.send(records)
        except MlflowException as error:
            if error.error_code not in _REJECTIONS:
                raise
            if len(records) > 1:
                for record in records:
                    self._send([record])
            else:
                self._note_rejected(error)

    def _moved_to(self, offset: int) -> None:
        self._log.mark_sent(Sent(offset, self.run_id, self._writer.attempt_ms))
        with self._progress:
            self._offset = offset
            self._progress.notify_all()

    def _note_away(self, error: Exception) -> None:
        self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "MLflow at %s cannot be used: run %s goes on, its metrics wait in %s (%s)",
                safe_uri(self._uri),
                self.run_id or self._log.path.stem,
                self._log.path,
                redact_uri(str(error), self._uri).partition("\n")[0],
            )

    def _note_back(self) -> None:
        self._backoff_s = 0.0
        if self._is_away:
            self._is_away = False
            logger.info("MLflow at %s is back: run %s", safe_uri(self._uri), self.run_id)

    def _note_rejected(self, error: MlflowException) -> None:
        if not self._has_rejected:
            self._has_rejected = True
            reason = redact_uri(str(error), self._uri)
            logger.warning("MLflow refuses a record of run %s: %s", self.run_id, reason)


def replay(log_path: Path, uri: str) -> int:
    """Bring a log into MLflow, into its own run or, where that is unknown, a new one.

    Running it again adds nothing.

    Returns:
        Metric points that were new.

    Raises:
        ValueError: no such log, or the file is none.
    """
    file = MetricsLog(log_path)
    first = file.first_start()
    if first is None:
        raise ValueError(f"log {str(log_path)!r}: no such file, or it does not begin with a run")
    writer = RunWriter(absolute_uri(uri), first, file.sent().run_id)
    writer.connect()
    num_points, offset = 0, 0
    while batch := _next_batch(file, offset):
        num_points += writer.send([record for record, _ in batch])
        offset = batch[-1][1]
    return num_points


def _next_batch(log: MetricsLog, offset: int) -> list[tuple[Record, int]]:
    """Metrics up to the size of one request, or one record of another kind."""
    batch: list[tuple[Record, int]] = []
    num_points = 0
    for record, end in log.read(offset):
        num_points += len(record.get("values", ()))
        if batch and (record["kind"] != "metrics" or num_points > MAX_METRICS):
            break
        batch.append((record, end))
        if record["kind"] != "metrics":
            break
    return batch


def _start_record(
    config: TrackingConfig,
    uri: str,
    run_name: str,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    resume_step: int | None,
) -> Record:
    return {
        "kind": "start",
        "spool_id": uuid.uuid4().hex,
        "run_name": run_name,
        "experiment": config.experiment,
        "parent_run_id": config.parent_run_id,
        "params": {key: redact_uri(str(value), config.uri) for key, value in params.items()},
        "tags": {key: redact_uri(str(value), config.uri) for key, value in tags.items()},
        "resume_step": resume_step,
        "time_ms": round(time.time() * 1000),
    }


def _set_aside(log: MetricsLog, run_id: str) -> None:
    """Another run's log stays beside, under its run's id, and can be replayed."""
    for path in (log.path, log.path.with_name(log.path.name + ".sent")):
        if path.exists():
            path.rename(path.with_name(f"{run_id}.{path.name}"))
