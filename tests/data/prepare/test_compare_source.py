"""Data sets are compared with what they were made from, by pixels that OpenCV decodes anew."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.converting import convert
from tests.data.pictures import encoded, jpeg, picture, write_class_folders
from tests.data.prepare.archives import example, record, write_hub_file
from vit_ray.data import open_dataset
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.jpeg_index.rewriting import Libjpeg, RewrittenJpeg, with_restart_markers
from vit_ray.data.prepare.convert import compare_source, shard_images
from vit_ray.data.prepare.convert.compare_source import Comparison, compare_with_source
from vit_ray.data.prepare.sources.entries import SourceUnit
from vit_ray.data.prepare.sources.formats import index_unit
from vit_ray.data.prepare.subset import subset
from vit_ray.data.prepare.verify import check_file
from vit_ray.retry import ONE_ATTEMPT, retry_policy
from vit_ray.storage import Location

pytestmark = pytest.mark.usefixtures("serial")


def write_images(folder: Path) -> Path:
    """Four JPEG files, one of them progressive, and a PNG, which stays as it comes."""
    (folder / "one").mkdir(parents=True)
    for number in range(3):
        (folder / "one" / f"{number}.jpg").write_bytes(jpeg(number, 60 + number, 200))
    (folder / "one" / "3.jpg").write_bytes(encoded(picture(3, 90, 70), progressive=True))
    (folder / "one" / "4.png").write_bytes(encoded(picture(4), "PNG"))
    return folder


def write_tar(folder: Path) -> Path:
    """The same as one shard of WebDataset."""
    images = write_images(folder / "images")
    with tarfile.open(folder / "all.tar", "w") as tar:
        for file in sorted(images.glob("*/*")):
            tar.add(file, file.name)
            label = tarfile.TarInfo(f"{file.stem}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(b"0"))
    return folder / "all.tar"


def write_parquet(folder: Path) -> Path:
    """The same as a file of a hub repository."""
    images = write_images(folder / "images")
    content = [file.read_bytes() for file in sorted(images.glob("*/*"))]
    write_hub_file(folder / "all.parquet", content, ["one"] * 5)
    return folder / "all.parquet"


def write_list(folder: Path) -> Path:
    """The same as a CSV file with their paths."""
    images = write_images(folder / "images")
    lines = [f"images/one/{file.name},one" for file in sorted(images.glob("*/*"))]
    (folder / "all.csv").write_text("\n".join(["path,label", *lines]))
    return folder / "all.csv"


def compared(manifest: Manifest) -> Comparison:
    return compare_with_source(manifest, check_file(0, manifest, 1.0).rewritten, 1.0)


def converted(source: Path, target: Path, **settings: Any) -> Manifest:
    convert(str(source), str(target), **settings)
    return open_dataset(str(target))


@pytest.mark.parametrize("write", [write_images, write_tar, write_parquet, write_list])
def test_rewritten_files_decode_as_those_of_the_source(write: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    found = compared(converted(source, tmp_path / "set"))
    assert (found.num_equal, found.differing) == (4, [])
    assert str(source) in found.source


def test_records_whose_label_is_another_feature_are_compared(tmp_path: Path) -> None:
    images = sorted(write_images(tmp_path / "images").glob("*/*"))
    records = [record(example(image=file.read_bytes(), kind=[0])) for file in images]
    (tmp_path / "set-train.tfrecord-00000-of-00001").write_bytes(b"".join(records))
    source = tmp_path / "set-train.tfrecord-00000-of-00001"
    found = compared(converted(source, tmp_path / "set", label_field="kind"))
    assert (found.num_equal, found.differing) == (4, [])
    assert "gone" not in found.source


def test_the_source_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    manifest = converted(Path("source"), tmp_path / "set")
    monkeypatch.chdir("/")
    assert compared(manifest).num_equal == 4


def test_a_part_of_a_set_is_compared_with_the_source_of_all(tmp_path: Path) -> None:
    whole = converted(write_images(tmp_path / "source"), tmp_path / "set")
    part = subset(whole.path, str(tmp_path / "part"), count=3)
    assert 0 < compared(part).num_equal == len(check_file(0, part, 1.0).rewritten) < 4


def test_a_set_says_that_its_source_is_gone(tmp_path: Path) -> None:
    manifest = converted(write_images(tmp_path / "source"), tmp_path / "set")
    shutil.rmtree(tmp_path / "source")
    found = compared(manifest)
    assert (found.num_equal, found.differing) == (0, [])
    assert "the source is gone" in found.source


REFUSAL = "AWS Error ACCESS_DENIED during HeadObject operation: HTTP status 403"
ERRORS = [PermissionError(13, REFUSAL), ConnectionResetError(104, "Connection reset by peer")]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, OSError], None]]:
    """Has what reads a source raise an error."""

    def fail(name: str, error: OSError) -> None:
        def raise_it(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(f"{compare_source.__name__}.{name}", raise_it)

    with retry_policy(ONE_ATTEMPT):
        yield fail


@pytest.mark.parametrize("error", ERRORS)
def test_storage_that_does_not_answer_is_not_told_as_a_source_that_is_gone(
    tmp_path: Path, fails: Callable[[str, OSError], None], error: OSError
) -> None:
    manifest = converted(write_images(tmp_path / "source"), tmp_path / "set")
    fails("list_units", error)
    assert f"the source cannot be read ({error})" in compared(manifest).source
    assert "gone" not in compared(manifest).source


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["index_unit", "IndexEntry.read"])
def test_originals_that_storage_does_not_give_are_told_apart_from_those_that_are_gone(
    tmp_path: Path, fails: Callable[[str, OSError], None], error: OSError, name: str
) -> None:
    manifest = converted(write_images(tmp_path / "source"), tmp_path / "set")
    fails(name, error)
    found = compared(manifest)
    assert (found.num_equal, found.differing) == (0, [])
    assert found.source.endswith(f"4 originals could not be read ({error})")


def test_a_folder_that_may_not_be_read_is_not_told_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, which may read everything."""
    manifest = converted(write_images(tmp_path / "source"), tmp_path / "set")
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("/one"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert "4 originals could not be read" in compared(manifest).source


def test_units_without_an_image_of_the_sample_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "source")
    write_class_folders(tmp_path / "source", 3, 2)
    manifest = converted(tmp_path / "source", tmp_path / "set")
    rewritten = [r for r in check_file(0, manifest, 1.0).rewritten if "class_" not in r.key]
    read: list[str] = []

    def index(unit: SourceUnit, pack: Location) -> Any:
        read.append(unit.name)
        return index_unit(unit, pack)

    monkeypatch.setattr(compare_source, "index_unit", index)
    assert compare_with_source(manifest, rewritten, 1.0).num_equal == 4
    assert read == ["one"]


def test_a_set_whose_report_is_gone_says_so(tmp_path: Path) -> None:
    manifest = converted(write_images(tmp_path / "source"), tmp_path / "set")
    (tmp_path / "set" / "report.json").unlink()
    assert "does not name the source" in compared(manifest).source


def test_originals_that_changed_are_counted_and_no_fault_of_the_set(tmp_path: Path) -> None:
    manifest = converted(write_images(tmp_path / "source"), tmp_path / "set")
    (tmp_path / "source" / "one" / "0.jpg").write_bytes(jpeg(9))
    (tmp_path / "source" / "one" / "1.jpg").unlink()
    found = compared(manifest)
    assert (found.num_equal, found.differing) == (2, [])
    assert "of 2 the originals are gone or have changed" in found.source


def test_other_pixels_than_those_of_the_original_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_image(image: bytes, writer: Libjpeg) -> RewrittenJpeg | None:
        return with_restart_markers(jpeg(8) if image == jpeg(1, 61, 200) else image, writer)

    monkeypatch.setattr(shard_images, "with_restart_markers", of_another_image)
    found = compared(converted(write_images(tmp_path / "source"), tmp_path / "set"))
    assert found.num_equal == 3
    assert [one.key for one in found.differing] == ["one/1.jpg"]


def test_images_that_were_made_smaller_are_not_compared(tmp_path: Path) -> None:
    manifest = converted(write_images(tmp_path / "source"), tmp_path / "set", shrink_to=62)
    found = compared(manifest)
    assert (found.num_equal, found.differing) == (2, [])


def test_sets_without_indices_have_nothing_to_compare(tmp_path: Path) -> None:
    source = write_images(tmp_path / "source")
    assert compared(converted(source, tmp_path / "set", index_jpeg=False)).source == ""
