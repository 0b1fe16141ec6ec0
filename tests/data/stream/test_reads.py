"""What reading tasks read and hold of a shuffle window, and what ranks get of it; no Ray."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.data.stream.reads import IMAGE_BYTES, blocks_of, readers_of, reads_of, spec_of
from vit_ray.data.order import Plan
from vit_ray.data.stream.blocks import as_one_row, cut
from vit_ray.data.stream.rank_blocks import RankBlock, Reading


def shards(rows_per_group: int, per_shard: int, count: int) -> list[int]:
    """Row groups of some shards of about `per_shard` images, each with its remainder at its end."""
    sizes = per_shard + np.random.default_rng(0).integers(-99, 100, count)
    groups = [[rows_per_group] * (n // rows_per_group) + [n % rows_per_group] for n in sizes]
    return [rows for rows in itertools.chain(*groups) if rows]


@pytest.mark.parametrize(
    ("rows_per_group", "batch", "world_size", "servers", "most"),
    [
        (64, 256, 1, 1, 1.1),
        (64, 512, 8, 2, 1.15),
        (16, 512, 8, 2, 1.1),
        (100, 512, 4, 1, 1.15),
        (16, 4096, 1, 1, 1.1),
        (16, 4096, 8, 1, 1.1),
        (16, 4096, 64, 8, 1.1),
    ],
)
def test_row_groups_are_read_about_once(
    rows_per_group: int, batch: int, world_size: int, servers: int, most: float
) -> None:
    """From the middle of a later epoch on, where windows and tasks cut other row groups."""
    spec = spec_of(shards(rows_per_group, 2426, 18), batch, "auto")
    assert (spec.window is None) == (batch > 512)
    start = (spec.num_images // batch * 2 + 1) * batch
    steps = range(3 * max(1, 4096 // batch), 12 * max(1, 4096 // batch))
    found = reads_of(spec, batch, world_size, servers, start, steps)
    assert found.rows > 0.4 * len(steps) * batch
    assert found.most_rows <= max(2048, batch // world_size)
    read = found.per_group @ spec.manifest.bytes / IMAGE_BYTES
    # A task may have read a row group for a step that is not counted.
    assert 0.99 * found.rows <= read < most * found.rows
    assert found.most_bytes <= 256 << 20


def taken(reader: Reading, rank: int) -> Iterator[Any]:
    """What a rank gets of the server."""
    for index in itertools.count():
        block = reader.next_block(rank, index)
        if block is None:
            return
        yield block


@pytest.mark.parametrize("start", [0, 3, 8])
@pytest.mark.parametrize(("world_size", "servers"), [(1, 1), (2, 2), (4, 2), (8, 2), (16, 1)])
def test_any_world_gets_the_global_batches_of_the_order(
    world_size: int, servers: int, start: int
) -> None:
    """Through the queues of the server and the cuts of the worker, and from anywhere."""
    batch = 512
    spec = spec_of([64] * 300, batch, 4 * batch, memory_mib=512)
    share, steps = batch // world_size, 6
    parts: list[list[np.ndarray]] = []
    for readers in readers_of(world_size, servers):
        blocks = blocks_of(spec, readers, share, start * batch, (start + steps) * batch)
        made = (RankBlock(rank, as_one_row({"sample": of}), 1) for rank, of in blocks)  # type: ignore[arg-type]
        reader = Reading(lambda made=made: made, readers.ranks)  # type: ignore[misc]
        for rank in readers.ranks:
            parts.append([found["sample"] for found in cut(taken(reader, rank), share)])
    plan = Plan(spec.manifest, spec.seed, window=spec.window)
    for step, got in enumerate(map(np.concatenate, zip(*parts, strict=True)), start):
        positions = np.arange(step * batch, (step + 1) * batch)
        np.testing.assert_array_equal(got, plan.rows_at(positions).samples)
    assert {len(part) for part in parts} == {steps}
