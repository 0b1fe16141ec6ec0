"""What one reading task makes, without Ray: with restart indices or without, of rows gone bad."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from tests.data.converting import convert, run_in_this_process
from tests.data.damage import broken_copy, damage
from tests.data.pictures import encoded
from tests.data.small_sets import used_rows
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.convert import checks
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.crops import crop_of
from vit_ray.data.dataset import Manifest, ShardFile, ShardFiles
from vit_ray.data.order import Partition
from vit_ray.data.parts import select
from vit_ray.data.randaugment import RandAugment
from vit_ray.data.restart_index import StoredImage
from vit_ray.data.restart_markers import Libjpeg, with_restart_markers
from vit_ray.data.shards import RowGroupReader
from vit_ray.data.stream.batches import Batch, BatchReader, StreamJob, StreamSpec

CHINA, FLOWER = load_sample_images().images
FILES = {
    "a.jpg": encoded(CHINA, subsampling=2),
    "b.jpg": encoded(FLOWER, subsampling=0),
    "c.jpg": encoded(CHINA[:401, :333], subsampling=1),
    "d.jpg": encoded(FLOWER[:300, :300, 0]),
    "e.jpg": encoded(CHINA[:, :500], progressive=True),
    "f.png": encoded(FLOWER[:64, :80], "PNG"),
    "g.jpg": encoded(CHINA[:20, :30]),
}


def read(
    manifest: Manifest,
    augmentation: Augmentation,
    *,
    is_training: bool = True,
    count: int | None = None,
) -> tuple[Batch, dict[int, str]]:
    count = count or manifest.num_images
    spec = StreamSpec(manifest, augmentation, seed=4)
    job = StreamJob(spec, Partition(1, count), 0, is_training=is_training)
    return BatchReader(job).batch(0, 0, count)


def converted(folder: Path, *, index_jpeg: bool) -> Manifest:
    (folder / "images" / "one").mkdir(parents=True)
    for name, content in FILES.items():
        (folder / "images" / "one" / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        run_in_this_process(patch)
        options: dict[str, Any] = {"rows_per_row_group": 3, "index_jpeg": index_jpeg}
        convert(str(folder / "images"), str(folder / "set"), **options)
    return open_dataset(str(folder / "set"))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """With restart indices, and without."""
    folder = tmp_path_factory.mktemp("indexed")
    return [converted(folder / str(is_on), index_jpeg=is_on) for is_on in (True, False)]


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(size=224, max_area=0.3),
        Augmentation(size=64),  # decoded at 1/2, 1/4 and 1/8 too
        Augmentation("center_crop", size=50, resize=60),
        Augmentation("center_crop", size=224, resize=256, is_exact=True),
        Augmentation("resize_crop", size=(100, 120), resize=130),
        Augmentation("resize", size=100, randaugment=RandAugment()),
    ],
)
def test_batches_have_the_crops_of_their_samples_with_indices_and_without(sets, augmentation):
    for is_training in (True, False):
        (indexed, bad), (plain, _) = (
            read(one, augmentation, is_training=is_training, count=35) for one in sets
        )
        assert not bad
        assert indexed.keys() == plain.keys()
        for name, column in plain.items():
            np.testing.assert_array_equal(indexed[name], column)
        used, samples = used_rows(sets[1])[0], plain["sample"].tolist()
        for place, sample in enumerate(samples if is_training else samples[:7]):
            crop = crop_of(used[sample][0], augmentation, (4, place // 7, sample))
            np.testing.assert_array_equal(plain["image"][place], crop)
    assert indexed["weight"].tolist() == [1.0] * 7 + [0.0] * 28
    for manifest in sets:
        assert check_file(0, manifest, decode_fraction=1.0).problems == []


WRONG: dict[str, Callable[[Any], Any]] = {
    "unit_height": lambda height: 2 * height,
    "unit_width": lambda _: 0,
    "front": lambda _: 1 << 20,
    "offsets": lambda offsets: offsets + 1,
}


def with_wrong_indices(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> Manifest:
    """A data set in whose indices a number is not that of the files."""

    def wrong(image: bytes, writer: Libjpeg) -> StoredImage | None:
        found = with_restart_markers(image, writer)
        if found is None:
            return None
        value = WRONG[name](getattr(found.index, name))
        return replace(found, index=replace(found.index, **{name: value}))

    monkeypatch.setattr(checks, "with_restart_markers", wrong)
    return converted(folder, index_jpeg=True)


@pytest.mark.parametrize("name", WRONG)
def test_an_index_that_is_not_of_its_file_costs_its_image_alone(monkeypatch, tmp_path, name):
    manifest = with_wrong_indices(monkeypatch, tmp_path, name)
    batch, bad = read(manifest, Augmentation(size=64), is_training=False)
    assert len(bad) >= 4
    assert all("its restart index" in why for why in bad.values())
    assert batch["image"].any(axis=(1, 2, 3)).sum() == 7 - len(bad)


def test_a_bad_row_is_described_and_replaced_by_a_neighbour_in_training(dataset, tmp_path):
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=2, rows=[5])
    batch, bad = read(manifest, Augmentation(size=16))
    again, _ = read(manifest, Augmentation(size=16))
    for name in batch:
        np.testing.assert_array_equal(batch[name], again[name])
    first = manifest.first_samples[2:4]
    sample = int(first[0]) + 5
    assert list(bad) == [sample]
    shard = manifest.files[int(manifest.file_index[2])].path
    key = RowGroupReader(manifest).read(2).key(5)
    for told in (key, shard, "row 5 of row group", "checksum differs"):
        assert told in bad[sample]
    counts = np.bincount(batch["sample"], minlength=300)
    assert (counts.sum(), counts[sample], counts[slice(*first)].max()) == (300, 0, 2)
    batch, bad = read(manifest, Augmentation(size=16), is_training=False)  # where it counts nothing
    assert list(bad) == [sample]
    assert batch["weight"][sample] == 0
    assert not batch["image"][sample].any()
    counted = batch["sample"][batch["weight"] == 1]
    assert counted.tolist() == [s for s in range(300) if s != sample]


def test_a_replacement_never_comes_from_the_held_out_rows(dataset, tmp_path):
    manifest, _ = broken_copy(dataset, tmp_path)
    kept, held_out = select(manifest, seed=0, held_out_fraction=0.5, fraction=1.0)
    damage(manifest, group=2, rows=list(range(0, 16, 2)))
    samples = read(kept, Augmentation(size=16))[0]["sample"]
    others = [held_out.samples_of(group) for group in np.flatnonzero(held_out.rows).tolist()]
    assert not np.isin(samples, np.concatenate(others)).any()
    assert len(samples) == 150


def test_a_row_group_without_a_good_image_has_substitutes_of_the_next(dataset, tmp_path):
    """As a part may have a single row of a row group; where many follow, it is an error."""
    manifest, _ = broken_copy(dataset, tmp_path)
    damage(manifest, group=18, rows=list(range(12)))
    batch, bad = read(manifest, Augmentation(size=16))
    assert sorted(bad) == list(range(288, 300))
    assert np.bincount(batch["sample"], minlength=300)[:16].sum() == 16 + 12
    for group in range(1, 9):
        damage(manifest, group, rows=list(range(16)))
    with pytest.raises(ValueError, match=r"no image of its row group .* next 7 can be decoded"):
        read(manifest, Augmentation(size=16))


NUM_GROUPS = 600_000


def as_ray_sends(found: Any) -> tuple[bytes, list[memoryview]]:
    """What each process unpickles, and the arrays that it shares with others."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(found, protocol=5, buffer_callback=buffers.append)
    return body, [buffer.raw().toreadonly() for buffer in buffers]


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_processes_share_all_of_manifest_and_order(held_out):
    numbers = np.arange(NUM_GROUPS, dtype=np.int32)
    rows = np.full(NUM_GROUPS, 64, np.int32)
    manifest = Manifest(
        *(numbers // 100, numbers % 100, rows, rows.astype(np.int64)),
        files=ShardFiles(ShardFile(f"{i}", 6400, 6400, 0) for i in range(NUM_GROUPS // 100)),
        classes=["a"],
    )
    part, _ = select(manifest, seed=0, held_out_fraction=held_out, fraction=1.0)
    job = StreamJob(StreamSpec(part), Partition(1, 64), 0, is_training=True)
    body, buffers = as_ray_sends(job)
    assert len(body) < 10_000
    order = BatchReader(pickle.loads(body, buffers=buffers)).order
    sent = 2 * sum(buffer.nbytes for buffer in buffers)
    drawn = sum(order.draw(epoch).nbytes for epoch in (0, 1))
    # Of a row group: the manifest's four columns and its first sample, of a part also its rows in
    # the whole, sent by the driver and by the stream server; its place in the order of two epochs.
    each = 2 * (28 + 4 * (held_out > 0)) + 2 * 16
    assert pytest.approx(sent + drawn, rel=0.05) == NUM_GROUPS * each
