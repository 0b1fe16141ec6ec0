"""A conversion that is refused, stopped, killed or damaged, and run again on the same source."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.convert.conftest import stopped_at
from tests.data.converting import convert
from tests.data.pictures import write_class_folders
from tests.data.small_sets import flips
from vit_ray.data import open_dataset
from vit_ray.data.convert import shards
from vit_ray.data.convert.index import parquet_output, read_facts, read_groups, write_facts
from vit_ray.data.convert.rows import Row
from vit_ray.storage import Location, locate

SETTINGS: dict[str, Any] = {"rows_per_row_group": 8, "shard_mib": 0.1, "seed": 3}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a data set."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


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
    check, seen = module.checked, []
    def get_stuck(*row):
        seen.append(row)
        if shard >= 5 and len(seen) == 4:
            time.sleep(600)
        return check(*row)
    module.checked = get_stuck
    try:
        return module.make_shard(shard, *shared)
    finally:
        module.checked = check

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
    assert contents(target) == contents(tmp_path / "undisturbed")


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


def test_every_flipped_bit_of_staged_facts_is_found_and_on_the_way_read_again(
    tmp_path, monkeypatch
):
    file = locate(str(tmp_path / "shard-000000.json"))
    write_facts(file, FACTS)
    assert read_facts(file) == FACTS
    for flip in flips(Path(file.path), bits_per_byte=2):
        with pytest.raises(ValueError, match="is not what was written"):
            pytest.fail(f"{flip}: read as {read_facts(file)}")
    whole = file.read()
    answers = [whole.replace(b"64", b"65", 1), whole]
    monkeypatch.setattr(Location, "read", lambda _: answers.pop(0))
    assert read_facts(file) == FACTS
    assert answers == []


def test_a_flipped_bit_of_a_staged_table_is_no_other_value(tmp_path):
    file = locate(str(tmp_path / "index.parquet"))
    with parquet_output(file, TABLE.schema) as writer:
        writer.write_table(TABLE, row_group_size=10)
    assert pa.concat_tables(read_groups(file)).equals(TABLE)
    for flip in flips(Path(file.path), bits_per_byte=1):
        try:
            found = pa.concat_tables(read_groups(file))
            # Names and types stand in the footer, which has no checksum.
            values = found.rename_columns(TABLE.column_names).cast(TABLE.schema)
        except (pa.ArrowException, OSError, KeyError, ValueError):
            continue
        # Rows that are missing are found when all images are counted.
        assert values.equals(TABLE) or values.num_rows != TABLE.num_rows, flip


def test_staged_images_that_are_gone_or_short_are_no_rejected_rows(tmp_path):
    pack = tmp_path / "index-0.bin"
    with pytest.raises(FileNotFoundError):
        Row("key", path=str(pack), offset=0, length=9).read()
    pack.write_bytes(b"12345")
    with pytest.raises(OSError, match="3 of 9 bytes at 2 are there"):
        Row("key", path=str(pack), offset=2, length=9).read()
    assert Row("key", path=str(pack), offset=2, length=3).read() == b"345"
