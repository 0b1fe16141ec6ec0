"""Rows that went bad after conversion: replaced and counted while training, up to a limit."""

from typing import Any

import numpy as np
import pytest

from tests.data.damage import broken_copy, damage
from tests.data.stream.reading import read_training
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import Partition
from vit_ray.data.parts import select
from vit_ray.data.shards import EncodedRows, RowGroupReader
from vit_ray.data.stream import ray_datasets
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec, _RowGroupCache
from vit_ray.data.stream.ray_datasets import BadRowLimit


def read_epoch(
    manifest: Manifest, is_training: bool = True, **options: Any
) -> tuple[dict[str, Any], dict[int, str]]:
    spec = StreamSpec(manifest, Augmentation(size=16), **options)
    job = StreamJob(spec, Partition(1, spec.num_images), 0, is_training)
    return BatchReader(job).batch(0, 0, spec.num_images)


def test_a_bad_row_is_described_and_replaced_by_a_neighbour_in_training(dataset, tmp_path):
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5])
    batch, bad = read_epoch(manifest)
    again, _ = read_epoch(manifest)
    for name in batch:
        np.testing.assert_array_equal(batch[name], again[name])
    sample = int(manifest.first_samples[2]) + 5
    assert list(bad) == [sample]
    key = RowGroupReader(manifest).read(2).key(5)
    assert key in bad[sample]
    assert manifest.files[int(manifest.file_index[2])].path in bad[sample]
    assert "row 5 of row group" in bad[sample]
    assert "checksum differs" in bad[sample]
    counts = np.bincount(batch["sample"], minlength=300)
    assert counts[sample] == 0
    assert counts.sum() == 300
    assert sorted(counts[manifest.first_samples[2] : manifest.first_samples[3]])[-1] == 2
    batch, bad = read_epoch(manifest, is_training=False)  # where it counts nothing
    assert list(bad) == [sample]
    assert batch["weight"][sample] == 0
    assert not batch["image"][sample].any()
    counted = batch["sample"][batch["weight"] == 1]
    assert counted.tolist() == [s for s in range(300) if s != sample]


def test_a_replacement_never_comes_from_the_held_out_rows(dataset, tmp_path):
    manifest, _ = broken_copy(dataset, tmp_path)
    kept, held_out = select(manifest, seed=0, held_out_fraction=0.5, fraction=1.0)
    damage(manifest, group=2, rows=list(range(0, 16, 2)))
    samples = read_epoch(kept)[0]["sample"]
    others = [held_out.samples_of(group) for group in np.flatnonzero(held_out.rows).tolist()]
    assert not np.isin(samples, np.concatenate(others)).any()
    assert len(samples) == 150


def test_a_row_group_without_a_good_image_has_substitutes_of_the_next(dataset, tmp_path):
    """As a part may have a single row of a row group; where many follow, it is an error."""
    manifest, _ = broken_copy(dataset, tmp_path)
    first = manifest.first_samples
    damage(manifest, group=18, rows=list(range(12)))
    batch, bad = read_epoch(manifest)
    assert sorted(bad) == list(range(first[18], 300))
    assert np.bincount(batch["sample"], minlength=300)[:16].sum() == 16 + 12
    for group in range(1, 9):
        damage(manifest, group, rows=list(range(16)))
    with pytest.raises(ValueError, match=r"no image of its row group .* next 7 can be decoded"):
        read_epoch(manifest)


def test_training_goes_on_below_the_limit_and_stops_above_it(ray_cluster, dataset, tmp_path):
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5, 9])
    spec = {"augmentation": Augmentation(size=16), "num_cpus": 0.5, "task_rows": 50}
    tolerant = StreamSpec(open_dataset(str(tmp_path)), max_bad_fraction=0.01, **spec)
    (batches,) = read_training(tolerant, 1, 50, start=0, stop=600)
    assert sum(len(batch["sample"]) for batch in batches) == 600
    strict = StreamSpec(open_dataset(str(tmp_path)), max_bad_fraction=0.004, **spec)
    with pytest.raises(Exception, match=r"2 of 300 images cannot be decoded, above"):
        read_training(strict, 1, 50, start=0, stop=300)


class Store:
    """The cluster's key-value store, and how often it was listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: set[bytes] = set()
        self.lists = 0
        monkeypatch.setattr(ray_datasets, "_internal_kv_put", lambda key, _: self.keys.add(key))
        monkeypatch.setattr(ray_datasets, "_internal_kv_list", self.list)

    def list(self, prefix: bytes) -> list[bytes]:
        self.lists += 1
        return [key for key in self.keys if key.startswith(prefix)]


def test_the_limit_counts_distinct_rows_of_all_processes(monkeypatch):
    Store(monkeypatch)
    one, other = (BadRowLimit("stream", 1000, 0.003) for _ in range(2))
    one.note({1: "one", 2: "two"})
    other.note({2: "two", 3: "three"})
    one.note({1: "one"})
    with pytest.raises(ValueError, match=r"4 of 1000 images .* one of them is four; run"):
        other.note({4: "four"})


@pytest.mark.slow
def test_many_bad_rows_are_counted_seldom_and_not_too_late(monkeypatch):
    """20,000 rows may be bad, 18,000 are, and 1,024 processes find more in turn."""
    store = Store(monkeypatch)
    store.keys = {f"vit_ray/bad_rows/stream/{-i}".encode() for i in range(1, 18_001)}
    limits = [BadRowLimit("stream", 20_000_000, 0.001) for _ in range(1024)]
    found = iter(range(10_000))

    def find_all() -> None:
        for sample in found:
            limits[sample % 1024].note({sample: "bad"})

    with pytest.raises(ValueError, match="of 20000000 images"):
        find_all()
    assert 20_000 < len(store.keys) < 20_000 + 1024
    assert store.lists < 2 * 1024


def test_row_groups_are_held_up_to_some_bytes_and_read_again_beyond(dataset):
    reads: list[int] = []
    reader = RowGroupReader(dataset)

    def read(group: int) -> EncodedRows:
        reads.append(group)
        return reader.read(group)

    not_quite_three = sum(reader.read(group).nbytes for group in range(3)) - 1
    cache = _RowGroupCache(read, not_quite_three)
    for group in (0, 1, 0, 1):
        assert cache(group).keys == reader.read(group).keys
    assert reads == [0, 1]
    for group in (2, 1, 0):
        cache(group)
    assert reads == [0, 1, 2, 0]
    none = _RowGroupCache(read, 0)
    assert none(3) is none(3)
