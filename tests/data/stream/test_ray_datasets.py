import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crops import Augmentation
from vit_ray.data.order.selection import split_rows
from vit_ray.data.order.shuffle import Order, ShuffleWindow
from vit_ray.data.stream.ray_datasets import (
    StreamSpec,
    evaluation_stream,
    split_stream,
    training_stream,
)
from vit_ray.data.stream.train_ingest import PendingEvaluation, PendingStream, StreamConfig

BATCH = 24
Batches = list[dict[str, NDArray[Any]]]


@pytest.fixture
def spec(dataset: Manifest) -> StreamSpec:
    crop = Augmentation("inception_crop", size=16)
    window = ShuffleWindow(BATCH, 3)
    return StreamSpec(
        dataset, crop, seed=11, window=window, num_cpus=0.5, block_rows=24, task_rows=96
    )


def take(iterator: Any, batch_size: int) -> Batches:
    batches = iterator.iter_batches(batch_size=batch_size)
    return [{name: column.copy() for name, column in batch.items()} for batch in batches]


def consume(dataset: ray.data.Dataset, world_size: int, batch_size: int) -> list[Batches]:
    """What each rank gets, in order."""
    remote_take = ray.remote(num_cpus=0)(take)
    splits = split_stream(dataset, world_size)
    return ray.get([remote_take.remote(split, batch_size) for split in splits])


def global_batches(spec: StreamSpec, world_size: int, start: int, stop: int) -> Batches:
    """Rows of each global batch, sorted by sample, joined over ranks."""
    micro = BATCH // world_size
    dataset = training_stream(
        spec, world_size=world_size, batch_size_per_rank=micro, start=start, stop=stop
    )
    ranks = consume(dataset, world_size, micro)
    steps = []
    for parts in zip(*ranks, strict=True):
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        ordered = np.argsort(joined["sample"], kind="stable")
        steps.append({name: column[ordered] for name, column in joined.items()})
    return steps


def assert_equal(left: Batches, right: Batches) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_ranks_gets_the_same_global_batches(
    spec: StreamSpec, world_size: int
) -> None:
    alone = global_batches(spec, 1, 0, 15 * BATCH)
    assert_equal(global_batches(spec, world_size, 0, 15 * BATCH), alone)


def test_global_batches_are_those_of_the_order(spec: StreamSpec) -> None:
    order = Order(spec.manifest.rows, spec.seed, window=spec.window)
    for step, batch in enumerate(global_batches(spec, 2, 0, 15 * BATCH)):
        expected = np.sort(order.samples_at(step * BATCH, (step + 1) * BATCH))
        np.testing.assert_array_equal(batch["sample"], expected)


@pytest.mark.parametrize("stopped_after", [1, 7, 14])
def test_a_resumed_run_gets_the_rest_of_the_uninterrupted_one(
    spec: StreamSpec, stopped_after: int
) -> None:
    whole = global_batches(spec, 2, 0, 15 * BATCH)
    rest = global_batches(spec, 4, stopped_after * BATCH, 15 * BATCH)
    assert_equal(rest, whole[stopped_after:])


def test_a_run_of_many_legs_is_one_run(spec: StreamSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = global_batches(spec, 2, 0, 20 * BATCH)
    monkeypatch.setattr("vit_ray.data.stream.ray_datasets._FIRST_SEGMENT_TASKS", 1)
    monkeypatch.setattr("vit_ray.data.stream.ray_datasets._LATER_SEGMENT_TASKS", 2)
    assert_equal(global_batches(spec, 2, 0, 20 * BATCH), whole)


def test_delayed_tasks_change_nothing(spec: StreamSpec, dataset: Manifest) -> None:
    slow = StreamSpec(**{**vars(spec), "augmentation": SlowAugmentation("inception_crop", 16)})
    assert_equal(global_batches(slow, 4, 0, 8 * BATCH), global_batches(spec, 1, 0, 8 * BATCH))


class SlowAugmentation(Augmentation):
    """Delays some images by an amount that differs from run to run."""

    @property
    def shape(self) -> tuple[int, int, int]:
        time.sleep(float(np.random.default_rng().choice([0, 0, 0, 0.3])))
        return super().shape


class DeadlyAugmentation(Augmentation):
    """Kills the first process that asks for it in the middle of a task, as a lost node would."""

    marker: Path

    @property
    def shape(self) -> tuple[int, int, int]:
        if ray.get_runtime_context().get_task_id() is not None:
            with contextlib.suppress(FileExistsError):
                self.marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().shape


def test_a_killed_reading_task_changes_nothing(spec: StreamSpec, tmp_path: Path) -> None:
    deadly = DeadlyAugmentation("inception_crop", 16)
    object.__setattr__(deadly, "marker", tmp_path / "killed")
    killing = StreamSpec(**{**vars(spec), "augmentation": deadly})
    assert_equal(global_batches(killing, 2, 0, 8 * BATCH), global_batches(spec, 1, 0, 8 * BATCH))
    assert (tmp_path / "killed").exists()


def test_each_image_comes_once_an_epoch(spec: StreamSpec) -> None:
    batches = global_batches(spec, 2, 0, 25 * BATCH)
    samples = np.concatenate([batch["sample"] for batch in batches])
    assert sorted(samples.tolist()) == sorted([*range(300), *range(300)])


def test_a_training_batch_keeps_the_contract(spec: StreamSpec) -> None:
    batch = global_batches(spec, 1, 0, BATCH)[0]
    assert {name: (c.dtype, c.shape) for name, c in batch.items()} == {
        "image": (np.dtype(np.uint8), (BATCH, 16, 16, 3)),
        "labels": (np.dtype(np.int32), (BATCH, 1)),
        "sample": (np.dtype(np.int64), (BATCH,)),
    }


def test_evaluation_gives_every_image_once_and_pads_with_weight_zero(spec: StreamSpec) -> None:
    whole = StreamSpec(spec.manifest, Augmentation("center_crop", 16, resize=20, flip=False))
    ranks = consume(evaluation_stream(whole, world_size=4, batch_size=32), 4, 32)
    assert [len(batches) for batches in ranks] == [3, 3, 3, 3]
    batches = [batch for rank in ranks for batch in rank]
    samples = np.concatenate([batch["sample"] for batch in batches])
    weights = np.concatenate([batch["weight"] for batch in batches])
    assert sorted(samples[weights == 1].tolist()) == list(range(300))
    assert len(samples) == 4 * 3 * 32
    assert set(samples[weights == 0].tolist()) == {-1}
    assert weights.dtype == np.float32


def test_a_dev_split_is_streamed_without_the_rest(spec: StreamSpec) -> None:
    kept, held_out = split_rows(spec.manifest, 0.2, seed=1)
    training = StreamSpec(**{**vars(spec), "rows": kept})
    seen = {int(s) for batch in global_batches(training, 2, 0, 10 * BATCH) for s in batch["sample"]}
    held = StreamSpec(**{**vars(spec), "rows": held_out})
    ranks = consume(evaluation_stream(held, world_size=2, batch_size=8), 2, 8)
    samples = {int(s) for batches in ranks for batch in batches for s in batch["sample"]} - {-1}
    assert (len(seen), len(samples)) == (240, 60)
    assert not seen & samples


def test_labels_belong_to_their_images(spec: StreamSpec, dataset: Manifest) -> None:
    """Three classes of pictures; the label of a sample is the same in both streams."""
    evaluated = consume(evaluation_stream(spec, world_size=1, batch_size=60), 1, 60)[0]
    label_of = {
        int(s): int(v)
        for b in evaluated
        for s, v in zip(b["sample"], b["labels"][:, 0], strict=True)
    }
    assert sorted(np.bincount(list(label_of.values())).tolist()) == [100, 100, 100]
    for batch in global_batches(spec, 2, 0, 4 * BATCH):
        assert [label_of[int(s)] for s in batch["sample"]] == batch["labels"][:, 0].tolist()


def test_the_train_config_builds_for_the_workers_there_are(spec: StreamSpec) -> None:
    pending = PendingStream(spec, lambda world_size: BATCH // world_size, 0, 4 * BATCH)
    evaluation = PendingEvaluation(spec, 10)
    shards = StreamConfig().configure({"train": pending, "eval": evaluation}, 3, None, None)
    remote_take = ray.remote(num_cpus=0)(take)
    parts = ray.get([remote_take.remote(shard["train"], BATCH // 3) for shard in shards])
    samples = np.concatenate([batch["sample"] for rank in parts for batch in rank])
    order = Order(spec.manifest.rows, spec.seed, window=spec.window)
    expected = order.samples_at(0, 4 * BATCH)
    np.testing.assert_array_equal(np.sort(samples), np.sort(expected))
    evaluated = ray.get([remote_take.remote(shard["eval"], 10) for shard in shards])
    assert [len(batches) for batches in evaluated] == [10, 10, 10]


def test_a_range_that_is_no_whole_number_of_passes_is_refused(spec: StreamSpec) -> None:
    with pytest.raises(ValueError, match="use a multiple of 24"):
        training_stream(spec, world_size=2, batch_size_per_rank=12, start=0, stop=100)
    with pytest.raises(ValueError, match="not a positive"):
        training_stream(spec, world_size=2, batch_size_per_rank=12, start=24, stop=24)
