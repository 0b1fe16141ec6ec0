"""Which samples each rank gets, and in which blocks, in 24 worlds: arithmetic, without Ray."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from pathlib import Path

import numpy as np

from tests.data.small_sets import write_set
from vit_ray.data.order.partition import Partition, read_tasks
from vit_ray.data.order.samples import Plan, rows_per_group
from vit_ray.data.order.selection import split_rows
from vit_ray.data.order.shuffle import ShuffleWindow
from vit_ray.data.stream.batches import StreamJob, StreamSpec

WORLD_SIZES = (1, 2, 3, 8)
RESUMED_STEPS = (0, 5, 43)
WINDOW_BATCHES = (None, 4)
IMAGES, BATCH, STEPS = 300, 24, 30


def record() -> dict[str, dict[str, str]]:
    """Of each world: digests of what travels in turn (blocks), and of its global batches."""
    with tempfile.TemporaryDirectory() as folder:
        images = [(str(k), [k % 3]) for k in range(IMAGES)]
        manifest = write_set(Path(folder), images, "abc")
        rows, _ = split_rows(manifest, 0.1, seed=1)
        streams = {
            "one set": StreamSpec(manifest, seed=11),
            "nine tenths": StreamSpec(manifest, seed=11, rows=rows),
        }
        # 4 x 2 x 3 worlds; the share takes the place of the whole set in the odd ones.
        worlds = itertools.product(WORLD_SIZES, WINDOW_BATCHES, RESUMED_STEPS)
        return {
            f"{size} ranks, window {window}, from step {step}, {name}": _digests(
                streams[name], size, window, step
            )
            for size, window, step in worlds
            for name in ["nine tenths" if step == 5 else "one set"]
        }


def _digests(spec: StreamSpec, world_size: int, batches: int | None, step: int) -> dict[str, str]:
    window = ShuffleWindow(BATCH, batches) if batches else None
    spec = StreamSpec(
        spec.manifest, seed=spec.seed, rows=spec.rows, window=window, block_rows=16, task_rows=64
    )
    partition, start = Partition(world_size, BATCH // world_size), step * BATCH
    counts = rows_per_group(spec.manifest, spec.rows)
    job = StreamJob(spec, partition, start, is_training=True, counts=counts)
    plan = Plan(spec.manifest, spec.seed, spec.rows, window=job.window)
    blocks, ranks = hashlib.sha256(), [list[np.ndarray]() for _ in range(world_size)]
    stop = STEPS * BATCH // world_size
    for task in read_tasks(partition, 0, stop, job.shape, range(world_size)):
        for rank, first, last in task.blocks():
            rows = plan.rows_at(start + partition.offsets(rank, first, last))
            blocks.update(repr((rank, first, last)).encode())
            ranks[rank].append(np.stack([rows.epochs, rows.samples]))
    # What the ranks got, put together again step by step: the same on any number of ranks.
    got = np.stack([np.concatenate(parts, axis=1) for parts in ranks]).astype(np.int64)
    steps = got.reshape(world_size, 2, STEPS, BATCH // world_size).transpose(2, 1, 0, 3)
    samples = np.ascontiguousarray(steps.reshape(STEPS, 2, BATCH))
    return {
        "blocks": blocks.hexdigest()[:16],
        "samples": hashlib.sha256(samples.tobytes()).hexdigest()[:16],
    }
