"""The record of a run on disk: an append-only JSONL file, the queue between training and MLflow.

Each record is first a line on disk, so it survives an outage of MLflow and the end of the process.
A second file, `<name>.sent`, says which part of the log MLflow has, and in which run.
"""

import contextlib
import io
import json
import logging
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from filelock import FileLock, Timeout

from vit_ray.addresses import redacted
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.outcomes import EventKind
from vit_ray.storage import locate

Record = dict[str, Any]
Status = Literal["FINISHED", "FAILED", "KILLED"]

# Tag with the reason why a run has failed.
FAILURE: Final = "vit_ray.failure"
# Kinds of records that become files of the MLflow run; all events share one file.
FILES: Final = ("text", "artifact", "event")
# Maximum number of metrics per request: a limit of MLflow's REST API.
MAX_METRICS: Final = 1000
# How long the process of a killed driver may take to release its logs.
RELEASE_S = 20.0
# Longest wait for a record that must be on disk before the caller continues.
ARRIVAL_S: Final = 300.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOpening:
    """How a run's record is opened: the contents of a start record.

    Attributes:
        log_path: local file of a single run; if it exists, it is continued, with its MLflow run.
        run_id: MLflow run to continue, such as one read from a checkpoint.
        params: the recipe. A continued run keeps its old values; values that changed are in the
            tag `vit_ray.changed_params`.
        continues: if neither `run_id` nor the log names a run, continue the newest run of this
            name, kind and folder: the log of a sweep may be on another machine.
        parent_log: log of the sweep or study that the run is part of.
        datasets: name, digest, source, context and profile of each input.
        measured_on: group for the workers' `eval/...`: `dev` if that split selects the model.
        awaited_metric: listed first among the run's metrics: MLflow's compare view draws the first.
        training_id: of a training that starts at step 0: another training's log is renamed.
        key: identifies this opening of the log; a repeated call with the same key does nothing.
    """

    config: TrackingConfig
    run_name: str
    log_path: Path
    run_id: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    continues: bool = False
    parent_log: Path | None = None
    datasets: list[dict[str, Any]] = field(default_factory=list)
    measured_on: str = "eval"
    awaited_metric: str | None = None
    training_id: str | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])


class Records(ABC):
    """Records of a run; each call adds one record to the run's log."""

    @abstractmethod
    def append(self, kind: str, wait_s: float = 0.0, **values: Any) -> object:
        """Write a record; from another process, wait up to `wait_s` until it is on disk."""

    def metrics(
        self, step: int, values: Mapping[str, float], wait_s: float = 0.0, **options: bool
    ) -> None:
        """Values at a step.

        A repeated step changes nothing, unless `again`: then the newest value counts. MLflow gets
        the number of values that are not finite.
        """
        if values:
            plain = {key: float(value) for key, value in values.items()}
            self.append("metrics", wait_s, step=int(step), values=plain, **options)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        """Results of child runs; they replace the results of an earlier start."""
        self.metrics(step, values, ARRIVAL_S, again=True)

    def event(self, kind: EventKind, text: str, step: int, wait_s: float = 0.0) -> None:
        self.append("event", wait_s, event=kind, text=text, step=step)

    def tag(self, key: str, value: str) -> None:
        self.append("tag", ARRIVAL_S, key=key, value=str(value))

    def text(self, name: str, text: str, wait_s: float = ARRIVAL_S) -> None:
        """A text that becomes a file of the MLflow run, such as `recipe.yaml`."""
        self.append("text", wait_s, name=name, text=text)

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """A file or folder in the run's folder; it must stay there until it is sent."""
        self.append("artifact", ARRIVAL_S, path=str(Path(path).resolve()), folder=folder)

    def model(self, name: str, step: int, **model: Any) -> None:
        """An MLflow model; it is logged after the command's last line.

        Args:
            step: number of training steps after which the run had these weights.
            model: what else `tracking.mlflow_model.log_model` reads.
        """
        self.append("model", ARRIVAL_S, name=name, step=step, **model)


class Sent(NamedTuple):
    """How much of a log MLflow has.

    Attributes:
        run_id: the MLflow run.
        points: MLflow has all metrics and tags before this byte of the log.
        files: MLflow has all files before this byte of the log.
    """

    run_id: str | None = None
    points: int = 0
    files: int = 0


class MetricsLog(Records):
    """The file; `append` is thread-safe and never raises."""

    def __init__(self, path: Path, on_record: Callable[[Record], None] | None = None) -> None:
        """`on_record`: called with each record, even if the disk is full."""
        self.path, self._on_record = path, on_record
        self.error = ""  # why the last record is not on disk
        self._unwritten = b""  # the end of the log, while the disk is full
        self._lock = threading.Lock()
        self._has_written = False
        self._sent_path = path.with_name(path.name + ".sent")

    def open(self, opening: RunOpening) -> None:
        """Write the start record of an opening, unless the log has it.

        If the log is of another run or training, it is renamed after its run id first; it can still
        be replayed.
        """
        starts, run_id = list(self.records("start")), self.read_sent().run_id
        if opening.key in [start["opening"] for start in starts]:
            return
        run_ids = [None, run_id, *(start["run_id"] for start in starts)]
        training_ids = [None, *(start["training_id"] for start in starts[:1])]
        is_other_training = bool(starts) and opening.training_id not in training_ids
        if is_other_training or (run_id and opening.run_id not in run_ids):
            prefix = run_id or time.strftime("%Y%m%dT%H%M%S")
            with self._lock:
                for path in (self.path, self._sent_path):
                    with contextlib.suppress(FileNotFoundError):
                        path.rename(path.with_name(f"{prefix}.{path.name}"))
        fields = [
            "run_name", "run_id", "training_id", "continues", "datasets", "awaited_metric",
            "measured_on",
        ]  # fmt: skip
        self.append(
            "start",
            **{name: getattr(opening, name) for name in fields},
            experiment=opening.config.experiment,
            parent_log=str(opening.parent_log) if opening.parent_log else None,
            params={key: str(value) for key, value in opening.params.items()},
            tags={key: str(value) for key, value in opening.tags.items()},
            user_tags=opening.config.tags,
            system_metrics=opening.config.system_metrics,
            opening=opening.key,
        )

    def append(self, kind: str, wait_s: float = 0.0, **values: Any) -> None:
        """Write one record without secrets; while the disk is full, keep it in memory and warn."""
        record = redacted({"kind": kind, "time_ms": round(time.time() * 1000), **values})
        with self._lock:
            self._unwritten += json.dumps(record).encode() + b"\n"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "ab", buffering=0) as file:
                    if not self._has_written and file.tell():
                        # A killed process may have written half a line; blank lines are skipped.
                        self._unwritten = b"\n" + self._unwritten
                    self._has_written = True
                    while self._unwritten:
                        self._unwritten = self._unwritten[file.write(self._unwritten) :]
                self.error = ""
            except OSError as error:
                if not self.error:
                    logger.warning("metrics cannot be kept in %s: %s", self.path, error)
                self.error = str(error)
        if self._on_record is not None:
            self._on_record(record)

    @property
    def size(self) -> int:
        """Bytes of all records."""
        with self._lock:
            on_disk = self.path.stat().st_size if self.path.exists() else 0
            return on_disk + len(self._unwritten)

    def read(self, offset: int, max_bytes: int = 2**20) -> list[tuple[Record, int]]:
        """Complete records from a byte offset on, each with the offset after it."""
        with self._lock:
            text, on_disk = b"", 0
            with contextlib.suppress(OSError), open(self.path, "rb") as file:
                on_disk = file.seek(0, os.SEEK_END)
                file.seek(offset)
                text = b"".join(file.readlines(max_bytes))  # at least one line, however long
            if offset + len(text) >= on_disk:
                text += self._unwritten[max(0, offset - on_disk) :]
        records = list[tuple[Record, int]]()
        for line in io.BytesIO(text):  # `splitlines` would also split at carriage returns
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            try:
                records.append((json.loads(line), offset))
            except ValueError:  # blank, or a killed process wrote half of it
                records.append(({"kind": "torn"}, offset))
        return records

    def records(self, *kinds: str, offset: int = 0) -> Iterator[Record]:
        """All records of these kinds, or of all kinds, that begin at or after a byte offset."""
        while records := self.read(offset):
            yield from (record for record, _ in records if not kinds or record["kind"] in kinds)
            offset = records[-1][1]

    def end_is_sent(self, status: Status) -> bool:
        """Whether the last opening finished with this status, and MLflow has the whole log."""
        sent, last = self.read_sent(), list(self.records("start", "finish"))[-1:]
        is_sent = min(sent.points, sent.files) >= self.size
        return is_sent and [record.get("status") for record in last] == [status]

    def read_sent(self) -> Sent:
        """What `mark_sent` wrote; only its run id if the log is shorter, thus another file."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            values = json.loads(self._sent_path.read_text())
            sent = Sent(values["run_id"], int(values["points"]), int(values["files"]))
            return sent if max(sent.points, sent.files) <= self.size else Sent(sent.run_id)
        return Sent()

    def mark_sent(self, sent: Sent) -> None:
        """Write to disk what is sent; never raises, since sending records twice does no harm.

        Records that are only in memory do not count: other records may get their offsets.
        """
        unfinished = self._sent_path.with_name(self._sent_path.name + ".half")
        try:
            size = self.path.stat().st_size
            on_disk = Sent(sent.run_id, min(sent.points, size), min(sent.files, size))
            unfinished.write_text(json.dumps(on_disk._asdict()))
            os.replace(unfinished, self._sent_path)
        except OSError as error:
            logger.debug("%s cannot be written: %s", self._sent_path, error)


def metrics_log_path(run_folder: str) -> Path:
    """The local file of a run's records; in `~/.cache` if the run's folder is remote."""
    folder = locate(run_folder)
    home = Path() if folder.is_local else Path.home() / ".cache" / "vit_ray"
    return home / folder.path / "metrics.jsonl"


def lock_log(log_path: Path) -> contextlib.ExitStack:
    """Lock the run's log until the result is closed or the process ends.

    Raises:
        RuntimeError: the process of an earlier driver still writes the log.
    """
    path, lock = log_path.with_suffix(".lock"), contextlib.ExitStack()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.enter_context(FileLock(path, RELEASE_S, thread_local=False))
    except Timeout:
        raise RuntimeError(
            f"the recorder of the run's last driver on this machine has not ended in "
            f"{RELEASE_S:g} s and still writes {log_path}; end that driver's job (ray job stop), "
            "then start again"
        ) from None
    except OSError:  # nothing can be written there: `append` will warn
        pass
    return lock
