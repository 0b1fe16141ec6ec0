"""A data set of JFT-300M's size: from `python jobs/pretrain.py` to the plan of the first task.

    python benchmarks/data_manifest.py [--out FILE.md]

303 million rows in 1.2 million row groups of 256 in 75,000 shards, by a manifest alone: the images
are not there. The job itself is started, in a process of its own, with a recipe for it; where it
would connect to the cluster, the training stream of 512 ranks is planned instead, and the rows of
the first task are found. Times count from before the interpreter starts; the peak is the resident
memory of the whole process, libraries included. The bar: 5 s and 1 GiB, for a share of the images
too, and for a run that goes on in the middle of an epoch.
"""

import argparse
import itertools
import json
import os
import resource
import runpy
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from benchmarks.result import finish, header, machine, measure_apart, measure_rounds

ROWS, ROW_GROUPS, SHARDS = 303_000_000, 1_200_000, 75_000
GLOBAL_BATCH = 4096
WORLD_SIZE = 512
ROUNDS = 5
JOB = Path(__file__).parent.parent / "jobs" / "pretrain.py"
CASES: dict[str, tuple[float, list[str]]] = {
    "all images": (0.0, []),
    "all images, from 60 % of the first epoch on": (0.6, []),
    "data.fraction=0.03": (0.0, ["data.fraction=0.03"]),
    "data.held_out_fraction=0.001": (0.0, ["data.held_out_fraction=0.001"]),
}


def write(folder: Path) -> None:
    """A manifest with the sizes of JFT-300M and no shards behind it."""
    from vit_ray.data.format.manifest import RowGroupColumns, write_manifest
    from vit_ray.data.format.shard_files import ShardFile
    from vit_ray.storage import locate

    rows = np.full(ROW_GROUPS, ROWS // ROW_GROUPS)
    rows[: ROWS % ROW_GROUPS] += 1
    per_shard = ROW_GROUPS // SHARDS
    crc32 = np.random.default_rng(0).integers(0, 1 << 32, ROW_GROUPS)
    columns = RowGroupColumns(
        np.repeat(np.arange(SHARDS), per_shard), np.tile(np.arange(per_shard), SHARDS), rows,
        rows * 110_000, {}, crc32,
    )  # fmt: skip
    files = [
        ShardFile(f"part-{i:05d}-of-{SHARDS:05d}.parquet", ROWS // SHARDS, 440_000_000, i)
        for i in range(SHARDS)
    ]
    write_manifest(
        locate(str(folder)),
        columns,
        files=files,
        classes=[f"class {i}" for i in range(18_291)],
        max_labels=8,
        origin={"seed": 0},
    )


def write_recipe(folder: Path) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(
        f"""name: jft
output: {folder}/runs
data: {{train: {folder}}}
model: {{name: ViT-H/14}}
train: {{global_batch_size: {GLOBAL_BATCH}, micro_batch_size: 8, loss: sigmoid}}
workers: {{num_workers: {WORLD_SIZE}}}
optim: {{epochs: 14}}
"""
    )
    return file


def plan_first_task(prepared: Any, start_fraction: float) -> tuple[int, int]:
    """Tasks of the first segment, and rows of the first full task."""
    from vit_ray.data.order.partition import Partition, read_tasks
    from vit_ray.data.order.samples import rows_per_group
    from vit_ray.data.stream.batches import BatchReader, StreamJob

    spec = prepared.resolved.streams["train"]
    start = int(spec.num_images * start_fraction) // GLOBAL_BATCH * GLOBAL_BATCH
    stop = prepared.resolved.total_steps * GLOBAL_BATCH
    partition = Partition(WORLD_SIZE, GLOBAL_BATCH // WORLD_SIZE)
    counts = rows_per_group(spec.manifest, spec.rows)
    job = StreamJob(spec, partition, start, is_training=True, counts=counts)
    ranks, last = range(WORLD_SIZE), (stop - start) // WORLD_SIZE
    planned = read_tasks(partition, 0, last, job.shape, ranks)
    tasks = list(itertools.islice(planned, 8 * WORLD_SIZE))
    reader = BatchReader(job)
    rows = sum(
        len(reader.plan.rows_at(start + partition.offsets(*block)).samples)
        for block in tasks[-1].blocks()
    )
    return len(tasks), rows


def walk(start_fraction: float) -> None:
    """Be `jobs/pretrain.py`, up to where it would connect; the rest of argv is the job's."""
    from vit_ray.launch import run

    def stop_here(prepared: Any, *_: Any) -> NoReturn:
        prepared_s = time.time()
        tasks, rows = plan_first_task(prepared, start_fraction)
        begun_s = float(os.environ["BEGUN_S"])
        figures = {
            "prepare_s": prepared_s - begun_s,
            "plan_s": time.time() - prepared_s,
            "cpu_s": time.process_time(),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "tasks": tasks,
            "rows": rows,
        }
        print(json.dumps(figures), flush=True)
        os._exit(0)

    run._run = stop_here  # type: ignore[assignment]
    runpy.run_path(str(JOB), run_name="__main__")


def run_apart(recipe: Path, case: str) -> dict[str, float]:
    start_fraction, overrides = CASES[case]
    command = [sys.executable, __file__, "--walk", str(start_fraction), str(recipe), *overrides]
    return measure_apart(command, BEGUN_S=str(time.time()))


def main() -> None:
    if sys.argv[1:2] == ["--walk"]:
        start_fraction = float(sys.argv[2])
        sys.argv = [str(JOB), *sys.argv[3:]]
        walk(start_fraction)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder)
        recipe = write_recipe(folder)
        size_mib = (folder / "manifest.parquet").stat().st_size / 2**20
        runs = measure_rounds(CASES, ROUNDS, partial(run_apart, recipe))
    lines = [
        f"# data_manifest: {machine()}\n",
        f"`python benchmarks/data_manifest.py`: {ROWS:,} rows, {ROW_GROUPS:,} row groups, "
        f"{SHARDS:,} shards; the manifest is {size_mib:.1f} MiB. `python jobs/pretrain.py`, from "
        f"before the interpreter starts to the rows of the first task of {WORLD_SIZE} ranks. "
        f"Median of {ROUNDS} (best in brackets); cases take turns.\n",
        *header(
            "run | to the checked recipe, s | to the first task, s (bar 5) | CPU, s | "
            "peak RSS, MiB (bar 1024)"
        ),
    ]
    for case, figures in runs.items():
        prepare = statistics.median(f["prepare_s"] for f in figures)
        totals = [f["prepare_s"] + f["plan_s"] for f in figures]
        cpu = statistics.median(f["cpu_s"] for f in figures)
        peak = statistics.median(f["peak_mib"] for f in figures)
        lines.append(
            f"| {case} | {prepare:.2f} | {statistics.median(totals):.2f} ({min(totals):.2f}) | "
            f"{cpu:.2f} | {peak:.0f} |"
        )
    finish("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
