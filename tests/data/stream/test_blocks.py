"""Blocks through Ray Data's own output buffer, and who gets which ones: no cluster."""

import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ray.data._internal.output_buffer import BlockOutputBuffer, OutputBlockSizeOption

from vit_ray.data.stream.ray_datasets import Segment, as_one_row, cut
from vit_ray.data.stream.stream_server import (
    RankBlock,
    Reading,
    StreamLostError,
    blocks_of,
)

Batch = dict[str, Any]


def batch(count: int, size: int, first: int = 0) -> Batch:
    rng = np.random.default_rng(first)
    return {
        "image": rng.integers(0, 256, (count, size, size, 3), np.uint8),
        "labels": rng.integers(0, 9, (count, 2), np.int32),
        "sample": np.arange(first, first + count),
    }


@pytest.mark.parametrize("size", [1, 224])
def test_ray_data_neither_joins_nor_slices_a_block(size):
    given = [batch(count, size, first) for count, first in [(64, 0), (64, 64), (8, 128)]]
    buffer = BlockOutputBuffer(OutputBlockSizeOption.of(target_max_block_size=1))
    blocks = []
    for one in given:
        buffer.add_block(as_one_row(one))
        blocks.extend(buffer.iter_ready_blocks())
    assert len(blocks) == 3
    for block, expected in zip(blocks, given, strict=True):
        found = list(cut([block], 8))
        for name, column in expected.items():
            np.testing.assert_array_equal(np.concatenate([one[name] for one in found]), column)
            assert found[0][name].dtype == column.dtype


@pytest.mark.parametrize(
    "block",
    [
        as_one_row(batch(20, 8)),
        pa.concat_tables([as_one_row(batch(8, 8)), as_one_row(batch(8, 8))]),
        as_one_row(batch(16, 8) | {"sample": np.arange(8)}),
    ],
    ids=["no whole batches", "two joined", "columns of unlike length"],
)
def test_a_block_of_another_size_is_refused(block):
    with pytest.raises(RuntimeError, match="multiple of 8 images"):
        list(cut([block], 8))


def block(name: Any, rank: int = 0) -> RankBlock:
    return RankBlock(rank, name, 1)


def test_a_block_reaches_its_rank_while_the_next_is_made():
    is_taken = threading.Event()

    def read() -> Generator[RankBlock, None, None]:
        yield block("a", rank=0)
        assert is_taken.wait(10), "rank 0 waits for the block of rank 1"
        yield block("b", rank=1)

    reader = Reading(read, range(2))
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(reader.next_block, 1, 0)
        assert reader.next_block(0, 0) == "a"
        is_taken.set()
        assert second.result() == "b"


def failing() -> Generator[RankBlock, None, None]:
    yield block("a")
    raise ValueError("too many bad images")


def test_every_rank_is_told_that_a_stream_failed():
    dealt = Reading(failing, range(3))
    assert dealt.next_block(0, 0) == "a"
    for rank, index in ((1, 0), (2, 0), (0, 1)):
        with pytest.raises(ValueError, match="too many bad images"):
            dealt.next_block(rank, index)


def test_each_rank_takes_its_own_blocks_in_their_order():
    names = [("a0", 0), ("b0", 1), ("c0", 2), ("a1", 0), ("a2", 0), ("b1", 1)]
    dealt = Reading(lambda: (block(name, rank=rank) for name, rank in names), range(3))
    assert [dealt.next_block(1, index) for index in range(3)] == ["b0", "b1", None]
    assert [dealt.next_block(0, index) for index in range(4)] == ["a0", "a1", "a2", None]
    with pytest.raises(StreamLostError, match="rank 2 has had 1 blocks, but was given 0"):
        dealt.next_block(2, 1)
    dealt = Reading(lambda: (block(name, rank=4) for name in "ab"), range(4, 6))
    assert dealt.next_block(4, 0) == "a"
    with pytest.raises(StreamLostError, match="rank 6 asked the server of ranks 4 to 5"):
        dealt.next_block(6, 0)


def test_an_execution_that_gives_too_few_blocks_is_an_error():
    dataset: Any = SimpleNamespace(iter_internal_ref_bundles=lambda: [])
    with pytest.raises(ValueError, match="shorter"):
        list(blocks_of(iter([Segment(dataset, [0], 0)])))


def made_up_segments(started: list[int], sizes: list[int], next_at: int) -> Iterator[Segment]:
    """Segments of one rank without Ray, that note when they are executed."""

    class Executed:
        def __init__(self, number: int) -> None:
            self.number = number

        def iter_internal_ref_bundles(self) -> list[Any]:
            started.append(self.number)
            metadata = SimpleNamespace(size_bytes=1)
            names = [f"{self.number}.{index}" for index in range(sizes[self.number])]
            entries = [SimpleNamespace(ref=name, metadata=metadata) for name in names]
            return [SimpleNamespace(blocks=[entry]) for entry in entries]

    for number, size in enumerate(sizes):
        dataset: Any = Executed(number)
        yield Segment(dataset, [0] * size, next_at)


def test_the_next_segment_starts_while_the_last_blocks_of_one_are_taken():
    started: list[int] = []
    blocks = blocks_of(made_up_segments(started, [6, 4, 4], 2))
    names = [str(next(blocks).block) for _ in range(3)]
    assert started == [0]
    names.append(str(next(blocks).block))
    deadline_s = time.monotonic() + 30
    while started == [0] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert started == [0, 1]
    names += [str(one.block) for one in blocks]
    assert names == [f"{n}.{index}" for n, size in enumerate((6, 4, 4)) for index in range(size)]


def test_no_block_is_made_that_no_rank_waits_for():
    """Ray Data would otherwise never see that training is slower than reading."""
    made: list[int] = []
    ended = threading.Event()

    def read() -> Generator[RankBlock, None, None]:
        try:
            for index in range(100):
                made.append(index)
                yield block(index, rank=index % 2)
        finally:
            ended.set()

    reading = Reading(read, range(2))
    assert [reading.next_block(0, index) for index in range(3)] == [0, 2, 4]
    time.sleep(0.1)
    assert [reading.next_block(1, index) for index in range(2)] == [1, 3]
    assert made == [0, 1, 2, 3, 4]
    reading.close()
    assert ended.wait(10)
