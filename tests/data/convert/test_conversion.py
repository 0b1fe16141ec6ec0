import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_sample_images

from tests.data.convert.conftest import stopped_at
from tests.data.converting import convert
from tests.data.pictures import encoded, jpeg, picture, write_class_folders
from vit_ray.data import open_dataset
from vit_ray.data import shards as data_shards
from vit_ray.data.convert import checks, conversion, shards
from vit_ray.data.convert.finished_sets import verify
from vit_ray.data.dataset import Manifest, ShardFile, checksum
from vit_ray.data.images import decode
from vit_ray.data.parts import subset
from vit_ray.storage import Location


def rows_of(manifest: Manifest) -> list[dict[str, object]]:
    tables = [pq.read_table(Path(manifest.root) / file.path) for file in manifest.files]
    return [row for table in tables for row in table.to_pylist()]


def test_every_image_arrives_with_its_pixels_and_its_class(dataset, image_folder):
    rows = rows_of(dataset)
    assert len(rows) == 300
    for row in rows:
        file = image_folder / str(row["key"])
        assert row["restart_index"] is not None
        np.testing.assert_array_equal(decode(row["image"]), decode(file.read_bytes()))
        assert [dataset.classes[label] for label in row["labels"]] == [file.parent.name]


def test_rows_are_shuffled_once_by_the_seed_through_ray_as_in_one_process(
    ray_cluster, image_folder, dataset, tmp_path
):
    keys = [str(row["key"]) for row in rows_of(dataset)]
    places = np.argsort(keys)
    assert abs(np.corrcoef(places, np.arange(300))[0, 1]) < 0.2
    settings = {"rows_per_row_group": 16, "shard_mib": 0.1}
    again = convert(str(image_folder), str(tmp_path / "again"), seed=3, **settings)
    other = convert(str(image_folder), str(tmp_path / "other"), seed=4, **settings)
    assert again.fingerprint == dataset.fingerprint != other.fingerprint
    assert [row["key"] for row in rows_of(open_dataset(str(tmp_path / "again")))] == keys


def test_unusable_files_are_listed_with_their_reason(serial, tmp_path):
    source, destination = tmp_path / "source", tmp_path / "set"
    write_class_folders(source, num_classes=2, per_class=20)
    (source / "class_0" / "notes.txt").write_text("no picture")
    (source / "class_0" / "empty.jpg").write_bytes(b"")
    (source / "class_1" / "cut.jpg").write_bytes(jpeg(1)[:-100])
    report = convert(str(source), str(destination), max_rejected_fraction=0.07)
    assert report.num_images == 40
    assert report.num_rejected == 3
    table = pq.read_table(destination / "rejected.parquet").to_pylist()
    reasons = {row["key"]: row["reason"] for row in table}
    assert "it is not one of JPEG, PNG" in reasons["class_0/notes.txt"]
    assert "empty" in reasons["class_0/empty.jpg"]
    assert "Premature end" in reasons["class_1/cut.jpg"]
    assert json.loads((destination / "report.json").read_text())["label_histogram"] == {
        "class_0": 20,
        "class_1": 20,
    }


def photograph(name: str) -> bytes:
    """One of scikit-learn's two, damaged in one of the usual ways."""
    whole = encoded(load_sample_images().images[0], quality=90)
    half = len(whole) // 2
    return {
        "whole": whole,
        "half of zeros": whole[:half] + bytes(len(whole) - half),
        "half of zeros and an end": whole[:half] + bytes(len(whole) - half - 2) + b"\xff\xd9",
        "cut, with an end": whole[:half] + b"\xff\xd9",
        "4 KiB of zeros": whole[:half] + bytes(4096) + whole[half + 4096 :],
        "stray bytes": whole[:-2] + bytes(40) + b"\xff\xd9",
        "cut, with an end and more": whole[:half] + b"\xff\xd9 behind",
        "without data": header_of_13000_x_13000(),
    }[name]


def header_of_13000_x_13000() -> bytes:
    """A grey file that ends where its coded data begin."""
    image = bytearray(encoded(np.full((8, 8), 128, np.uint8)))
    at = image.index(b"\xff\xc0")
    image[at + 5 : at + 9] = (13_000).to_bytes(2) * 2
    scan = image.index(b"\xff\xda")
    return bytes(image[: scan + 2 + int.from_bytes(image[scan + 2 : scan + 4])]) + b"\xff\xd9"


ENDS_EARLY = (
    "half of zeros", "cut, with an end", "cut, with an end and more", "without data",
)  # fmt: skip
DAMAGED = ("half of zeros and an end", "4 KiB of zeros", "stray bytes")


def write_damaged(folder: Path, *names: str) -> Path:
    (folder / "cat").mkdir(parents=True)
    for name in names:
        (folder / "cat" / f"{name}.jpg").write_bytes(photograph(name))
    return folder


@pytest.mark.parametrize("options", [{}, {"index_jpeg": False}, {"shrink_to": 100}])
def test_photographs_that_end_early_are_rejected_and_other_damage_is_counted(
    serial, tmp_path, options
):
    source = write_damaged(tmp_path / "source", "whole", *DAMAGED, *ENDS_EARLY)
    report = convert(str(source), str(tmp_path / "set"), max_rejected_fraction=0.9, **options)
    assert (report.num_images, report.num_damaged) == (4, 3)
    assert set(report.rejected) == {f"cat/{name}.jpg" for name in ENDS_EARLY}
    for key, reason in report.rejected.items():
        assert "remature end" in reason, (key, reason)
    damaged = pq.read_table(tmp_path / "set" / "damaged.parquet").to_pylist()
    assert {row["key"] for row in damaged} == {f"cat/{name}.jpg" for name in DAMAGED}
    assert all("extraneous bytes" in row["reason"] for row in damaged)
    assert json.loads((tmp_path / "set" / "report.json").read_text())["num_damaged"] == 3
    assert verify(str(tmp_path / "set")).problems == []


@pytest.mark.parametrize(("damaged", "count"), [("reject", 1), ("keep", 4)])
def test_damaged_photographs_are_all_rejected_or_all_kept(serial, tmp_path, damaged, count):
    names = ("whole", "stray bytes", "cut, with an end", "4 KiB of zeros")
    source = write_damaged(tmp_path / "source", *names)
    options = {"damaged": damaged, "max_rejected_fraction": 0.9}
    report = convert(str(source), str(tmp_path / "set"), **options)
    assert (report.num_images, report.num_rejected) == (count, 4 - count)
    assert report.num_damaged == count - 1
    assert pq.read_table(tmp_path / "set" / "damaged.parquet").num_rows == count - 1


def test_a_header_without_data_is_never_decoded(serial, tmp_path, monkeypatch):
    """It would take a gigabyte."""
    source = write_damaged(tmp_path / "source", "whole", "without data")
    assert (source / "cat" / "without data.jpg").stat().st_size < 400
    decoded: list[int] = []
    monkeypatch.setattr(checks, "decode", lambda image: decoded.append(len(image)))
    report = convert(str(source), str(tmp_path / "set"), max_rejected_fraction=0.5)
    assert (report.num_images, decoded) == (1, [])


@pytest.mark.parametrize("index_jpeg", [True, False])
def test_a_whole_jpeg_is_decoded_by_libjpeg_alone_and_all_else_by_the_decoder_of_training(
    serial, tmp_path, monkeypatch, index_jpeg
):
    source = write_damaged(tmp_path / "source", "whole", "stray bytes")
    (source / "cat" / "other.png").write_bytes(encoded(picture(0, 30, 40), "PNG"))
    decode, decoded = checks.decode, set[bytes]()

    def noted(image: bytes) -> Any:
        decoded.add(image)
        return decode(image)

    monkeypatch.setattr(checks, "decode", noted)
    report = convert(str(source), str(tmp_path / "set"), index_jpeg=index_jpeg)
    assert (report.num_images, report.num_damaged) == (3, 1)
    names = ("stray bytes.jpg", "other.png")
    assert decoded == {(source / "cat" / name).read_bytes() for name in names}


def test_a_refusal_is_lifted_without_a_second_conversion(serial, tmp_path, monkeypatch):
    source = tmp_path / "source"
    write_class_folders(source, num_classes=1, per_class=98)
    for name in "ab":
        (source / "class_0" / f"{name}.jpg").write_bytes(b"broken")
    options = {"rows_per_row_group": 8, "shard_mib": 0.05}
    told = r"2 of 100 .*max_rejected_fraction=0.01; .* with convert.max_rejected_fraction=0.02"
    with pytest.raises(ValueError, match=told):
        convert(str(source), str(tmp_path / "set"), **options)
    monkeypatch.setattr(shards, "read_ahead", lambda _: pytest.fail("made again"))
    report = convert(str(source), str(tmp_path / "set"), max_rejected_fraction=0.02, **options)
    assert (report.num_images, report.num_rejected) == (98, 2)


def test_a_refusal_leaves_no_list_that_stands_in_the_way_of_a_mended_source(serial, tmp_path):
    source, target = tmp_path / "source", tmp_path / "set"
    write_class_folders(source, num_classes=1, per_class=8)
    (source / "class_0" / "broken.jpg").write_bytes(b"broken")
    listed = [f"{file.relative_to(tmp_path)},0\n" for file in sorted(source.glob("*/*"))]
    rows = tmp_path / "list.csv"

    def convert_list(text: str) -> int:
        rows.write_text(text)
        return convert(str(rows), str(target)).num_images

    with pytest.raises(ValueError, match="1 of 9 "):
        convert_list("path,label\n" + "".join(listed))
    kept = [line for line in listed if "broken" not in line]
    with pytest.raises(ValueError, match="1 integers from 5 to 5, and not 0 to 0"):
        convert_list("path,label\n" + "".join(kept).replace(",0", ",5"))
    assert convert_list("path,label\n" + "".join(kept)) == 8


def test_a_restart_makes_only_the_shards_that_were_not_finished(
    serial, image_folder, tmp_path, monkeypatch
):
    target, staging = tmp_path / "set", tmp_path / "set" / "_staging"
    settings = {"rows_per_row_group": 8, "shard_mib": 0.1, "seed": 3}
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(str(image_folder), str(target), **settings)
    with pytest.raises(ValueError, match="run the same convert command again"):
        open_dataset(str(target))
    shards = sorted(target.glob("part-*.parquet"))
    content = shards[1].read_bytes()
    (staging / "shard-000001.json").unlink()
    (staging / "lock-00000001.json.0123abcd.tmp").touch()  # killed while it renewed it
    shards[1].write_bytes(b"half written")
    made = {file: file.stat().st_mtime_ns for file in shards}
    assert convert(str(image_folder), str(target), **settings).num_images == 300
    again = {file: file.stat().st_mtime_ns for file in shards}
    assert {file for file in shards if made[file] != again[file]} == {shards[1]}
    assert shards[1].read_bytes() == content
    assert not staging.exists()


def test_a_source_without_images_is_refused(serial, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        convert(str(tmp_path / "nothing"), str(tmp_path / "set"))
    (tmp_path / "flat").mkdir()
    with pytest.raises(ValueError, match="has no files of the format"):
        convert(str(tmp_path / "flat"), str(tmp_path / "set"))


def test_a_restart_keeps_the_index_of_finished_units(serial, image_folder, tmp_path, monkeypatch):
    target = tmp_path / "set"
    with stopped_at(monkeypatch, "shards_for", is_done=False):
        convert(str(image_folder), str(target), seed=1)
    index = {file: file.stat().st_mtime_ns for file in (target / "_staging").glob("index-*")}
    assert len(index) == 6
    next(file for file in index if file.suffix == ".json").unlink()
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(str(image_folder), str(target), seed=1)
    again = [file for file, made in index.items() if file.stat().st_mtime_ns != made]
    assert len({file.stem for file in again}) == 1
    with stopped_at(monkeypatch, "shards_for", is_done=False):
        convert(str(image_folder), str(tmp_path / "other"), seed=1)
    assert convert(str(image_folder), str(tmp_path / "other"), seed=2).num_images == 300


def test_a_conversion_killed_right_before_its_manifest_is_finished_by_a_restart(
    serial, image_folder, tmp_path, monkeypatch
):
    target = tmp_path / "set"
    with stopped_at(monkeypatch, "_write_manifest", is_done=False):
        convert(str(image_folder), str(target), seed=1)
    assert not (target / "manifest.parquet").exists()
    monkeypatch.setattr(shards, "read_ahead", lambda _: pytest.fail("made again"))
    report = convert(str(image_folder), str(target), seed=1)
    assert report.fingerprint == open_dataset(str(target)).fingerprint
    assert not (target / "_staging").exists()


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
    settings = {"rows_per_row_group": 8, "shard_mib": 0.02, "seed": 3}
    convert(str(image_folder), str(target), **settings)
    for file, before in finished.items():
        after = file.stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    convert(str(image_folder), str(tmp_path / "undisturbed"), **settings)
    assert contents(target) == contents(tmp_path / "undisturbed")


WAITS_IN_THE_MIDDLE = """
import sys
from tests.data.converting import convert, one_by_one
from vit_ray.data.convert import index, shards

def and_wait(work, items, *others, **shown):
    if work.__name__ == "_index":
        print("begun", flush=True)
        sys.stdin.read()
    return one_by_one(work, items, *others)

index.run_tasks, shards.run_tasks = and_wait, one_by_one
print(convert(sys.argv[1], sys.argv[2]).num_images, flush=True)
"""


def test_of_two_conversions_the_second_is_refused(serial, image_folder, tmp_path, monkeypatch):
    """The first is a process of its own, and finishes in peace."""
    monkeypatch.setattr("vit_ray.lock.RELEASE_S", 0.1)
    command = [sys.executable, "-c", WAITS_IN_THE_MIDDLE, str(image_folder), str(tmp_path / "set")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as first:  # type: ignore[call-overload]
        assert first.stdout.readline() == "begun\n"
        with pytest.raises(
            ValueError, match=rf"another conversion: process {first.pid} of .* on .*wait"
        ):
            convert(str(image_folder), str(tmp_path / "set"))
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
        convert(str(image_folder), str(tmp_path / "set"))
    assert not (tmp_path / "set" / "manifest.parquet").exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "footer", "gone"])
def test_a_shard_that_is_not_as_written_is_no_part_of_a_data_set(
    serial, image_folder, tmp_path, monkeypatch, damage
):
    """Nor a reason to begin from the start: the command again makes the shard anew."""
    target = tmp_path / "set"
    settings = {"rows_per_row_group": 8, "shard_mib": 0.1, "seed": 3}
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(str(image_folder), str(target), **settings)
    shards = sorted(target.glob("part-*.parquet"))
    content = shards[1].read_bytes()
    spoilt = {"empty": b"", "cut": content[:-1], "footer": content[:-9] + bytes(9)}
    shards[1].unlink()
    if damage in spoilt:
        shards[1].write_bytes(spoilt[damage])
    with pytest.raises(ValueError, match=rf"1 of {len(shards)} shards .*part-00001.*run the same"):
        convert(str(image_folder), str(target), **settings)
    assert not (target / "manifest.parquet").exists()
    made = shards[0].stat().st_mtime_ns
    assert convert(str(image_folder), str(target), **settings).num_images == 300
    assert shards[1].read_bytes() == content
    assert shards[0].stat().st_mtime_ns == made


def test_pages_carry_checksums(dataset):
    """Parquet's own, which its reader verifies: a flipped bit in any column is found."""
    file = Path(dataset.root) / dataset.files[0].path
    metadata = pq.ParquetFile(file).metadata.row_group(0)
    for column in range(metadata.num_columns):
        chunk = metadata.column(column)
        content = bytearray(file.read_bytes())
        content[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
        with pytest.raises(OSError, match="CRC checksum verification failed"):
            pq.read_table(pa.BufferReader(bytes(content)), page_checksum_verification=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a data set."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_all_rejected_files_are_listed_and_some_are_shown(serial, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_REJECTED_SHOWN", 2)
    write_class_folders(tmp_path / "source", num_classes=1, per_class=4)
    for name in "abc":
        (tmp_path / "source" / "class_0" / f"{name}.jpg").write_bytes(b"broken")
    options = {"rows_per_row_group": 1, "shard_mib": 0.001, "max_rejected_fraction": 0.5}
    report = convert(str(tmp_path / "source"), str(tmp_path / "set"), **options)
    assert (report.num_images, report.num_rejected, len(report.rejected)) == (4, 3, 2)
    assert pq.read_table(tmp_path / "set" / "rejected.parquet").num_rows == 3
    manifest = open_dataset(str(tmp_path / "set"))
    assert manifest.num_images == 4
    parts = sorted(file.name for file in (tmp_path / "set").glob("part-*"))
    assert parts == sorted(file.path for file in manifest.files)


@pytest.mark.parametrize(
    "name",
    [
        "report.json",
        "rejected.parquet",
        "damaged.parquet",
        "part-00000-of-00001.parquet",
        "_staging/settings.txt",
        "cats/1.jpg",
        "notes.txt",
        "part-2.txt",
    ],
)
def test_a_file_of_somebody_else_is_never_replaced(serial, image_folder, tmp_path, name):
    file = tmp_path / "set" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    with pytest.raises(ValueError, match=rf"{name.partition('/')[0]}.* move it away"):
        convert(str(image_folder), str(tmp_path / "set"))
    assert file.read_bytes() == b"mine"
    assert [path for path in (tmp_path / "set").rglob("*") if path.is_file()] == [file]


def test_hidden_files_do_not_make_a_destination_taken(serial, image_folder, tmp_path):
    for folder in (".git", "lost+found"):
        (tmp_path / "set" / folder).mkdir(parents=True)
    (tmp_path / "set" / "Thumbs.db").write_bytes(b"")
    assert convert(image_folder, tmp_path / "set").num_images == 300


def test_a_destination_in_the_source_is_refused(serial, tmp_path):
    write_class_folders(tmp_path / "pets", 2, 2)
    with pytest.raises(ValueError, match=r"is in convert\.source=.*choose a folder outside"):
        convert(tmp_path / "pets", tmp_path / "pets" / "train")
    assert sorted(path.name for path in (tmp_path / "pets").iterdir()) == ["class_0", "class_1"]
    convert(tmp_path / "pets", tmp_path / "pets_converted")


def test_what_another_version_has_made_is_refused(serial, image_folder, tmp_path, monkeypatch):
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(image_folder, tmp_path / "staged")
    convert(image_folder, tmp_path / "set")
    for file in (tmp_path / "staged" / "_staging" / "plan.json", tmp_path / "set" / "source.json"):
        content = b'{"settings": {"seed": 0}, "units": {}, "version": 7}'  # as version 7 wrote it
        file.write_bytes(b"%s\n%08x" % (content, checksum(content)))
        told = "of another version of vit_ray; choose another convert.destination"
        with pytest.raises(ValueError, match=told):
            convert(image_folder, file.parents["plan" in file.name])
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"not what was written; choose another convert\.destination"
        ):
            convert(image_folder, file.parents["plan" in file.name])


def test_a_refusal_in_a_folder_that_was_lost_deletes_nothing(serial, tmp_path, monkeypatch):
    staging = tmp_path / "set" / "_staging"

    def and_another_takes_over(*_: Any) -> None:
        (staging / "lock-00000009.json").write_text("{}")
        (staging / "index-0123456789abcdef.json").write_text("{}")
        raise ValueError("refused")

    monkeypatch.setattr(conversion, "_plan", and_another_takes_over)
    write_class_folders(tmp_path / "source", num_classes=2, per_class=2)
    with pytest.raises(ValueError, match="refused"):
        convert(tmp_path / "source", tmp_path / "set")
    assert (staging / "index-0123456789abcdef.json").exists()


def test_a_refusal_keeps_its_reason_where_the_folder_is_a_link(serial, tmp_path):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match="holds no images"):
        convert(tmp_path / "empty", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


def test_our_own_mistake_is_no_rejected_row(serial, image_folder, tmp_path, monkeypatch):
    def broken(*_: Any) -> None:
        raise ValueError("a mistake in the writer")

    monkeypatch.setattr(shards.ShardWriter, "add", broken)
    with pytest.raises(ValueError, match="a mistake in the writer"):
        convert(str(image_folder), str(tmp_path / "set"), max_rejected_fraction=1.0)
    assert not list((tmp_path / "set").glob("part-*"))


def test_each_footer_is_read_once(serial, image_folder, tmp_path, monkeypatch):
    read: list[str] = []
    original = data_shards.open_shard

    def counted(location: Location, entry: ShardFile) -> Any:
        read.append(location.path)
        return original(location, entry)

    monkeypatch.setattr(data_shards, "open_shard", counted)
    report = convert(str(image_folder), str(tmp_path / "set"), rows_per_row_group=8, shard_mib=0.1)
    assert len(read) == len(set(read)) == report.num_shards > 1


def test_a_strip_that_no_jpeg_can_hold_is_rejected(serial, tmp_path):
    write_class_folders(tmp_path / "source", num_classes=1, per_class=9)
    strip = encoded(np.zeros((20, 70_000, 3), np.uint8), "PNG")
    (tmp_path / "source" / "class_0" / "strip.png").write_bytes(strip)
    report = convert(
        str(tmp_path / "source"), str(tmp_path / "set"), shrink_to=19, max_rejected_fraction=0.1
    )
    assert report.num_images == 9
    assert "66500 x 19 pixels" in report.rejected["class_0/strip.png"]
    assert convert(str(tmp_path / "source"), str(tmp_path / "whole")).num_images == 10


def test_a_full_disk_is_named(serial, small_disk, tmp_path):
    write_class_folders(tmp_path / "source", num_classes=1, per_class=30)
    (tmp_path / "source" / "class_0" / "large.png").write_bytes(
        encoded(np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8), "PNG")
    )
    with pytest.raises(OSError, match=rf"No space left on device: '{small_disk}/set/part-00000"):
        convert(tmp_path / "source", small_disk / "set")


def test_what_the_maker_says_of_a_set_stands_in_its_manifest(serial, image_folder, tmp_path):
    about = {"license": "CC-BY-4.0", "source_url": "https://x.org/set", "evaluation_only": True}
    convert(image_folder, tmp_path / "set", **about)
    assert open_dataset(str(tmp_path / "set")).about == about
    part = subset(str(tmp_path / "set"), str(tmp_path / "part"), count=9)
    assert part.about == open_dataset(part.path).about == about
    convert(image_folder, tmp_path / "plain")
    assert open_dataset(str(tmp_path / "plain")).about == {}
