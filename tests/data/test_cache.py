"""A node's cache: whole or not there, within its disk, and made again when it is removed."""

import logging
import shutil
from pathlib import Path

import pytest

from tests.data.damage import damage
from tests.data.small_sets import SHARD, write_rows
from tests.recipes import recipe_with
from vit_ray.data import shards as caches
from vit_ray.data.boxes import Augmentation
from vit_ray.data.dataset import Manifest
from vit_ray.data.parts import subset
from vit_ray.data.shards import Cache, RowGroupReader
from vit_ray.launch.resolved_run import stream_of

LABELS = [(0,), (1, 2), (2,), (1,), (0,), (2, 0)]
KEYS = [f"key {i}" for i in range(6)]


@pytest.fixture
def small(tmp_path: Path) -> Manifest:
    return write_rows(tmp_path / "small", LABELS)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"), 0)


def keys(manifest: Manifest, cache: Cache) -> list[str]:
    """Of all rows, by a reader of its own, after each image was looked at."""
    reader, found = RowGroupReader(manifest, cache), []
    for group in range(manifest.num_row_groups):
        rows = reader.read(group)
        found += [rows.key(row) for row in range(len(rows.keys)) if rows.image(row)]
    return found


def entries(cache: Cache) -> list[Path]:
    return sorted(Path(cache.folder).iterdir())


def test_what_was_read_once_needs_the_store_no_more(small, cache, tmp_path):
    assert keys(small, cache) == KEYS
    part = subset(small.path, str(tmp_path / "part"), count=3)
    (Path(small.root) / SHARD).unlink()
    assert keys(small, cache) == KEYS
    assert set(keys(part, cache)) <= set(KEYS)
    with pytest.raises(ValueError, match="is missing"):
        RowGroupReader(small).read(0)
    other = write_rows(tmp_path / "other", LABELS[::-1])
    keys(other, cache)
    assert len(entries(cache)) == 4


def test_a_flipped_byte_of_any_entry_is_read_again(small, cache):
    keys(small, cache)
    assert len(entries(cache)) == 2
    for file in entries(cache):
        whole = file.read_bytes()
        damaged = [whole[:cut] for cut in (0, 1, len(whole) - 1)]
        damaged += [
            whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :]
            for byte in range(0, len(whole), 97)
        ]
        for content in damaged:
            file.write_bytes(content)
            assert keys(small, cache) == KEYS
            assert file.read_bytes() == whole
    file.write_bytes(damaged[-1])
    (Path(small.root) / SHARD).unlink()
    with pytest.raises(ValueError, match="is missing"):  # it is never used
        keys(small, cache)


def test_a_damaged_image_is_noticed_each_time(small, cache):
    damage(small, 0, [0])
    for _ in range(2):
        with pytest.raises(ValueError, match="checksum differs"):
            RowGroupReader(small, cache).read(0).image(0)


def test_a_folder_that_a_cleaner_removed_is_made_again(small, cache):
    keys(small, cache)
    before = [file.name for file in entries(cache)]
    reader = RowGroupReader(small, cache)
    for group in (0, 1):
        shutil.rmtree(cache.folder)
        reader.read(group)
    reader.read(0)
    assert [file.name for file in entries(cache)] == before


def test_a_disk_keeps_the_space_that_it_shall_leave_free_and_a_bad_folder_is_named(small, tmp_path):
    free = shutil.disk_usage(tmp_path).free
    cache = Cache(str(tmp_path / "cache"), 2 * free)
    assert keys(small, cache) == KEYS
    assert entries(cache) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"data.cache_dir=.* cannot be used on this node"):
        keys(small, Cache(str(tmp_path / "file" / "cache"), 0))


def test_a_disk_that_is_really_full_is_told_once_and_costs_nothing_else(
    small_disk, tmp_path, caplog
):
    whole = write_rows(tmp_path / "large", LABELS * 40, 20_000)
    caches._warn_once.cache_clear()
    cache = Cache(str(small_disk / "cache"), -1 << 40)  # whatever is free
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert keys(whole, cache) == [f"key {i}" for i in range(240)]
    assert caplog.text.count("No space left on device; reading continues without it") == 1
    kept = [file.suffix for file in small_disk.glob("cache/*-*")]
    assert kept
    assert ".tmp" not in kept


def test_a_recipe_gives_the_cache_of_each_node(small):
    data = {"cache_dir": "/local", "cache_free_gib": 2.0}
    recipe = recipe_with(data=data)
    assert stream_of(recipe.data, 0, Augmentation(), small).cache == Cache("/local", 2 * 2**30)
    with pytest.raises(ValueError, match=r"cache_dir='s3://b/c' is not a local folder"):
        recipe_with(data={"cache_dir": "s3://b/c"})
