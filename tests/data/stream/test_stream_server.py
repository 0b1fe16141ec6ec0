"""What a stream server keeps of evaluations, so that the same images are decoded once."""

import uuid
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
from ray.data._internal import stats

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crops import Augmentation
from vit_ray.data.stream import stream_server
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.stream_server import DealtBlocks, KeptBlocks, Pass, StreamServer

Blocks = list[tuple[Any, int]]


class Reader:
    """Gives some blocks, and counts how often it was asked to."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.times = blocks, 0

    def __call__(self) -> Generator[tuple[Any, int], None, None]:
        self.times += 1
        yield from self.blocks


def test_a_reading_that_fits_is_kept_and_one_that_does_not_is_read_again() -> None:
    kept = KeptBlocks(10)
    small, large = Reader([("a", 4), ("b", 6)]), Reader([("c", 5), ("d", 6)])
    for _ in range(3):
        assert list(kept.blocks(b"small", small)) == small.blocks
        assert list(kept.blocks(b"large", large)) == large.blocks
    assert (small.times, large.times) == (1, 3)


def test_what_was_used_last_is_kept() -> None:
    kept = KeptBlocks(10)
    readers = {key: Reader([(key, 4)]) for key in (b"a", b"b", b"c")}
    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        assert list(kept.blocks(key, readers[key])) == [(key, 4)]
    assert {key: reader.times for key, reader in readers.items()} == {b"a": 1, b"b": 2, b"c": 1}


def test_a_reading_that_was_left_or_failed_is_not_kept() -> None:
    kept = KeptBlocks(10)
    reader = Reader([("a", 1), ("b", 1)])
    left = kept.blocks(b"key", reader)
    next(left)
    left.close()

    def failing() -> Generator[tuple[Any, int], None, None]:
        yield "a", 1
        raise OSError("storage is away")

    with pytest.raises(OSError, match="away"):
        list(kept.blocks(b"key", failing))
    assert list(kept.blocks(b"key", reader)) == reader.blocks
    assert reader.times == 2


def test_every_rank_is_told_that_a_stream_failed() -> None:
    def failing() -> Generator[tuple[Any, int], None, None]:
        yield "a", 1
        raise ValueError("too many bad images")

    dealt = DealtBlocks(failing(), 3)
    assert dealt.next_block(0, 0) == "a"
    for rank, index in ((1, 0), (2, 0), (0, 1)):
        with pytest.raises(ValueError, match="too many bad images"):
            dealt.next_block(rank, index)


def samples_of(server: StreamServer, spec: StreamSpec, group: str, number: int = 0) -> np.ndarray:
    """Sample numbers of an evaluation by one rank."""
    one = Pass(ray.put({"eval": spec}), "eval", group, number, 1, 50)
    blocks = []
    while found := server.next_block(one, 0, len(blocks)):
        blocks.append(ray.get(found[0]).to_pydict()["sample"])
    return np.concatenate([np.ravel(block) for block in blocks])


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


def test_trainings_of_one_lane_share_the_decoded_images_of_an_evaluation(
    dataset: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[StreamSpec] = []
    evaluation_datasets = stream_server.evaluation_datasets

    def counted(spec: StreamSpec, **options: int) -> Any:
        read.append(spec)
        return evaluation_datasets(spec, **options)

    monkeypatch.setattr(stream_server, "evaluation_datasets", counted)
    crop = Augmentation("resize", size=16, flip=False)
    spec = StreamSpec(dataset, crop, num_cpus=0.5)
    workers, images = uuid.uuid4().hex, partial(samples_of, StreamServer())
    first = images(spec, f"{workers} 0")
    for group, number in ((f"{workers} 0", 1), (f"{workers} 1", 0)):
        np.testing.assert_array_equal(images(spec, group, number), first)
        assert len(read) == 1
    one_node = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: one_node * 2)
    np.testing.assert_array_equal(images(spec, f"{workers} 5"), first)
    assert len(read) == 2
    monkeypatch.setattr(ray, "nodes", lambda: one_node)
    changes = (
        (replace(spec, augmentation=replace(crop, size=8)), f"{workers} 2"),
        (spec, "workers-started-anew 0"),
        (replace(spec, object_store_mib=64), f"{workers} 3"),
        (replace(spec, object_store_mib=64), f"{workers} 4"),
    )
    for count, (changed, group) in enumerate(changes, 3):
        np.testing.assert_array_equal(images(changed, group), first)
        assert len(read) == count
