"""What one reading task does, without Ray."""

from collections import Counter
from dataclasses import replace

import numpy as np

from tests.data.small_sets import samples_at
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.order import Order, Partition, ShuffleWindow, read_tasks
from vit_ray.data.randaugment import RandAugment
from vit_ray.data.shards import EncodedRows, RowGroupReader
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec


def test_a_task_reads_the_row_groups_of_its_window_once(digits, monkeypatch):
    """Two epochs of 1,497 images in row groups of 32, in windows of eight batches of 64."""
    reads: Counter[int] = Counter()
    read = RowGroupReader.read

    def counted(self: RowGroupReader, group: int) -> EncodedRows:
        reads[group] += 1
        return read(self, group)

    monkeypatch.setattr(RowGroupReader, "read", counted)
    manifest = open_dataset(digits.train)
    spec = StreamSpec(
        manifest, Augmentation(size=8), seed=3, window=ShuffleWindow(64, 8), task_rows=512
    )
    partition = Partition(4, 16)
    job = StreamJob(spec, partition, 0, is_training=True)
    batches: list[list[np.ndarray]] = [[] for _ in range(46)]
    for task in read_tasks(partition, 0, 46 * partition.batch_size_per_rank, job.shape, range(4)):
        reader = BatchReader(job)  # another process may make each task
        for rank, first, last in task.blocks():
            samples = reader.batch(rank, first, last)[0]["sample"]
            step = first // partition.batch_size_per_rank
            for part in np.split(samples, (last - first) // partition.batch_size_per_rank):
                batches[step].append(part)
                step += 1
    order = Order(manifest.rows, seed=3, window=spec.window)
    for step, parts in enumerate(batches):
        expected = samples_at(order, step * 64, step * 64 + 64)
        np.testing.assert_array_equal(np.concatenate(parts), expected)
    # The first window is made in small blocks of a task each, for an early first batch.
    first_window = set(order.places(np.arange(512)).groups.tolist())
    others = [reads[group] for group in range(47) if group not in first_window]
    # Twice in two epochs, and once more where a window ends in a row group.
    assert min(others) == 2
    assert sum(others) < 2.4 * len(others)


def test_each_crop_is_augmented_by_the_key_of_its_sample(digits):
    manifest = open_dataset(digits.train)
    plain = StreamSpec(manifest, Augmentation(size=16), seed=3, window=ShuffleWindow(64, 8))
    changed = replace(plain.augmentation, randaugment=RandAugment())
    batches = []
    for spec in (plain, replace(plain, augmentation=changed)):
        job = StreamJob(spec, Partition(1, 64), 1497, is_training=True)
        batches.append(BatchReader(job).batch(0, 0, 64)[0])
    crops, found = (batch["image"] for batch in batches)
    samples = batches[0]["sample"].tolist()
    expected = [
        changed.changed(crop.copy(), (3, 1, sample))
        for crop, sample in zip(crops, samples, strict=True)
    ]
    np.testing.assert_array_equal(found, np.stack(expected))
    assert (found != crops).any(axis=(1, 2, 3)).sum() > 32
