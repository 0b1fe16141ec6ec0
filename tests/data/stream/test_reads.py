"""Large batches with a shuffle window: what tasks read and hold, and what ranks get; no Ray."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.data.stream.reads import (
    IMAGE_BYTES,
    blocks_of,
    queued_of,
    readers_of,
    reads_of,
    spec_of,
)
from vit_ray.data.order import Plan
from vit_ray.data.partition import largest_piece, pieces_of
from vit_ray.data.stream.blocks import as_one_row, cut
from vit_ray.data.stream.rank_blocks import RankBlock, Reading
from vit_ray.data.stream.ray_datasets import planned

BATCH, WINDOW = 4096, 16_384


def shards(rows_per_group: int, per_shard: int, count: int) -> list[int]:
    """Row groups of some shards of about `per_shard` images, each with its remainder at its end."""
    sizes = per_shard + np.random.default_rng(0).integers(-99, 100, count)
    groups = [[rows_per_group] * (n // rows_per_group) + [n % rows_per_group] for n in sizes]
    return [rows for rows in itertools.chain(*groups) if rows]


SETS = {
    "even": [64] * 700,
    "shards of 256 MiB": shards(64, 2426, 18),
    "large row groups": shards(100, 2426, 18),
}


@pytest.mark.parametrize(
    ("kind", "batch", "world_size", "servers", "memory_mib", "most"),
    [
        ("even", 4096, 8, 1, 256, 1.1),
        ("shards of 256 MiB", 4096, 1, 1, 256, 1.1),
        ("shards of 256 MiB", 4096, 4, 2, 1024, 1.1),
        ("shards of 256 MiB", 4096, 8, 1, 128, 1.2),
        ("shards of 256 MiB", 4096, 8, 1, 256, 1.1),
        ("shards of 256 MiB", 4096, 16, 2, 256, 1.1),
        ("shards of 256 MiB", 4080, 24, 3, 256, 1.1),
        ("shards of 256 MiB", 4096, 64, 1, 128, 1.15),
        ("shards of 256 MiB", 4096, 64, 1, 256, 1.1),
        ("shards of 256 MiB", 4096, 64, 8, 256, 1.1),
        ("large row groups", 4096, 8, 1, 256, 1.15),
        ("shards of 256 MiB", 1538, 1, 1, 256, 1.1),
        ("shards of 256 MiB", 1538, 2, 1, 256, 1.1),
        ("shards of 256 MiB", 2000, 1, 1, 256, 1.1),
        ("shards of 256 MiB", 2000, 8, 1, 256, 1.1),
        ("shards of 256 MiB", 2048, 1, 1, 256, 1.1),
        ("shards of 256 MiB", 4096, 8, 1, 82, 1.15),
        pytest.param("shards of 256 MiB", 4096, 512, 1, 256, 1.3, marks=pytest.mark.slow),
        pytest.param("shards of 256 MiB", 4096, 512, 64, 256, 1.55, marks=pytest.mark.slow),
    ],
)
def test_row_groups_of_a_large_batch_are_read_about_once(
    kind: str, batch: int, world_size: int, servers: int, memory_mib: int, most: float
) -> None:
    """From the middle of a window of a later epoch on, where windows cut other row groups."""
    spec = spec_of(SETS[kind], batch, "auto", memory_mib)
    assert spec.window is not None
    num_rows = spec.window.num_rows
    # Blocks have grown to their full size by then, of up to sixteen windows.
    steps = range(35, 99) if world_size == 512 else range(3, 15)
    start = (spec.num_images // batch * 2 + 1) * batch
    found = reads_of(spec, batch, world_size, servers, start, steps)
    assert found.rows > 0.4 * len(steps) * batch
    assert found.most_rows <= 2048
    read = found.per_group @ spec.manifest.bytes / IMAGE_BYTES
    # A task may have read a row group for a step that is not counted.
    assert 0.99 * found.rows <= read < most * found.rows
    assert found.most_bytes <= memory_mib << 20
    # The first blocks are of one batch: each has rows of most row groups of its rank's window.
    assert found.first_step < 1.2 * num_rows / spec.manifest.rows.mean() + 2 * world_size


@pytest.mark.parametrize(
    ("batch", "world_size", "servers", "size"),
    [
        (2048, 1, 1, 224),
        (2048, 8, 1, 224),
        (4096, 8, 2, 224),
        (4096, 64, 8, 224),
        (1300, 1, 1, 384),
    ],
)
def test_a_server_queues_at_most_a_window_before_its_first_batch_is_whole(
    batch: int, world_size: int, servers: int, size: int
) -> None:
    """Less the batch itself; and nothing beside the first batch of a run."""
    spec = spec_of(SETS["even"], batch, "auto", size=size)
    assert spec.window is not None
    num_rows = spec.window.num_rows
    assert num_rows * 3 * size**2 <= 1200 << 20
    for readers in readers_of(spec, world_size, servers, batch // world_size):
        queued = queued_of(spec, readers, batch // world_size, 0, 12)
        assert queued[0] <= batch / servers
        assert max(queued) <= (num_rows - batch) / servers + 2 * 256


def test_a_block_has_no_more_windows_than_a_task_holds_row_groups() -> None:
    """One is for the next rank's block; 256 images at most."""
    spec = spec_of(shards(64, 2426, 18), 4096, "auto")
    readers = next(readers_of(spec, 512, 64, 8))
    _, tasks = planned(spec, readers, 8, 0, 100 * 8192)
    sizes = [last - first for task in tasks for _, first, last in task.blocks()]
    assert max(sizes) == 16 * 2 * 8


def taken(reader: Reading, rank: int) -> Iterator[Any]:
    """What a rank gets of the server."""
    for index in itertools.count():
        block = reader.next_block(rank, index)
        if block is None:
            return
        yield block


@pytest.mark.parametrize("start", [0, 3, 8])
@pytest.mark.parametrize(
    ("world_size", "servers", "memory_mib", "pieces"),
    [
        (1, 1, 162, 8),
        (2, 2, 162, 4),
        (4, 2, 162, 2),
        (8, 2, 162, 1),
        (16, 1, 162, 1),
        (1, 1, 32, 64),
    ],
)
def test_any_world_gets_the_global_batches_of_the_order(
    world_size: int, servers: int, memory_mib: int, pieces: int, start: int
) -> None:
    """Through the queues of the server and the joints of the worker, and from anywhere."""
    batch = 2048
    spec = spec_of([64] * 300, batch, 4 * batch, memory_mib)
    share, steps = batch // world_size, 6
    parts: list[list[np.ndarray]] = []
    for readers in readers_of(spec, world_size, servers, share):
        assert readers.pieces == pieces
        blocks = blocks_of(spec, readers, share, start * batch, (start + steps) * batch)

        made = (RankBlock(rank, as_one_row({"sample": of}), 1) for rank, of in blocks)  # type: ignore[arg-type]
        reader = Reading(lambda made=made: made, readers.ranks, pieces=readers.pieces)  # type: ignore[misc]
        for rank in readers.ranks:
            parts.append([found["sample"] for found in cut(taken(reader, rank), share)])
    plan = Plan(spec.manifest, spec.seed, None, window=spec.window)
    for step, got in enumerate(map(np.concatenate, zip(*parts, strict=True)), start):
        positions = np.arange(step * batch, (step + 1) * batch)
        expected = plan.rows_at(positions).samples
        np.testing.assert_array_equal(got, expected)
    assert {len(part) for part in parts} == {steps}


def test_the_first_round_of_a_large_window_has_tasks_of_its_own() -> None:
    """So the first batch waits for no other batch of its window."""
    spec = spec_of([64] * 700, BATCH, WINDOW)
    (readers,) = readers_of(spec, 8, 1, 512)
    blocks = list(blocks_of(spec, readers, 512, 0, 2 * WINDOW))
    first = [rank for rank, _ in blocks[:16]]
    assert first == list(range(16))
    assert Counter(rank for rank, _ in blocks) == dict.fromkeys(range(16), 8)
    assert [rank for rank, _ in blocks[16:22]] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("batch", "rows"), [(4096, 32), (1538, 769), (2062, 1031), (1334, 667), (96, 48), (7, 7)]
)
def test_a_share_of_any_number_of_ranks_has_pieces_of_the_least_size(batch: int, rows: int) -> None:
    assert largest_piece(batch) == rows
    for share in (one for one in range(1, batch + 1) if batch % one == 0):
        assert 4 * share / pieces_of(share, 4, 4 * rows) <= 4 * rows


@pytest.mark.parametrize(
    ("share", "passes", "held", "pieces"),
    [
        (512, 4, 1756, 2),  # 2,048 rows
        (512, 4, 2048, 1),
        (4096, 4, 1756, 16),  # 10 would do, and divides nothing
        (513, 4, 700, 3),
        (509, 4, 700, 1),  # a prime
        (64, 4, 100, 1),  # 3 would do, and 4 are too small
        (512, 4, 0, 1),
    ],
)
def test_a_share_is_cut_into_the_fewest_equal_pieces_that_a_task_holds(
    share: int, passes: int, held: int, pieces: int
) -> None:
    assert pieces_of(share, passes, held) == pieces
