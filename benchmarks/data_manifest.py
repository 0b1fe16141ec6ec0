"""A manifest of JFT-300M's size: opening it, planning an epoch, and resuming in the middle of one.

    python benchmarks/data_manifest.py [--out FILE.md]

303 million rows in 1.2 million row groups of 256 in 75,000 shards. Each step runs in a process of
its own; the peak is the whole process's resident memory, interpreter and libraries included. The
bar: 10 s and 1 GiB, and resuming at 60 % no slower than starting.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, ROW_GROUPS, SHARDS = 303_000_000, 1_200_000, 75_000
GLOBAL_BATCH = 4096
WORLD_SIZE = 512


def write(folder: Path) -> None:
    """A manifest with the sizes of JFT-300M and no shards behind it."""
    from vit_ray.data.format.manifest import RowGroupColumns, ShardFile, write_manifest
    from vit_ray.storage import locate

    rows = np.full(ROW_GROUPS, ROWS // ROW_GROUPS)
    rows[: ROWS % ROW_GROUPS] += 1
    per_shard = ROW_GROUPS // SHARDS
    columns = RowGroupColumns(
        np.repeat(np.arange(SHARDS), per_shard), np.tile(np.arange(per_shard), SHARDS), rows,
        rows * 110_000, {},
    )  # fmt: skip
    files = [
        ShardFile(f"part-{i:05d}-of-{SHARDS:05d}.parquet", ROWS // SHARDS, 440_000_000)
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


def plan(folder: Path, share: float) -> dict[str, float]:
    """Open the manifest, plan the epoch, and locate the first global batch from some share on."""
    from vit_ray.data import open_dataset
    from vit_ray.data.order.partition import Partition, plan_segments, read_tasks
    from vit_ray.data.order.shuffle import Order

    begun = time.perf_counter()
    manifest = open_dataset(str(folder))
    opened = time.perf_counter()
    start = int(manifest.num_images * share) // GLOBAL_BATCH * GLOBAL_BATCH
    partition = Partition(WORLD_SIZE, GLOBAL_BATCH // WORLD_SIZE)
    rows_per_rank = (
        (manifest.num_images * 14 - start) // GLOBAL_BATCH * partition.batch_size_per_rank
    )
    bounds = plan_segments(
        partition, rows_per_rank, task_rows=1024, first_tasks=512, later_tasks=8192
    )
    read_tasks(partition, *bounds[0], block_rows=128, task_rows=1024)
    Order(manifest.rows, seed=0).samples_at(start, start + GLOBAL_BATCH)
    planned = time.perf_counter()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "open_s": opened - begun,
        "plan_s": planned - opened,
        "peak_mib": peak_kib / 1024,
    }


def run_apart(folder: Path, share: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--folder", str(folder), "--share", str(share)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--share", type=float)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.share is not None:
        print(json.dumps(plan(args.folder, args.share)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder)
        size_mib = (folder / "manifest.parquet").stat().st_size / 2**20
        runs = {share: [run_apart(folder, share) for _ in range(3)] for share in (0.0, 0.6)}
    lines = [
        f"# data_manifest: {time.strftime('%Y-%m-%d')}, {platform.machine()}\n",
        f"`python benchmarks/data_manifest.py`: {ROWS:,} rows, {ROW_GROUPS:,} row groups, "
        f"{SHARDS:,} shards; the manifest is {size_mib:.1f} MiB. Best of 3.\n",
        "| start at | open, s | plan, s | together, s (bar 10) | peak RSS, MiB (bar 1024) |",
        "|---|---|---|---|---|",
    ]
    for share, figures in runs.items():
        best = min(figures, key=lambda f: f["open_s"] + f["plan_s"])
        total = best["open_s"] + best["plan_s"]
        lines.append(
            f"| {share:.0%} of the epoch | {best['open_s']:.2f} | {best['plan_s']:.2f} | "
            f"{total:.2f} | {best['peak_mib']:.0f} |"
        )
    report = "\n".join(lines) + "\n"
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
