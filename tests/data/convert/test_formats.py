"""Which files a source has: formats, splits, globs and brace ranges."""

import subprocess

import pytest

from tests.data.convert.archives import converted, labels_of, parquet, tar_of, write_files
from tests.data.converting import convert, units
from tests.data.pictures import jpeg
from vit_ray.data.convert.files import expand_braces, split_of

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 20, 24) for i in range(3)]


def hub_repository(*names: str) -> dict[str, bytes | str]:
    """A downloaded repository; the label of every row is the number of its file."""
    structs = [{"bytes": image} for image in IMAGES]
    files = {
        name: parquet({"image": structs, "label": [number] * 3})
        for number, name in enumerate(names)
    }
    return {
        **files,
        "README.md": "---\ndataset_info: {}\n---\n",
        ".gitattributes": "*.parquet filter=lfs\n",
        ".cache/train.parquet": b"half a download",
    }


def test_a_downloaded_repository_is_read_by_its_root(tmp_path):
    names = [f"data/train-{i:05d}-of-00002.parquet" for i in range(2)]
    root = write_files(tmp_path / "source", hub_repository(*names))
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
def test_the_splits_of_a_repository_are_never_mixed(tmp_path, names):
    root = write_files(tmp_path / "source", hub_repository(*names))
    with pytest.raises(ValueError, match=r"has several splits: test, train; give one as convert"):
        converted(root, tmp_path / "set")
    train = converted(root, tmp_path / "set", split="train", labels_are="names")
    assert set(labels_of(train).values()) == {"1"}
    assert len(converted(root, tmp_path / "all", split="all")) == 6


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


def tars(*names: str) -> dict[str, bytes]:
    return {
        name: tar_of([("a.jpg", IMAGES[0]), ("a.cls", f"c{number}".encode())])
        for number, name in enumerate(names)
    }


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("{00..02}.tar", ["00", "01", "02"]),
        ("0[12].tar", ["01", "02"]),
        ("0{1,3}.*", ["01", "03"]),
        ("**/*.tar", ["00", "01", "02", "03", "deep/04"]),
        ("*/*.tar", ["04"]),
    ],
)
def test_patterns_stand_for_files(tmp_path, pattern, taken):
    write_files(tmp_path / "source", tars("00.tar", "01.tar", "02.tar", "03.tar", "deep/04.tar"))
    found = labels_of(converted(f"{tmp_path}/source/{pattern}", tmp_path / "set"))
    assert set(found) == {f"{name}/a" for name in taken}


def test_a_path_that_exists_is_no_pattern(tmp_path):
    write_files(tmp_path / "odd[1]{a,b}", tars("0.tar"))
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


def test_what_is_refused_is_read_when_the_user_has_chosen(tmp_path):
    shards = {f"train-{i:05d}-of-00003.parquet": hub_repository("a")["a"] for i in (0, 2)}
    write_files(tmp_path / "data", shards)
    some = f"{tmp_path}/data/train-{{00000,00002}}-of-00003.parquet"
    for in_place in (False, True):
        assert convert(some, tmp_path / f"some {in_place}", in_place=in_place).num_images == 6
    classes = {"cat/0.jpg": IMAGES[0], "dog/0.jpg": IMAGES[1], "labels.csv": "id,label\n0,tabby\n"}
    write_files(tmp_path / "classes", classes)
    rows = converted(tmp_path / "classes", tmp_path / "folders", format="folder")
    assert labels_of(rows) == {"cat/0.jpg": "cat", "dog/0.jpg": "dog"}
    write_files(tmp_path / "both", tars("0.tar") | {"list.csv": b"path,label\n"})
    assert [unit.format for unit in units(tmp_path / "both", format="webdataset")] == ["webdataset"]
