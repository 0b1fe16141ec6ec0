"""A conversion that is run again: done, or of a source or settings that have changed."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.convert.archives import stored_rows, tar_of, write_files
from tests.data.convert.conftest import stopped_at
from tests.data.converting import convert
from tests.data.pictures import jpeg
from tests.data.s3_server import create_bucket, serve_conditional_s3, this_process_uses
from vit_ray.data.convert import conversion
from vit_ray.data.convert.finished_sets import verify
from vit_ray.storage import locate

ANIMALS = ("cat", "dog")
SMALL: dict[str, Any] = {"rows_per_row_group": 4, "shard_mib": 0.01, "seed": 3}


def write_source(source: Path, count: int = 20) -> dict[str, str]:
    """Of the kind that its name says: class folders, a list, or an archive; key to class."""
    if source.suffix == ".tar":
        # Another has the same size, and its time is not set back.
        return write_tar(source, list(range(20)) if count == 20 else list(range(19, -1, -1)))
    folder = source.parent if source.suffix else source
    rows = {f"{ANIMALS[i % 2]}/{i:03d}.jpg": ANIMALS[i % 2] for i in range(count)}
    for i, name in enumerate(rows):
        if not (folder / name).exists():
            write_files(folder, {name: jpeg(i, 40, 50)})
    if source.suffix == ".csv":
        lines = [f"{path},{name}\n" for path, name in rows.items()]
        source.write_text("".join(["path,label\n", *lines]))
    return rows


def write_tar(file: Path, numbers: list[int]) -> dict[str, str]:
    """Samples in this order; the archives of equal numbers in any order have one size."""
    images = [jpeg(i, 40, 50).ljust(3000, b"\0") for i in numbers]
    pairs = []
    for i, image in zip(numbers, images, strict=True):
        pairs += [(f"{i:03d}.jpg", image), (f"{i:03d}.cls", ANIMALS[i % 2].encode())]
    write_files(file.parent, {file.name: tar_of(pairs)})
    return {f"{file.stem}/{i:03d}": ANIMALS[i % 2] for i in numbers}


def labels_of(target: Path) -> dict[str, str]:
    return {key: name for key, row in stored_rows(target).items() for name in row["names"]}


@pytest.mark.parametrize("function", ["shards_for", "make_shards", "commit"])
@pytest.mark.parametrize("name", ["source", "list.csv", "a.tar"])
def test_a_source_that_changed_meanwhile_is_converted_as_it_is_now(
    serial, tmp_path, monkeypatch, name, function
):
    source, target = tmp_path / name, tmp_path / "set"
    write_source(source)
    with stopped_at(monkeypatch, function, is_done=False):
        convert(source, target, **SMALL)
    expected = write_source(source, 30)
    report = convert(source, target, **SMALL)
    assert labels_of(target) == expected
    assert len(list(target.glob("part-*"))) == report.num_shards
    convert(source, tmp_path / "undisturbed", **SMALL)
    assert stored_rows(target) == stored_rows(tmp_path / "undisturbed")


def test_the_files_of_an_index_that_was_interrupted_are_deleted(serial, tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "set"
    expected = write_source(source)
    with stopped_at(monkeypatch, "build_index", is_done=True):
        convert(source, target, **SMALL)
    left = {*target.glob("_staging/index-*")}
    with stopped_at(monkeypatch, "make_shards", is_done=False):
        convert(source, target, **SMALL)
    assert left
    assert not left & {*target.glob("_staging/index-*")}
    convert(source, target, **SMALL)
    assert labels_of(target) == expected
    assert not (target / "_staging").exists()


@pytest.mark.parametrize("name", ["source", "a.tar"])
def test_a_source_that_changes_while_it_is_converted_is_an_error(
    serial, tmp_path, monkeypatch, name
):
    source, target = tmp_path / name, tmp_path / "set"
    write_source(source)
    changed = source / "cat" / "004.jpg" if source.is_dir() else source
    with monkeypatch.context() as patch:
        make = conversion.make_shards

        def change_first(*arguments: Any) -> None:
            content = changed.read_bytes()
            changed.write_bytes(content[:-1] + b"x")
            make(*arguments)

        patch.setattr(conversion, "make_shards", change_first)
        with pytest.raises(ValueError, match=rf"{changed} has changed since .* same command again"):
            convert(source, target, **SMALL)
    assert not (target / "manifest.parquet").exists()
    changed.unlink()
    write_source(source)
    assert convert(source, target, **SMALL).num_images == 20
    assert labels_of(target)


def test_an_object_that_changes_while_it_is_converted_is_an_error(serial, tmp_path, monkeypatch):
    expected = write_source(tmp_path / "source")

    def upload() -> None:
        for file in (tmp_path / "source").rglob("*.jpg"):
            locate(f"s3://bucket/{file.relative_to(tmp_path)}").write(file.read_bytes())

    make = conversion.make_shards

    def change_first(*arguments: Any) -> None:
        write_files(tmp_path / "source", {"cat/004.jpg": jpeg(99, 40, 50)})
        upload()
        make(*arguments)

    # Its server heeds If-Match, unlike rclone's.
    with serve_conditional_s3() as port, this_process_uses(port, timeout_s=60):
        create_bucket("bucket")
        upload()
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "make_shards", change_first)
            told = "s3://bucket/source/cat/004.jpg has changed since"
            with pytest.raises(ValueError, match=told):
                convert("s3://bucket/source", tmp_path / "set", **SMALL)
        convert("s3://bucket/source", tmp_path / "set", **SMALL)
        assert convert("s3://bucket/source", tmp_path / "set", **SMALL).was_done
        assert labels_of(tmp_path / "set") == expected


def test_what_is_done_is_not_done_again(serial, tmp_path, monkeypatch):
    write_source(tmp_path / "list.csv")
    monkeypatch.chdir(tmp_path)
    first = convert(tmp_path / "list.csv", tmp_path / "set", **SMALL)
    assert not first.was_done
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "set").iterdir()}
    os.utime(tmp_path / "list.csv")  # touched, and not changed
    again = convert("list.csv", "set", **SMALL)
    assert again.was_done
    assert (again.fingerprint, again.num_images) == (first.fingerprint, 20)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "set").iterdir()} == made


def test_a_conversion_that_was_killed_after_its_commit_is_done(serial, tmp_path, monkeypatch):
    """Or refused, where its source has changed, which is listed."""
    source, targets = tmp_path / "tars", [tmp_path / "set", tmp_path / "other"]
    for name in ("a", "b", "c"):
        write_tar(source / f"{name}.tar", list(range(6)))
    for target in targets:
        with stopped_at(monkeypatch, "commit", is_done=True):
            convert(source, target, **SMALL)
        assert (target / "_staging" / "shard-000000.json").exists()
    assert convert(source, targets[0], **SMALL).was_done
    write_tar(source / "d.tar", [1, 2])
    write_tar(source / "b.tar", [5, 4, 3, 2, 1, 0])
    (source / "c.tar").unlink()
    why = r"source has changed since: \S*b.tar, \S*c.tar, \S*d.tar \(.*\); choose another"
    with pytest.raises(ValueError, match=why):
        convert(source, targets[1], **SMALL)
    for target in targets:
        assert not (target / "_staging").exists()
        assert verify(str(target)).problems == []


def test_other_settings_are_listed(serial, tmp_path, monkeypatch):
    write_source(tmp_path / "source")
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(tmp_path / "source", tmp_path / "set", **SMALL)
    other: dict[str, Any] = SMALL | {"seed": 4, "shrink_to": 30}
    why = r"seed=4 \(it was 3\), convert.shrink_to=30 \(it was None\)"
    with pytest.raises(ValueError, match=rf"conversion of other settings: {why}; repeat"):
        convert(tmp_path / "source", tmp_path / "set", **other)
    convert(tmp_path / "source", tmp_path / "set", **SMALL)
    with pytest.raises(ValueError, match=rf"already holds a data set of other settings: {why};"):
        convert(tmp_path / "source", tmp_path / "set", **other)


def test_a_folder_without_plan_or_record_is_not_overwritten(serial, tmp_path, monkeypatch):
    """Nobody knows of which conversion its shards are."""
    source, target, settings = tmp_path / "source", tmp_path / "set", SMALL | {"seed": 4}
    write_source(source)
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(source, target, **SMALL)
    (target / "source.json").unlink()
    made = {file: file.read_bytes() for file in target.glob("part-*")}
    with pytest.raises(ValueError, match=r"is not empty and holds no data set .* it has 'part-0"):
        convert(source, target, **settings)
    assert {file: file.read_bytes() for file in target.glob("part-*")} == made
    for file in made:
        file.rename(tmp_path / file.name)  # as the message says
    convert(source, target, **settings)
    convert(source, tmp_path / "undisturbed", **settings)
    assert stored_rows(target) == stored_rows(tmp_path / "undisturbed")
    for name in ("manifest.parquet", "source.json"):
        (target / name).rename(tmp_path / name)
        with pytest.raises(ValueError, match=r"holds no data set with its .*: it has 'damaged"):
            convert(source, target, **settings)
        (tmp_path / name).rename(target / name)
