"""Which files a source has: class folders, formats, splits, globs and brace ranges."""

import errno
import os
import subprocess
from typing import Any

import pytest

from tests.data.convert.archives import (
    converted,
    labels_of,
    parquet,
    rejections,
    tar_of,
    write_files,
)
from tests.data.converting import convert, units
from tests.data.pictures import jpeg
from vit_ray.data.convert.files import expand_braces, split_of

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = {
    f"{label}/{i}.jpg": jpeg(i + 10 * len(label)) for label in ("cat", "dog") for i in range(9)
}
PICTURES = list(IMAGES.values())


def numbered(*names: str) -> dict[str, bytes]:
    return {name: PICTURES[i % len(PICTURES)] for i, name in enumerate(names)}


def images_of(rows: dict[str, tuple[bytes, Any]]) -> dict[str, bytes]:
    return {key: image for key, (image, _) in rows.items()}


def test_class_folders_may_be_links_and_a_loop_is_refused(tmp_path):
    write_files(tmp_path / "stored", {"1.jpg": PICTURES[0]})
    root = write_files(tmp_path / "source", IMAGES)
    os.symlink(tmp_path / "stored", root / "tiger")
    found = converted(root, tmp_path / "set")
    assert images_of(found) == IMAGES | {"tiger/1.jpg": PICTURES[0]}
    for link, target in (("cat/again", root / "cat"), ("whole", root)):
        os.symlink(target, root / link)
        with pytest.raises(ValueError, match=rf"/{link}.*' is a link to a folder"):
            converted(root, tmp_path / f"set {target.name}")
        (root / link).unlink()


def test_what_cannot_be_read_is_rejected(tmp_path):
    root = write_files(tmp_path / "source", IMAGES)
    os.mkfifo(root / "cat" / "pipe.jpg")
    os.symlink(tmp_path / "nowhere", root / "cat" / "gone.jpg")
    os.symlink("itself", root / "cat" / "itself")
    (root / "dog" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"")
    (root / "beside.jpg").write_bytes(IMAGES["cat/0.jpg"])
    assert len(converted(root, tmp_path / "set", max_rejected_fraction=0.5)) == 18
    odd = "it is a broken link or not a regular file"
    assert rejections(tmp_path / "set") == {
        **dict.fromkeys(("cat/pipe.jpg", "cat/gone.jpg", "cat/itself"), odd),
        "dog/caf\\udce9.jpg": "its name or its label is not valid UTF-8",
        "beside.jpg": "it is not in a class folder",
    }


def test_what_systems_and_downloads_leave_is_no_image_and_no_class(tmp_path):
    left = (
        "@eaDir/cat/3.jpg", "cat/@eaDir/4.jpg", "$RECYCLE.BIN/5.jpg",
        "System Volume Information/6.jpg", "dog/7.jpg.part", "cat/Thumbs.db", "cat/desktop.ini",
        "dog/.DS_Store", "dog/._0.jpg", "__MACOSX/cat/._0.jpg",
    )  # fmt: skip
    root = write_files(tmp_path / "s", IMAGES | numbered(*left))
    assert images_of(converted(root, tmp_path / "set")) == IMAGES
    assert rejections(tmp_path / "set") == {}


def test_a_folder_that_cannot_be_looked_into_is_an_error(tmp_path, monkeypatch):
    """Nobody knows how many images it has; the superuser, who runs some tests, may look anyway."""
    root = write_files(tmp_path / "source", IMAGES)
    look = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("/dog"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return look(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ValueError, match=r"folder '.*/dog' cannot be read \(Permission denied\)"):
        convert(root, tmp_path / "set")


def test_splits_of_class_folders_must_be_chosen(tmp_path):
    for split in ("train", "val"):
        write_files(tmp_path / "source" / split, IMAGES)
    with pytest.raises(ValueError, match=r"has several splits: train, validation; give one as"):
        converted(tmp_path / "source", tmp_path / "set")
    for split in ("val", "validation"):
        assert images_of(converted(tmp_path / "source", tmp_path / split, split=split)) == IMAGES
    everything = converted(tmp_path / "source", tmp_path / "all", split="all")
    assert set(everything) == {f"{s}/{n}" for s in ("train", "val") for n in IMAGES}
    assert set(labels_of(everything).values()) == {"cat", "dog"}


def test_a_test_split_without_classes_is_no_class(tmp_path):
    root = write_files(tmp_path / "source", numbered("train/cat/1.jpg", "test/1.jpg"))
    with pytest.raises(ValueError, match=r"several splits: test, train"):
        converted(root, tmp_path / "set")
    (root / "test" / "1.jpg").unlink()
    (root / "test").rename(root / "annotations")  # and the only split needs no choice
    assert list(converted(root, tmp_path / "set")) == ["cat/1.jpg"]


def test_a_class_may_be_called_as_a_split_is(tmp_path):
    """Vehicles: a train stands beside a cat."""
    root = write_files(tmp_path / "source", IMAGES | numbered("train/steam/1.jpg"))
    with pytest.raises(ValueError, match=r"they lie deeper, such as in '.*/train/steam'"):
        converted(root, tmp_path / "set")
    found = converted(root, tmp_path / "set", format="folder")
    assert set(labels_of(found).values()) == {"cat", "dog", "train"}
    with pytest.raises(ValueError, match=r"has no folders such as train and val"):
        converted(root, tmp_path / "other", split="train")


def test_patterns_may_stand_for_the_root_the_classes_or_the_second_level(tmp_path):
    root = write_files(tmp_path / "source", IMAGES)
    for number, pattern in enumerate((f"{root}*", f"{root}/*")):
        assert images_of(converted(pattern, tmp_path / f"{number}")) == IMAGES
    with pytest.raises(ValueError, match=r"split='nonsense'.* leave convert.split out"):
        units(f"{root}/*", split="nonsense")
    deep = write_files(tmp_path / "deep", numbered("a/airfield/1.jpg", "b/bar/2.jpg"))
    assert labels_of(converted(f"{deep}/*/*", tmp_path / "set")) == {
        "a/airfield/1.jpg": "airfield",
        "b/bar/2.jpg": "bar",
    }


SYNOLOGY = tuple(f"a/airfield/@eaDir/1.jpg/SYNO_{size}.jpg" for size in "SM")
WRONG_DEPTH = [
    ("", ("a/airfield/1.jpg", "b/bar/2.jpg"), "a/airfield"),
    ("", ("Aves/123/1.jpg", "Fungi/cover.jpg"), "Aves/123"),
    ("", ("a/1.jpg", "a/airfield/2.jpg"), "a/airfield"),
    ("", ("a/airfield/1.jpg", *SYNOLOGY), "a/airfield"),
    ("", ("train/cat/1.jpg", "images/3.jpg"), "train/cat"),
    ("", ("bottle/2020/1.jpg", "test_tube/2020/2.jpg"), "2020"),
    ("", ("Data/CLS-LOC/train/n01/1.JPEG", "Data/CLS-LOC/val/2.JPEG"), "CLS-LOC/train/n01"),
    ("/*", ("train/cat/1.jpg", "val/cat/2.jpg", "examples/e.jpg"), "train/cat"),
    ("/*", ("train/cat/1.jpg", "train/a.jpg", "train/b.jpg", "dog/3.jpg"), "train/cat"),
    ("/*", ("part-1/cat/1.jpg", "part-1/preview.jpg", "part-2/cat/2.jpg"), "part-1/cat"),
]


@pytest.mark.parametrize(("pattern", "names", "deeper"), WRONG_DEPTH)
def test_class_folders_are_not_looked_for_at_the_wrong_depth(tmp_path, pattern, names, deeper):
    root = write_files(tmp_path / "s", numbered(*names))
    with pytest.raises(ValueError, match=rf"they lie deeper, such as in '.*/{deeper}'"):
        convert(f"{root}{pattern}", tmp_path / "set")
    if not pattern:  # unless the user says so
        assert {u.name for u in units(root, format="folder")} >= {names[0].partition("/")[0]}


@pytest.mark.parametrize("folders", [("train_images", "val_images"), ("train2017", "val2017")])
def test_folders_of_images_that_are_splits_by_their_names_are_no_classes(tmp_path, folders):
    root = write_files(tmp_path / "s", numbered(*(f"{name}/1.jpg" for name in folders)))
    write_files(root, {"annotations/a.json": "{}"})
    with pytest.raises(ValueError, match=r"has several splits: train, validation"):
        convert(root, tmp_path / "set")
    with pytest.raises(ValueError, match=rf"expected .*/{folders[1]}/CLASS/IMAGE; .*format=folder"):
        convert(root, tmp_path / "set", split="val")
    assert {unit.name for unit in units(root, format="folder")} >= {*folders}


def hub_repository(*names: str) -> dict[str, bytes | str]:
    """A downloaded repository; the label of every row is the number of its file."""
    structs = [{"bytes": image} for image in PICTURES[:3]]
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
        ("data/train_sd-00000-of-00002.parquet", "train_sd"),
        ("data/validation-00000-of-00001-aa00.parquet", "validation"),
        ("imagenet1k-validation-07.tar", "validation"),
        ("val2017.tar", "validation"),
        ("trainer-01.tar", None),
    ],
)
def test_the_name_of_a_file_tells_its_split(path, split):
    assert split_of(path) == split


def tars(*names: str) -> dict[str, bytes]:
    return {
        name: tar_of([("a.jpg", PICTURES[0]), ("a.cls", f"c{number}".encode())])
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
    ["a", "{000..003}", "{8..11}x", "{3..1}", "{a,b}/{0..1}", "{}", "{x}", "a{,b}"],
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
    classes = {
        "cat/0.jpg": PICTURES[0],
        "dog/0.jpg": PICTURES[1],
        "labels.csv": "id,label\n0,tabby\n",
    }
    write_files(tmp_path / "classes", classes)
    rows = converted(tmp_path / "classes", tmp_path / "folders", format="folder")
    assert labels_of(rows) == {"cat/0.jpg": "cat", "dog/0.jpg": "dog"}
    write_files(tmp_path / "both", tars("0.tar") | {"list.csv": b"path,label\n"})
    assert [unit.format for unit in units(tmp_path / "both", format="webdataset")] == ["webdataset"]
