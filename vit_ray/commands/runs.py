"""The runs of an output folder: state, progress and accuracy of each."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vit_ray.checkpoints.checkpoint_format import COMMIT
from vit_ray.checkpoints.run_checkpoints import (
    has_had_checkpoints,
    list_checkpoints,
    newest_checkpoint,
)
from vit_ray.lock import held_by
from vit_ray.measure.best_evaluation import with_best
from vit_ray.metric_names import (
    DEV_AVERAGED_TOP1,
    DEV_GROUP,
    DEV_TOP1,
    EVAL_AVERAGED_TOP1,
    EVAL_TOP1,
)
from vit_ray.storage import Location, locate
from vit_ray.tracking.metrics_log import MetricsLog, metrics_log_path

_ACCURACIES = (EVAL_AVERAGED_TOP1, EVAL_TOP1, DEV_AVERAGED_TOP1, DEV_TOP1)
_ENDS = {"FINISHED": "finished", "KILLED": "stopped", "FAILED": "failed"}


@dataclass(frozen=True)
class RunRow:
    """One run, as its folder shows it."""

    name: str
    state: str
    """`running`, with where; else how its last driver ended: `finished`, `stopped`, `failed`,
    `interrupted` if it died, `not running` if that is not known here."""
    step: int
    """Step of its newest checkpoint; 0 without one."""
    top1: float | None
    """Accuracy of its last evaluation, or of the best if the run keeps that; averaged weights
    first."""
    measured_on: str | None
    """`test`, or `dev` for images held out of the training set; None without an accuracy, and where
    it is not known here."""
    age_s: float | None
    """Seconds since its newest checkpoint was committed."""
    run_id: str | None


def list_runs(output: str) -> list[RunRow]:
    """The runs in a folder or bucket, by name; folders without a run are left out.

    Raises:
        ValueError: there is no such folder, or a file in its place.
        OSError: it cannot be read.
    """
    folder = locate(output)
    if not folder.exists():
        raise ValueError(f"{output!r}: no such folder; give the `output` of your recipes")
    folder.refuse_file_in_its_place("OUTPUT")
    rows = (_row(folder.child(name)) for name in sorted(folder.list_folders()))
    return [row for row in rows if row is not None]


def _row(folder: Location) -> RunRow | None:
    name, log = folder.uri.rpartition("/")[2], metrics_log_path(folder.uri)
    if not log.exists() and not has_had_checkpoints(folder):
        return None
    owner = held_by(folder)
    recorded = [] if owner else MetricsLog(log).opened()  # a long log takes seconds
    if owner:
        state = f"running: {owner}"
    elif not log.exists():  # its last driver ran on another machine
        state = "not running"
    else:
        ends = [one["status"] for one in recorded if one["kind"] == "finish"]
        state = _ENDS.get(ends[-1], ends[-1]) if ends else "interrupted"
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        if list_checkpoints(folder):
            state += "; none of its checkpoints is complete"
            return RunRow(name, state, 0, None, None, None, None)
        metrics: dict[str, float] = {}  # an evaluation has only a log
        for one in recorded:
            metrics |= one["values"] if one["kind"] == "metrics" else {}
        return RunRow(name, state, 0, *_accuracy(metrics, log), None, None)
    position = checkpoint.position
    if position.progress.ended and not owner:
        state = f"finished: {position.progress.ended}"
    accuracy = _accuracy(with_best(position.progress.metrics), log)
    committed = checkpoint.folder.child(COMMIT).info().mtime
    age_s = None if committed is None else max(0.0, time.time() - committed.timestamp())
    return RunRow(name, state, position.step, *accuracy, age_s, position.tracking_run_id)


def _accuracy(metrics: Mapping[str, float], log: Path) -> tuple[float | None, str | None]:
    """Top-1 and what it is of: a run calls both sets `eval/`, and only its log says which it is.

    A resumed run may have another set than before.
    """
    key = next((key for key in _ACCURACIES if key in metrics), None)
    if key is None:
        return None, None
    if key.startswith(DEV_GROUP):
        return metrics[key], "dev"
    start = MetricsLog(log).last_start()
    if start is None or "measured_on" not in start:  # an early log does not say
        return metrics[key], None
    return metrics[key], "dev" if start["measured_on"] == "dev" else "test"


def print_runs(output: str, as_json: bool) -> int:
    """Print the runs as a table, or as one JSON list."""
    rows = list_runs(output)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    if not rows:
        print(f"no runs in {output}; give the `output` of your recipes")
        return 0
    table = Table()
    for title in ("run", "state", "step", "top-1", "measured on", "newest checkpoint"):
        table.add_column(title, overflow="fold")
    for row in rows:
        age = "none"
        if row.age_s is not None:
            sizes = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
            size, unit = next((one for one in sizes if row.age_s >= one[0]), sizes[-1])
            age = f"{row.age_s / size:.0f} {unit} ago"
        top1 = "" if row.top1 is None else f"{row.top1:.2%}"
        step = "" if row.age_s is None else str(row.step)
        table.add_row(row.name, row.state, step, top1, row.measured_on or "", age)
    Console().print(table)
    return 0
