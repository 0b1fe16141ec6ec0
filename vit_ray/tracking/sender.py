"""Two threads that send a log to MLflow: one the metrics and tags in order, one the files.

A file that cannot be stored delays neither the metrics, nor the end of the run, nor other files. It
is retried with growing pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
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
_REJECTIONS: Final = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
"""The request itself is wrong, so trying again does not help."""
_DATABASE: Final = "BAD_REQUEST"
"""MLflow's word for nearly every error of its database: a wrong value, a full pool, a failover."""

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
        self._num_tries, self._num_cuts = 0, log.num_cuts
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
            while not self._has_sent(goal) and (left_s := deadline - time.monotonic()) > 0:
                if self._num_tries >= last_try:
                    break
                self._wake.set()
                self._progress.wait(min(left_s, 0.5))
        return self._has_sent(goal)

    def _has_sent(self, goal: int) -> bool:
        return self._offset >= goal and self._num_cuts == self._log.num_cuts

    def _restarts_after_cut(self) -> bool:
        """Whether the log has been cut since the last call: it is then sent from its start."""
        with self._progress:
            earlier, self._num_cuts = self._num_cuts, self._log.num_cuts
            if self._num_cuts != earlier:
                self._offset = 0
            return self._num_cuts != earlier

    @abstractmethod
    def _advance(self) -> bool:
        """Send what there is; False if some of it failed and is to be tried later."""

    def _work(self) -> None:
        while not self._ends:
            if self._advance():
                self._backoff_s = 0.0
            else:
                self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)
            with self._progress:
                self._num_tries += 1
                self._progress.notify_all()
            self._wake.wait(self._backoff_s or BATCH_INTERVAL_S)
            self._wake.clear()

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
        self._doubtful: tuple[Record | None, int] = None, 0
        """A record that the database refuses, and how often it did."""
        self.is_away = False
        self.num_refused = 0
        """Records that MLflow does not take although it takes others; they are left out."""

    def _advance(self) -> bool:
        """After any error MLflow counts as away, and is retried later."""
        try:
            if self._writer.run_id is None:
                self._writer.connect()
                self._log.mark_sent(run_id=self._writer.run_id)
            self._restarts_after_cut()  # what MLflow has is not sent twice
            while (found := next_batch(self._log, self._offset, files=False))[1] > self._offset:
                send_each(self._writer, found[0], self._refuses)
                self._failed_tries = 0
                self._note_back()  # before whoever waits for this offset looks at the files
                self._moved_to(found[1])
                self._log.mark_sent(offset=found[1])
            self._note_back()
        except Exception as error:
            self._failed_tries += 1
            if not self.is_away:
                self.is_away = True
                name = self._writer.run_id or self._log.path.stem
                text = f"MLflow at {safe_uri(self._writer.uri)} cannot be used: run {name} "
                self._warn(f"{text}continues, its metrics wait in {self._log.path}", error)
            return False
        return True

    def _note_back(self) -> None:
        if self.is_away:
            self.is_away = False
            uri = safe_uri(self._writer.uri)
            logger.info("MLflow at %s is back: run %s", uri, self._writer.run_id)

    def _refuses(self, error: Exception, records: list[Record]) -> bool:
        """Whether MLflow rejects the record, or keeps failing on it while it takes similar ones.

        Points, and the end, wait for as long as MLflow or the way to it fails: writing them may
        be slow where a tag is written at once. An error of its database may be of the database or
        of a point: the point that remains of the batch is left out when it has failed again and
        again, and MLflow takes a point that it took before.
        """
        if isinstance(error, MlflowException) and error.error_code == _DATABASE:
            if len(records) == 1 and not self._is_at_fault(records[0]):
                return False
        elif not _is_rejection(error):
            is_outage = isinstance(error, (OSError, MlflowException))
            if is_outage and records[0]["kind"] in ("metrics", "finish"):
                return False
            if self._failed_tries < MAX_TRIES or not self._writer.takes_writes():
                return False
        if len(records) == 1:
            self.num_refused += 1
            if self.num_refused == 1:
                self._warn(f"MLflow refuses a record of run {self._writer.run_id}", error)
        return True

    def _is_at_fault(self, record: Record) -> bool:
        """Whether it has failed again and again, each time while MLflow took a point it has."""
        if not self._writer.takes_writes():
            return False
        doubtful, count = self._doubtful
        self._doubtful = record, count + 1 if record == doubtful else 1
        return self._doubtful[1] >= MAX_TRIES


class FileSender(Sender):
    """Texts, artifacts and the history; one that fails does not hold up the others."""

    def __init__(
        self, log: MetricsLog, writer: RunWriter, offset: int, points: PointSender
    ) -> None:
        """`points` finds the run first, and knows whether MLflow is away."""
        super().__init__("mlflow-files", log, writer, offset)
        self._points = points
        self._read_to = offset
        self._waiting: dict[int, Record] = {}  # by the offset before it
        self._events = log.events_before(offset, writer.opening.get("opening"))
        """Of this opening, and what the one before could not send."""
        self._events_from: int | None = None
        """Offset before the first of them that MLflow does not have."""

    @property
    def waiting(self) -> list[str]:
        """Names of the files that could not be stored so far."""
        history = [] if self._events_from is None else ["the history"]
        return [*(file_name(record) for record in self._waiting.values()), *history]

    def _advance(self) -> bool:
        if self._writer.run_id is None or self._points.is_away:
            return True
        for offset, record in list(self._waiting.items()):
            self._send(offset, record)
        if self._restarts_after_cut():
            self._read_to, self._waiting, self._events = 0, {}, []
        while (found := next_batch(self._log, self._read_to, files=True))[1] > self._read_to:
            for record in found[0]:
                if record["kind"] == "event":
                    self._note_event(self._read_to, record)
                else:
                    self._send(self._read_to, record)
            self._read_to = found[1]
        if self._events_from is not None:
            self._send_events()
        held = [*self._waiting, *([] if self._events_from is None else [self._events_from])]
        self._moved_to(min(held, default=self._read_to))
        self._log.mark_sent(files_offset=self._offset)
        return not held

    def _note_event(self, offset: int, record: Record) -> None:
        self._events.append(record)
        self._events_from = offset if self._events_from is None else self._events_from

    def _send_events(self) -> None:
        try:
            self._writer.log_history(self._events)
        except Exception as error:
            self._warn(f"run {self._writer.run_id}: its history cannot be stored with it", error)
        else:
            self._events_from = None

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


def send_each(
    writer: RunWriter, records: list[Record], leaves_out: Callable[[Exception, list[Record]], bool]
) -> int:
    """Send a batch; where it fails, each record by itself, so that one costs only itself.

    Args:
        leaves_out: called with an error and what was sent: whether to continue without it. An
            error after which it is not left out is raised.

    Returns:
        Metric points that were new.
    """
    try:
        return writer.send(records) if records else 0
    except Exception as error:
        if not leaves_out(error, records):
            raise
        singles = [[record] for record in records] if len(records) > 1 else []
        return sum(send_each(writer, single, leaves_out) for single in singles)


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
    return str(record["path"] if record["kind"] == "artifact" else record["name"])
