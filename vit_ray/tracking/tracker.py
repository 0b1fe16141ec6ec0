"""Sends a run's log to MLflow: training never waits for MLflow, nor fails with it.

Every record goes to the log. One thread sends the points, tags and the end in order, and another
one the files, so that a file that cannot be stored delays neither the points, nor the end, nor
other files. Both keep trying while MLflow is away, and send what is missing when it is back, with
the original times. Nothing here uses Ray.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final

from vit_ray.addresses import absolute_uri, sqlite_file
from vit_ray.tracking.metrics_log import (
    FILES,
    SENT_KINDS,
    MetricsLog,
    ParentMissingError,
    Record,
    RunOpening,
    Status,
    parent_run_of,
)
from vit_ray.tracking.mlflow_api import MlflowException
from vit_ray.tracking.mlflow_client import page_hint, redact_uri, safe_uri, unusable
from vit_ray.tracking.mlflow_run import MAX_METRICS, ForeignFileError, RunWriter

BATCH_INTERVAL_S: Final = 1.0
"""Metrics are collected this long before they are sent."""
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 60.0
MAX_TRIES = 4
"""Failures of a record, while MLflow accepts others of its kind, after which it is left out."""
FILE_TRIES_AT_END: Final = 3
NEVER_REACHED_S: Final = 5.0
"""Longest wait at a run's end for an MLflow that has never answered."""
_REJECTIONS: Final = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
"""The request itself is wrong, so trying again does not help."""
_FINAL: Final = (ForeignFileError, FileNotFoundError)
_DATABASE: Final = "BAD_REQUEST"
"""MLflow's code for nearly every error of its database: a wrong value, a full pool, a failover."""

_finding: Final = threading.Lock()
"""Held while a run is found or created: a log never gets a second run."""

logger = logging.getLogger(__name__)


class Repeater(threading.Thread):
    """A thread that repeats a step until it is ended, with growing pauses after failures."""

    def __init__(self, name: str, step: Callable[[], bool]) -> None:
        """`step`: returns False if some of it failed and must be tried again later."""
        super().__init__(name=name, daemon=True)
        self._step, self._num_tries, self.ends = step, 0, False
        self._wake = threading.Event()
        self._progress = threading.Condition()

    def run(self) -> None:
        pause_s = 0.0
        while not self.ends:
            pause_s = (
                0.0 if self._step() else min(max(2 * pause_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)
            )
            with self._progress:
                self._num_tries += 1
                self._progress.notify_all()
            self._wake.wait(pause_s or BATCH_INTERVAL_S)
            self._wake.clear()

    def end(self, join_s: float) -> None:
        """Stop repeating, and wait up to `join_s` for the step in progress."""
        self.ends = True
        self._wake.set()
        self.join(join_s)

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float, max_tries: float = inf
    ) -> bool:
        """Whether it is done by the deadline of `time.monotonic`, or after this many steps."""
        last_try = self._num_tries + max_tries
        with self._progress:
            while not is_done() and self._num_tries < last_try:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._wake.set()
                self._progress.wait(min(left_s, 0.5))
        return is_done()

    def wait_for_try(self, wait_s: float) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._num_tries > 0, wait_s)


class Tracker:
    """Records one run through `log`. No method raises; `flush`, `finish` and `close` wait."""

    def __init__(self, log: MetricsLog, uri: str, first: Record, start: Record) -> None:
        """
        Args:
            uri: as `absolute_uri` gives it.
            first: the record that opened the log.
            start: of the present opening.
        """
        self.log, self._uri = log, uri
        self._first, self._start = first, start
        self._wanted: str | None = None
        """The MLflow run to continue, if known."""
        self._writer: RunWriter | None = None
        sent = log.read_sent()
        self._points_at, self._files_at = (0, sent.offset), (0, sent.files_offset)
        """Truncations of the log, and bytes of it up to which MLflow has everything but files, and
        the files."""
        self._read_to = sent.files_offset
        self._is_away, self._failed_tries = False, 0
        self._num_refused = 0
        """Records that MLflow rejects although it accepts others; they are left out."""
        self._doubtful: tuple[Record | None, int] = None, 0
        """A record that the database refuses, and how often it did."""
        self._num_from_memory = 0
        """Records that are not on disk and were sent."""
        self.problem = ""
        """What MLflow does not have, and why; set by `close`."""
        self._last_error = ""
        self._waiting: dict[int, Record] = {}
        """Files and events that MLflow does not have, by the offset before them."""
        self._warned: set[int] = set()
        """Offsets of those that have failed."""
        self._points = Repeater("mlflow-points", self._send_points)
        self._files = Repeater("mlflow-files", self._send_files)

    @classmethod
    def start(
        cls, opening: RunOpening, log: MetricsLog | None = None, wait_s: float = 10.0
    ) -> "Tracker":
        """Open the run and start sending; recording continues if the log has this opening.

        Args:
            log: of the opening's path, if this process has one.
            wait_s: longest wait for the run to exist, so that `run_id` is known.
        """
        log = log or MetricsLog(opening.log_path)
        start = log.open(opening)
        first = log.first_start() or start  # on a full disk there is none
        tracker = cls(log, absolute_uri(opening.config.uri), first, start)
        tracker._wanted = log.read_sent().run_id or opening.run_id
        tracker._points.start()
        tracker._files.start()
        tracker._points.wait_for_try(wait_s)
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None until MLflow has answered for the first time."""
        return self._writer.run_id if self._writer else None

    @property
    def hint(self) -> str:
        """The command or link that opens MLflow's page; empty while MLflow has no run."""
        if (writer := self._writer) is None:
            return ""
        return page_hint(self._uri, writer.experiment_id, has_view=writer.has_view)

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False if it does not in time.

        A file that cannot be stored is waited for only during a few more attempts.
        """
        size, deadline = self.log.size, time.monotonic() + timeout_s
        num_in_memory = len(self.log.unwritten)
        return self._points.wait_until(
            lambda: (
                self._points_at >= (self.log.num_cuts, size)
                and self._num_from_memory >= min(num_in_memory, len(self.log.unwritten))
            ),
            deadline,
        ) and self._files.wait_until(
            lambda: self._files_at >= (self.log.num_cuts, size), deadline, FILE_TRIES_AT_END
        )

    def finish(self, status: Status = "FINISHED", timeout_s: float = 30.0) -> bool:
        self.log.end(status)
        return self.close(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Send what is recorded, then stop; logs how to send what MLflow did not accept.

        Returns:
            Whether MLflow has everything.
        """
        is_making_file = sqlite_file(self._uri) is not None and not self._is_away
        if self.run_id is None and not is_making_file:  # MLflow was away from the beginning
            timeout_s = min(timeout_s, NEVER_REACHED_S)
        is_sent = self.flush(timeout_s)
        for thread in (self._points, self._files):
            thread.end(timeout_s if is_sent else 0.0)
        missing = list(dict.fromkeys(map(file_name, self._waiting.values())))
        if refused := self._num_refused:
            missing = [f"{refused} refused record{'s' if refused > 1 else ''}", *missing]
        is_sent &= not missing
        if not is_sent:
            what = ", ".join(missing) if missing else "all"
            why = self._last_error or f"it did not take it in {timeout_s:g} s"
            self.problem = (
                f"MLflow at {safe_uri(self._uri)} does not have {what} of run {self.run_id} ({why})"
            )
        if self.log.error:
            text = f"{self.log.path} cannot be written ({self.log.error}): free space there"
            self.problem = f"{self.problem}; {text}" if self.problem else text
        if self.problem:
            logger.warning("%s; then run: vit-ray replay %s URI", self.problem, self.log.path)
        return is_sent and not self.log.error

    def _send_points(self) -> bool:
        """Find or create the run, and send all but files; after any error MLflow counts as away."""
        try:
            if self._writer is None:
                if self._start.get("parent_log") and parent_run_of(self._start) is None:
                    raise ParentMissingError("the run that it is part of is not there yet")
                # A tracker that was ended before a slow MLflow answered may still be creating the
                # run.
                with _finding:
                    self._writer = self._connected()
            cuts, offset = self._points_at
            if cuts != self.log.num_cuts:  # what MLflow has is not sent twice
                cuts, offset = self.log.num_cuts, 0
            while (found := next_batch(self.log, offset, files=False))[1] > offset:
                if self._points.ends:  # the next opening's tracker sends it
                    break
                send_each(self._writer, found[0], self._refuses)
                self._failed_tries = 0
                self._is_away = False  # before callers that wait for this offset look at the files
                self._points_at = cuts, (offset := found[1])
                self.log.mark_sent(offset=offset)
            in_memory = list(self.log.unwritten)  # the disk is full
            known = self._num_from_memory if self._num_from_memory <= len(in_memory) else 0
            for record in in_memory[known:]:
                if record["kind"] in SENT_KINDS and record["kind"] not in FILES:
                    send_each(self._writer, [record], self._refuses)
            self._num_from_memory = len(in_memory)
            self._points_at, self._is_away = (cuts, offset), False
            if not (self._num_refused or self._waiting):
                self._last_error = ""
        except Exception as error:
            self._failed_tries += 1
            self._last_error = redact_uri(str(error) or repr(error), self._uri).partition("\n")[0]
            if not self._is_away:
                self._is_away = True
                name = self.run_id or self.log.path.stem
                text = f"MLflow at {safe_uri(self._uri)} cannot be used: run {name} "
                self._warn(f"{text}continues, its metrics wait in {self.log.path}", error)
            return False
        return True

    def _connected(self) -> RunWriter:
        """The run, found or created; another one than before gets all of the log."""
        before = self.log.read_sent().run_id
        folder, wanted = self.log.path.parent, self._wanted
        writer = RunWriter(self._uri, self._first, folder, wanted, self._start)
        self._wanted = writer.run_id
        if before not in (None, writer.run_id):
            logger.warning(
                "MLflow at %s does not have run %s, or has it for another folder: all of %s is "
                "sent to run %s",
                safe_uri(self._uri),
                before,
                self.log.path,
                writer.run_id,
            )
            cuts = self.log.num_cuts
            self._points_at, self._files_at = (cuts, 0), (cuts, 0)
            self._read_to, self._waiting = 0, {}
            self.log.mark_sent(offset=0, files_offset=0)
        self.log.mark_sent(run_id=writer.run_id)
        return writer

    def _refuses(self, error: Exception, records: list[Record]) -> bool:
        """Whether MLflow rejects the record, or keeps failing on it while it accepts similar ones.

        Points, and the end, wait while MLflow or the connection fails: writing them may be slow
        even if a tag is written at once. An error of its database may come from the database or
        from a point: the last remaining point of a batch is left out after repeated failures, each
        while MLflow accepted a point that it has.
        """
        assert self._writer is not None
        if isinstance(error, MlflowException) and self._writer.is_deleted():
            self._writer = None  # to be found or created again
            return False
        if isinstance(error, MlflowException) and error.error_code == _DATABASE:
            if len(records) > 1:
                return True
            if not self._writer.takes_writes():
                return False
            doubtful, count = self._doubtful
            self._doubtful = records[0], count + 1 if records[0] == doubtful else 1
            if self._doubtful[1] < MAX_TRIES:
                return False
        elif not _is_rejection(error):
            is_outage = isinstance(error, (OSError, MlflowException))
            if is_outage and records[0]["kind"] in ("metrics", "finish"):
                return False
            if self._failed_tries < MAX_TRIES or not self._writer.takes_writes():
                return False
        if len(records) == 1:
            self._num_refused += 1
            if self._num_refused == 1:
                self._warn(f"MLflow refuses a record of run {self.run_id}", error)
        return True

    def _send_files(self) -> bool:
        """Send texts, artifacts and the history, each separately."""
        if self._writer is None or self._is_away:
            return True
        cuts = self.log.num_cuts
        if cuts != self._files_at[0]:
            self._read_to, self._waiting = 0, {}
        while (found := next_batch(self.log, self._read_to, files=True))[1] > self._read_to:
            for record in found[0]:
                self._waiting[self._read_to] = record
            self._read_to = found[1]
        for offset, record in list(self._waiting.items()):
            if record["kind"] != "event":
                self._send_file(self._writer, [offset], record)
        if events := [o for o, record in self._waiting.items() if record["kind"] == "event"]:
            self._send_file(self._writer, events, self._waiting[events[0]])
        self._files_at = cuts, min(self._waiting, default=self._read_to)
        self.log.mark_sent(files_offset=self._files_at[1])
        return not self._waiting

    def _send_file(self, writer: RunWriter, offsets: list[int], record: Record) -> None:
        """Send a file, or the whole history for the events at these offsets."""
        try:
            if record["kind"] == "event":
                writer.log_history(self.log.events())
            else:
                writer.send([record])
        except Exception as error:
            is_final = isinstance(error, _FINAL) or _is_rejection(error)
            if is_final or self._warned.isdisjoint(offsets):
                name = file_name(record)
                self._warn(f"run {self.run_id}: {name} cannot be stored with it", error)
            if not is_final:
                self._warned.update(offsets)
                return
        for offset in offsets:
            del self._waiting[offset]

    def _warn(self, text: str, error: Exception) -> None:
        self._last_error = redact_uri(str(error), self._uri).partition("\n")[0]
        logger.warning("%s (%s)", text, self._last_error)


def _is_rejection(error: Exception) -> bool:
    return isinstance(error, MlflowException) and error.error_code in _REJECTIONS


def send_each(
    writer: RunWriter, records: list[Record], leaves_out: Callable[[Exception, list[Record]], bool]
) -> int:
    """Send a batch; if it fails, each record separately, so that a bad record loses only itself.

    Args:
        leaves_out: called with an error and what was sent; returns whether to continue without it,
            or else the error is raised.

    Returns:
        Returns the number of new metric points.
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
    """Metrics up to the size of one request, or one record of another kind, and the offset after
    them.

    Args:
        files: only files, or only the rest; other records are skipped. None: all.
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
    if record["kind"] == "event":
        return "the history"
    return str(record["path"] if record["kind"] == "artifact" else record["name"])


@dataclass
class Replayed:
    """The result of a replay."""

    num_points: int = 0
    refused: list[str] = field(default_factory=list)
    """Records that MLflow rejected, or that name files outside the run's folder, each with the
    reason."""


def replay(log_path: Path, uri: str) -> Replayed:
    """Send a log to MLflow, to its own run or, if that is unknown, to a new one.

    Running it again adds nothing. Only files in the log's own folder are sent.

    Raises:
        ValueError: there is no such log, or the file is not a log.
        RuntimeError: MLflow cannot be used at this address.
    """
    log = MetricsLog(log_path)
    first = log.first_start()
    if first is None:
        raise ValueError(
            f"log {str(log_path)!r}: no such file, or it does not begin with a run's start; give a "
            "run's metrics.jsonl"
        )
    try:
        run_id, start = log.read_sent().run_id, log.starts()[-1]
        writer = RunWriter(absolute_uri(uri), first, log_path.parent, run_id, start)
        writer.opening = first
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
            leave_out(error, events[:1])
    return done
