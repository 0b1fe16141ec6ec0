"""Two threads that send a log to MLflow: one the metrics and tags in order, one the files.

A file that cannot be stored delays neither the metrics, nor the end of the run, nor other files. It
is retried with growing pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import Final

from vit_ray.tracking.metrics_log import FILES, SENT_KINDS, MetricsLog, Record
from vit_ray.tracking.mlflow_api import MlflowException
from vit_ray.tracking.mlflow_client import redact_uri, safe_uri
from vit_ray.tracking.mlflow_run import MAX_METRICS, ForeignFileError, RunWriter

BATCH_INTERVAL_S: Final = 1.0
"""Metrics are gathered this long before they are sent."""
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 60.0
MAX_TRIES = 4
"""Of a record that MLflow does not take although it takes others of its kind."""
FILE_TRIES_AT_END: Final = 3
_REJECTIONS: Final = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST")
"""The request itself is wrong, so trying again does not help."""

logger = logging.getLogger(__name__)


class Sender(ABC):
    """A thread that sends its part of a log, from an offset on, until it is ended."""

    def __init__(self, name: str, log: MetricsLog, writer: RunWriter, offset: int) -> None:
        self._log, self._writer = log, writer
        self._offset = offset
        """Bytes of the log up to which MLflow has this sender's part."""
        self._backoff_s = 0.0
        self._ends = False
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._num_tries = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def end(self, join_s: float) -> None:
        """Send no more, and wait up to `join_s` for what is being sent."""
        self._ends = True
        self._wake.set()
        self._thread.join(join_s)

    def wait_for_try(self, wait_s: float) -> None:
        """Wait until a first pass has been made."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_tries > 0, wait_s)

    def flush(self, goal: int, deadline: float, max_tries: float = float("inf")) -> bool:
        """Wait until the log is sent up to a byte; False when it is not by then.

        Args:
            deadline: by `time.monotonic`.
            max_tries: give up after so many passes.
        """
        last_try = self._num_tries + max_tries
        with self._progress:
            while self._offset < goal and (left_s := deadline - time.monotonic()) > 0:
                if self._num_tries >= last_try:
                    break
                self._wake.set()
                self._progress.wait(min(left_s, 0.5))
        return self._offset >= goal

    @abstractmethod
    def _advance(self) -> None:
        """Send what there is; raises nothing."""

    def _work(self) -> None:
        while not self._ends:
            self._advance()
            with self._progress:
                self._num_tries += 1
                self._progress.notify_all()
            self._wake.wait(self._backoff_s or BATCH_INTERVAL_S)
            self._wake.clear()

    def _back_off(self) -> None:
        self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)

    def _moved_to(self, offset: int) -> None:
        with self._progress:
            self._offset = offset
            self._progress.notify_all()

    def _warn(self, text: str, error: Exception) -> None:
        reason = redact_uri(str(error), self._writer.uri).partition("\n")[0]
        logger.warning("%s (%s)", text, reason)


class PointSender(Sender):
    """Start, metrics, tags and end, in their order; it also finds or creates the run."""

    def __init__(self, log: MetricsLog, writer: RunWriter, offset: int) -> None:
        super().__init__("mlflow-points", log, writer, offset)
        self._failed_tries = 0
        self.is_away = False
        self.num_refused = 0
        """Records that MLflow does not take although it takes others; they are left out."""

    def _advance(self) -> None:
        """After any error MLflow counts as away, and is retried later."""
        try:
            if self._writer.run_id is None:
                self._writer.connect()
                self._log.mark_sent(run_id=self._writer.run_id)
            while (found := next_batch(self._log, self._offset, files=False))[1] > self._offset:
                self._send(found[0])
                self._failed_tries = 0
                self._note_back()  # before whoever waits for this offset looks at the files
                self._moved_to(found[1])
                self._log.mark_sent(offset=found[1])
            self._note_back()
        except Exception as error:
            self._failed_tries += 1
            self._back_off()
            if not self.is_away:
                self.is_away = True
                name = self._writer.run_id or self._log.path.stem
                text = f"MLflow at {safe_uri(self._writer.uri)} cannot be used: run {name} "
                self._warn(f"{text}continues, its metrics wait in {self._log.path}", error)

    def _note_back(self) -> None:
        self._backoff_s = 0.0
        if self.is_away:
            self.is_away = False
            uri = safe_uri(self._writer.uri)
            logger.info("MLflow at %s is back: run %s", uri, self._writer.run_id)

    def _send(self, records: list[Record]) -> None:
        if not records:
            return
        try:
            self._writer.send(records)
        except Exception as error:
            if not self._is_refusal(error, records[0]["kind"]):
                raise
            if len(records) > 1:
                for record in records:
                    self._send([record])
                return
            self.num_refused += 1
            if self.num_refused == 1:
                self._warn(f"MLflow refuses a record of run {self._writer.run_id}", error)

    def _is_refusal(self, error: Exception, kind: str) -> bool:
        """Whether MLflow rejects the record, or keeps failing on it while it takes similar ones.

        Points, and the end, wait for as long as MLflow or the way to it fails: writing them may
        be slow where a tag is written at once.
        """
        if _is_rejection(error):
            return True
        if kind in ("metrics", "finish") and isinstance(error, (OSError, MlflowException)):
            return False
        return self._failed_tries >= MAX_TRIES and self._writer.takes_writes(kind)


class FileSender(Sender):
    """Texts and artifacts; one that fails does not hold up the others."""

    def __init__(
        self, log: MetricsLog, writer: RunWriter, offset: int, points: PointSender
    ) -> None:
        """`points` finds the run first, and knows whether MLflow is away."""
        super().__init__("mlflow-files", log, writer, offset)
        self._points = points
        self._read_to = offset
        self._waiting: dict[int, Record] = {}  # by the offset before it

    @property
    def waiting(self) -> list[str]:
        """Names of the files that could not be stored so far."""
        return [file_name(record) for record in self._waiting.values()]

    def _advance(self) -> None:
        if self._writer.run_id is None or self._points.is_away:
            return
        for offset, record in list(self._waiting.items()):
            self._send(offset, record)
        while (found := next_batch(self._log, self._read_to, files=True))[1] > self._read_to:
            for record in found[0]:
                self._send(self._read_to, record)
            self._read_to = found[1]
        if self._waiting:
            self._back_off()
        else:
            self._backoff_s = 0.0
        self._moved_to(min(self._waiting, default=self._read_to))
        self._log.mark_sent(files_offset=self._offset)

    def _send(self, offset: int, record: Record) -> None:
        try:
            self._writer.send([record])
        except Exception as error:
            is_final = isinstance(error, ForeignFileError) or _is_rejection(error)
            if is_final or offset not in self._waiting:
                name = file_name(record)
                self._warn(f"run {self._writer.run_id}: {name} cannot be stored with it", error)
            if not is_final:
                self._waiting[offset] = record
                return
        self._waiting.pop(offset, None)


def _is_rejection(error: Exception) -> bool:
    return isinstance(error, MlflowException) and error.error_code in _REJECTIONS


def next_batch(
    log: MetricsLog, offset: int, *, files: bool | None = None
) -> tuple[list[Record], int]:
    """Metrics up to the size of one request, or one record of another kind, and the offset behind.

    Args:
        files: files alone, or the rest alone; what is left out is passed over. None: all.
    """
    batch: list[Record] = []
    num_points = 0
    for record, end in log.read(offset):
        if record["kind"] in SENT_KINDS and files in (None, record["kind"] in FILES):
            num_points += len(record.get("values", ()))
            is_metrics = record["kind"] == "metrics"
            if batch and (not is_metrics or num_points > MAX_METRICS):
                break
            batch.append(record)
            if not is_metrics:
                return batch, end
        offset = end
    return batch, offset


def file_name(record: Record) -> str:
    """Name of a file in messages."""
    return str(record["name"] if record["kind"] == "text" else record["path"])
