"""The record of one run: its log on disk, and what sends it to MLflow.

Training never waits for MLflow, nor dies with it. What is recorded goes to the log; threads send it
to MLflow in batches, keep trying while MLflow is away, and catch up when it returns, with the
original times. Nothing here knows Ray.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vit_ray.tracking.metrics_log import FILES, MetricsLog, Record, RunOpening, Status
from vit_ray.tracking.mlflow_client import absolute_uri, page_hint, redact_uri, safe_uri, unusable
from vit_ray.tracking.mlflow_run import RunWriter
from vit_ray.tracking.sender import (
    FILE_TRIES_AT_END,
    FileSender,
    PointSender,
    file_name,
    next_batch,
    send_each,
)

logger = logging.getLogger(__name__)

NEVER_REACHED_S: Final = 5.0
"""Longest wait at a run's end for an MLflow that has not answered once in all of it."""


class Tracker:
    """Records one run through `log`. No method raises; `flush`, `finish` and `close` wait."""

    def __init__(self, log: MetricsLog, writer: RunWriter) -> None:
        self.log = log
        self._writer = writer
        sent = log.read_sent()
        self._points = PointSender(log, writer, sent.offset)
        self._files = FileSender(log, writer, sent.files_offset, self._points)

    @classmethod
    def start(
        cls, opening: RunOpening, log: MetricsLog | None = None, wait_s: float = 10.0
    ) -> Tracker:
        """Open the run and start sending; recording continues where the log has this opening.

        Args:
            log: of the opening's path, if there is one in this process.
            wait_s: longest wait for the run to exist, so that `run_id` is known.
        """
        log = log or MetricsLog(opening.log_path)
        start = log.open(opening)
        first = log.first_start() or start  # on a full disk there is none
        run_id = opening.run_id or log.read_sent().run_id
        writer = RunWriter(absolute_uri(opening.config.uri), first, log.path.parent, run_id)
        writer.opening = start
        tracker = cls(log, writer)
        tracker._points.start()
        tracker._files.start()
        tracker._points.wait_for_try(wait_s)
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None until MLflow could be reached for the first time."""
        return self._writer.run_id

    @property
    def hint(self) -> str:
        """The command or link that opens MLflow's page."""
        return page_hint(self._writer.uri, self._writer.experiment_id)

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False when it does not in time.

        A file that cannot be stored is waited for only while it is tried a few times more.
        """
        goal, deadline = self.log.size, time.monotonic() + timeout_s
        return self._points.flush(goal, deadline) and self._files.flush(
            goal, deadline, FILE_TRIES_AT_END
        )

    def finish(self, status: Status = "FINISHED", timeout_s: float = 30.0) -> bool:
        """End the run, and `close`."""
        self.log.append("finish", status=status)
        return self.close(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Send what is recorded, and no more; says how to send what MLflow did not take.

        Returns:
            Whether MLflow has everything.
        """
        if self.run_id is None:  # MLflow was away from the beginning
            timeout_s = min(timeout_s, NEVER_REACHED_S)
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
                safe_uri(self._writer.uri),
                ", ".join(missing) if missing else "all",
                self.run_id,
                self.log.path,
            )
        return is_sent and not missing


@dataclass
class Replayed:
    """The result of a replay."""

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
    writer = RunWriter(absolute_uri(uri), first, log_path.parent, log.read_sent().run_id)
    try:
        writer.connect()
    except Exception as error:
        raise unusable(uri, error) from None
    done, offset = Replayed(), 0

    def leave_out(error: Exception, records: list[Record]) -> bool:
        if len(records) == 1:
            what = file_name(records[0]) if records[0]["kind"] in FILES else records[0]["kind"]
            done.refused.append(redact_uri(f"{what}: {error}".partition("\n")[0], uri))
        return True

    events: list[Record] = []
    while (found := next_batch(log, offset))[1] > offset:
        events += [record for record in found[0] if record["kind"] == "event"]
        done.num_points += send_each(writer, found[0], leave_out)
        offset = found[1]
    if events:
        try:
            writer.log_history(events)
        except Exception as error:
            done.refused.append(redact_uri(f"history: {error}".partition("\n")[0], uri))
    return done
