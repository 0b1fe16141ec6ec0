"""What a conversion is measured against: the writers of other libraries, as their guides use them.

    PYTHONPATH=PEERS python benchmarks/convert_peers.py WRITER FOLDER_OF_CLASS_FOLDERS TARGET

The files are in random order. There is one process a core; it reads its part of the files and
writes its own shards. No library looks at an image; in one way OpenCV decodes each first. Libraries
are imported before the clock starts. Prints a line of JSON.
"""

import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import psutil

from benchmarks.data_stream import import_streaming

SHARD_BYTES = 64 << 20
CORES = os.cpu_count() or 1
Read = Callable[[list[Path]], Iterator[tuple[str, str, bytes]]]


def tree_cpu_s() -> float:
    """CPU seconds so far of this process, its descendants, and those of them that have ended."""
    spent = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            spent += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue
    return spent


def read(files: list[Path]) -> Iterator[tuple[str, str, bytes]]:
    """Key, class and bytes of each file."""
    for file in files:
        yield f"{file.parent.name}/{file.stem}", file.parent.name, file.read_bytes()


def read_decoded(files: list[Path]) -> Iterator[tuple[str, str, bytes]]:
    """Likewise, of each that OpenCV decodes."""
    cv2.setNumThreads(1)
    for key, label, image in read(files):
        if cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR) is not None:
            yield key, label, image


def write_mds(files: list[Path], part: int, target: Path, read: Read = read) -> None:
    """A folder of each process, as MosaicML's guide has it; `merge_mds` joins their indices."""
    columns = {"image": "bytes", "label": "str", "key": "str"}
    out = str(target / f"{part}")
    with import_streaming().MDSWriter(out=out, columns=columns, size_limit=SHARD_BYTES) as writer:
        for key, label, image in read(files):
            writer.write({"image": image, "label": label, "key": key})


def merge_mds(target: Path) -> None:
    importlib.import_module("streaming.base.util").merge_index(str(target))


def write_tars(files: list[Path], part: int, target: Path) -> None:
    """By TarWriters, which ShardWriter opens one after the other."""
    import webdataset

    pattern = str(target / f"{part}-%05d.tar")
    with webdataset.ShardWriter(pattern, len(files), SHARD_BYTES, verbose=0) as writer:
        for key, label, image in read(files):
            writer.write({"__key__": key, "jpg": image, "cls": label})


def write_parquet(files: list[Path], part: int, target: Path) -> None:
    """A shard at a time from memory; this library's other ways write an Arrow file first."""
    import datasets

    datasets.disable_progress_bars()
    names = sorted(folder.name for folder in files[0].parent.parent.iterdir())
    label = datasets.ClassLabel(names=names)
    features = datasets.Features({"image": datasets.Image(), "label": label})
    images: list[dict[str, Any]] = []
    labels: list[int] = []
    num_bytes = num_shards = 0
    for number, (key, name, image) in enumerate(read(files), 1):
        images.append({"bytes": image, "path": f"{key}.jpg"})
        labels.append(names.index(name))
        num_bytes += len(image)
        if num_bytes >= SHARD_BYTES or number == len(files):
            rows = datasets.Dataset.from_dict({"image": images, "label": labels}, features)
            rows.to_parquet(target / f"{part}-{num_shards:05d}.parquet")
            images, labels, num_bytes, num_shards = [], [], 0, num_shards + 1


class Writer(NamedTuple):
    """Imports a library, writes the shards of one process, and ends the whole."""

    load: Callable[[], object]
    write: Callable[[list[Path], int, Path], None]
    end: Callable[[Path], None] = lambda target: None


WRITERS = {
    "MDSWriter": Writer(import_streaming, write_mds, merge_mds),
    "TarWriter": Writer(partial(importlib.import_module, "webdataset"), write_tars),
    "datasets": Writer(partial(importlib.import_module, "datasets"), write_parquet),
    "MDSWriter, decoded": Writer(
        import_streaming, partial(write_mds, read=read_decoded), merge_mds
    ),
}


def main() -> None:
    """Write with one library."""
    name, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    load, write, end = WRITERS[name]
    load()
    target.mkdir(parents=True)
    begin_s, cpu_s = time.perf_counter(), tree_cpu_s()
    files = sorted(source.glob("*/*"))
    random.Random(0).shuffle(files)  # noqa: S311  # an order of files
    parts = [files[part::CORES] for part in range(CORES)]
    with ProcessPoolExecutor(CORES, multiprocessing.get_context("fork")) as pool:
        list(pool.map(write, parts, range(CORES), [target] * CORES))  # fails if a process ends
    end(target)
    facts = {"seconds": time.perf_counter() - begin_s, "cpu_s": tree_cpu_s() - cpu_s}
    written = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(json.dumps({**facts, "images": len(files), "bytes": written}))


if __name__ == "__main__":
    main()
