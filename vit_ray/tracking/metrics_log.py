"""The record of a run on disk: an append-only JSONL file, the queue between training and MLflow.

Whatever is to be recorded is first a line on disk, so it survives an outage of MLflow and the end
of the process. A second file, `<name>.sent`, notes how far MLflow has it, and in which run.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import IO, Any, Final, Literal

from vit_ray.config.secrets import redacted
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.outcomes import EventKind

Record = dict[str, Any]
Status = Literal["FINISHED", "FAILED", "KILLED"]

RUN_FOLDER: Final = "vit_ray.run_folder"
"""Tag of the folder that has the run's checkpoints: two outputs may have runs of one name."""
STARTUP: Final = "startup/first_step_s"
"""Metric that counts once in each opening: later attempts do not start the run."""
FILES: Final = ("text", "artifact", "model")
"""Kinds of records that become files of the run."""
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "start": {
        "spool_id": str,
        "run_name": str,
        "experiment": str,
        "parent_run_id": (str, NoneType),
        "params": dict,
        "tags": dict,
        "resume_step": (int, NoneType),
    },
    "metrics": {"step": int, "values": dict},
    "tag": {"key": str, "value": str},
    "text": {"name": str, "text": str},
    "artifact": {"path": str, "folder": str},
    "model": {
        "path": str,
        "name": str,
        "step": int,
        "params": dict,
        "register_as": (str, NoneType),
    },
    "finish": {"status": str},
    "event": {"event": dict},
    "wish": {"what": str, "reason": str},
}
_START: Final = b'{"kind": "start"'
_FINISH: Final = b'{"kind": "finish"'
SENT_KINDS: Final = frozenset(_FIELDS) - {"event", "wish"}
"""What MLflow gets; other kinds are for the process that opens the log again."""
RELEASE_S = 20.0
"""How long the process of a driver that was killed may take to release its logs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOpening:
    """How a run's record is opened."""

    config: TrackingConfig
    run_name: str
    log_path: Path
    """Local file; the log of an earlier attempt is continued, with its run. It is of one run."""
    run_id: str | None = None
    """MLflow run to continue, such as one kept in a checkpoint."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Recipe; a key that a continued run has keeps its old value, and the new one is shown in the
    tag `vit_ray.changed_params`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    resume_step: int | None = None
    """Step of the checkpoint that training resumes from."""
    parent: RunOpening | None = None
    """Of the sweep or study that the run is part of."""
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Inputs: name, digest, source, context and profile of each."""
    measured_on: str = "eval"
    """Group of what workers call `eval/...`: `dev` where it is a split to choose on."""
    awaited_metric: str | None = None
    """Listed first among the run's metrics: MLflow's compare view draws the first one."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """Identifies this opening of the log, also after its process has died and was restarted."""


@dataclass(frozen=True)
class Sent:
    """What MLflow has of a log."""

    offset: int = 0
    """Bytes up to which it has everything but files."""
    files_offset: int = 0
    """Bytes up to which it has all files."""
    run_id: str | None = None
    """The run that has them."""


class MetricsLog:
    """The file; writing a record is safe from any thread and never raises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_record: Callable[[Record], None] | None = None
        """Called with each record, also where the disk is full."""
        self._lock = threading.Lock()
        self._has_warned = False
        self._sent_path = path.with_name(path.name + ".sent")
        self._sent = self.read_sent()

    def open(self, opening: RunOpening) -> list[Record]:
        """The start record of an opening, written unless it is there, and what followed it.

        The log of another run is set aside, named by its run id, and can be replayed.
        """
        run_id = self.read_sent().run_id
        if opening.run_id and run_id and opening.run_id != run_id:
            for path in (self.path, self._sent_path):
                if path.exists():
                    path.rename(path.with_name(f"{run_id}.{path.name}"))
            self._sent = Sent()
        if earlier := self.opened(opening.key):
            return earlier
        start = self._append(
            "start",
            spool_id=uuid.uuid4().hex,
            run_name=opening.run_name,
            experiment=opening.config.experiment,
            parent_run_id=opening.config.parent_run_id,
            params={key: str(value) for key, value in opening.params.items()},
            tags={key: str(value) for key, value in opening.tags.items()},
            resume_step=opening.resume_step,
            datasets=opening.datasets,
            awaited_metric=opening.awaited_metric,
            measured_on=opening.measured_on,
            opening=opening.key,
        )
        return [start]

    def metrics(self, step: int, values: Mapping[str, float], *, is_again: bool = False) -> None:
        """Values at a step; a value that is not finite counts up `<key>_nonfinite`.

        Args:
            is_again: the later value of a step counts, as of the results of a sweep that was
                started again; else the first one does.
        """
        plain = {key: float(value) for key, value in values.items()}
        again = {"again": True} if is_again else {}
        self._append("metrics", step=int(step), values=plain, **again)

    def event(self, kind: EventKind, text: str, step: int) -> None:
        """An event of the run's history."""
        event = {"kind": kind, "text": text, "step": step, "time_s": time.time()}
        self._append("event", event=event)

    def note(self, kind: str, values: Mapping[str, Any]) -> None:
        """What MLflow does not get, such as that the run is to stop, and must not be lost."""
        self._append(kind, **values)

    def tag(self, key: str, value: str) -> None:
        """A tag of the run."""
        self._append("tag", key=key, value=str(value))

    def text(self, name: str, text: str) -> None:
        """A text to keep with the run as a file, such as `recipe.yaml`."""
        self._append("text", name=name, text=text)

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """A file or folder of the run's folder, which must stay where it is until it is sent."""
        self._append("artifact", path=str(Path(path).resolve()), folder=folder)

    def content(self, name: str, content: bytes, folder: str) -> None:
        """A file to keep with the run by its content, from a worker on any node.

        Raises:
            OSError: it cannot be written next to the log.
        """
        path = self.path.parent / name
        path.write_bytes(content)
        self.artifact(path, folder)

    def model(
        self,
        files: Mapping[str, str],
        name: str,
        step: int,
        params: Mapping[str, str],
        register_as: str | None,
    ) -> None:
        """A model of MLflow by the texts of its files; without one where they cannot be written.

        Args:
            step: at which the run had the model.
            params: shown with it.
            register_as: registered model that gets it as a version.
        """
        folder = self.path.parent / f"mlflow-model-{step:08d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(text)
        except OSError as error:
            return logger.warning("%s: no model is logged: %s", self.path, error)
        self._append(
            "model",
            path=str(folder.resolve()),
            name=name,
            step=step,
            params=dict(params),
            register_as=register_as,
        )

    def finish(self, status: Status) -> None:
        """The run has ended."""
        self._append("finish", status=status)

    def _append(self, kind: str, **values: Any) -> Record:
        """Write one record without secrets; a full disk loses it with one warning, nothing else."""
        record = {"kind": kind, **values, "time_ms": round(time.time() * 1000)}
        line = json.dumps(redacted(record)) + "\n"
        try:
            with self._lock:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "a+b") as file:
                    file.write(_line_end(file) + line.encode())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("metrics cannot be kept in %s: %s", self.path, error)
        if self.on_record is not None:
            self.on_record(record)
        return record

    def read(self, offset: int, max_bytes: int = 2**20) -> list[tuple[Record, int]]:
        """Whole records from a byte offset on, each with the offset behind it."""
        if self.size <= offset:
            return []
        with open(self.path, "rb") as file:
            file.seek(offset)
            text = file.read(max_bytes)
            if b"\n" not in text:  # a record longer than that, such as a text artifact
                text += file.readline()
        records = []
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            records.append((_parsed(line), offset))
        return records

    def opened(self, key: str) -> list[Record]:
        """The start record of an opening and what was recorded since; empty: there is none."""
        found: list[Record] = []
        is_ours = False
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                if line.startswith(_START):
                    is_ours = _parsed(line).get("opening") == key
                if is_ours:
                    found.append(_parsed(line))
        return found

    def end_is_sent(self, status: Status) -> bool:
        """Whether the last opening has ended with this status, and MLflow has all of the log."""
        sent, last = self.read_sent(), None
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                if line.startswith((_START, _FINISH)):
                    last = _parsed(line)
        has_all = min(sent.offset, sent.files_offset) >= self.size
        return has_all and last is not None and last.get("status") == status

    def first_start(self) -> Record | None:
        """The record that opened the file."""
        return next((r for r, _ in self.read(0) if r["kind"] == "start"), None)

    @property
    def size(self) -> int:
        """Bytes written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read_sent(self) -> Sent:
        """How far MLflow has the file, as noted by `mark_sent`; of a file that is gone, nothing."""
        try:
            noted = json.loads(self._sent_path.read_text())
            known = {one.name: noted[one.name] for one in fields(Sent) if one.name in noted}
            if known.get("files_offset") is None:  # as far as the rest
                known["files_offset"] = known.get("offset", 0)
            sent = Sent(**known)
            return Sent(run_id=sent.run_id) if sent.offset > self.size else sent
        except (OSError, ValueError, TypeError):
            return Sent()

    def mark_sent(self, **changes: Any) -> None:
        """Note fields of `Sent` on disk; never raises, as sending twice does no harm."""
        half = self._sent_path.with_suffix(".half")
        try:
            with self._lock:
                self._sent = replace(self._sent, **changes)
                half.write_text(json.dumps(asdict(self._sent)))
                os.replace(half, self._sent_path)
        except OSError as error:
            logger.debug("cannot note progress beside %s: %s", self.path, error)


def lock_log(log_path: Path, run_name: str) -> IO[str]:
    """The run's log for this process alone, until the file is closed or the process ends.

    Raises:
        RuntimeError: the process of an earlier driver still writes it.
    """
    path = log_path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115 - held until the run has ended
    except OSError:  # nothing can be written there: the log itself will warn
        return io.StringIO()
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"run {run_name!r}: the recorder of its last driver on this machine "
                    f"has not ended in {RELEASE_S:g} s and still writes {log_path}; end "
                    "that driver's job (ray job stop), then start again"
                ) from None
            time.sleep(0.5)


def _line_end(file: Any) -> bytes:
    """Ends the half line that a killed process may have left."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _parsed(line: bytes) -> Record:
    """The record of a line, or `{"kind": "torn"}`: the file may have been edited."""
    torn: Record = {"kind": "torn"}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return torn
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return torn
    expected = _FIELDS.get(record["kind"])
    if expected is None:
        return record
    is_whole = (
        isinstance(record.get("time_ms"), int)
        and all(isinstance(record.get(key), kind) for key, kind in expected.items())
        and all(isinstance(one, (int, float)) for one in dict(record.get("values", {})).values())
    )
    return record if is_whole else torn
