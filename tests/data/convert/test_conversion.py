"""What a conversion makes, what it refuses, and that it goes on where it was killed."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import stored_rows, write_files
from tests.data.convert.conftest import stopped_at
from tests.data.converting import config_of, convert
from tests.data.pictures import jpeg, write_class_folders
from tests.data.small_sets import flips
from vit_ray.data import open_dataset
from vit_ray.data.convert import conversion, shards
from vit_ray.data.convert.finished_sets import deduplicate, verify
from vit_ray.data.convert.rows import Row, Unit
from vit_ray.data.convert.shards import parquet_output, read_facts, read_groups, write_facts
from vit_ray.data.images import decode
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.parts import subset
from vit_ray.storage import Location, locate


def test_every_image_arrives_with_its_pixels_and_its_class(dataset, image_folder):
    rows = stored_rows(dataset.path)
    assert len(rows) == 300
    for key, row in rows.items():
        file = image_folder / key
        assert row["restart_index"] is not None
        np.testing.assert_array_equal(decode(row["image"]), decode(file.read_bytes()))
        assert row["names"] == [file.parent.name]


def test_rows_are_shuffled_once_by_the_seed_through_ray_as_in_one_process(
    ray_cluster, image_folder, dataset, tmp_path, monkeypatch
):
    """Paths may be relative to the driver's working directory, which its workers do not have."""
    keys = list(stored_rows(dataset.path))
    order = KeyedPermutation(300, conversion.SHUFFLE, 3).ranks(np.arange(300, dtype=np.int64))
    assert keys == [sorted(keys)[row] for row in order]
    monkeypatch.chdir(tmp_path)
    source, settings = os.path.relpath(image_folder), {"rows_per_row_group": 16, "shard_mib": 0.1}
    again = convert(source, "again", seed=3, **settings)
    other = convert(source, "other", seed=4, **settings)
    assert again.fingerprint == dataset.fingerprint != other.fingerprint
    assert list(stored_rows("again")) == keys
    assert verify("again", decode_fraction=1.0).problems == []
    assert len(deduplicate("again", [subset("other", "part", count=9).path], "clean")) == 9


def test_unusable_files_are_listed_with_their_reason(serial, tmp_path):
    source, target = tmp_path / "source", tmp_path / "set"
    write_class_folders(source, num_classes=2, per_class=20)
    (source / "class_0" / "notes.txt").write_text("no picture")
    (source / "class_0" / "empty.jpg").write_bytes(b"")
    (source / "class_1" / "cut.jpg").write_bytes(jpeg(1)[:-100])
    options = {"rows_per_row_group": 1, "shard_mib": 0.005, "max_rejected_fraction": 0.07}
    report = convert(source, target, **options)
    assert (report.num_images, report.num_rejected) == (40, 3)
    table = pq.read_table(target / "rejected.parquet").to_pylist()
    reasons = {row["key"]: row["reason"] for row in table}
    assert len(table) == len(reasons) == 3
    assert "it is not one of JPEG, PNG" in reasons["class_0/notes.txt"]
    assert "empty" in reasons["class_0/empty.jpg"]
    assert "Premature end" in reasons["class_1/cut.jpg"]
    counts = json.loads((target / "report.json").read_text())["label_histogram"]
    assert counts == {"class_0": 20, "class_1": 20}
    manifest = open_dataset(str(target))
    assert manifest.num_images == 40
    assert len(manifest.files) > 1
    parts = sorted(file.name for file in target.glob("part-*"))
    assert parts == sorted(file.path for file in manifest.files)


def test_a_full_temporary_disk_is_named(serial, small_disk, tmp_path, monkeypatch):
    rows = "".join(f"{i}.jpg,x,{'c' * 1000}\n" for i in range(4000))
    (tmp_path / "list.csv").write_text("path,label,caption\n" + rows)
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with pytest.raises(OSError, match=rf"set TMPDIR to a larger disk.*{small_disk}"):
        convert(tmp_path / "list.csv", tmp_path / "set", columns=["caption"])


def test_tens_of_thousands_of_class_folders_are_looked_at_by_few_tasks(monkeypatch):
    parts: list[list[Unit]] = []
    monkeypatch.setattr(conversion, "run_tasks", lambda _, items, **__: parts.extend(items) or [])
    config = config_of("/a", "/set")
    units = [Unit("folder", f"/a/{i}", "/a", config) for i in range(30_000)]
    conversion.versions_of(units)
    assert len(parts) <= 1024
    assert [unit for part in parts for unit in part] == units


def test_our_own_mistake_is_no_rejected_row(serial, image_folder, tmp_path, monkeypatch):
    def broken(*_: Any) -> None:
        raise ValueError("a mistake in the writer")

    monkeypatch.setattr(shards, "row_groups", broken)
    with pytest.raises(ValueError, match="a mistake in the writer"):
        convert(image_folder, tmp_path / "set", max_rejected_fraction=1.0)
    assert not list((tmp_path / "set").glob("part-*"))


@pytest.mark.parametrize(
    "name",
    ["report.json", "part-00000-of-00001.parquet", "_staging/settings.txt", "cats/1.jpg", "a.txt"],
)
def test_a_file_of_somebody_else_is_never_replaced(serial, image_folder, tmp_path, name):
    """Hidden files are nobody's."""
    write_files(tmp_path / "set", {".git/a": "", "lost+found/b": "", "Thumbs.db": "", name: "mine"})
    with pytest.raises(ValueError, match=rf"{name.partition('/')[0]}.* move it away"):
        convert(image_folder, tmp_path / "set")
    assert (tmp_path / "set" / name).read_text() == "mine"
    assert len([path for path in (tmp_path / "set").rglob("*") if path.is_file()]) == 4
    (tmp_path / "set" / name).unlink()
    shutil.rmtree(tmp_path / "set" / "cats", ignore_errors=True)
    assert convert(image_folder, tmp_path / "set").num_images == 300


def test_a_destination_in_the_source_is_refused_also_through_a_link(serial, tmp_path):
    write_class_folders(tmp_path / "pets", 2, 2)
    (tmp_path / "link").symlink_to(tmp_path / "pets")
    for name in ("pets/train", "link/train"):
        with pytest.raises(ValueError, match=r"is in convert\.source=.*choose a folder outside"):
            convert(tmp_path / "pets", tmp_path / name)
    assert sorted(path.name for path in (tmp_path / "pets").iterdir()) == ["class_0", "class_1"]
    convert(tmp_path / "pets", tmp_path / "pets_converted")


def test_what_a_refused_conversion_leaves_is_no_class_of_the_next(serial, tmp_path):
    files = {"in/cat/1.jpg": jpeg(1), "in/dog/2.jpg": jpeg(2), "in/cat/0.jpg": b"broken"}
    root = write_files(tmp_path / "s", files)
    with pytest.raises(ValueError, match="not usable images"):
        convert(root / "in", root / "out")
    with pytest.raises(ValueError, match=r"'.*/out' holds '.*', of a conversion; move that folder"):
        convert(root, tmp_path / "set", format="folder", max_rejected_fraction=0.9)
    assert not (tmp_path / "set").exists()


def test_what_another_version_has_made_is_refused(serial, image_folder, tmp_path, monkeypatch):
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(image_folder, tmp_path / "staged")
    convert(image_folder, tmp_path / "set")
    content = b'{"settings": {"seed": 0}, "units": {}, "version": 7}'  # as version 7 wrote it
    for name in ("staged/source.json", "set/source.json"):
        target = tmp_path / name.partition("/")[0]
        (tmp_path / name).write_bytes(b"%s\n%08x" % (content, zlib.crc32(content)))
        with pytest.raises(ValueError, match=r"of other settings: version=\d+ \(it was None"):
            convert(image_folder, target)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"not what was written; .* or choose another"):
            convert(image_folder, target)


WAITS_IN_THE_MIDDLE = """
import sys
from tests.data.converting import convert, one_by_one
from vit_ray.data.convert import conversion, shards

def and_wait(work, items, *others, **shown):
    if work.__name__ == "_index":
        print("begun", flush=True)
        sys.stdin.read()
    return one_by_one(work, items, *others, **shown)

conversion.run_tasks, shards.run_tasks = and_wait, one_by_one
print(convert(sys.argv[1], sys.argv[2]).num_images, flush=True)
"""


def test_of_two_conversions_the_second_is_refused(serial, image_folder, tmp_path, monkeypatch):
    """The first is a process of its own, and finishes in peace."""
    monkeypatch.setattr("vit_ray.lock.RELEASE_S", 0.1)
    command = [sys.executable, "-c", WAITS_IN_THE_MIDDLE, str(image_folder), str(tmp_path / "set")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as first:  # type: ignore[call-overload]
        assert first.stdout.readline() == "begun\n"
        with pytest.raises(ValueError, match=rf"in use by process {first.pid} of .* on "):
            convert(image_folder, tmp_path / "set")
        assert first.communicate()[0] == "300\n"
    assert open_dataset(str(tmp_path / "set")).num_images == 300
    assert not (tmp_path / "set" / "_staging").exists()


def test_who_has_lost_the_destination_does_not_commit(serial, image_folder, tmp_path, monkeypatch):
    check = shards._check_shards

    def and_another_takes_over(*arguments: Any) -> None:
        check(*arguments)
        (tmp_path / "set" / "_staging" / "lock-00000009.json").write_text("{}")

    monkeypatch.setattr(shards, "_check_shards", and_another_takes_over)
    with pytest.raises(ValueError, match=r"convert.destination=.* has been taken over by"):
        convert(image_folder, tmp_path / "set")
    assert not (tmp_path / "set" / "manifest.parquet").exists()


SETTINGS: dict[str, Any] = {"rows_per_row_group": 8, "shard_mib": 0.1, "seed": 3}


def test_a_refusal_is_lifted_without_a_second_conversion(serial, tmp_path, monkeypatch):
    source = tmp_path / "source"
    write_class_folders(source, num_classes=1, per_class=98)
    for name in "ab":
        (source / "class_0" / f"{name}.jpg").write_bytes(b"broken")
    options = {"rows_per_row_group": 8, "shard_mib": 0.05}
    told = r"2 of 100 .*max_rejected_fraction=0.01; .* with convert.max_rejected_fraction=0.02"
    with pytest.raises(ValueError, match=told):
        convert(source, tmp_path / "set", **options)
    monkeypatch.setattr(shards, "read_ahead", lambda _: pytest.fail("made again"))
    report = convert(source, tmp_path / "set", max_rejected_fraction=0.02, **options)
    assert (report.num_images, report.num_rejected) == (98, 2)


@pytest.mark.parametrize("function", ["commit", "_write_manifest"])
def test_a_restart_makes_only_the_shards_that_were_not_finished(
    serial, image_folder, tmp_path, monkeypatch, function
):
    target, staging = tmp_path / "set", tmp_path / "set" / "_staging"
    with stopped_at(monkeypatch, function, is_done=False):
        convert(image_folder, target, **SETTINGS)
    with pytest.raises(ValueError, match="run the same convert command again"):
        open_dataset(str(target))
    parts = sorted(target.glob("part-*.parquet"))
    content = parts[1].read_bytes()
    (staging / "shard-000001.json").unlink()
    (staging / "lock-00000001.json.0123abcd.tmp").touch()  # killed while it renewed it
    parts[1].write_bytes(b"half written")
    made = {file: file.stat().st_mtime_ns for file in parts}
    assert convert(image_folder, target, **SETTINGS).num_images == 300
    again = {file: file.stat().st_mtime_ns for file in parts}
    assert {file for file in parts if made[file] != again[file]} == {parts[1]}
    assert parts[1].read_bytes() == content
    assert not staging.exists()


STUCK_AFTER_FIVE_SHARDS = """
import sys, time
import ray
from tests.data.converting import convert
from vit_ray.data.convert import shards as module

def stuck(shard, *shared):
    from vit_ray.data.convert import shards as module
    check, seen = module.image_or_reason, []
    def get_stuck(*row):
        seen.append(row)
        if shard >= 5 and len(seen) == 4:
            time.sleep(600)
        return check(*row)
    module.image_or_reason = get_stuck
    try:
        return module.make_shard(shard, *shared)
    finally:
        module.image_or_reason = check

run_tasks = module.run_tasks
module.run_tasks = lambda work, *others, **shown: run_tasks(stuck, *others, **shown)
ray.init(address=sys.argv[1], log_to_driver=False)
convert(sys.argv[2], sys.argv[3], rows_per_row_group=8, shard_mib=0.02, seed=3)
"""


@pytest.mark.slow
def test_a_conversion_killed_in_the_middle_goes_on_where_it_was(
    ray_cluster, image_folder, tmp_path
):
    """The driver is a process of its own, and is killed while shards are half written."""
    target, staging = tmp_path / "set", tmp_path / "set" / "_staging"
    command = [sys.executable, "-c", STUCK_AFTER_FIVE_SHARDS, ray_cluster.address]
    with subprocess.Popen([*command, str(image_folder), str(target)]) as driver:
        while len(list(staging.glob("shard-*.json"))) < 5 or not list(target.glob("part-*.tmp")):
            assert driver.poll() is None
            time.sleep(0.05)
        driver.kill()
    finished = {file: file.stat() for file in target.glob("part-*.parquet")}
    assert len(finished) == 5
    settings = SETTINGS | {"shard_mib": 0.02}
    convert(image_folder, target, **settings)
    for file, before in finished.items():
        after = file.stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    convert(image_folder, tmp_path / "undisturbed", **settings)
    first, other = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (target, tmp_path / "undisturbed")
    )
    assert first == other


@pytest.mark.parametrize("damage", ["empty", "cut", "footer", "gone"])
def test_a_shard_that_is_not_as_written_is_no_part_of_a_data_set(
    serial, image_folder, tmp_path, monkeypatch, damage
):
    """Nor a reason to begin from the start: the command again makes the shard anew."""
    target = tmp_path / "set"
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(image_folder, target, **SETTINGS)
    parts = sorted(target.glob("part-*.parquet"))
    content = parts[1].read_bytes()
    spoilt = {"empty": b"", "cut": content[:-1], "footer": content[:-9] + bytes(9)}
    parts[1].unlink()
    if damage in spoilt:
        parts[1].write_bytes(spoilt[damage])
    with pytest.raises(ValueError, match=rf"1 of {len(parts)} shards .*part-00001.*run the same"):
        convert(image_folder, target, **SETTINGS)
    assert not (target / "manifest.parquet").exists()
    made = parts[0].stat().st_mtime_ns
    assert convert(image_folder, target, **SETTINGS).num_images == 300
    assert parts[1].read_bytes() == content
    assert parts[0].stat().st_mtime_ns == made


FACTS = {"rows": [64, 64, 12], "row_group_crc32": [7, 8, 9], "reason": "of\ntwo lines \u00fc"}
TABLE = pa.table({"key": [f"image {i}" for i in range(20)]})


def test_every_flipped_bit_of_a_staged_file_is_found_and_on_the_way_read_again(
    tmp_path, monkeypatch
):
    file, table = locate(str(tmp_path / "facts.json")), locate(str(tmp_path / "index.parquet"))
    write_facts(file, FACTS)
    for flip in flips(Path(file.path), bits_per_byte=2):
        with pytest.raises(ValueError, match="is not what was written"):
            pytest.fail(f"{flip}: read as {read_facts(file)}")
    with parquet_output(table, TABLE.schema) as writer:
        writer.write_table(TABLE, row_group_size=10)
    assert pa.concat_tables(read_groups(table)).equals(TABLE)
    for flip in flips(Path(table.path), bits_per_byte=1):
        # Names and types stand in the footer, which has no checksum, and rows that are missing are
        # found when all images are counted.
        with contextlib.suppress(pa.ArrowException, OSError, KeyError, ValueError):
            found = pa.concat_tables(read_groups(table))
            values = found.rename_columns(TABLE.column_names).cast(TABLE.schema)
            assert values.equals(TABLE) or values.num_rows != TABLE.num_rows, flip
    whole = file.read()
    answers = [whole.replace(b"64", b"65", 1), whole]
    monkeypatch.setattr(Location, "read", lambda _: answers.pop(0))
    assert read_facts(file) == FACTS
    assert answers == []


def test_staged_images_that_are_gone_or_short_are_no_rejected_rows(tmp_path):
    pack = tmp_path / "index-0.bin"
    with pytest.raises(FileNotFoundError):
        Row("key", path=str(pack), offset=0, length=9).read()
    pack.write_bytes(b"12345")
    with pytest.raises(OSError, match="3 of 9 bytes at 2 are there"):
        Row("key", path=str(pack), offset=2, length=9).read()
    assert Row("key", path=str(pack), offset=2, length=3).read() == b"345"
