"""The record of a run on disk: an append-only JSONL file, the queue between training and MLflow.

Each record is first a line on disk, so it survives an outage of MLflow and the end of the process.
A second file, `<name>.sent`, notes how far MLflow has the log, and in which run.
"""

import contextlib
import io
import json
import logging
import math
import os
import shutil
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import IO, Any, Final, Literal, NamedTuple

from filelock import FileLock, Timeout

from vit_ray.config.secrets import redacted
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.metric_names import DEV_GROUP, EVAL_GROUP, FEW_SHOT_GROUP
from vit_ray.outcomes import EventKind
from vit_ray.storage import locate

Record = dict[str, Any]
Status = Literal["FINISHED", "FAILED", "KILLED"]

STARTED_OVER: Final = "vit_ray.started_over_from"
"""Tag of a run that started at step 0 and replaces an earlier one: the earlier run's id."""
FILES: Final = ("text", "artifact", "model", "event")
"""Kinds of records that become files of the run; its events share one file."""
FAILURE: Final = "vit_ray.failure"
"""Tag with the reason why a run has failed."""
CARD: Final = "README.md"
"""File of a logged model that describes it."""
REQUIREMENTS: Final = "requirements.txt"
MEASURED: Final = (EVAL_GROUP, DEV_GROUP, FEW_SHOT_GROUP)
"""Prefixes of an evaluation's metrics."""
_FIELDS: dict[str, dict[str, Any]] = {
    "start": {
        "run_name": str,
        "experiment": str,
        "parent_run_id": (str, NoneType),
        "params": dict,
        "tags": dict,
        "resume_step": (int, NoneType),
        "opening": str,
    },
    "metrics": {"step": int, "values": dict},
    "tag": {"key": str, "value": str},
    "text": {"name": str, "text": str},
    "artifact": {"path": str, "folder": str},
    "model": {"files": dict, "name": str, "step": int, "params": dict},
    "event": {"event": str, "text": str, "step": int},
    "finish": {"status": str},
}
SENT_KINDS: Final = frozenset(_FIELDS)
"""Kinds that MLflow gets; others are for the process that reopens the log."""
_FIELDS |= {
    "place wait": {"begin_s": (int, float), "end_s": (int, float)},
    "work": {"attempt": str, "begin_s": (int, float), "until_s": (int, float), "seconds": dict},
}
_TIMELINE: Final = tuple(
    f'{{"kind": "{kind}"'.encode()
    for kind in (
        "start",
        "place wait",
        "work",
        "finish",
        f'event", "event": "{EventKind.WORKER_FAILED}',
    )
)
"""Beginnings of the lines from which a run's time is computed."""
_START: Final = b'{"kind": "start"'
_EVENT: Final = b'{"kind": "event"'
RELEASE_S = 20.0
"""How long the process of a killed driver may take to release its logs."""
ARRIVAL_S: Final = 300.0
"""Longest wait for a record that must be on disk before the caller continues."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOpening:
    """How a run's record is opened."""

    config: TrackingConfig
    run_name: str
    log_path: Path
    """Local file of a single run; the log of an earlier attempt is continued, with its run."""
    run_id: str | None = None
    """MLflow run to continue, such as one kept in a checkpoint."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Recipe; a key that a continued run has keeps its old value, and the new one is shown in the
    tag `vit_ray.changed_params`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    resume_step: int | None = None
    """Step of the checkpoint that training resumes from."""
    parent: "RunOpening | None" = None
    """Opening of the sweep or study that the run is part of."""
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Inputs: name, digest, source, context and profile of each."""
    measured_on: str = "eval"
    """Group for what workers call `eval/...`: `dev` if it is a split for selection."""
    awaited_metric: str | None = None
    """Listed first among the run's metrics: MLflow's compare view draws the first one."""
    began_s: float | None = None
    """Unix time at which the driver started to work on it."""
    training_id: str | None = None
    """For a training that starts at step 0: the log of an earlier one is set aside."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """Identifies this opening of the log, also after its process died and was restarted."""


class Recorder(ABC):
    """What can be recorded for a run; each call is one record of its log."""

    @abstractmethod
    def append(self, kind: str, wait_s: float = 0.0, **values: Any) -> object:
        """Write a record; from another process, wait up to `wait_s` until it is on disk."""

    def metrics(
        self, step: int, values: Mapping[str, float], wait_s: float = 0.0, **options: bool
    ) -> None:
        """Values at a step, where the first one counts; values that are not finite are counted."""
        if values:
            plain = {key: float(value) for key, value in values.items()}
            self.append("metrics", wait_s, step=int(step), values=plain, **options)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        """Results of child runs, which replace those of an earlier start."""
        self.metrics(step, values, ARRIVAL_S, again=True)

    def event(self, kind: EventKind, text: str, step: int, wait_s: float = 0.0) -> None:
        self.append("event", wait_s, event=kind, text=text, step=step)

    def tag(self, key: str, value: str) -> None:
        self.append("tag", ARRIVAL_S, key=key, value=str(value))

    def text(self, name: str, text: str, wait_s: float = ARRIVAL_S) -> None:
        """A text to keep with the run as a file, such as `recipe.yaml`."""
        self.append("text", wait_s, name=name, text=text)

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """A file or folder in the run's folder, which must stay there until it is sent."""
        self.append("artifact", ARRIVAL_S, path=str(Path(path).resolve()), folder=folder)

    def model(
        self,
        files: Mapping[str, str],
        name: str,
        step: int,
        params: Mapping[str, str],
        register_as: str | None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """A model of MLflow, given as the texts of its files.

        Args:
            step: at which the run had the model.
            params: shown with it.
            register_as: registered model that gets it as a version.
            metrics: of the run; those of its evaluation are also given to the model.
        """
        self.append(
            "model",
            ARRIVAL_S,
            files=dict(files),
            name=name,
            step=step,
            params=dict(params),
            register_as=register_as,
            metrics={k: v for k, v in (metrics or {}).items() if k.startswith(MEASURED)},
        )


class Sent(NamedTuple):
    """How much of a log MLflow has."""

    offset: int = 0
    """Bytes up to which it has everything but files."""
    files_offset: int = 0
    """Bytes up to which it has all files."""
    run_id: str | None = None
    """The run that has them."""


class MetricsLog(Recorder):
    """The file; writing a record is safe from any thread and never raises."""

    def __init__(self, path: Path, on_record: Callable[[Record], None] | None = None) -> None:
        """`on_record`: called with each written record, even if the disk is full."""
        self.path, self._on_record = path, on_record
        self.num_cuts = 0
        """How often the file was found shorter than before."""
        self.error = ""
        """Why the last record is not on disk."""
        self.unwritten: list[Record] = []
        """Records that are only in memory, because the disk is full."""
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._end = 0
        self._sent_path = path.with_name(path.name + ".sent")
        self._sent = self.read_sent()
        self._work_path = path.with_name(path.name + ".work")
        self._work: dict[str, Any] | None = None
        with contextlib.suppress(OSError, ValueError):
            self._work = json.loads(self._work_path.read_text())

    def open(self, opening: RunOpening) -> Record:
        """Write the start record of an opening, unless it is there.

        A new opening of another run or training sets the log aside, named by its run id; it can be
        replayed.
        """
        if earlier := self.opened(opening.key):
            return earlier[0]
        run_id, tags = self.read_sent().run_id, dict(opening.tags)
        ours = {run_id, *(start.get("run_id") for start in self.starts())}
        first, training_id = self.first_start(), opening.training_id
        if first and training_id and first.get("training_id") != training_id:
            self._set_aside(run_id or time.strftime("%Y%m%dT%H%M%S"))
            tags |= {STARTED_OVER: run_id} if run_id else {}
        elif opening.run_id and run_id and opening.run_id not in ours:
            self._set_aside(run_id)
        same = ["run_name", "run_id", "resume_step", "datasets", "awaited_metric", "measured_on"]
        return self.append(
            "start",
            **{name: getattr(opening, name) for name in same},
            experiment=opening.config.experiment,
            parent_run_id=opening.config.parent_run_id,
            parent_log=str(opening.parent.log_path) if opening.parent else None,
            params={key: str(value) for key, value in opening.params.items()},
            tags={key: str(value) for key, value in tags.items()},
            user_tags=opening.config.tags,
            opening=opening.key,
            began_s=opening.began_s,
            training_id=training_id,
        )

    def _set_aside(self, name: str) -> None:
        with self._lock:
            for path in (self.path, self._sent_path, self._work_path):
                if path.exists():
                    path.rename(path.with_name(f"{name}.{path.name}"))
            self._sent, self._end, self._work = Sent(), 0, None
            if self._file is not None:
                self._file.close()
                self._file = None

    def content(self, name: str, content: bytes, folder: str) -> None:
        """A file to keep with the run, given by its content, from a worker on any node.

        Raises:
            OSError: it cannot be written next to the log.
        """
        path = self.path.parent / name
        path.write_bytes(content)
        self.artifact(path, folder)

    def append(self, kind: str, wait_s: float = 0.0, **values: Any) -> Record:
        """Write one record without secrets; a full disk keeps it in memory, with one warning."""
        record = redacted({"kind": kind, **values, "time_ms": round(time.time() * 1000)})
        try:
            with self._lock:
                self.unwritten.append(record)
                lines = [json.dumps(one) + "\n" for one in self.unwritten]
                line = "".join(lines).encode()
                file = self._opened_file()
                end = file.seek(0, os.SEEK_END)
                if end < self._end:
                    self.num_cuts += 1
                    logger.warning("%s was truncated: unsent records in it are lost", self.path)
                if end:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # half a line left by a killed process
                        line = b"\n" + line
                file.write(line)
                file.flush()
                self._end = file.tell()
                self.unwritten, self.error = [], ""
        except OSError as error:
            if not self.error:
                logger.warning("metrics cannot be kept in %s: %s", self.path, error)
            self.error = str(error)
        if self._on_record is not None:
            self._on_record(record)
        return record

    def _opened_file(self) -> IO[bytes]:
        """The file; if it was deleted, it is written again from the open file."""
        earlier, is_there = self._file, self.path.exists()
        if (
            earlier is not None
            and is_there
            and os.path.samestat(os.fstat(earlier.fileno()), self.path.stat())
        ):
            return earlier
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if earlier is not None and not is_there:
            logger.warning("%s was deleted while in use; written again", self.path)
            half = self.path.with_name(self.path.name + ".half")
            earlier.seek(0)
            with open(half, "wb") as copy:
                shutil.copyfileobj(earlier, copy)
            os.replace(half, self.path)
        self._file = open(self.path, "a+b")  # noqa: SIM115 - for the next record, too
        if earlier is not None:  # only now: until here it may be the only copy
            earlier.close()
        return self._file

    def read(self, offset: int, max_bytes: int = 2**20) -> list[tuple[Record, int]]:
        """Complete records from a byte offset on, each with the offset after it."""
        if self.size <= offset:
            return []
        with open(self.path, "rb") as file:
            file.seek(offset)
            text = file.read(max_bytes)
            if b"\n" not in text:  # a record longer than that, such as a text artifact
                text += file.readline()
        records = []
        for line in io.BytesIO(text):  # `splitlines` would also end one at a carriage return
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            records.append((_parsed(line), offset))
        return records

    def opened(self, key: str | None = None, end: float = math.inf) -> list[Record]:
        """The start record of an opening, by default the last, and what was recorded since.

        Args:
            end: bytes of the file that are read.
        """
        found: list[Record] = []
        is_ours, position = False, 0
        for line in self._lines():
            position += len(line)
            if position > end:
                break
            if line.startswith(_START):
                is_ours = key in (None, _parsed(line).get("opening"))
                found = [] if key is None else found
            if is_ours:
                found.append(_parsed(line))
        return found

    def _lines(self) -> Iterator[bytes]:
        """The lines of the file; none if it cannot be read."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            yield from file

    def starts(self) -> list[Record]:
        """The start records of all openings."""
        found = (_parsed(line) for line in self._lines() if line.startswith(_START))
        return [record for record in found if record["kind"] == "start"]

    def events(self) -> list[Record]:
        """The events of all openings."""
        found = (_parsed(line) for line in self._lines() if line.startswith(_EVENT))
        return [record for record in found if record["kind"] == "event"]

    def end(self, status: Status) -> None:
        """Write the last record of an opening."""
        self.append("finish", status=status)

    def keep_work(self, **work: Any) -> None:
        """Keep what an attempt has completed in a small separate file, because it comes each
        second.

        What the previous attempt had becomes a record of the log.
        """
        before = self._work
        if before is not None and before["attempt"] != work["attempt"]:
            self.append("work", **before)
        elif before is not None and before["until_s"] > work["until_s"]:
            return  # threads make calls in any order
        self._work = work
        self._replace(self._work_path, work)

    def timeline(self) -> list[Record]:
        """Records from which the run's time is computed, of all openings."""
        found = [_parsed(line) for line in self._lines() if line.startswith(_TIMELINE)]
        if self._work is not None:
            found.append(_parsed(json.dumps({"kind": "work", **self._work, "time_ms": 0}).encode()))
        return found

    def end_is_sent(self, status: Status) -> bool:
        """Whether the last opening has ended with this status, and MLflow has all of the log."""
        sent = self.read_sent()
        ends = [record["status"] for record in self.opened() if record["kind"] == "finish"]
        return min(sent.offset, sent.files_offset) >= self.size and ends[-1:] == [status]

    def first_start(self) -> Record | None:
        """The record that opened the file."""
        return next((r for r, _ in self.read(0) if r["kind"] == "start"), None)

    @property
    def size(self) -> int:
        """Bytes written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read_sent(self) -> Sent:
        """How far MLflow has the file, as noted by `mark_sent`; for a missing file, nothing."""
        try:
            noted = json.loads(self._sent_path.read_text())
            sent = Sent(int(noted["offset"]), int(noted["files_offset"]), noted["run_id"])
        except (OSError, ValueError, TypeError, KeyError):
            return Sent()
        return sent if sent.offset <= self.size else Sent(run_id=sent.run_id)

    def mark_sent(self, **changes: Any) -> None:
        """Note fields of `Sent` on disk; never raises, since sending twice does no harm."""
        with self._lock:
            self._sent = self._sent._replace(**changes)
            self._replace(self._sent_path, self._sent._asdict())

    def _replace(self, path: Path, content: dict[str, Any]) -> None:
        half = path.with_name(path.name + ".half")
        try:
            half.write_text(json.dumps(content))
            os.replace(half, path)
        except OSError as error:
            logger.debug("%s cannot be written: %s", path, error)


class ParentMissingError(RuntimeError):
    """MLflow does not have the run of the sweep or study that a run is part of."""


def parent_run_of(start: Record) -> str | None:
    """MLflow's id of the sweep or study that a run is part of, if MLflow has it.

    By the log of that run, which notes the id as soon as MLflow has it: so a child that starts
    while MLflow is away is still attached to it.
    """
    if start["parent_run_id"] or not start.get("parent_log"):
        return start["parent_run_id"] or None
    return MetricsLog(Path(start["parent_log"])).read_sent().run_id


def metrics_log_path(run_folder: str) -> Path:
    """Local file that keeps what is recorded of a run until MLflow has it."""
    folder = locate(run_folder)
    home = Path() if folder.is_local else Path.home() / ".cache" / "vit_ray"
    return home / folder.path / "metrics.jsonl"


def lock_log(log_path: Path, run_name: str) -> contextlib.ExitStack:
    """Lock the run's log for this process, until this is closed or the process ends.

    Raises:
        RuntimeError: the process of an earlier driver still writes it.
    """
    path, held = log_path.with_suffix(".lock"), contextlib.ExitStack()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held.enter_context(FileLock(path, RELEASE_S, thread_local=False))
    except Timeout:
        raise RuntimeError(
            f"run {run_name!r}: the recorder of its last driver on this machine has not ended in "
            f"{RELEASE_S:g} s and still writes {log_path}; end that driver's job (ray job stop), "
            "then start again"
        ) from None
    except OSError:  # nothing can be written there: the log itself will warn
        pass
    return held


def _parsed(line: bytes) -> Record:
    """The record of a line, or `{"kind": "torn"}`: the file may have been edited."""
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        record: Record = json.loads(line)
        wanted = {"kind": str, "time_ms": int, **_FIELDS.get(record["kind"], {})}
        has_fields = all(isinstance(record[key], kind) for key, kind in wanted.items())
        if has_fields and all(
            isinstance(v, int | float) for v in record.get("values", {}).values()
        ):
            return record
    return {"kind": "torn"}
