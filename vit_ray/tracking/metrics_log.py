"""An append-only JSONL file that is the queue between training and MLflow.

Whatever is to be recorded is first a line on disk, so it survives an outage of MLflow and the end
of the process. Beside the file, `<name>.sent` says how far MLflow has it, and in which run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Final

from vit_ray.config.secrets import redacted

Record = dict[str, Any]

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
"""What MLflow gets; other kinds are for the recorder that opens the log again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """What MLflow has of a log."""

    offset: int = 0
    """Bytes up to which it has everything but files."""
    files_offset: int | None = None
    """Bytes up to which it has all files; None: as many as of the rest."""
    run_id: str | None = None
    """The run that has them."""


class MetricsLog:
    """The file; appending is safe from any thread and never raises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._has_warned = False
        self.num_lost = 0

    def append(self, record: Record) -> None:
        """Write one record without secrets; a full disk loses it with one warning, nothing else."""
        line = json.dumps(redacted(record)) + "\n"
        try:
            with self._lock:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "a+b") as file:
                    file.write(self._line_end(file) + line.encode())
        except OSError as error:
            self.num_lost += 1
            if not self._has_warned:
                self._has_warned = True
                logger.warning("metrics cannot be kept in %s: %s", self.path, error)

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

    def opened(self, key: str) -> list[Record] | None:
        """What was recorded since a recorder opened the log under this key; None: none ever did."""
        found: list[Record] | None = None
        is_ours = False
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                if line.startswith(_START):
                    is_ours = _parsed(line).get("opening") == key
                    found = [] if is_ours else found
                elif is_ours and found is not None:
                    found.append(_parsed(line))
        return found

    def end_is_sent(self, status: str) -> bool:
        """Whether the last opening has ended with this status, and MLflow has all of the log."""
        sent, last = self.sent(), None
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                if line.startswith((_START, _FINISH)):
                    last = _parsed(line)
        files_offset = sent.offset if sent.files_offset is None else sent.files_offset
        has_all = min(sent.offset, files_offset) >= self.size
        return has_all and last is not None and last.get("status") == status

    def first_start(self) -> Record | None:
        """The record that opened the file."""
        records = self.read(0)
        return next((r for r, _ in records if r["kind"] == "start"), None)

    @property
    def size(self) -> int:
        """Bytes written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sent(self) -> Sent:
        """How far MLflow has the file, as noted by `mark_sent`; of a file that is gone, nothing."""
        try:
            noted = json.loads(self._sent_path.read_text())
            sent = Sent(**{one.name: noted[one.name] for one in fields(Sent) if one.name in noted})
            return Sent(run_id=sent.run_id) if sent.offset > self.size else sent
        except (OSError, ValueError, TypeError):
            return Sent()

    def mark_sent(self, sent: Sent) -> None:
        """Note how far MLflow has the file; never raises, as sending twice does no harm."""
        half = self._sent_path.with_suffix(".half")
        try:
            half.write_text(json.dumps(asdict(sent)))
            os.replace(half, self._sent_path)
        except OSError as error:
            logger.debug("cannot note progress beside %s: %s", self.path, error)

    @property
    def _sent_path(self) -> Path:
        return self.path.with_name(self.path.name + ".sent")

    @staticmethod
    def _line_end(file: Any) -> bytes:
        """End the half line that a killed process may have left."""
        if file.seek(0, os.SEEK_END) == 0:
            return b""
        file.seek(-1, os.SEEK_END)
        return b"" if file.read(1) == b"\n" else b"\n"


def _parsed(line: bytes) -> Record:
    try:
        record = json.loads(line)
        return record if _is_whole(record) else {"kind": "torn"}
    except (ValueError, RecursionError):
        return {"kind": "torn"}


def _is_whole(record: Any) -> bool:
    """Whether a record has the fields of its kind; the file may have been edited."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return False
    fields = _FIELDS.get(record["kind"])
    if fields is None:
        return True
    if not isinstance(record.get("time_ms"), int):
        return False
    values = record.get("values", {})
    return all(isinstance(record.get(key), kind) for key, kind in fields.items()) and all(
        isinstance(value, (int, float)) for value in dict(values).values()
    )
