"""Conversion's index: drawing the lists of all shards out of it, at growing numbers of images.

    python benchmarks/data_index.py [--images 5 20 100] [--out FILE.md]

Made up: paths of 60 bytes, no images. Each size runs in a process of its own: the search for
repeated keys, then the lists, as a conversion makes them from the index of its units. CPU seconds
(so that what else runs on the machine counts little) and peak memory per million images tell
whether the work grows with the images only. The peer is pyarrow's `Table.take` of a shard's rows
from the whole index, memory-mapped, for a few shards; its time for all is reckoned from them. It is
left out (nan) above --peer-up-to, where its index would fill the disk.
"""

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vit_ray.data.prepare.convert.shard_lists import ShardRows, shuffled_rows, write_shard_lists
from vit_ray.data.prepare.sources.entries import INDEX_SCHEMA, WHOLE_FILE
from vit_ray.data.prepare.sources.source_index import (
    ENTRIES_AT_A_TIME,
    SourceIndex,
    find_repeated_keys,
)
from vit_ray.storage import Location, locate

ROWS_PER_UNIT = 1 << 20
ROWS_PER_SHARD = 2560
"""Images of 105 KB in a shard of 256 MiB."""
PEER_SHARDS = 5


def entries(first: int, count: int) -> pa.Table:
    """Rows of an index whose paths have 60 bytes."""
    rows = np.arange(first, first + count)
    numbers = pc.utf8_lpad(pa.array(rows).cast(pa.string()), 12, "0")
    classes = pa.array([f"class_{i:05d}" for i in range(997)]).take(rows % 997)
    keys = pc.binary_join_element_wise(classes, "image" * 6, numbers, "/")
    columns = {
        "path": pc.binary_join_element_wise("", "img", keys, "/"),
        "offset": np.full(count, WHOLE_FILE, np.int64),
        "length": np.full(count, 105_000, np.int64),
        "key": keys,
        "labels": pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), classes),
    }
    arrays = [pa.array(columns.get(f.name, pa.nulls(count))).cast(f.type) for f in INDEX_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def write_parts(folder: Location, count: int) -> list[Location]:
    """Indexes of units; all are of the same content but for the row numbers in their keys."""
    parts = []
    for first in range(0, count, ROWS_PER_UNIT):
        part = folder.child(f"index-{first:012d}.parquet")
        table = entries(first, min(ROWS_PER_UNIT, count - first))
        with part.atomic_output() as target:
            pq.write_table(table, target.path, row_group_size=ENTRIES_AT_A_TIME, compression="zstd")
        parts.append(part)
    return parts


def measure(count: int, scratch: Path) -> dict[str, float]:
    """CPU seconds of both steps, and peak memory of the process."""
    staging = locate(str(scratch / "staging"))
    subprocess.run([sys.executable, __file__, "--write", str(count), str(scratch)], check=True)
    parts = [staging.child(i.base_name) for i in staging.list_files()]
    rows = [pq.read_metadata(part.path).num_rows for part in parts]
    begun, begun_s = time.process_time(), time.monotonic()
    repeated = find_repeated_keys(parts, count, scratch)
    searched = time.process_time()
    index = SourceIndex(parts, rows, [], False, "", 0, 0, repeated)
    shards = ShardRows(count, -(-count // ROWS_PER_SHARD), 64)
    write_shard_lists(index, shards, 0, staging, scratch)
    listed = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "search": searched - begun,
        "lists": listed - searched,
        "wall": time.monotonic() - begun_s,
        "peak": peak,
    }


def measure_peer(count: int, scratch: Path) -> dict[str, float]:
    """CPU seconds that `Table.take` needs for all shards, reckoned from a few."""
    file = str(scratch / "index.arrow")
    with pa.ipc.new_file(file, INDEX_SCHEMA) as output:
        for part in sorted((scratch / "staging").glob("index-*")):
            for batch in pq.ParquetFile(part).iter_batches(ENTRIES_AT_A_TIME):
                output.write_batch(batch.cast(INDEX_SCHEMA))
    table = pa.ipc.open_file(pa.memory_map(file)).read_all()
    shards = -(-count // ROWS_PER_SHARD)
    begun = time.process_time()
    for shard in range(PEER_SHARDS):
        places = np.arange(ROWS_PER_SHARD, dtype=np.int64) + shard * ROWS_PER_SHARD
        table.take(pa.array(shuffled_rows(count, 0, places)))
    seconds = (time.process_time() - begun) / PEER_SHARDS * shards
    return {"peer": seconds, "peer_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def in_process(step: str, count: int, scratch: Path) -> dict[str, float]:
    command = [sys.executable, __file__, f"--{step}", str(count), str(scratch)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Every size, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=float, nargs="+", default=[5, 20, 100], help="millions")
    parser.add_argument("--peer-up-to", type=float, default=20, help="millions")
    parser.add_argument("--out", type=Path)
    for step in ("write", "ours", "peer"):
        parser.add_argument(f"--{step}", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_parts(locate(f"{args.write[1]}/staging"), int(args.write[0]))
        return
    for step, work in (("ours", measure), ("peer", measure_peer)):
        if given := getattr(args, step):
            print(json.dumps(work(int(given[0]), Path(given[1]))))
            return
    lines = [
        f"# data_index: {time.strftime('%Y-%m-%d')}, {platform.machine()}, one core\n",
        f"`python benchmarks/data_index.py --images {' '.join(f'{m:g}' for m in args.images)} "
        f"--peer-up-to {args.peer_up_to:g}`; "
        f"shards of {ROWS_PER_SHARD} images.\n",
        "| million images | repeated keys, CPU s | lists, CPU s | both, CPU s per million "
        "| both, wall s | peak, MiB | pyarrow take, CPU s (reckoned) | its peak | take / lists |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for millions in args.images:
        count = int(millions * 1e6)
        with tempfile.TemporaryDirectory() as scratch:
            found = in_process("ours", count, Path(scratch))
            if millions <= args.peer_up_to:
                found |= in_process("peer", count, Path(scratch))
        seconds = found["search"] + found["lists"]
        peer = found.get("peer", math.nan)
        lines.append(
            f"| {millions:g} | {found['search']:.0f} | {found['lists']:.0f} "
            f"| {seconds / millions:.2f} | {found['wall']:.0f} | {found['peak']:.0f} "
            f"| {peer:.0f} | {found.get('peer_peak', math.nan):.0f} | {peer / found['lists']:.1f} |"
        )
        print(lines[-1], flush=True)
    report = "\n".join(lines) + "\n"
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
