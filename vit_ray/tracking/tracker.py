"""Sends a run's log to MLflow: training never waits for MLflow, nor fails with it.

One thread sends the records in order. It keeps trying while MLflow is away, and sends what is
missing when it is back, with the original times. A file that cannot be stored waits, so that it
delays neither the points, nor the end, nor other files. Nothing here uses Ray.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vit_ray.addresses import absolute_uri, sqlite_file
from vit_ray.tracking.metrics_log import (
    FILES,
    SENT_KINDS,
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
    """Records one run through `log`. No method raises; `flush`, `finish` and `close` wait."""

    def __init__(self, log: MetricsLog, uri: str, run_id: str | None = None) -> None:
        """
        Args:
            log: has a start record.
            uri: of the store.
            run_id: the MLflow run to continue, if the log has none.
        """
        super().__init__(name="mlflow", daemon=True)
        self.log, self._uri, self._wanted = log, absolute_uri(uri), run_id
        self.problem = ""
        """Set at the end: what MLflow does not have, and why; empty if it has everything."""
        self._writer: RunWriter | None = None
        self._sent = Sent()
        self._waiting: dict[int, Record] = {}
        """Files that MLflow does not have, by the offset before them."""
        self._warned: set[int] = set()
        self._num_refused = 0
        self._is_away = False
        self._last_error = ""
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
        tracker = cls(log, opening.config.uri, opening.run_id)
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
        return page_hint(self._uri, writer.experiment_id, has_view=writer.has_view)

    def wait_for_try(self, wait_s: float) -> None:
        """Wait until MLflow has answered, or has failed to."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_tries > 0, wait_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far but models; False if not in time.

        A file that cannot be stored is waited for only during a few more attempts.
        """
        size, until_s = self.log.size, time.monotonic() + timeout_s
        with self._progress:
            last_try: float = float("inf")
            while self._sent.offset < size or self._missing_files():
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
        missing = self._missing_files()
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

    def _missing_files(self) -> list[str]:
        waiting = [file_name(one) for one in [*self._waiting.values()] if one["kind"] != "model"]
        return list(dict.fromkeys(waiting))

    def models(self) -> dict[int, Model]:
        """The models that wait for the command's last line, by the offset of their record."""
        if (writer := self._writer) is None:
            return {}
        waiting = {at: one for at, one in [*self._waiting.items()] if one["kind"] == "model"}
        return {at: (writer.run_id, writer.opening, one) for at, one in waiting.items()}

    def mark_logged(self, offset: int) -> None:
        """A model is logged; call this after the end."""
        del self._waiting[offset]
        self._mark(self._sent.offset)

    def run(self) -> None:
        """Send until the end, with growing pauses after failures."""
        pause_s = 0.0
        while not self._ends:
            is_done = self._send()
            pause_s = 0.0 if is_done else min(max(2 * pause_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)
            with self._progress:
                self._num_tries += 1
                self._progress.notify_all()
            self._wake.wait(pause_s or BATCH_INTERVAL_S)
            self._wake.clear()

    def _send(self) -> bool:
        """Find or create the run, and send all; after any error MLflow counts as away."""
        try:
            writer = self._writer or self._connect()
            while (found := next_batch(self.log, self._sent.offset))[1] > self._sent.offset:
                if self._ends:  # the next opening's tracker sends it
                    break
                self._send_batch(writer, *found)
            for offset, record in list(self._waiting.items()):
                self._send_file(writer, offset, record)
        except Exception as error:
            self._last_error = redact_uri(str(error) or repr(error), self._uri).partition("\n")[0]
            if not self._is_away:
                self._is_away = True
                text = (
                    f"MLflow at {safe_uri(self._uri)} cannot be used: run "
                    f"{self.run_id or self.log.path.stem} continues, its metrics wait in "
                    f"{self.log.path}"
                )
                self._warn(text, error)
            return False
        self._is_away = False
        if not (missing := self._missing_files()) and not self._num_refused:
            self._last_error = ""
        return not missing

    def _connect(self) -> RunWriter:
        """The run, found or created; another one than before gets all of the log.

        Raises:
            RuntimeError: MLflow does not have the run of the sweep or study that it is part of.
        """
        *_, start = self.log.records("start")
        if start["parent_log"] and parent_run_of(start) is None:
            raise RuntimeError("the run that it is part of is not there yet")
        # A tracker that ended before a slow MLflow answered may still be creating the run.
        with _finding:
            sent = self.log.read_sent()
            writer = RunWriter(self._uri, self.log, sent.run_id or self._wanted)
            if sent.run_id not in (None, writer.run_id):
                logger.warning(
                    "MLflow at %s does not have run %s, or has it for another folder: all of %s "
                    "is sent to run %s",
                    safe_uri(self._uri),
                    sent.run_id,
                    self.log.path,
                    writer.run_id,
                )
                sent = Sent()
            self._waiting = {at: self.log.read(at)[0][0] for at in sent.waiting}
            self._sent = sent._replace(run_id=writer.run_id)
            self.log.mark_sent(self._sent)
        self._writer = writer
        return writer

    def _send_batch(self, writer: RunWriter, records: list[Record], end: int) -> None:
        if records and records[0]["kind"] in FILES:
            self._waiting[self._sent.offset] = records[0]
        else:
            send_each(writer, records, self._leaves_out)
        self._is_away = False
        self._mark(end)

    def _mark(self, offset: int) -> None:
        self._sent = self._sent._replace(offset=offset, waiting=tuple(self._waiting))
        self.log.mark_sent(self._sent)

    def _leaves_out(self, error: Exception, records: list[Record]) -> bool:
        """Whether MLflow rejects these records; after any other error all wait."""
        assert self._writer is not None
        if isinstance(error, MlflowException) and self._writer.is_deleted():
            self._writer = None  # to be found or created again
            return False
        if getattr(error, "error_code", "") not in _REJECTIONS:
            return False
        if len(records) == 1:
            self._num_refused += 1
            if self._num_refused == 1:
                self._warn(f"MLflow refuses a record of run {self.run_id}", error)
        return True

    def _send_file(self, writer: RunWriter, offset: int, record: Record) -> None:
        """Send a file; models wait for the command's last line."""
        if record["kind"] == "model":
            return
        try:
            writer.send([record])
        except Exception as error:
            code = getattr(error, "error_code", "")
            is_final = isinstance(error, _FINAL) or code in _REJECTIONS
            if is_final or offset not in self._warned:
                self._warned.add(offset)
                name = file_name(record)
                self._warn(f"run {self.run_id}: {name} cannot be stored with it", error)
            if not is_final:
                return
        del self._waiting[offset]
        self._mark(self._sent.offset)

    def _warn(self, text: str, error: Exception) -> None:
        self._last_error = redact_uri(str(error), self._uri).partition("\n")[0]
        logger.warning("%s (%s)", text, self._last_error)


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


def next_batch(log: MetricsLog, offset: int) -> tuple[list[Record], int]:
    """Metrics up to the size of one request, or the one record of another kind that begins here,
    and the offset after them; what MLflow does not get is passed over.
    """
    batch: list[Record] = []
    start, num_points = offset, 0
    for record, end in log.read(offset):
        if record["kind"] == "metrics":
            num_points += len(record["values"])
            if batch and num_points > MAX_METRICS:
                break
            batch.append(record)
        elif record["kind"] in SENT_KINDS:
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
    if not list(log.records("start")):
        raise ValueError(
            f"log {str(log_path)!r}: no such file, or it does not begin with a run's start; give a "
            "run's metrics.jsonl"
        )
    try:
        writer = RunWriter(absolute_uri(uri), log, log.read_sent().run_id)
    except Exception as error:
        raise unusable(uri, error) from None
    done, offset, models = Replayed(), 0, list[Model]()

    def leave_out(error: Exception, records: list[Record]) -> bool:
        if len(records) == 1:
            what = file_name(records[0]) if records[0]["kind"] in FILES else records[0]["kind"]
            done.refused.append(redact_uri(f"{what}: {error}".partition("\n")[0], uri))
        return True

    while (found := next_batch(log, offset))[1] > offset:
        records, offset = found
        if records and records[0]["kind"] == "model":
            models.append((writer.run_id, writer.opening, records[0]))
        elif records and records[0]["kind"] != "event":
            done.num_points += send_each(writer, records, leave_out)
    if events := list(log.records("event")):
        send_each(writer, events[-1:], leave_out)
    for problem, (_, _, record) in zip(log_models(uri, models), models, strict=True):
        if problem:
            done.refused.append(f"{file_name(record)}: {problem}")
    return done
