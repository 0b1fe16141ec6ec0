"""Rows that went bad after conversion: replaced and counted while training, up to a limit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_manifest import broken_copy
from tests.data.test_stream import consume
from vit_ray.data import open_dataset
from vit_ray.data.batches import BatchReader, StreamJob, StreamSpec
from vit_ray.data.images import Augmentation
from vit_ray.data.layout import World
from vit_ray.data.manifest import Manifest
from vit_ray.data.reader import RowGroupReader
from vit_ray.data.selection import split_rows
from vit_ray.data.stream import training_stream


def damage(manifest: Manifest, group: int, rows: list[int]) -> None:
    """Flip a byte in the middle of some images of a row group, on disk."""
    encoded = RowGroupReader(manifest).read(group)
    shard = Path(manifest.shard_location(group).path)
    content = shard.read_bytes()
    for row in rows:
        image = encoded.images[row].as_py()
        at = content.index(image) + len(image) // 2
        content = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
    shard.write_bytes(content)


def read_epoch(manifest: Manifest, **options: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """A whole epoch as one batch, without Ray."""
    spec = StreamSpec(manifest, Augmentation(size=16), **options)
    plan = spec.rows.rows_per_group(manifest) if spec.rows else manifest.rows
    job = StreamJob(spec, World(1, spec.num_images), 0, is_training=True, counts=plan)
    return BatchReader(job).batch(0, 0, spec.num_images)


def test_a_bad_row_is_replaced_by_a_neighbour_and_described(
    dataset: Manifest, tmp_path: Path
) -> None:
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5])
    batch, bad = read_epoch(manifest)
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


def test_the_replacement_is_the_same_on_every_worker(dataset: Manifest, tmp_path: Path) -> None:
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5, 6])
    first, second = read_epoch(manifest)[0], read_epoch(manifest)[0]
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_replacement_never_comes_from_the_held_out_rows(
    dataset: Manifest, tmp_path: Path
) -> None:
    manifest, _ = broken_copy(dataset, tmp_path)
    kept, held_out = split_rows(manifest, 0.5)
    damage(manifest, group=2, rows=list(range(0, 16, 2)))
    samples = read_epoch(manifest, rows=kept)[0]["sample"]
    assert not held_out.mask(samples).any()
    assert len(samples) == 150


def test_a_row_group_without_a_good_image_is_an_error(dataset: Manifest, tmp_path: Path) -> None:
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=1, rows=list(range(16)))
    with pytest.raises(ValueError, match=r"no image of its row group .* can be decoded"):
        read_epoch(manifest)


def test_training_goes_on_below_the_limit_and_stops_above_it(
    dataset: Manifest, tmp_path: Path
) -> None:
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5, 9])
    spec = {"augmentation": Augmentation(size=16), "num_cpus": 0.5, "task_rows": 50}
    tolerant = StreamSpec(open_dataset(str(tmp_path)), max_bad_fraction=0.01, **spec)
    stream = training_stream(tolerant, world_size=1, micro_batch_size=50, start=0, stop=600)
    (batches,) = consume(stream, 1, 50)
    assert sum(len(batch["sample"]) for batch in batches) == 600
    strict = StreamSpec(open_dataset(str(tmp_path)), max_bad_fraction=0.004, **spec)
    stream = training_stream(strict, world_size=1, micro_batch_size=50, start=0, stop=300)
    with pytest.raises(Exception, match=r"2 of 300 images cannot be decoded, above"):
        consume(stream, 1, 50)
