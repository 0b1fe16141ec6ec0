"""What a stream server keeps of evaluations, so that the same images are decoded once."""

import itertools
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
from ray.data._internal import stats

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crops import Augmentation
from vit_ray.data.order.shuffle import Order, ShuffleWindow
from vit_ray.data.stream import ray_datasets, stream_server
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.ray_datasets import HostRanks, Segment, segments_of
from vit_ray.data.stream.stream_server import (
    KEPT_SHARE,
    DealtBlocks,
    KeptBlocks,
    Pass,
    PassName,
    RankBlock,
    StreamLostError,
    StreamServer,
    _most_kept_bytes,
    blocks_of,
)

Blocks = list[RankBlock]


class Reader:
    """Gives some blocks, and counts how often it was asked to."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.times = blocks, 0

    def __call__(self) -> Generator[RankBlock, None, None]:
        self.times += 1
        yield from self.blocks


def block(name: Any, size: int = 1, rank: int = 0) -> RankBlock:
    return RankBlock(rank, name, size)


def test_a_reading_that_fits_is_kept_and_one_that_does_not_is_read_again() -> None:
    kept = KeptBlocks(10)
    small, large = Reader([block("a", 4), block("b", 6)]), Reader([block("c", 5), block("d", 6)])
    for _ in range(3):
        assert list(kept.blocks(b"small", small)) == small.blocks
        assert list(kept.blocks(b"large", large)) == large.blocks
    assert (small.times, large.times) == (1, 3)


def test_what_was_used_last_is_kept() -> None:
    kept = KeptBlocks(10)
    readers = {key: Reader([block(key, 4)]) for key in (b"a", b"b", b"c")}
    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        assert list(kept.blocks(key, readers[key])) == [block(key, 4)]
    assert {key: reader.times for key, reader in readers.items()} == {b"a": 1, b"b": 2, b"c": 1}


def test_a_reading_that_was_left_or_failed_is_not_kept() -> None:
    kept = KeptBlocks(10)
    reader = Reader([block("a"), block("b")])
    left = kept.blocks(b"key", reader)
    next(left)
    left.close()

    def failing() -> Generator[RankBlock, None, None]:
        yield block("a")
        raise OSError("storage is away")

    with pytest.raises(OSError, match="away"):
        list(kept.blocks(b"key", failing))
    assert list(kept.blocks(b"key", reader)) == reader.blocks
    assert reader.times == 2


def test_every_rank_is_told_that_a_stream_failed() -> None:
    def failing() -> Generator[RankBlock, None, None]:
        yield block("a")
        raise ValueError("too many bad images")

    dealt = DealtBlocks(failing())
    assert dealt.next_block(0, 0) == "a"
    for rank, index in ((1, 0), (2, 0), (0, 1)):
        with pytest.raises(ValueError, match="too many bad images"):
            dealt.next_block(rank, index)


def test_each_rank_takes_its_own_blocks_in_their_order() -> None:
    blocks = (block(name, rank=rank) for rank, name in enumerate(("a0", "b0", "c0")))
    later = (block(name, rank=rank) for name, rank in (("a1", 0), ("a2", 0), ("b1", 1)))
    dealt = DealtBlocks(one for one in itertools.chain(blocks, later))
    assert [dealt.next_block(1, 0), dealt.next_block(1, 1), dealt.next_block(1, 2)] == [
        "b0", "b1", None,
    ]  # fmt: skip
    assert [dealt.next_block(0, index) for index in range(4)] == ["a0", "a1", "a2", None]
    with pytest.raises(StreamLostError, match="rank 2 has had 1 blocks, but was given 0"):
        dealt.next_block(2, 1)


def test_a_rank_of_another_host_is_refused() -> None:
    dealt = DealtBlocks((block(name, rank=4) for name in "ab"), range(4, 6))
    assert dealt.next_block(4, 0) == "a"
    with pytest.raises(StreamLostError, match="rank 6 asked the server of ranks 4 to 5"):
        dealt.next_block(6, 0)


@pytest.mark.parametrize(("ranks", "is_near"), [(range(1), True), (range(2), False)])
def test_tasks_of_a_server_of_several_run_on_its_own_host_first(
    dataset: Manifest, ranks: range, is_near: bool
) -> None:
    tiny = Augmentation("resize", size=8, flip=False)
    readers = HostRanks(uuid.uuid4().hex, ranks, 2)
    segment = next(
        segments_of(StreamSpec(dataset, tiny), readers, batch_size=12, start=0, stop=240)
    )
    strategy = segment.dataset._logical_plan.dag.ray_remote_args["scheduling_strategy"]
    node = ray.get_runtime_context().get_node_id()
    assert (getattr(strategy, "node_id", None) == node) == is_near
    assert is_near or strategy == "SPREAD"
    assert ray.data.DataContext.get_current().scheduling_strategy == "SPREAD"


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


def test_the_next_segment_starts_while_the_last_blocks_of_one_are_taken() -> None:
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


def test_an_execution_that_gives_too_few_blocks_is_an_error() -> None:
    (whole,) = made_up_segments([], [3], 0)
    with pytest.raises(ValueError, match="shorter"):
        list(blocks_of(iter([replace(whole, ranks=[0, 0, 0, 0])])))


def test_a_run_of_many_segments_is_one_run(
    dataset: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_datasets, "_SEGMENT_TASKS", 3)
    window = ShuffleWindow(24, 3)
    tiny = Augmentation("resize", size=8, flip=False)
    spec = StreamSpec(dataset, tiny, seed=11, window=window, num_cpus=0.5, task_rows=96)
    readers = HostRanks("many-segments", range(2), 2)
    segments = list(segments_of(spec, readers, batch_size=12, start=0, stop=20 * 24))
    assert len(segments) > 2
    found: list[list[int]] = [[], []]
    for one in blocks_of(iter(segments)):
        found[one.rank] += np.ravel(ray.get(one.block).to_pydict()["sample"]).tolist()
    got = np.array(found).reshape(2, 20, 12).transpose(1, 0, 2).reshape(20, 24)
    order = Order(dataset.rows, 11, window=window)
    expected = order.samples_at(0, 20 * 24).reshape(20, 24)
    np.testing.assert_array_equal(got, expected)


def samples_of(server: StreamServer, spec: StreamSpec, group: str, number: int = 0) -> np.ndarray:
    """Sample numbers of an evaluation by one rank."""
    one = Pass(PassName(group, "eval", number), ray.put({"eval": spec}), range(1), 1, 50)
    blocks = []
    while found := server.next_block(one, 0, len(blocks)):
        blocks.append(ray.get(found[0]).to_pydict()["sample"])
    return np.concatenate([np.ravel(block) for block in blocks])


def test_what_is_kept_is_a_share_of_the_store_of_its_own_node(
    ray_cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = ray.nodes()
    own = KEPT_SHARE * node["Resources"]["object_store_memory"]
    larger = {"object_store_memory": 100 * own}
    nodes = [{**node, "NodeID": "another", "Resources": larger}, node]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert _most_kept_bytes() == pytest.approx(own)


def test_where_nobody_sees_statistics_no_process_is_started_for_them(
    dataset: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = MagicMock()
    monkeypatch.setattr(stats, "get_or_create_stats_actor", asked)
    for name, method in vars(stats._StatsManager).items():
        if isinstance(method, staticmethod):
            monkeypatch.setattr(stats._StatsManager, name, method)  # and back after the test
    spec = StreamSpec(dataset, Augmentation("resize", size=8, flip=False), num_cpus=0.5)
    for keeps_statistics in (True, False):
        asked.reset_mock()
        server = StreamServer(keeps_statistics=keeps_statistics, warms_up=False)
        assert len(samples_of(server, spec, uuid.uuid4().hex)) == 300
        assert asked.called == keeps_statistics


def test_trainings_of_one_pool_share_the_decoded_images_of_an_evaluation(
    dataset: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[StreamSpec] = []
    segments_of = stream_server.segments_of

    def counted(spec: StreamSpec, *options: Any) -> Any:
        read.append(spec)
        return segments_of(spec, *options)

    monkeypatch.setattr(stream_server, "segments_of", counted)
    crop = Augmentation("resize", size=16, flip=False)
    spec = StreamSpec(dataset, crop, num_cpus=0.5)
    workers, images = uuid.uuid4().hex, partial(samples_of, StreamServer())
    first = images(spec, f"{workers} 0")
    for group, number in ((f"{workers} 0", 1), (f"{workers} 1", 0)):
        np.testing.assert_array_equal(images(spec, group, number), first)
        assert len(read) == 1
    # With a node that has left or come, blocks may have gone.
    nodes = [*ray.nodes(), {**ray.nodes()[0], "NodeID": "another"}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    for number in (5, 6):
        np.testing.assert_array_equal(images(spec, f"{workers} {number}"), first)
        assert len(read) == 2
    nodes[1] = {**nodes[1], "Alive": False}
    np.testing.assert_array_equal(images(spec, f"{workers} 7"), first)
    assert len(read) == 2  # those of the first time are there
    changes = (
        (replace(spec, augmentation=replace(crop, size=8)), f"{workers} 2"),
        (spec, "workers-started-anew 0"),
        (replace(spec, object_store_mib=64), f"{workers} 3"),
        (replace(spec, object_store_mib=64), f"{workers} 4"),
    )
    for count, (changed, group) in enumerate(changes, 3):
        np.testing.assert_array_equal(images(changed, group), first)
        assert len(read) == count
