"""Sends a run's log to MLflow: training never waits for MLflow, nor fails with it.

One thread sends the records in order. It keeps trying while MLflow is away, and sends what is
missing when it is back, with the original times. Files are sent apart, so that one that cannot be
stored delays neither the points nor the end. Nothing here uses Ray.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vit_ray.addresses import absolute_uri, sqlite_file
from vit_ray.tracking.metrics_log import (
    FILES,
    MetricsLog,
    Record,
    RunOpening,
    Sent,
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
FILE_TRIES_AT_END: Final = 3
NEVER_REACHED_S: Final = 5.0
"""Longest wait at a run's end for an MLflow that has never answered."""
MODELS_S: Final = 300.0
"""Limit for logging the models of a command."""
_REJECTIONS: Final = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
"""The request itself is wrong, so trying again does not help."""
_FINAL: Final = (ForeignFileError, FileNotFoundError)

_finding: Final = threading.Lock()
"""Held while a run is found or created: a log never gets a second run."""

Model = tuple[str, Record, Record]
"""A model to log: its MLflow run, the run's start record, and the model's record."""

logger = logging.getLogger(__name__)


class Tracker(threading.Thread):
    """Records one run through `log`. No method of a started one raises; `flush`, `finish` and
    `close` wait.
    """

    def __init__(self, log: MetricsLog, uri: str, *, is_replay: bool = False) -> None:
        """
        Args:
            log: has a start record.
            uri: of the store.
            is_replay: send all of the log, also to another store than that of its run, and
                without the run that it is part of.
        """
        super().__init__(name="mlflow", daemon=True)
        self.log, self._uri = log, absolute_uri(uri)
        self._is_replay, self._marks = is_replay, True
        self.problem = ""
        """Set at the end: what MLflow does not have, and why; empty if it has everything."""
        self.refused: list[str] = []
        """What MLflow has refused, each with the reason."""
        self.num_points = 0
        """New points that were sent."""
        self._writer: RunWriter | None = None
        self._sent = Sent()
        self._is_away = False
        self._last_error = ""
        self._blocked: Record | None = None
        """A file that could not be stored."""
        self._ends, self._num_tries = False, 0
        self._wake = threading.Event()
        self._progress = threading.Condition()

    @classmethod
    def begin(
        cls, opening: RunOpening, log: MetricsLog | None = None, wait_s: float = 10.0
    ) -> "Tracker":
        """Open the run and start sending; recording continues if the log has this opening.

        Args:
            log: of the opening's path, if this process has one.
            wait_s: longest wait for the run to exist, so that `run_id` is known.
        """
        log = log or MetricsLog(opening.log_path)
        log.open(opening)
        tracker = cls(log, opening.config.uri)
        tracker.start()
        tracker.wait_for_try(wait_s)
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
        return page_hint(self._uri, writer.experiment_id, writer.view)

    def wait_for_try(self, wait_s: float) -> None:
        """Wait until MLflow has answered, or has failed to."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_tries > 0, wait_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far but models; False if not in time.

        Files that cannot be stored are waited for only during a few more attempts.
        """
        size, until_s = self.log.size, time.monotonic() + timeout_s
        with self._progress:
            last_try: float = float("inf")
            while min(self._sent.offset, self._sent.files) < size:
                if self._sent.offset >= size:
                    last_try = min(last_try, self._num_tries + FILE_TRIES_AT_END)
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self._num_tries >= last_try:
                    return False
                self._wake.set()
                self._progress.wait(min(left_s, 0.5))
        return True

    def finish(self, status: Status = "FINISHED", timeout_s: float = 30.0) -> bool:
        self.log.append("finish", status=status)
        return self.close(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Send what is recorded, then stop; logs how to send what MLflow did not accept.

        Returns:
            Whether MLflow has everything but models.
        """
        is_making_file = sqlite_file(self._uri) is not None and not self._is_away
        if self.run_id is None and not is_making_file:  # MLflow was away from the beginning
            timeout_s = min(timeout_s, NEVER_REACHED_S)
        is_sent = self.flush(timeout_s)
        self._ends = True
        self._wake.set()
        self.join(timeout_s if is_sent else 0.0)
        missing = self.missing_files()
        if num := len(self.refused):
            missing = [f"{num} refused record{'s' * (num > 1)}", *missing]
        if missing or not is_sent:
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
        return not self.problem

    def missing_files(self) -> list[str]:
        """Names of files that MLflow does not have."""
        offset, found = self._sent.files, list[str]()
        while records := self.log.read(offset):
            offset = records[-1][1]
            found += [file_name(one) for one, _ in records if one["kind"] in FILES]
        return list(dict.fromkeys(found))

    def models(self) -> list[Model]:
        """The run's models, which are logged after the command's last line."""
        if (writer := self._writer) is None:
            return []
        return [(writer.run_id, writer.opening, one) for one in self.log.records("model")]

    def run(self) -> None:
        """Send until the end, with growing pauses after failures."""
        pause_s = 0.0
        while not self._ends:
            is_done = self._try()
            pause_s = 0.0 if is_done else min(max(2 * pause_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)
            with self._progress:
                self._num_tries += 1
                self._progress.notify_all()
            self._wake.wait(pause_s or BATCH_INTERVAL_S)
            self._wake.clear()

    def _try(self) -> bool:
        """Send all; after any error MLflow counts as away."""
        try:
            self.send()
        except Exception as error:
            text = (
                f"MLflow at {safe_uri(self._uri)} cannot be used: run "
                f"{self.run_id or self.log.path.stem} continues, its metrics wait in "
                f"{self.log.path}"
            )
            self._note(text, error, is_new=not self._is_away)
            self._is_away = True
            return False
        self._is_away = False
        return self._sent.files >= self._sent.offset

    def send(self) -> None:
        """Find or create the run, and send all; files until one that cannot be stored.

        Raises:
            Exception: any error of MLflow's, after which all that is left waits.
        """
        writer = self._writer or self._connect()
        while (found := next_batch(self.log, self._sent.offset))[1] > self._sent.offset:
            if self._ends:  # the next opening's tracker sends it
                return
            self._send_each(writer, found[0])
            self._is_away = False
            self._mark(offset=found[1])
        self._send_files(writer)

    def _connect(self) -> RunWriter:
        """The run, found or created; another one than before gets all of the log.

        Raises:
            RuntimeError: MLflow does not have the run of the sweep or study that it is part of.
        """
        *_, start = self.log.records("start")
        if start["parent_log"] and parent_run_of(start) is None and not self._is_replay:
            raise RuntimeError("the run that it is part of is not there yet")
        # A tracker that ended before a slow MLflow answered may still be creating the run.
        with _finding:
            sent = self.log.read_sent()
            writer = RunWriter(self._uri, self.log, sent.run_id or start["run_id"])
            if self._is_replay:  # what another store has is noted nowhere
                self._marks, sent = sent.run_id in (None, writer.run_id), Sent()
            elif sent.run_id not in (None, writer.run_id):
                logger.warning(
                    "MLflow at %s does not have run %s, or has it for another folder: all of %s "
                    "is sent to run %s",
                    safe_uri(self._uri),
                    sent.run_id,
                    self.log.path,
                    writer.run_id,
                )
                sent = Sent()
            self._sent = sent
            self._mark(run_id=writer.run_id)
        self._writer = writer
        return writer

    def _mark(self, **changes: Any) -> None:
        self._sent = self._sent._replace(**changes)
        if self._marks:
            self.log.mark_sent(self._sent)

    def _send_each(self, writer: RunWriter, records: list[Record]) -> None:
        """Send a batch; if MLflow refuses it, each record by itself: a bad one loses only itself.

        Raises:
            Exception: any other error of MLflow's.
        """
        try:
            self.num_points += writer.send(records) if records else 0
        except Exception as error:
            if isinstance(error, MlflowException) and writer.is_deleted():
                self._writer = None  # to be found or created again
                raise
            is_refused = getattr(error, "error_code", "") in _REJECTIONS
            if not (is_refused or isinstance(error, _FINAL)):
                raise
            for record in records if len(records) > 1 else ():
                self._send_each(writer, [record])
            if len(records) == 1:
                what = file_name(records[0]) if records[0]["kind"] in FILES else records[0]["kind"]
                self._note(f"run {self.run_id}: MLflow refuses {what}", error, not self.refused)
                self.refused.append(f"{what}: {self._last_error}")

    def _send_files(self, writer: RunWriter) -> None:
        """Send files until one that cannot be stored; it waits, and those after it."""
        while (records := self.log.read(self._sent.files)) and not self._ends:
            events = [one for one, _ in records if one["kind"] == "event"]
            for record, end in records:
                # The history is written as a whole.
                if record["kind"] in FILES and (record["kind"] != "event" or record is events[-1]):
                    try:
                        self._send_each(writer, [record])
                    except Exception as error:
                        if self._writer is None:
                            raise
                        text = f"run {self.run_id}: {file_name(record)} cannot be stored with it"
                        self._note(text, error, is_new=record != self._blocked)
                        self._blocked = record
                        return
                self._mark(files=end)

    def _note(self, text: str, error: Exception, is_new: bool) -> None:
        self._last_error = redact_uri(str(error) or repr(error), self._uri).partition("\n")[0]
        if is_new:
            logger.warning("%s (%s)", text, self._last_error)


def next_batch(log: MetricsLog, offset: int) -> tuple[list[Record], int]:
    """Metrics up to the size of one request, or the one record of another kind that begins here,
    and the offset after them; what is no point or tag is passed over.
    """
    batch: list[Record] = []
    start, num_points = offset, 0
    for record, end in log.read(offset):
        if record["kind"] == "metrics":
            num_points += len(record["values"])
            if batch and num_points > MAX_METRICS:
                break
            batch.append(record)
        elif record["kind"] in ("start", "tag", "finish"):
            return (batch, offset) if offset > start else ([record], end)
        offset = end
    return batch, offset


def file_name(record: Record) -> str:
    """Name of a file in messages."""
    if record["kind"] == "event":
        return "the history"
    return str(record["path"] if record["kind"] == "artifact" else record["name"])


def log_models(uri: str, models: Sequence[Model]) -> list[str]:
    """Log models in a process of their own: MLflow's part for models imports pandas and SciPy.

    Returns:
        Why each of them is not logged; empty if it is.
    """
    if not models:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vit_ray.tracking.mlflow_model"],
            input=json.dumps([uri, list(models)]),
            capture_output=True,
            text=True,
            check=True,
            timeout=MODELS_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [repr(error)] * len(models)
    return [redact_uri(one, uri) for one in json.loads(done.stdout.splitlines()[-1])]


class Replayed(NamedTuple):
    """The result of a replay."""

    num_points: int
    """New ones."""
    refused: list[str]
    """What was not sent, each with the reason."""


def replay(log_path: Path, uri: str) -> Replayed:
    """Send a log to MLflow, to its own run or, if that is unknown, to a new one.

    Running it again adds nothing. Only files in the log's own folder are sent.

    Raises:
        ValueError: there is no such log, or the file is not a log.
        RuntimeError: MLflow cannot be used at this address.
    """
    log = MetricsLog(log_path)
    if not list(log.records("start")):
        raise ValueError(
            f"log {str(log_path)!r}: no such file, or it does not begin with a run's start; give a "
            "run's metrics.jsonl"
        )
    tracker = Tracker(log, uri, is_replay=True)
    try:
        tracker.send()
    except Exception as error:
        raise unusable(uri, error) from None
    models = tracker.models()
    found = zip(models, log_models(absolute_uri(uri), models), strict=True)
    lost = [f"{file_name(record)}: {problem}" for (_, _, record), problem in found if problem]
    return Replayed(tracker.num_points, [*tracker.refused, *tracker.missing_files(), *lost])
