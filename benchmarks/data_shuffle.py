"""Which images meet again in the next epoch, and what it costs to read so.

    python benchmarks/data_shuffle.py [--streaming SITE_PACKAGES] [--out FILE.md]

Mixing: of the pairs of images in a batch of one epoch, the share that is in one batch of the next
too, over that of a full shuffle. ImageNet's 1,281,167 rows in row groups of 64; peers have shards
of 4,096 rows. Peers: MosaicML Streaming's `py1e` (its own code from the given site-packages, e.g.
of `pip install --no-deps mosaicml-streaming` in another environment, called as arithmetic), and a
model of tf.data's shuffle buffer over shuffled shards.

Reading: an epoch of generated JPEGs by one bare process, task by task and with nothing kept between
tasks, as if each were made by another process; with and without the window, in turn.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.result import finish, header, machine, measure_rounds

Int64Array = NDArray[np.int64]

ROWS, ROWS_PER_GROUP, ROWS_PER_SHARD = 1_281_167, 64, 4096
WINDOW_ROWS = 2048
IMAGES = 4096
ROUNDS = 5


def groups_of(rows: int, size: int) -> Int64Array:
    counts = np.full(-(-rows // size), size)
    counts[-1] -= counts.sum() - rows
    return counts


def ours(batch: int, window_rows: int) -> Callable[[int], Int64Array]:
    from vit_ray.data.order.shuffle import Order, ShuffleWindow

    window = ShuffleWindow(batch, window_rows // batch) if window_rows > batch else None
    order = Order(groups_of(ROWS, ROWS_PER_GROUP), seed=0, window=window)
    return lambda epoch: order.samples_at(epoch * ROWS, (epoch + 1) * ROWS)


def buffered(buffer_rows: int) -> Callable[[int], Int64Array]:
    """Shards in a random order through a buffer from which a random row is taken each time."""

    def epoch_order(epoch: int) -> Int64Array:
        rng = np.random.default_rng(epoch)
        shards = np.array_split(np.arange(ROWS), -(-ROWS // ROWS_PER_SHARD))
        stream = np.concatenate([shards[i] for i in rng.permutation(len(shards))])
        buffer, rest = stream[:buffer_rows].copy(), stream[buffer_rows:]
        taken = np.empty(ROWS, np.int64)
        for i, (place, row) in enumerate(
            zip(rng.integers(0, buffer_rows, len(rest)).tolist(), rest.tolist(), strict=True)
        ):
            taken[i] = buffer[place]
            buffer[place] = row
        taken[len(rest) :] = rng.permutation(buffer)
        return taken

    return epoch_order


def streaming_py1e(site_packages: Path, block_rows: int) -> Callable[[int], Int64Array]:
    """Streaming's own function; its packages' `__init__` files would import torch and clouds."""
    for name in ("streaming", "streaming.base", "streaming.base.shuffle"):
        package = types.ModuleType(name)
        package.__path__ = [str(site_packages.joinpath(*name.split(".")))]
        sys.modules[name] = package
    shuffle: Any = importlib.import_module("streaming.base.shuffle.py1e").get_shuffle_py1e
    sizes = groups_of(ROWS, ROWS_PER_SHARD)
    return lambda epoch: shuffle(sizes, 1, 0, epoch, block_rows)


def times_chance(order: Callable[[int], Int64Array], batch: int) -> tuple[float, float]:
    """The share of pairs that meet again, and that over a full shuffle's."""
    whole = ROWS // batch * batch
    batch_of = np.full(ROWS, -1)
    batch_of[order(1)[:whole]] = np.arange(whole) // batch
    before = batch_of[order(0)[:whole]].reshape(-1, batch)
    again = 0
    for row in before:
        counts = np.bincount(row[row >= 0])
        again += int((counts * (counts - 1)).sum())
    share = again / (whole * (batch - 1))
    return share, share / ((batch - 1) / (ROWS - 1))


def mixing(streaming: Path | None) -> list[str]:
    lines = [
        "| order | images held | batch 64 | batch 512 | batch 4096 |",
        "|---|---|---|---|---|",
    ]
    cases: list[tuple[str, int, Callable[[int], Callable[[int], Int64Array]]]] = [
        ("row groups in turn (`data.shuffle_window=0`)", 64, lambda batch: ours(batch, 0)),
        (
            "a window of 2,048 images (the default up to batch 1024)",
            2048,
            lambda batch: ours(batch, WINDOW_ROWS),
        ),
        (
            "a window of 8,192 images (the default for batch 4096 at 224 pixels)",
            8192,
            lambda batch: ours(batch, 8192),
        ),
        ("a window of 16,384 images", 16384, lambda batch: ours(batch, 16384)),
        ("tf.data's buffer of 2,048 (model)", 2048, lambda _: buffered(2048)),
        ("tf.data's buffer of 16,384 (model)", 16384, lambda _: buffered(16384)),
        ("tf.data's buffer of 250,000 (model)", 250_000, lambda _: buffered(250_000)),
    ]
    if streaming is not None:
        cases += [
            (
                f"Streaming's py1e, blocks of {rows:,}",
                rows,
                lambda _, rows=rows: streaming_py1e(streaming, rows),
            )  # type: ignore[misc]
            for rows in (2048, 16384, 1 << 18)
        ]
    for name, held, order in cases:
        figures = [times_chance(order(batch), batch) for batch in (64, 512, 4096)]
        cells = " | ".join(f"{share:.3%} ({times:,.1f} x)" for share, times in figures)
        lines.append(f"| {name} | {held:,} | {cells} |")
        print(lines[-1], flush=True)
    return lines


def write_images(folder: Path) -> None:
    """A data set of noisy JPEGs of ImageNet's usual size, without Ray."""
    import cv2

    from vit_ray.data.format.manifest import RowGroupColumns, write_manifest
    from vit_ray.data.format.shard_files import ShardFile
    from vit_ray.data.format.shard_writer import EncodedImage, ShardWriter
    from vit_ray.storage import locate

    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (16, 24, 32, 3), dtype=np.uint8)
    images = []
    for picture in coarse:
        smooth = cv2.resize(picture, (500, 375), interpolation=cv2.INTER_CUBIC)
        noisy = cv2.add(smooth, rng.integers(0, 48, smooth.shape, dtype=np.uint8))
        images.append(cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 85])[1].tobytes())
    location = locate(str(folder))
    with ShardWriter(location.child("part.parquet"), ROWS_PER_GROUP) as writer:
        for i in range(IMAGES):
            image = images[i % len(images)]
            writer.add(EncodedImage(image, (0,), f"{i}", 500, 375))
    facts = writer.facts()
    count = len(facts.rows)
    columns = RowGroupColumns(
        np.zeros(count), np.arange(count), np.array(facts.rows), np.array(facts.row_group_bytes),
        {}, np.array(facts.row_group_crc32),
    )  # fmt: skip
    file = ShardFile("part.parquet", IMAGES, facts.bytes, facts.footer_crc32)
    write_manifest(location, columns, files=[file], classes=["a"], max_labels=1, origin={})


def read_epoch(folder: Path, batch: int, world_size: int, window_rows: int) -> tuple[float, float]:
    """CPU seconds, and bytes read for each byte used, of an epoch but for its first small tasks."""
    from vit_ray.data import open_dataset
    from vit_ray.data.format.row_groups import ShardReader
    from vit_ray.data.images.crops import Augmentation
    from vit_ray.data.order.partition import Partition, read_tasks
    from vit_ray.data.order.shuffle import ShuffleWindow
    from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec

    read = 0
    content = ShardReader.content

    def counted(self: ShardReader, row_group: int) -> Any:
        nonlocal read
        found = content(self, row_group)
        read += found.size
        return found

    manifest = open_dataset(str(folder))
    window = ShuffleWindow(batch, window_rows // batch) if window_rows > batch else None
    spec = StreamSpec(
        manifest, Augmentation(size=224), window=window, task_rows=max(1024, window_rows),
        cache_mib=512,
    )  # fmt: skip
    partition = Partition(world_size, batch // world_size)
    job = StreamJob(spec, partition, 0, is_training=True, counts=manifest.rows)
    ShardReader.content = counted  # type: ignore[method-assign]
    try:
        rows = IMAGES // batch * partition.batch_size_per_rank
        planned = read_tasks(partition, 0, rows, job.shape, range(world_size))
        tasks = [list(task.blocks()) for task in planned]
        full = [blocks for blocks in tasks if len(blocks) > 1]
        images = sum(last - first for blocks in full for _, first, last in blocks)
        begun_s = time.process_time()
        for blocks in full:
            reader = BatchReader(job)
            for block in blocks:
                reader.batch(*block)
        taken_s = (time.process_time() - begun_s) / images
        return taken_s, read / images / (int(manifest.bytes.sum()) / IMAGES)
    finally:
        ShardReader.content = content  # type: ignore[method-assign]


def reading(folder: Path) -> list[str]:
    import cv2

    cv2.setNumThreads(1)
    lines = header(
        "batch | ranks | images/s of CPU time, in turn | with the window | ratio | "
        "bytes read per byte used, in turn | with the window"
    )
    for batch, world_size in ((64, 1), (64, 8), (512, 1), (512, 8)):
        found = measure_rounds(
            (0, WINDOW_ROWS), ROUNDS, partial(read_epoch, folder, batch, world_size)
        )
        (before, read), (after, read_window) = (
            ([one[0] for one in rounds], rounds[-1][1]) for rounds in found.values()
        )
        ratio = statistics.median(b / a for a, b in zip(after, before, strict=True))
        lines.append(
            f"| {batch} | {world_size} | {1 / statistics.median(before):,.0f} | "
            f"{1 / statistics.median(after):,.0f} | {ratio:.3f} | {read:.2f} | "
            f"{read_window:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streaming", type=Path, help="site-packages that hold streaming")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_images(Path(scratch))
        read = reading(Path(scratch))
    mixed = mixing(args.streaming)
    chance = ", ".join(f"{(b - 1) / (ROWS - 1):.4%} for {b}" for b in (64, 512, 4096))
    report = "\n".join(
        [
            f"# data_shuffle: {machine()}\n",
            "`python benchmarks/data_shuffle.py --streaming SITE_PACKAGES`\n",
            "## Pairs of a batch that meet again in the next epoch\n",
            f"In brackets, over a full shuffle ({chance}).\n",
            *mixed,
            "\n## Reading an epoch\n",
            f"{IMAGES:,} JPEGs of 500 x 375, median of {ROUNDS} rounds in turn; the ratio is the "
            "median of the rounds' own. The small first tasks of a run are left out: for an early "
            "first batch each reads what it needs of the first window, which is read some times.\n",
            *read,
        ]
    )
    finish(report, args.out)


if __name__ == "__main__":
    main()
