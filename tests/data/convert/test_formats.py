"""Which files a source has: formats, splits, globs and brace ranges."""

import bz2
import gzip
import lzma
import subprocess
import zlib
from pathlib import Path

import pytest

from tests.data.convert.archives import converted, labels_of, tar_of, write_hub_file
from tests.data.converting import units
from tests.data.pictures import jpeg
from vit_ray.data.convert import files
from vit_ray.data.convert.files import expand_braces, split_of

IMAGES = [jpeg(i) for i in range(3)]


def hub_repository(root: Path, names: list[str]) -> Path:
    """A downloaded repository; the label of every row is the number of its file."""
    for number, name in enumerate(names):
        write_hub_file(root / name, IMAGES, [number] * len(IMAGES))
    (root / "README.md").write_text("---\ndataset_info: {}\n---\n")
    (root / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (root / ".cache").mkdir()
    (root / ".cache" / "train.parquet").write_bytes(b"half a download")
    return root


def test_a_downloaded_repository_is_read_by_its_root(serial, tmp_path):
    names = [f"data/train-{i:05d}-of-00002.parquet" for i in range(2)]
    root = hub_repository(tmp_path / "source", names)
    found = labels_of(converted(root, tmp_path / "set"))
    stems = [name.removesuffix(".parquet") for name in names]
    assert found == {f"{stem}/{i:08d}": str(n) for n, stem in enumerate(stems) for i in range(3)}


@pytest.mark.parametrize(
    "names",
    [
        ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001-0a1b2c3d.parquet"],
        ["default/test/0000.parquet", "default/train/0000.parquet"],
        ["my_test.parquet", "training.parquet"],
    ],
)
def test_the_splits_of_a_repository_are_never_mixed(serial, tmp_path, names):
    root = hub_repository(tmp_path / "source", names)
    with pytest.raises(ValueError, match=r"has several splits: test, train; give one as convert"):
        converted(root, tmp_path / "set")
    train = converted(root, tmp_path / "set", split="train", labels_are="names")
    assert set(labels_of(train).values()) == {"1"}
    assert len(converted(root, tmp_path / "all", split="all")) == 6


def test_files_of_no_split_are_not_taken_along(tmp_path):
    root = hub_repository(tmp_path, ["train.parquet", "more.parquet"])
    with pytest.raises(ValueError, match=r"several splits: \(files without a split\), train"):
        units(str(root))


def test_the_configurations_of_a_repository_are_never_mixed(tmp_path):
    root = hub_repository(tmp_path, ["small/train-00000-of-00001.parquet", "large/train.parquet"])
    with pytest.raises(ValueError, match=r"several folders of data: large, small; give one"):
        units(str(root))


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("data/train_sd-00000-of-00002.parquet", "train_sd"),
        ("data/validation-00000-of-00001-aa00.parquet", "validation"),
        ("imagenet1k-validation-07.tar", "validation"),
        ("default/partial-train/0000.parquet", "train"),
        ("val2017.tar", "validation"),
        ("Train.csv", "train"),
        ("trainer-01.tar", None),
        ("contest.tar", None),
        ("00000.tar", None),
    ],
)
def test_the_name_of_a_file_tells_its_split(path, split):
    assert split_of(path) == split


def tars(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = tar_of([("a.jpg", IMAGES[0]), ("a.cls", f"c{number}".encode())])
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("{00..02}.tar", ["00", "01", "02"]),
        ("0[12].tar", ["01", "02"]),
        ("0{1,3}.*", ["01", "03"]),
        ("*.tar", ["00", "01", "02", "03"]),
        ("**/*.tar", ["00", "01", "02", "03", "deep/04"]),
        ("*/*.tar", ["04"]),
    ],
)
def test_patterns_stand_for_files(serial, tmp_path, pattern, taken):
    tars(tmp_path / "source", ["00.tar", "01.tar", "02.tar", "03.tar", "deep/04.tar"])
    found = labels_of(converted(f"{tmp_path}/source/{pattern}", tmp_path / "set"))
    assert set(found) == {f"{name}/a" for name in taken}


def test_a_file_that_a_range_names_and_is_not_there_is_an_error(tmp_path):
    tars(tmp_path, ["000.tar", "002.tar"])
    with pytest.raises(ValueError, match=r"nothing matches 1 of the 3 .*, the first .*001.tar'"):
        units(f"{tmp_path}/{{000..002}}.tar")
    with pytest.raises(ValueError, match=r"nothing matches 1 of the 1 .*x\*\.tar'"):
        units(f"{tmp_path}/x*.tar")


def test_a_path_that_exists_is_no_pattern(tmp_path):
    tars(tmp_path / "odd[1]{a,b}", ["0.tar"])
    (unit,) = units(f"{tmp_path}/odd[1]{{a,b}}")
    assert unit.path.endswith("/odd[1]{a,b}/0.tar")


@pytest.mark.parametrize(
    "pattern",
    ["a", "{000..003}", "{8..11}x", "{3..1}", "{a,b}/{0..1}", "{a,b{1,2}}", "{}", "{x}", "a{,b}"],
)
def test_braces_stand_for_what_a_shell_makes_of_them(pattern):
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {pattern}"], capture_output=True, text=True, check=True
    )
    assert sorted(expand_braces(pattern)) == sorted(shell.stdout.splitlines())


def test_a_range_has_a_limit():
    with pytest.raises(ValueError, match=rf"gives more than {files.MOST_PATHS:,} files"):
        expand_braces("{0..99999999999}")
    with pytest.raises(ValueError, match="gives more than"):
        expand_braces("{0..9999}{0..9999}")


def test_several_formats_in_a_folder_must_be_told_apart(tmp_path):
    tars(tmp_path, ["0.tar"])
    (tmp_path / "list.csv").write_text("path,label\n")
    with pytest.raises(
        ValueError, match=r"formats csv, webdataset; choose one with convert.format"
    ):
        units(str(tmp_path))
    assert [unit.format for unit in units(tmp_path, format="webdataset")] == ["webdataset"]


@pytest.mark.parametrize("name", ["set.tar.gz", "set.zip", "image.jpg"])
def test_a_file_of_no_format_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"unpack it first|no known format"):
        units(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.tar", "a.tfrecord"])
@pytest.mark.parametrize("module", [gzip, bz2, lzma, zlib], ids=lambda module: module.__name__)
def test_an_archive_that_is_compressed_is_not_said_to_be_damaged(serial, tmp_path, name, module):
    kind = {"gzip": "gzip", "bz2": "bzip2", "lzma": "xz", "zlib": "zlib"}[module.__name__]
    content = tar_of([("0.jpg", jpeg(0)), ("0.cls", b"cat")])
    (tmp_path / name).write_bytes(module.compress(content))
    with pytest.raises(
        ValueError, match=rf"{name}' is compressed with {kind}; decompress it first"
    ):
        converted(tmp_path / name, tmp_path / "set")


def test_a_folder_of_packed_archives_is_named(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected .*/CLASS/IMAGE; unpack archives first"):
        units(str(tmp_path))


@pytest.mark.parametrize("name", ["labels.csv", "labels.jsonl"])
def test_a_list_beside_class_folders_is_not_taken_without_a_word(serial, tmp_path, name):
    for label in ("cat", "dog"):
        (tmp_path / "source" / label).mkdir(parents=True)
        (tmp_path / "source" / label / "0.jpg").write_bytes(jpeg(0))
    (tmp_path / "source" / name).write_text("id,label\n0,tabby\n")
    why = r"has a list \((csv|jsonl)\) next to folders of images \(cat, dog\); set convert.format="
    with pytest.raises(ValueError, match=why):
        units(str(tmp_path / "source"))
    rows = converted(tmp_path / "source", tmp_path / "set", format="folder")
    assert labels_of(rows) == {"cat/0.jpg": "cat", "dog/0.jpg": "dog"}
