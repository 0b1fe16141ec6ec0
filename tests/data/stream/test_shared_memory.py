"""What the reading processes of a host share, as a stream sends it to them; without Ray."""

import pickle
from typing import Any

import numpy as np
import pytest

from vit_ray.data.dataset import Manifest, ShardFile, ShardFiles
from vit_ray.data.order import Partition
from vit_ray.data.parts import select
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec

GROUPS = 600_000


def as_ray_sends(found: Any) -> tuple[bytes, list[memoryview]]:
    """What each process unpickles, and the arrays that it shares with others."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(found, protocol=5, buffer_callback=buffers.append)
    return body, [buffer.raw().toreadonly() for buffer in buffers]


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_processes_share_all_of_manifest_and_order(held_out):
    numbers, rows = np.arange(GROUPS, dtype=np.int32), np.full(GROUPS, 64, np.int32)
    manifest = Manifest(
        numbers // 100, numbers % 100, rows, rows.astype(np.int64), {},
        path="", root="", num_images=64 * GROUPS, classes=["a"], max_labels=1, fingerprint="",
        files=ShardFiles(ShardFile(f"{i}", 6400, 6400, 0) for i in range(GROUPS // 100)),
    )  # fmt: skip
    part, _ = select(manifest, seed=0, held_out_fraction=held_out, fraction=1.0)
    spec = StreamSpec(part)
    job = StreamJob(spec, Partition(1, 64), 0, is_training=True)
    body, buffers = as_ray_sends(job)
    assert len(body) < 10_000
    plan = BatchReader(pickle.loads(body, buffers=buffers)).plan
    sent = 2 * sum(buffer.nbytes for buffer in buffers)
    drawn = sum(plan.order.draw(epoch).nbytes for epoch in (0, 1))
    # Of a row group: the manifest's four columns and its first sample, of a part also its rows in
    # the whole, sent by the driver and by the stream server; its place in the order of two epochs.
    each = 2 * (28 + 4 * (held_out > 0)) + 2 * 16
    assert pytest.approx(sent + drawn, rel=0.05) == GROUPS * each
