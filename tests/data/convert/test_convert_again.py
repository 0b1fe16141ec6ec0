"""A conversion that is run again: done, interrupted, or of a source that has changed."""

import contextlib
import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import tar_of
from tests.data.convert.conftest import stopped_at
from tests.data.converting import convert
from tests.data.pictures import jpeg
from tests.data.s3_server import create_bucket, serve_conditional_s3, this_process_uses
from vit_ray.data import open_dataset
from vit_ray.data.convert import conversion, index
from vit_ray.data.convert.finished_sets import verify
from vit_ray.storage import locate

SMALL = {"rows_per_row_group": 4, "shard_mib": 0.01, "seed": 3}


def write_files(folder: Path, numbers: range) -> dict[str, str]:
    """Files of two classes, those that are there left alone; key to class."""
    found = {}
    for i in numbers:
        name = "dog" if i % 2 else "cat"
        (folder / name).mkdir(parents=True, exist_ok=True)
        file = folder / name / f"{i:03d}.jpg"
        if not file.exists():
            file.write_bytes(jpeg(i, 40, 50))
        found[f"{name}/{i:03d}.jpg"] = name
    return found


def write_list(file: Path, rows: dict[str, str]) -> None:
    sink = io.StringIO()
    csv.writer(sink).writerows([["path", "label"], *rows.items()])
    file.write_text(sink.getvalue())


def write_tar(file: Path, numbers: list[int]) -> dict[str, str]:
    """Samples in this order; the archives of equal numbers in any order have one size."""
    pairs = [
        (f"{i:03d}.{suffix}", content)
        for i in numbers
        for suffix, content in (
            ("jpg", jpeg(i, 40, 50).ljust(3000, b"\0")), ("cls", b"dog" if i % 2 else b"cat"),
        )
    ]  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(tar_of(pairs))
    return {f"{file.stem}/{i:03d}": "dog" if i % 2 else "cat" for i in numbers}


def pictures_of(target: Path) -> dict[str, tuple[str, int]]:
    """Key to class and checksum of the image, in the order of samples."""
    manifest = open_dataset(str(target))
    root = Path(manifest.root)
    tables = [pq.read_table(root / file.path) for file in manifest.files]
    rows = [row for table in tables for row in table.to_pylist()]
    assert len(rows) == manifest.num_images
    return {r["key"]: (manifest.classes[r["labels"][0]], r["crc32"]) for r in rows}


def labels_of(target: Path) -> dict[str, str]:
    return {key: label for key, (label, _) in pictures_of(target).items()}


def test_a_label_that_is_mended_after_an_error_is_read_again(serial, tmp_path):
    rows = write_files(tmp_path, range(20))
    write_list(tmp_path / "list.csv", rows | {"cat/004.jpg": "cta"})
    options: dict[str, Any] = {"classes": ["cat", "dog"], **SMALL}
    with pytest.raises(ValueError, match=r"labels \['cta'\] are not in the classes"):
        convert(str(tmp_path / "list.csv"), str(tmp_path / "set"), **options)
    write_list(tmp_path / "list.csv", rows)
    convert(str(tmp_path / "list.csv"), str(tmp_path / "set"), **options)
    assert labels_of(tmp_path / "set") == rows


def grow_files(source: Path) -> dict[str, str]:
    return write_files(source, range(30))


def grow_list(source: Path) -> dict[str, str]:
    rows = write_files(source.parent, range(30))
    write_list(source, rows)
    return rows


def turn_tar(source: Path) -> dict[str, str]:
    """As large as before, and its time is not set back."""
    return write_tar(source, list(range(19, -1, -1)))


def begin_files(source: Path) -> None:
    write_files(source, range(20))


def begin_list(source: Path) -> None:
    write_list(source, write_files(source.parent, range(20)))


def begin_tar(source: Path) -> None:
    write_tar(source, list(range(20)))


CHANGES: dict[str, tuple[Callable[[Path], None], Callable[[Path], dict[str, str]]]] = {
    "source": (begin_files, grow_files),
    "list.csv": (begin_list, grow_list),
    "a.tar": (begin_tar, turn_tar),
}


@pytest.mark.parametrize("function", ["shards_for", "make_shards", "commit"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_source_that_changed_meanwhile_is_converted_as_it_is_now(
    serial, tmp_path, monkeypatch, name, function
):
    source, target = tmp_path / name, tmp_path / "set"
    begin, change = CHANGES[name]
    begin(source)
    with stopped_at(monkeypatch, function, is_done=False):
        convert(str(source), str(target), **SMALL)
    expected = change(source)
    report = convert(str(source), str(target), **SMALL)
    assert labels_of(target) == expected
    assert len(list(target.glob("part-*"))) == report.num_shards
    convert(str(source), str(tmp_path / "undisturbed"), **SMALL)
    assert pictures_of(target) == pictures_of(tmp_path / "undisturbed")


def test_a_source_that_changed_twice_has_the_rows_that_it_has_now(serial, tmp_path, monkeypatch):
    """The second change takes the first back, whose rows were indexed, and killed before facts."""
    source, target = tmp_path / "list.csv", tmp_path / "set"
    rows = write_files(tmp_path, range(20))
    wrong = rows | {"cat/004.jpg": "dog"}
    for listed, at in ((rows, (conversion, "RowStore")), (wrong, (index, "write_facts"))):
        write_list(source, listed)
        with monkeypatch.context() as patch:
            patch.setattr(*at, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                convert(source, target, **SMALL)
    write_list(source, rows)
    convert(source, target, **SMALL)
    assert labels_of(target) == rows


def test_a_source_that_changed_is_listed_once(serial, tmp_path, monkeypatch):
    begin_files(tmp_path / "source")
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(tmp_path / "source", tmp_path / "set", **SMALL)
    grow_files(tmp_path / "source")
    units_of = Mock(wraps=conversion.units_of)
    monkeypatch.setattr(conversion, "units_of", units_of)
    convert(tmp_path / "source", tmp_path / "set", **SMALL)
    units_of.assert_called_once()


def test_files_are_listed_once(serial, tmp_path, monkeypatch):
    listed, plain = Counter[str](), index.rows_of
    monkeypatch.setattr(
        index, "rows_of", lambda unit, **keys: listed.update([unit.name]) or plain(unit, **keys)
    )
    begin_files(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "set", **SMALL)
    assert listed == {"cat": 1, "dog": 1}


@pytest.mark.parametrize("name", ["source", "a.tar"])
def test_a_source_that_changes_while_it_is_converted_is_an_error(
    serial, tmp_path, monkeypatch, name
):
    source, target = tmp_path / name, tmp_path / "set"
    CHANGES[name][0](source)
    changed = source / "cat" / "004.jpg" if source.is_dir() else source
    with monkeypatch.context() as patch:
        make = conversion.make_shards

        def change_first(*arguments: Any) -> None:
            content = changed.read_bytes()
            changed.write_bytes(content[:-1] + b"x")
            make(*arguments)

        patch.setattr(conversion, "make_shards", change_first)
        with pytest.raises(ValueError, match=rf"{changed} has changed since .* same command again"):
            convert(str(source), str(target), **SMALL)
    assert not (target / "manifest.parquet").exists()
    changed.unlink()
    CHANGES[name][0](source)
    assert convert(str(source), str(target), **SMALL).num_images == 20
    assert labels_of(target)


@contextlib.contextmanager
def store() -> Iterator[None]:
    """S3 with a bucket `source`, which heeds If-Match (rclone's does not)."""
    with serve_conditional_s3() as port, this_process_uses(port, timeout_s=60):
        create_bucket("source")
        yield


def test_an_object_that_changes_while_it_is_converted_is_an_error(serial, tmp_path, monkeypatch):
    def upload(name: str, numbers: list[int]) -> None:
        write_tar(tmp_path / "a.tar", numbers)
        locate(f"s3://source/{name}/a.tar").write((tmp_path / "a.tar").read_bytes())

    with store():
        upload("tars", list(range(20)))
        for i in range(20):
            image = jpeg(i, 40, 50)
            locate(f"s3://source/files/{'dog' if i % 2 else 'cat'}/{i:03d}.jpg").write(image)
        make, seeds = conversion.make_shards, iter((98, 99))

        def change_first(*arguments: Any) -> None:
            upload("tars", list(range(19, -1, -1)))
            locate("s3://source/files/cat/004.jpg").write(jpeg(next(seeds), 40, 50))
            make(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(conversion, "make_shards", change_first)
            for name, changed in (("tars", "tars/a.tar"), ("files", "files/cat/004.jpg")):
                with pytest.raises(ValueError, match=f"s3://source/{changed} has changed since"):
                    convert(f"s3://source/{name}", str(tmp_path / name), **SMALL)
        for name in ("tars", "files"):
            convert(f"s3://source/{name}", str(tmp_path / name), **SMALL)
            assert convert(f"s3://source/{name}", str(tmp_path / name), **SMALL).was_done
        expected = {f"a/{i:03d}": "dog" if i % 2 else "cat" for i in range(20)}
        assert labels_of(tmp_path / "tars") == expected
        assert len(labels_of(tmp_path / "files")) == 20


def test_what_is_done_is_not_done_again(serial, tmp_path, monkeypatch):
    begin_list(tmp_path / "list.csv")
    monkeypatch.chdir(tmp_path)
    first = convert(str(tmp_path / "list.csv"), str(tmp_path / "set"), **SMALL)
    assert not first.was_done
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "set").iterdir()}
    os.utime(tmp_path / "list.csv")  # touched, and not changed
    again = convert("list.csv", "set", **SMALL)
    assert again.was_done
    assert (again.fingerprint, again.num_images) == (first.fingerprint, 20)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "set").iterdir()} == made


def test_a_conversion_that_was_killed_after_its_commit_is_done(serial, tmp_path, monkeypatch):
    source, targets = tmp_path / "source", [tmp_path / "set", tmp_path / "other"]
    begin_files(source)
    for target in targets:
        with stopped_at(monkeypatch, "commit", is_done=True):
            convert(source, target, **SMALL)
        assert (target / "_staging" / "plan.json").exists()
    assert convert(source, targets[0], **SMALL).was_done
    grow_files(source)
    with pytest.raises(ValueError, match="its source has changed since"):
        convert(source, targets[1], **SMALL)
    for target in targets:
        assert not (target / "_staging").exists()
        assert verify(str(target)).problems == []


def test_other_settings_are_listed(serial, tmp_path, monkeypatch):
    begin_files(tmp_path / "source")
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(str(tmp_path / "source"), str(tmp_path / "set"), **SMALL)
    other: dict[str, Any] = SMALL | {"seed": 4, "shrink_to": 30}
    why = r"seed=4 \(it was 3\), convert.shrink_to=30 \(it was None\)"
    with pytest.raises(ValueError, match=rf"conversion of other settings: {why}; repeat"):
        convert(str(tmp_path / "source"), str(tmp_path / "set"), **other)
    convert(str(tmp_path / "source"), str(tmp_path / "set"), **SMALL)
    with pytest.raises(ValueError, match=rf"already holds a data set of other settings: {why};"):
        convert(str(tmp_path / "source"), str(tmp_path / "set"), **other)


def test_what_has_changed_in_a_source_is_listed(serial, tmp_path):
    for name in ("a", "b", "c"):
        write_tar(tmp_path / "tars" / f"{name}.tar", list(range(6)))
    convert(str(tmp_path / "tars"), str(tmp_path / "set"), **SMALL)
    write_tar(tmp_path / "tars" / "d.tar", [1, 2])
    write_tar(tmp_path / "tars" / "b.tar", [5, 4, 3, 2, 1, 0])
    (tmp_path / "tars" / "c.tar").unlink()
    why = r"source has changed since: \S*d.tar new, \S*b.tar changed, \S*c.tar gone; choose another"
    with pytest.raises(ValueError, match=why):
        convert(str(tmp_path / "tars"), str(tmp_path / "set"), **SMALL)
    assert verify(str(tmp_path / "set")).problems == []


def test_a_set_without_its_record_is_refused(serial, tmp_path):
    begin_files(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "set", **SMALL)
    (tmp_path / "set" / "source.json").unlink()
    with pytest.raises(ValueError, match=r"holds no data set with its source.json: it has 'dama"):
        convert(tmp_path / "source", tmp_path / "set", **SMALL)


def test_a_refused_conversion_leaves_nothing_in_a_set_that_another_has_finished(
    serial, tmp_path, monkeypatch
):
    """It looked before the other had ended, and got the lock after that."""
    source, target = tmp_path / "source", tmp_path / "set"
    begin_files(source)
    alone = conversion._alone
    found: list[Any] = []

    def late(folder: Any) -> Any:
        if not found:
            found.append(None)
            convert(source, target, **SMALL)
        return alone(folder)

    monkeypatch.setattr(conversion, "_alone", late)
    with pytest.raises(ValueError, match=r"data set of other settings: seed=4 \(it was 3\)"):
        convert(source, target, **SMALL | {"seed": 4})
    assert not (target / "_staging").exists()
    assert open_dataset(str(target)).num_images == 20


def test_shards_whose_plan_was_deleted_are_not_those_of_another_plan(serial, tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "set"
    begin_files(source)
    with stopped_at(monkeypatch, "commit", is_done=False):
        convert(source, target, **SMALL)
    (target / "_staging" / "plan.json").unlink()
    made = {file: file.read_bytes() for file in target.glob("part-*")}
    with pytest.raises(ValueError, match=r"is not empty and holds no data set .* it has 'part-0"):
        convert(source, target, **SMALL | {"seed": 4})
    assert {file: file.read_bytes() for file in target.glob("part-*")} == made
    for file in made:
        file.rename(tmp_path / file.name)  # as the message says
    convert(source, target, **SMALL | {"seed": 4})
    convert(source, tmp_path / "undisturbed", **SMALL | {"seed": 4})
    assert pictures_of(target) == pictures_of(tmp_path / "undisturbed")


def test_a_conversion_without_a_plan_overwrites_no_file_of_the_user(serial, tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "set"
    begin_files(source)
    with stopped_at(monkeypatch, "shards_for", is_done=False):
        convert(source, target, **SMALL)
    (target / "_staging" / "lock-00000001.json").write_text("{}")
    (target / "part-00000-of-00001.parquet").write_text("the user's")
    with pytest.raises(ValueError, match=r"it has 'part-00000-of-00001.parquet'; choose a new fo"):
        convert(source, target, **SMALL)
    assert (target / "part-00000-of-00001.parquet").read_text() == "the user's"
    (target / "part-00000-of-00001.parquet").unlink()
    for lock in (target / "_staging").glob("lock-*"):
        lock.unlink()
    assert convert(source, target, **SMALL).num_images == 20


def test_keys_are_relative_to_the_folder_of_all_files_that_match_now(serial, tmp_path, monkeypatch):
    """The index of an interrupted start has them relative to a folder below it."""
    source, target = str(tmp_path / "tars" / "*" / "*.tar"), tmp_path / "set"
    write_tar(tmp_path / "tars" / "a" / "1.tar", [0, 1, 2])
    with stopped_at(monkeypatch, "shards_for", is_done=False):
        convert(source, target, **SMALL)
    (first,) = (target / "_staging").glob("index-*.parquet")
    write_tar(tmp_path / "tars" / "b" / "2.tar", [3, 4])
    with stopped_at(monkeypatch, "shards_for", is_done=False):
        convert(source, target, **SMALL)
    assert not first.exists()
    convert(source, target, **SMALL)
    assert sorted(labels_of(target)) == [f"a/1/00{i}" for i in range(3)] + ["b/2/003", "b/2/004"]
