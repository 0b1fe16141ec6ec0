"""Sends a run's log to MLflow. Training never waits for MLflow, and never fails because of it.

One thread sends metrics and tags in order, with their original times; when MLflow has them all, it
sends the next file, so a file that fails delays no metrics. An artifact store that hangs delays
everything, until it answers or the run is opened or replayed again. The thread keeps trying while
MLflow is away. Models are logged after a command's last line, by another process, since that
imports pandas and SciPy. Nothing here uses Ray.
"""

import atexit
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vit_ray.addresses import absolute_uri
from vit_ray.tracking.metrics_log import (
    FILES,
    MAX_METRICS,
    MetricsLog,
    Record,
    RunOpening,
    Sent,
    Status,
)
from vit_ray.tracking.store_requests import limited_requests, redact_uri, safe_uri, unusable

if TYPE_CHECKING:
    from vit_ray.tracking.mlflow_run import RunWriter

# Metrics are collected this long before they are sent, unless somebody waits until they are.
BATCH_INTERVAL_S: Final = 1.0
FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 60.0
FILE_TRIES_AT_END: Final = 3
# Longest waits at a run's end: for the first attempt, which imports MLflow and may create a SQLite
# file; for an MLflow that has never answered; and for a disk that hangs.
FIRST_TRY_S: Final = 120.0
NEVER_REACHED_S: Final = 5.0
_WRITE_S: Final = 5.0
# Limit for logging the models of a command.
MODELS_S: Final = 300.0
# Kinds of records that are sent before files.
POINTS: Final = ("start", "metrics", "tag", "finish")
# Kinds of which several records are sent at once.
BATCHED: Final = ("metrics", "event")
# Codes of requests that are wrong: trying again does not help.
_REJECTIONS: Final = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")

# Locked while a run is looked up or created, so that a log never gets a second run.
_run_lookup: Final = threading.Lock()

logger = logging.getLogger(__name__)


@dataclass
class _Queue:
    """Records of some kinds, which are sent in order, and the attempts to send them.

    Attributes:
        name: the field of `Sent` up to which they are sent.
        error: why the last attempt failed; empty if it succeeded.
        num_failed: failed attempts so far.
        pause_s: from a failure to the next attempt, which is due at `due_s`.
    """

    name: str
    kinds: Sequence[str]
    error: str = ""
    num_failed: int = 0
    pause_s: float = 0.0
    due_s: float = 0.0


class Tracker:
    """Sends the records of one run, which callers write to `log`.

    Only `send` raises errors; a replay calls only this method. `flush`, `finish` and `close` wait.

    Attributes:
        points: metrics, and the start, tags and end of the run.
        files: what becomes a file of the run.
        run_id: the MLflow run's id; None until MLflow has answered for the first time.
        hint: the command or link that opens MLflow's page; empty while `run_id` is None.
        refused: records that MLflow has refused, each with the reason.
        num_points: new metric points that were sent.
    """

    def __init__(self, log: MetricsLog, uri: str, *, is_replay: bool = False) -> None:
        """
        Args:
            log: has a start record.
            uri: of the MLflow store.
            is_replay: the caller sends the whole log, perhaps to another store, and no parent run
                has to be there.
        """
        self.log, self._uri, self._is_replay = log, absolute_uri(uri), is_replay
        self.num_points = 0
        self.refused: list[str] = []
        self._writer: RunWriter | None = None
        self._sent, self._writes_sent, self._is_stopped = Sent(), True, False
        self._sent_lock = threading.Lock()
        self.points, self.files = _Queue("points", POINTS), _Queue("files", FILES)
        self._tried, self._num_waiting = threading.Condition(), 0
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        if not is_replay:
            self._thread.start()

    @classmethod
    def begin(cls, opening: RunOpening, wait_s: float = 10.0) -> "Tracker":
        """Open the run and start sending; if the log has this opening, the run is continued.

        Args:
            wait_s: longest wait for MLflow's run id.
        """
        log = MetricsLog(opening.log_path)
        log.open(opening)
        tracker = cls(log, opening.config.uri)
        tracker.wait_for_try(wait_s)
        return tracker

    def _run(self) -> None:
        """Send points, or else files, when they are due or somebody waits, until stopped."""
        while not self._is_stopped:
            has_sent = self._try(self.points)
            if not has_sent and not self.points.error:
                has_sent = self._try(self.files)
            with self._tried:
                self._tried.notify_all()
                if not has_sent:
                    self._tried.wait(BATCH_INTERVAL_S)

    def _try(self, queue: _Queue) -> bool:
        """Send if it is due or awaited, and note the result; warn once per outage."""
        if not self._num_waiting and time.monotonic() < queue.due_s:
            return False
        try:
            with limited_requests():
                has_sent = self.send(queue)
            queue.error, queue.pause_s, queue.due_s = "", 0.0, 0.0
            return has_sent
        except Exception as error:
            text = (
                f"MLflow at {safe_uri(self._uri)} cannot be used: run "
                f"{self.run_id or self.log.path.stem} continues, its {queue.name} wait in "
                f"{self.log.path}"
            )
            queue.error = self._warned_reason(text, error, is_new=not queue.error)
            queue.num_failed += 1
            queue.pause_s = min(max(2 * queue.pause_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)
            queue.due_s = time.monotonic() + queue.pause_s
            return False

    def _warned_reason(self, text: str, error: Exception, *, is_new: bool) -> str:
        # One line, without secrets.
        reason = redact_uri(str(error) or repr(error), self._uri).partition("\n")[0]
        if is_new:
            logger.warning("%s (%s)", text, reason)
        return reason

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        with self._tried:
            self._num_waiting += 1
            self._tried.notify_all()
            self._tried.wait_for(is_done, timeout_s)
            self._num_waiting -= 1

    @property
    def run_id(self) -> str | None:
        return self._writer.run_id if self._writer else None

    @property
    def hint(self) -> str:
        return self._writer.hint if self._writer else ""

    def wait_for_try(self, wait_s: float) -> None:
        """Wait until MLflow has given the run an id, or an attempt has failed."""
        self._wait_until(lambda: bool(self._writer or self.points.num_failed), wait_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far except models; False if not in time.

        Files that fail get a few more attempts; for a store that hangs the wait is `timeout_s`.
        """
        size, last = self.log.size, self.files.num_failed + FILE_TRIES_AT_END

        def is_done() -> bool:
            has_files = self._sent.files >= size or self.files.num_failed >= last
            return self._sent.points >= size and has_files

        self._wait_until(is_done, timeout_s)
        return min(self._sent.points, self._sent.files) >= size

    def finish(self, status: Status = "FINISHED", timeout_s: float = 30.0) -> bool:
        """End the run; a warning says what MLflow does not have, and how to send it.

        Returns:
            Whether MLflow has everything except models.
        """
        self.log.append("finish", status=status)
        if problem := self.close(timeout_s):
            logger.warning("%s; then run: vit-ray replay %s URI", problem, self.log.path)
        return not problem

    def close(self, timeout_s: float = 30.0) -> str:
        """Send the remaining records, then stop; returns what MLflow does not have, and why."""
        self.wait_for_try(FIRST_TRY_S)
        if self.run_id is None:  # MLflow was away from the beginning
            timeout_s = min(timeout_s, NEVER_REACHED_S)
        is_sent = self.flush(timeout_s)
        self.stop(timeout_s if is_sent else 0.0)
        missing = [f"{len(self.refused)} refused records"] if self.refused else []
        if self._sent.points < self.log.size:
            missing.append("the last points")
        missing += self.missing_files()
        problems = []
        if missing:
            refused = self.refused[-1:] if is_sent else []
            timed_out = f"it did not take it in {timeout_s:g} s"
            reasons = [self.points.error, self.files.error, *refused, timed_out]
            problems.append(
                f"MLflow at {safe_uri(self._uri)} does not have {', '.join(missing)} of run "
                f"{self.run_id} ({next(filter(None, reasons))})"
            )
        if self.log.error:
            problems.append(
                f"{self.log.path} cannot be written ({self.log.error}): free space there"
            )
        return "; ".join(problems)

    def stop(self, wait_s: float) -> None:
        """Send no more; a request in progress is not written down as sent."""
        self._is_stopped = True
        if self._sent_lock.acquire(timeout=_WRITE_S):  # while `_mark` writes
            self._sent_lock.release()
        with self._tried:
            self._tried.notify_all()
        self._thread.join(wait_s)

    def missing_files(self) -> list[str]:
        records = self.log.records(*FILES, offset=self._sent.files)
        return list(dict.fromkeys(map(record_name, records)))

    def send(self, queue: _Queue) -> bool:
        """Find or create the run, and send the next records of a queue; False if there are none.

        Raises:
            Exception: any error of MLflow's or of the artifact store; these records and later ones
                of the queue wait for the next call.
        """
        writer, offset = self._writer or self._connect(), getattr(self._sent, queue.name)
        records, end = next_batch(self.log, offset, queue.kinds)
        if records:
            self._send_each(writer, records)
        if end > offset:
            self._mark(**{queue.name: end})
        return end > offset

    def _connect(self) -> "RunWriter":
        """Find or create the run; a run that does not have this log's records gets all of them.

        Raises:
            RuntimeError: the run belongs to a sweep or study that MLflow does not have yet.
        """
        # Here, in a thread: importing MLflow takes seconds.
        from vit_ray.tracking.mlflow_run import RunWriter

        # A tracker that ended before a slow MLflow answered may still be creating the run.
        with _run_lookup:
            sent = self.log.read_sent()
            writer = RunWriter(self._uri, self.log, needs_parent=not self._is_replay)
            if self._is_replay:  # what another store has is not written down
                self._writes_sent, sent = sent.run_id in (None, writer.run_id), Sent()
            elif sent.run_id not in (None, writer.run_id):
                logger.warning(
                    "MLflow at %s does not have run %s, or has it for another folder: all of %s "
                    "is sent to run %s",
                    safe_uri(self._uri), sent.run_id, self.log.path, writer.run_id,
                )  # fmt: skip
                sent = Sent()
            self._sent, self._writer = sent, writer
            self._mark(run_id=writer.run_id)
        return writer

    def _mark(self, **changes: Any) -> None:
        """Write down what is sent, unless the next opening's tracker sends it."""
        with self._sent_lock:
            if self._is_stopped:
                return
            self._sent = self._sent._replace(**changes)
            if self._writes_sent:
                self.log.mark_sent(self._sent)

    def _send_each(self, writer: "RunWriter", records: list[Record]) -> None:
        """Send a batch. If MLflow refuses it, send each record by itself, to lose only the bad one.

        Raises:
            Exception: any other error of MLflow's.
        """
        try:
            self.num_points += writer.send(records)
        except Exception as error:
            code = getattr(error, "error_code", None)  # only MLflow's errors have one
            if code and writer.active(writer.run_id) is None:
                self._writer = None  # the next attempt looks it up or creates it again
                raise
            if code not in _REJECTIONS and not isinstance(error, FileNotFoundError):
                raise
            if len(records) > 1:
                for record in records:
                    self._send_each(writer, [record])
            else:
                name = record_name(records[0])
                text = f"run {self.run_id}: MLflow refuses {name}"
                reason = self._warned_reason(text, error, is_new=not self.refused)
                self.refused.append(f"{name}: {reason}")


def next_batch(log: MetricsLog, offset: int, kinds: Sequence[str]) -> tuple[list[Record], int]:
    """The next records of these kinds to send, and the offset after them.

    Either metrics, up to the size of one request, or events, or a single record of another kind.
    """
    batch: list[Record] = []
    num_points = 0
    for record, end in log.read(offset):
        kind = record["kind"]
        if kind in kinds:
            num_points += len(record.get("values", ()))
            if batch and (kind not in BATCHED or kind != batch[0]["kind"]):
                break
            if batch and num_points > MAX_METRICS:
                break
            batch.append(record)
        offset = end
    return batch, offset


def record_name(record: Record) -> str:
    """Name of a record in messages: of its file or model, else its kind."""
    if record["kind"] == "event":
        return "the history"
    return str(record.get("path") or record.get("name") or record["kind"])


@limited_requests()
def replay(log_path: Path, uri: str) -> Tracker:
    """Send a log to its run in MLflow, or to a new run if MLflow has none for it.

    A second replay adds nothing. Only files in the log's folder are sent.

    Returns:
        The tracker; `refused` also has the files and models that were not sent.

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
        while tracker.send(tracker.points):
            pass
    except Exception as error:
        raise unusable(uri, error) from None
    try:
        while tracker.send(tracker.files):
            pass
    except Exception as error:
        logger.warning("%s", unusable(uri, error))
    models = [model | {"run_id": tracker.run_id} for model in recorded_models(log)]
    tracker.refused += tracker.missing_files()
    tracker.refused += [problem for _, problem in log_models(absolute_uri(uri), models)]
    return tracker


def log_models_later(uri: str, log_path: Path) -> threading.Thread:
    """Log the models of a run and its child runs while the command prints its last lines.

    At its end, the process waits for this thread, at most `MODELS_S` + 30 s.
    """

    def log_all() -> None:
        for path, problem in log_models(uri, models_of_tree(log_path)):
            text = "a model is not logged (%s); run: vit-ray replay %s URI"
            logger.warning(text, problem, path)

    thread = threading.Thread(target=log_all, daemon=True)
    thread.start()
    atexit.register(thread.join, MODELS_S + 30)
    return thread


def recorded_models(log: MetricsLog) -> list[Record]:
    """The models of a run: their records with the path of the log, and with the run's id.

    The id is None until MLflow has all of the log: before, the id in a copied folder may be that of
    the original.
    """
    sent = log.read_sent()
    run_id = sent.run_id if sent.points >= log.size else None
    return [{**record, "log": str(log.path), "run_id": run_id} for record in log.records("model")]


def models_of_tree(log_path: Path) -> list[Record]:
    """The models of a run and its child runs, as `recorded_models`."""
    models, paths = list[Record](), [log_path]
    for path in paths:
        log = MetricsLog(path)
        models += recorded_models(log)
        children = dict.fromkeys(Path(record["path"]) for record in log.records("child"))
        paths += [child for child in children if child not in paths]
    return models


def log_models(uri: str, models: Sequence[Record]) -> list[tuple[str, str]]:
    """Log models; returns for each that is not logged the path of its log, and why."""
    if not models:
        return []
    try:
        completed = subprocess.run(
            [sys.executable, "-m", "vit_ray.tracking.mlflow_model"],
            input=json.dumps([uri, list(models)]),
            capture_output=True,
            text=True,
            check=True,
            timeout=MODELS_S,
        )
        problems = json.loads(completed.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        problems = [(model["log"], repr(error)) for model in models]
    return [(path, redact_uri(problem, uri)) for path, problem in problems]
