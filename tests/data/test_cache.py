"""A node's cache: right or not there, bounded among processes, and nobody else's files touched."""

import contextlib
import errno
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.data.small_sets import SHARD, used_rows, write_rows
from vit_ray.config import Recipe
from vit_ray.data import cache as local_cache
from vit_ray.data import open_dataset
from vit_ray.data.cache import LocalCache
from vit_ray.data.dataset import Manifest, checksum
from vit_ray.data.prepare.subset import subset
from vit_ray.data.shards import RowGroupReader

ONE, OTHER = "0" * 16, "1" * 16
LABELS = [(0,), (1, 2), (2,), (1,), (0,), (2, 0)]


@pytest.fixture
def small(tmp_path: Path) -> Manifest:
    return write_rows(tmp_path / "small", LABELS)


@pytest.fixture
def cache(tmp_path: Path) -> LocalCache:
    return LocalCache(str(tmp_path / "cache"), 1 << 20)


def keys(manifest: Manifest, cache: LocalCache) -> list[str]:
    """Of all rows, by a reader of its own, after each image was looked at."""
    reader, found = RowGroupReader(manifest, cache), []
    for group in range(manifest.num_row_groups):
        rows = reader.read(group)
        assert rows.is_whole
        found += [rows.key(row) for row in range(len(rows.keys)) if rows.image(row)]
    return found


def entries(cache: LocalCache) -> dict[str, int]:
    return {path.name: stat.st_size for path, stat in local_cache._entries(Path(cache.folder))}


def test_what_was_read_once_needs_the_store_no_more(small: Manifest, cache: LocalCache) -> None:
    before = keys(small, cache)
    assert len(before) == 6
    (Path(small.root) / SHARD).unlink()
    assert keys(small, cache) == before
    with pytest.raises(ValueError, match="is missing"):
        RowGroupReader(small).read(0)


def test_a_part_of_a_data_set_is_read_from_what_the_whole_has_kept(
    small: Manifest, cache: LocalCache, tmp_path: Path
) -> None:
    before = keys(small, cache)
    part = subset(small.path, str(tmp_path / "part"), count=3)
    (Path(small.root) / SHARD).unlink()
    reader = RowGroupReader(part, cache)
    found = [key for group in range(part.num_row_groups) for key in reader.read(group).keys]
    assert {str(key) for key in found} <= set(before)
    other = write_rows(tmp_path / "other", LABELS[::-1])
    assert other.shards_digest != small.shards_digest == part.shards_digest


def test_a_flipped_byte_of_any_entry_is_read_again(
    small: Manifest, cache: LocalCache, caplog: pytest.LogCaptureFixture
) -> None:
    before = keys(small, cache)
    assert len(entries(cache)) == 3
    for name in entries(cache):
        file = Path(cache.folder) / name
        whole = file.read_bytes()
        for byte in range(0, len(whole), 97):
            file.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
            assert keys(small, cache) == before
            assert file.read_bytes() == whole
        for cut in (0, 1, len(whole) - 1):
            file.write_bytes(whole[:cut])
            assert keys(small, cache) == before
    assert "differs from its checksum" in caplog.text


def test_a_damaged_entry_is_never_used_where_the_store_is_away(
    small: Manifest, cache: LocalCache
) -> None:
    keys(small, cache)
    (Path(small.root) / SHARD).unlink()
    entry = Path(cache.folder) / f"{small.shards_digest}-0-1"
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    reader = RowGroupReader(small, cache)
    reader.read(0)
    with pytest.raises(ValueError, match="is missing"):
        reader.read(1)


def test_a_full_cache_keeps_what_it_has_of_a_data_set(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path / "cache"), 100)
    for number in range(5):
        cache.write(f"{ONE}-0-{number}", bytes(40))
        os.utime(tmp_path / "cache" / f"{ONE}-0-0", (0, 0))
    assert entries(cache) == {f"{ONE}-0-0": 40, f"{ONE}-0-1": 40}


def test_what_others_used_last_longest_ago_makes_room(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path / "cache"), 100)
    now = time.time()
    for number, idle_s in ((0, 7200), (1, 9000), (2, 60)):
        cache.write(f"{OTHER}-0-{number}", bytes(30))
        os.utime(tmp_path / "cache" / f"{OTHER}-0-{number}", (now - idle_s, now - idle_s))
    half = tmp_path / "cache" / f"{ONE}-0-7.0123abcd.tmp"
    half.write_bytes(bytes(5))
    os.utime(half, (0, 0))
    cache.write(f"{ONE}-0-0", bytes(30))
    assert entries(cache).keys() == {f"{OTHER}-0-0", f"{OTHER}-0-2", f"{ONE}-0-0"}
    cache.write(f"{ONE}-0-1", bytes(40))
    assert entries(cache).keys() == {f"{OTHER}-0-2", f"{ONE}-0-0", f"{ONE}-0-1"}
    cache.write(f"{ONE}-0-2", bytes(1))
    assert sum(entries(cache).values()) == 100
    assert f"{ONE}-0-2" not in entries(cache)


def test_use_counts_as_use(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path / "cache"), 100)
    cache.write(f"{OTHER}-0-0", bytes(90))
    os.utime(tmp_path / "cache" / f"{OTHER}-0-0", (0, 0))
    assert cache.read(f"{OTHER}-0-0", checksum(bytes(90)), 90) is not None
    cache.write(f"{ONE}-0-0", bytes(90))
    assert entries(cache) == {f"{OTHER}-0-0": 90}


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"holds 'holiday.jpg' and is no cache of vit_ray"):
        LocalCache(str(tmp_path / "photos"), 100).write(f"{ONE}-0-0", bytes(40))
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["holiday.jpg"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"data.cache_dir=.* cannot be used on this node"):
        LocalCache(str(tmp_path / "file" / "cache"), 100).read(f"{ONE}-0-0", 0, 40)


def test_files_that_are_not_the_caches_own_stay(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path / "cache"), 100)
    cache.write(f"{OTHER}-0-0", bytes(40))
    for name in ("notes.txt", "part-00000-of-00001.parquet", f"{OTHER}-0-0.bak"):
        (tmp_path / "cache" / name).write_bytes(bytes(500))
    for file in (tmp_path / "cache").iterdir():
        os.utime(file, (0, 0))
    cache.write(f"{ONE}-0-0", bytes(80))
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {
        "vit_ray_cache", "vit_ray_cache.lock", "notes.txt", "part-00000-of-00001.parquet",
        f"{OTHER}-0-0.bak", f"{ONE}-0-0",
    }  # fmt: skip


def test_a_full_disk_leaves_no_half_file_and_stops_no_reading(
    small: Manifest,
    cache: LocalCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def write_half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(bytes(memoryview(content)[:10]))
        raise OSError(errno.ENOSPC, "No space left on device")

    local_cache._warn_once.cache_clear()
    monkeypatch.setattr(Path, "write_bytes", write_half)
    with caplog.at_level(logging.WARNING):
        assert keys(small, cache) == [f"key {i}" for i in range(6)]
    assert entries(cache) == {}
    assert caplog.text.count("No space left on device; reading continues without it") == 1


def test_a_folder_that_goes_away_stops_no_reading(small: Manifest, cache: LocalCache) -> None:
    before = keys(small, cache)
    for file in Path(cache.folder).iterdir():
        file.unlink()
    Path(cache.folder).rmdir()
    assert keys(small, cache) == before


def _read_again_and_again(path: str, cache: LocalCache, times: int) -> int:
    """Rounds in which every row came as it is and the bound held."""
    manifest = open_dataset(path)
    whole, _ = used_rows(manifest)
    good = 0
    for _ in range(times):
        found = keys(manifest, cache)
        sizes = sum(size for name, size in entries(cache).items())
        good += found == [key for _, _, key in whole.values()] and sizes <= cache.most_bytes
    return good


def test_processes_share_a_folder_within_the_bound(tmp_path: Path) -> None:
    """Two data sets that take turns in it, neither of which fits beside the other."""
    sets = [write_rows(tmp_path / name, LABELS, size) for name, size in (("a", 4000), ("b", 5000))]
    cache = LocalCache(str(tmp_path / "cache"), 40_000)
    with multiprocessing.get_context("forkserver").Pool(4, _forget_idle) as pool:
        jobs = [(one.path, cache, 40) for one in sets * 2]
        assert pool.starmap(_read_again_and_again, jobs, chunksize=1) == [40] * 4
    assert not [name for name in entries(cache) if name.endswith(".tmp")]


def _forget_idle() -> None:
    local_cache._IDLE_S = -1.0  # type: ignore[misc]


def test_a_recipe_gives_the_cache_of_each_node(tmp_path: Path) -> None:
    recipe = Recipe(name="a", data={"cache_dir": "here"}).with_absolute_paths()
    assert recipe.data.cache_dir == str(Path("here").absolute())
    with pytest.raises(ValueError, match=r"cache_dir='s3://b/c' is not a local folder"):
        recipe.with_changes(data={"cache_dir": "s3://b/c"})


def test_a_folder_is_listed_once_and_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Mock(side_effect=local_cache._entries)
    monkeypatch.setattr(local_cache, "_entries", looks)
    cache = LocalCache(str(tmp_path / "cache"), 3000)
    for number in range(500):
        cache.write(f"{ONE}-0-{number}", bytes(10))
    assert looks.call_count == 2
    assert sum(entries(cache).values()) == 3000
    monkeypatch.setattr(local_cache, "_FULL_S", 0.0)
    (tmp_path / "cache" / f"{ONE}-0-7").unlink()
    marker = tmp_path / "cache" / "vit_ray_cache"
    marker.write_bytes(b"%20d %20d\n" % (3000, 0))  # the while is over
    cache.write(f"{ONE}-0-900", bytes(10))
    assert f"{ONE}-0-900" in entries(cache)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 42, b"12", b"-5 0\n", b"%20d %20d\n" % (0, 0), b"9" * 60 + b" 1\n"]
)
def test_whatever_the_marker_says_the_bound_holds(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "vit_ray_cache").write_bytes(content)
    for number in range(9):
        (folder / f"{ONE}-0-{number}").write_bytes(bytes(10))
    cache = LocalCache(str(folder), 100)
    for number in range(9, 20):
        cache.write(f"{ONE}-0-{number}", bytes(10))
    assert sum(entries(cache).values()) == 100


def test_a_writer_that_is_killed_leaves_no_wrong_entry_and_no_wrong_count(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path / "cache"), 2_000_000)
    random = np.random.default_rng(1)
    for _ in range(12):
        writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(cache,))
        writer.start()
        time.sleep(random.uniform(0.005, 0.05))
        writer.kill()
        writer.join()
    found = entries(cache)
    whole = [name for name in found if not name.endswith(".tmp")]
    assert len(whole) > 10
    for name in whole:
        assert cache.read(name, checksum(_content_of(name)), 100_000) is not None
    for number in range(1000):
        cache.write(f"{ONE}-3-{number}", bytes(9_000))
    assert 1_900_000 < sum(entries(cache).values()) <= 2_000_000


def _write_for_ever(cache: LocalCache) -> None:
    for number in range(os.getpid() % 1000 * 1000, 10**9):
        cache.write(f"{ONE}-0-{number}", _content_of(f"{ONE}-0-{number}"))


def _content_of(name: str) -> bytes:
    return name.encode() * 1000


def _extend(entry: Path) -> None:
    os.truncate(entry, 1 << 26)


def _replace_by_folder(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


def _replace_by_loop(entry: Path) -> None:
    entry.unlink()
    entry.symlink_to(entry.name)


def _empty(entry: Path) -> None:
    entry.write_bytes(b"")


@pytest.mark.parametrize("damage", [_extend, _replace_by_folder, _replace_by_loop, _empty])
def test_an_entry_that_is_no_file_of_its_size_is_read_from_the_source(
    small: Manifest,
    cache: LocalCache,
    damage: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def checksum_of_little(content: bytes) -> int:
        assert len(content) < 1 << 20, "a file that may be larger than memory was read"
        return checksum(content)

    before = keys(small, cache)
    monkeypatch.setattr(local_cache, "checksum", checksum_of_little)
    for name in entries(cache):
        damage(Path(cache.folder) / name)
    assert keys(small, cache) == before
    assert keys(small, cache) == before


@pytest.mark.parametrize("is_full_before", [True, False])
def test_a_disk_that_is_really_full_is_told_once_and_costs_nothing_else(
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_full_before: bool,
) -> None:
    whole = write_rows(tmp_path / "large", LABELS * 40, 20_000)
    if is_full_before:
        (small_disk / "other").write_bytes(b"")
        with contextlib.suppress(OSError):
            (small_disk / "other").write_bytes(bytes(3 << 20))
    writes = Mock(side_effect=local_cache._write)
    monkeypatch.setattr(local_cache, "_write", writes)
    local_cache._warn_once.cache_clear()
    cache = LocalCache(str(small_disk / "cache"), 1 << 30)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert keys(whole, cache) == [f"key {i}" for i in range(240)]
    assert caplog.text.count("No space left on device; reading continues without it") == 1
    kept = list(small_disk.glob("cache/*-*"))
    assert bool(kept) != is_full_before
    assert not [file for file in kept if file.suffix == ".tmp"]
    assert writes.call_count <= len(kept) + 1


def test_a_disk_too_full_for_the_folder_is_told_and_costs_nothing_else(
    small: Manifest,
    cache: LocalCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    local_cache._warn_once.cache_clear()
    monkeypatch.setattr(Path, "touch", full)
    with caplog.at_level(logging.WARNING):
        assert keys(small, cache) == [f"key {i}" for i in range(6)]
    assert caplog.text.count("No space left on device; reading continues without it") == 1
