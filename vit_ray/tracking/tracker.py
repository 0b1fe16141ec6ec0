"""The one writer of a training's MLflow run; training never waits for MLflow, nor dies with it.

What is recorded goes to a log on disk; threads send it to MLflow in batches, keep trying
while MLflow is away, and catch up when it returns, with the original times. `Tracker` knows
nothing of Ray: the driver puts it into an actor beside itself.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking.batch_sender import (
    FILE_TRIES_AT_END,
    FileSender,
    PointSender,
    file_name,
    next_batch,
)
from vit_ray.tracking.metrics_log import FILES, MetricsLog, Record, Sent
from vit_ray.tracking.mlflow_client import absolute_uri, page_hint, redact_uri, safe_uri, unusable
from vit_ray.tracking.mlflow_writer import RunWriter

Status = Literal["FINISHED", "FAILED", "KILLED"]

logger = logging.getLogger(__name__)


class Tracker:
    """Records one run. No method raises, and only `flush` and `finish` wait."""

    def __init__(self, uri: str, log: MetricsLog, writer: RunWriter, sent: Sent) -> None:
        self._uri = uri
        self._log = log
        self._writer = writer
        self._has_rejected = False
        self._noting = threading.Lock()
        self._points = PointSender(
            log,
            writer,
            sent.offset,
            on_progress=self._note_progress,
            on_away=self._note_away,
            on_back=self._note_back,
            on_refusal=self._note_refused,
        )
        files_offset = sent.offset if sent.files_offset is None else sent.files_offset
        self._files = FileSender(
            log,
            writer,
            files_offset,
            self._points,
            on_progress=self._note_progress,
            on_failure=self._note_failed_file,
        )

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
        datasets: Sequence[Mapping[str, Any]] = (),
        awaited_metric: str | None = None,
        key: str = "",
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
            datasets: inputs; `name`, `digest`, `source`, `context` and `profile` of each.
            awaited_metric: key that is to stand first, though its value comes last.
            key: of this opening; when the log has it already, recording goes on as if it had never
                stopped.
            wait_s: how long to wait for the run to exist, so that `run_id` is known.
        """
        uri = absolute_uri(config.uri)
        file = MetricsLog(log_path)
        sent = file.sent()
        if run_id and sent.run_id and run_id != sent.run_id:
            _set_aside(file, sent.run_id)
            sent = Sent()
        record = _start_record(config, uri, run_name, params or {}, tags or {}, resume_step)
        record |= {"datasets": [dict(one) for one in datasets], "awaited_metric": awaited_metric}
        first = file.first_start() or record
        if not key or file.opened(key) is None:
            file.append({**record, "opening": key})
        writer = RunWriter(uri, first, log_path.parent, run_id or sent.run_id)
        tracker = cls(uri, file, writer, sent)
        tracker._points.start()
        tracker._files.start()
        tracker._points.wait_for_tries(1, wait_s)
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None until MLflow could be reached for the first time."""
        return self._writer.run_id

    @property
    def hint(self) -> str:
        """The command or link that opens MLflow's page."""
        return page_hint(self._uri, self._writer.experiment_id)

    def metrics(self, step: int, values: Mapping[str, float], *, is_again: bool = False) -> None:
        """Record values at a step; a value that is not finite counts up `<key>_nonfinite`.

        Args:
            is_again: the later value of a step counts; else the first one does.
        """
        plain = {key: float(value) for key, value in values.items()}
        again = {"again": True} if is_again else {}
        self._record({"kind": "metrics", "step": int(step), "values": plain, **again})

    def tag(self, key: str, value: str) -> None:
        """Set a tag of the run."""
        self._record({"kind": "tag", "key": key, "value": str(value)})

    def note(self, kind: str, **fields: Any) -> None:
        """Keep in the log alone what a recorder that opens it again needs to know."""
        self._record({"kind": kind, **fields})

    def artifact_text(self, name: str, text: str) -> None:
        """Keep a text as a file of the run, such as `recipe.yaml`."""
        self._record({"kind": "text", "name": name, "text": text})

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """Keep a file or folder of the run's folder; it must stay where it is until it is sent."""
        self._record({"kind": "artifact", "path": str(Path(path).resolve()), "folder": folder})

    def model(
        self,
        path: str | Path,
        name: str,
        step: int,
        params: Mapping[str, str],
        register_as: str | None,
    ) -> None:
        """Log a model of MLflow: a folder of the run's folder that stays where it is.

        Args:
            step: at which the run had the model.
            params: shown with it.
            register_as: registered model of which it becomes a version.
        """
        self._record(
            {
                "kind": "model",
                "path": str(Path(path).resolve()),
                "name": name,
                "step": step,
                "params": dict(params),
                "register_as": register_as,
            }
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False when it does not in time.

        A file that cannot be stored is waited for only while it is tried a few times more.
        """
        goal, deadline = self._log.size, time.monotonic() + timeout_s
        return self._points.flush(goal, deadline) and self._files.flush(
            goal, deadline, FILE_TRIES_AT_END
        )

    def finish(self, status: Status = "FINISHED", timeout_s: float = 30.0) -> bool:
        """End the run, and `close`."""
        self.record_end(status)
        return self.close(timeout_s)

    def record_end(self, status: Status) -> None:
        """The run has ended; `close` comes next."""
        self._record({"kind": "finish", "status": status})

    def close(self, timeout_s: float = 30.0) -> bool:
        """Send what is recorded, and no more; says how to send what MLflow did not take.

        Returns:
            Whether MLflow has everything.
        """
        is_sent = self.flush(timeout_s)
        for sender in (self._points, self._files):
            sender.end(timeout_s if is_sent else 0.0)
        missing = self._files.waiting
        if refused := self._points.num_refused:
            missing = [f"{refused} refused record{'s' if refused > 1 else ''}", *missing]
        if not is_sent or missing:
            logger.warning(
                "MLflow at %s does not have %s of run %s; when that is mended: "
                "python jobs/replay.py %s URI",
                safe_uri(self._uri),
                ", ".join(missing) if missing else "all",
                self.run_id,
                self._log.path,
            )
        return is_sent and not missing

    def _record(self, record: Record) -> None:
        self._log.append({**record, "time_ms": round(time.time() * 1000)})

    def _note_progress(self) -> None:
        with self._noting:
            points, files = self._points.offset, self._files.offset
            self._log.mark_sent(Sent(points, files, self.run_id))

    def _note_away(self, error: Exception) -> None:
        logger.warning(
            "MLflow at %s cannot be used: run %s goes on, its metrics wait in %s (%s)",
            safe_uri(self._uri),
            self.run_id or self._log.path.stem,
            self._log.path,
            self._reason(error),
        )

    def _note_back(self) -> None:
        logger.info("MLflow at %s is back: run %s", safe_uri(self._uri), self.run_id)

    def _note_refused(self, error: Exception) -> None:
        if not self._has_rejected:
            self._has_rejected = True
            logger.warning(
                "MLflow refuses a record of run %s: %s", self.run_id, self._reason(error)
            )

    def _note_failed_file(self, name: str, error: Exception) -> None:
        logger.warning(
            "run %s: %s cannot be stored with it (%s)", self.run_id, name, self._reason(error)
        )

    def _reason(self, error: Exception) -> str:
        return redact_uri(str(error), self._uri).partition("\n")[0]


@dataclass
class Replayed:
    """What came of a replay."""

    num_points: int = 0
    """Metric points that were new."""
    refused: list[str] = field(default_factory=list)
    """Records that MLflow did not take, or that are not the run's to send, each with the reason."""


def replay(log_path: Path, uri: str) -> Replayed:
    """Send a log to MLflow, to its own run or, where that is unknown, to a new one.

    Running it again adds nothing. Only files in the log's own folder are sent.

    Raises:
        ValueError: no such log, or the file is none.
        RuntimeError: MLflow cannot be used at this address.
    """
    is_none = "://" not in uri and uri not in ("databricks", "uc")
    if is_none or re.fullmatch(r"sqlite:/*(:memory:)?", uri):  # of memory, which ends with replay
        raise ValueError(f"URI {uri!r} is no address; give sqlite:///mlflow.db or http://HOST:PORT")
    if log_path.is_dir():
        raise ValueError(f"log {str(log_path)!r} is a folder; give a metrics.jsonl file in it")
    log = MetricsLog(log_path)
    first = log.first_start()
    if first is None:
        raise ValueError(f"log {str(log_path)!r}: no such file, or it does not begin with a run")
    writer = RunWriter(absolute_uri(uri), first, log_path.parent, log.sent().run_id)
    try:
        writer.connect()
    except Exception as error:
        raise unusable(uri, error) from None
    done, offset = Replayed(), 0
    while (found := next_batch(log, offset))[1] > offset:
        _replay_batch(writer, found[0], done)
        offset = found[1]
    done.refused = [redact_uri(text, uri) for text in done.refused]
    return done


def _replay_batch(writer: RunWriter, records: list[Record], done: Replayed) -> None:
    try:
        done.num_points += writer.send(records)
    except Exception as error:
        if len(records) > 1:
            for record in records:
                _replay_batch(writer, [record], done)
            return
        what = file_name(records[0]) if records[0]["kind"] in FILES else records[0]["kind"]
        done.refused.append(f"{what}: {error}".partition("\n")[0])


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
        "params": {key: str(value) for key, value in params.items()},
        "tags": {key: str(value) for key, value in tags.items()},
        "resume_step": resume_step,
        "time_ms": round(time.time() * 1000),
    }


def _set_aside(log: MetricsLog, run_id: str) -> None:
    """The log of another run is kept, renamed by its run id, and can be replayed."""
    for path in (log.path, log.path.with_name(log.path.name + ".sent")):
        if path.exists():
            path.rename(path.with_name(f"{run_id}.{path.name}"))
