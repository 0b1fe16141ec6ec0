"""The report page over 200 runs of 100,000 metric points each, from SQLite and from a server.

    python benchmarks/report.py [--shape SHAPE] [--runs N] [--store FILE.db] [--out FILE.md]

The store is written by SQL, as recorders would fill it: ten metrics of every tenth step or so and
a few of evaluations. A page is made by a process of its own; times count from before the
interpreter starts, the peak is the resident memory of that process, libraries and the scripts that
draw the figures included. The bar: 20 s and 1 GiB. The peer reads the same curves by MLflow's
client, `get_metric_history`, and draws nothing. The server's own memory is not counted.

Each run keeps the file of its loss curve, as the recorder writes it at the end of a long run;
"server alone" is a page that samples every history. What the file costs a run is measured with a
log of 100,000 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.result import finish, header, machine, measure_apart, measure_rounds

RUNS = 200
POINTS = 100_000
EVALUATIONS = 200
ROUNDS = 3
EVERY_STEP = (
    "train/loss", "train/lr", "train/grad_norm", "train/images_per_s", "perf/mfu",
    "perf/step_ms_median", "perf/memory_gib", "data/wait_fraction",
)  # fmt: skip
EVALUATED = ("eval/loss", "eval/top1", "few_shot/5_shot_top1")
MODELS = ("ViT-Ti/16", "ViT-S/16", "ViT-B/16", "ViT-L/16", "R50x1", "R101x1", "R50x1+ViT-B/32")
STARTED_MS = 1_763_000_000_000
SHAPES = {
    "spread over 11 metrics": (POINTS - len(EVALUATED) * EVALUATIONS) // len(EVERY_STEP),
    "all of train/loss": 0,
}
"""Points of each metric of `EVERY_STEP`; 0 = `train/loss` has all there are."""
_POINTS = """
WITH RECURSIVE steps(step) AS (SELECT 0 UNION ALL SELECT step + 1 FROM steps WHERE step + 1 < ?)
INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan)
SELECT ?, 2.3 / (1 + step * 1e-3) + (step * 7919 % 1000) * 1e-4, ? + step, run_uuid, step, 0
FROM steps, (SELECT run_uuid FROM runs ORDER BY run_uuid) ORDER BY step, run_uuid
"""
_LAST = """
INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid)
SELECT ?, ?, ?, ?, 0, ?
"""


def loss_at(step: int) -> float:
    """As `_POINTS` has it."""
    return 2.3 / (1 + step * 1e-3) + (step * 7919 % 1000) * 1e-4


def files_of(path: Path) -> Path:
    """Folder of the files that the server of a store sends."""
    return path.with_suffix(".files")


def write_store(path: Path, points: int, num_runs: int) -> str:
    """A SQLite store of a study; returns its address."""
    from mlflow.entities import Param, RunTag

    from vit_ray import kept_curve
    from vit_ray.config.recorded_recipe import stored_tag
    from vit_ray.tracking.mlflow_client import open_client

    counts = dict.fromkeys(EVERY_STEP, points) if points else {"train/loss": POINTS}
    counts |= dict.fromkeys(EVALUATED, EVALUATIONS) if points else {}
    file = kept_curve.text_of({step: loss_at(step) for step in range(counts["train/loss"])})
    uri = f"sqlite:///{path}"
    client = open_client(uri)
    experiment = client.create_experiment("benchmark", artifact_location="mlflow-artifacts:/b")
    run_ids = []
    for k in range(num_runs):
        model = MODELS[k % len(MODELS)]
        tags = {"vit_ray.kind": "study_cell", "vit_ray.study_label": model, "data.train": "data/x"}
        tags[stored_tag(kept_curve.TAG)] = str(counts["train/loss"] - 1)
        params = {"model.name": model, "optim.epochs": str(k % 5 + 1), "seed": str(k)}
        run = client.create_run(experiment, STARTED_MS + k, run_name=f"cell-{k}")
        client.log_batch(
            run.info.run_id,
            params=[Param(*pair) for pair in params.items()],
            tags=[RunTag(*pair) for pair in tags.items()],
        )
        place = files_of(path) / "b" / run.info.run_id / "artifacts" / kept_curve.FILE
        place.parent.mkdir(parents=True)
        place.write_text(file)
        client.set_terminated(run.info.run_id)
        run_ids.append(run.info.run_id)
    with contextlib.closing(sqlite3.connect(path)) as store:
        _fill(store, run_ids, counts)
    return uri


def _fill(store: sqlite3.Connection, run_ids: list[str], counts: dict[str, int]) -> None:
    found = store.execute(
        "SELECT name, sql FROM sqlite_master WHERE tbl_name = 'metrics' AND type = 'index'"
    )
    indices = {name: sql for name, sql in found if sql}
    store.execute("PRAGMA synchronous = OFF")
    store.execute("PRAGMA journal_mode = OFF")
    for name in indices:
        store.execute(f'DROP INDEX "{name}"')
    for key, count in sorted(counts.items()):
        store.execute(_POINTS, (count, key, STARTED_MS))
        for k, run_id in enumerate(run_ids):
            store.execute(_LAST, (key, 0.5 + k / 1000, STARTED_MS + count, count - 1, run_id))
    for k, run_id in enumerate(run_ids):
        last = {"study/exaflops": 10 ** (k / 60), "study/train_images": 1e6, "perf/mfu": 0.4}
        last |= {"study/forward_gmacs": 1.0 + k, "cost/core_days": 1.0 + k}
        for key in last.keys() - counts.keys():
            store.execute(_LAST, (key, last[key], STARTED_MS, 0, run_id))
    for sql in indices.values():
        store.execute(sql)
    store.commit()


def make_page(uri: str, folder: str) -> int:
    """Runs in a process of its own; bytes of the page."""
    from vit_ray.report.page import write_report

    return write_report(uri, "benchmark", Path(folder) / "report.html").page.stat().st_size


def make_page_of_histories(uri: str, folder: str) -> int:
    """As `make_page`, of runs that keep no file of their loss curve."""
    from vit_ray.report.runs import RecordedRun

    RecordedRun.keeps_curve = property(lambda _: False)
    return make_page(uri, folder)


def read_by_client(uri: str, _: str) -> int:
    """The peer: points of the same curves."""
    from mlflow.tracking import MlflowClient

    from vit_ray.report.figures.chart_list import CURVES

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("benchmark")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=RUNS)
    return sum(
        len(client.get_metric_history(run.info.run_id, key))
        for run in runs
        for key in CURVES
        if key in run.data.metrics
    )


WAYS = {"page": make_page, "page of histories": make_page_of_histories, "peer": read_by_client}


def measure_end(folder: Path) -> str:
    """What the file costs a long run at its end, in one line."""
    from vit_ray import kept_curve
    from vit_ray.tracking.metrics_log import MetricsLog

    path = folder / "metrics.jsonl"
    log = MetricsLog(path)
    with open(path, "w") as file:
        for step in range(POINTS):
            values = dict.fromkeys(EVERY_STEP, 0.1234567890123456) | {"train/loss": loss_at(step)}
            record = {"kind": "metrics", "step": step, "values": values, "time_ms": STARTED_MS}
            file.write(json.dumps(record) + "\n")
    size, taken_s = log.size, []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        log.end("FINISHED")
        taken_s.append(time.perf_counter() - begun_s)
    (text, _), *_ = log.read(size)
    assert text["name"] == kept_curve.FILE
    return (
        f"The end of a run with a log of {POINTS:,} steps ({size / 2**20:.0f} MiB): "
        f"{statistics.median(taken_s):.2f} s (best {min(taken_s):.2f}) to make the file of "
        f"{len(text['text']) / 1000:.1f} kB."
    )


def run_apart(way: str, uri: str, folder: Path) -> dict[str, float]:
    """Seconds, MiB and what came of it, of a process of its own."""
    command = [sys.executable, __file__, "--run", way, uri, str(folder)]
    begun_s = time.time()
    figures = measure_apart(command, PYTHONPATH=str(Path(__file__).parents[1]))
    return {**figures, "s": time.time() - begun_s}


@contextlib.contextmanager
def serving(uri: str, files: Path) -> Iterator[str]:
    """Address of an MLflow server of the store, inside the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    server = subprocess.Popen(
        [*command, "--port", str(port), "--workers", "2", "--artifacts-destination", str(files)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health"),
            ):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 9)  # its workers, too; it has only been read
        server.wait()


def measure(folder: Path, shape: str, points: int, kept: Path | None, num_runs: int) -> list[str]:
    """Rows of the table for a store of one shape."""
    path = kept or folder / f"{points}.db"
    uri = f"sqlite:///{path}" if path.exists() else write_store(path, points, num_runs)
    size_gib = path.stat().st_size / 2**30
    lines = []
    with serving(uri, files_of(path)) as address:
        ways = {
            "page from SQLite": ("page", uri),
            "page from server": ("page", address),
            "page from server alone": ("page of histories", address),
        }
        figures = measure_rounds(ways, ROUNDS, lambda one: run_apart(*ways[one], folder))
        figures["peer: get_metric_history, SQLite"] = [run_apart("peer", uri, folder)]
    for what, rounds in figures.items():
        seconds = [one["s"] for one in rounds]
        peak = max(one["peak_mib"] for one in rounds)
        lines.append(
            f"| {shape} ({size_gib:.1f} GiB) | {what} | {statistics.median(seconds):.1f} "
            f"({min(seconds):.1f}) | {peak:.0f} | {rounds[0]['result'] / 1e6:.2f} |"
        )
    return lines


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        result = WAYS[sys.argv[2]](sys.argv[3], sys.argv[4])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"result": result, "peak_mib": peak}))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, help="kept here, and used if it is there")
    parser.add_argument("--shape", choices=SHAPES, help="this one alone")
    parser.add_argument("--runs", type=int, default=RUNS, help="default %(default)s")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        f"# report: {machine()}\n",
        f"`python benchmarks/report.py`: {args.runs} runs of {POINTS:,} metric points each. "
        f"Seconds from before the interpreter starts, median of {ROUNDS} (best in brackets), "
        "the peer once; "
        "peak resident memory of the process.\n",
        *header(
            "points of a run (store) | what | s (bar 20) | peak RSS, MiB (bar 1024) | page, MB, or "
            "million points read"
        ),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for shape, points in SHAPES.items():
            if args.shape in (None, shape):
                lines += measure(Path(scratch), shape, points, args.store, args.runs)
        lines.append(f"\n{measure_end(Path(scratch))}")
    finish("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
