import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.convert.archives import converted, labels_of, rejections
from tests.data.converting import convert, units
from tests.data.pictures import jpeg

IMAGES = {
    f"{label}/{i}.jpg": jpeg(i + 10 * len(label)) for label in ("cat", "dog") for i in range(9)
}


def write_images(root: Path, below: str = "") -> Path:
    for name, image in IMAGES.items():
        file = root / below / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image)
    return root


def test_a_loop_of_links_gives_each_image_once(serial, tmp_path):
    root = write_images(tmp_path / "source")
    (root / "cat" / "deep").mkdir()
    os.symlink(root / "cat", root / "cat" / "deep" / "again")
    os.symlink(root, root / "whole")
    found = converted(root, tmp_path / "set")
    assert {key: image for key, (image, _) in found.items()} == IMAGES
    again = "it is a link to a folder that is read already"
    assert rejections(tmp_path / "set") == {"cat/deep/again": again, "whole": again}


def test_a_linked_folder_is_read(serial, tmp_path):
    write_images(tmp_path / "stored")
    (tmp_path / "source").mkdir()
    os.symlink(tmp_path / "stored" / "cat", tmp_path / "source" / "tiger")
    found = labels_of(converted(tmp_path / "source", tmp_path / "set"))
    assert found == {f"tiger/{i}.jpg": "tiger" for i in range(9)}


def test_what_cannot_be_read_is_rejected(serial, tmp_path):
    root = write_images(tmp_path / "source")
    os.mkfifo(root / "cat" / "pipe.jpg")
    os.symlink(tmp_path / "nowhere", root / "cat" / "gone.jpg")
    os.symlink("itself", root / "cat" / "itself")
    (root / "dog" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"")
    (root / "beside.jpg").write_bytes(IMAGES["cat/0.jpg"])
    assert len(converted(root, tmp_path / "set", max_rejected_fraction=0.5)) == 18
    assert rejections(tmp_path / "set") == {
        "cat/pipe.jpg": "it is not a regular file",
        "cat/gone.jpg": "it cannot be read: No such file or directory",
        "cat/itself": "it cannot be read: Too many levels of symbolic links",
        "dog/caf\\udce9.jpg": "its name or its label is not valid UTF-8",
        "beside.jpg": "it is not in a class folder",
    }


def test_numbers_as_folder_names_are_names(serial, tmp_path):
    for i, name in enumerate(("10", "9", "09")):
        (tmp_path / "source" / name).mkdir(parents=True)
        (tmp_path / "source" / name / "a.jpg").write_bytes(jpeg(i))
    found = labels_of(converted(tmp_path / "source", tmp_path / "set", classes=["9", "10", "09"]))
    assert found == {f"{name}/a.jpg": name for name in ("10", "9", "09")}


def test_splits_of_class_folders_must_be_chosen(serial, tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / "source", split)
    with pytest.raises(ValueError, match=r"has several splits: train, validation; give one as"):
        converted(tmp_path / "source", tmp_path / "set")
    for split in ("val", "validation"):
        found = converted(tmp_path / "source", tmp_path / split, split=split)
        assert {key: image for key, (image, _) in found.items()} == IMAGES
    everything = converted(tmp_path / "source", tmp_path / "all", split="all")
    assert set(everything) == {f"{s}/{n}" for s in ("train", "val") for n in IMAGES}
    assert set(labels_of(everything).values()) == {"cat", "dog"}
    with pytest.raises(ValueError, match=r"split='test' is not in .*it has train, validation"):
        converted(tmp_path / "source", tmp_path / "test", split="test")


def test_a_test_split_without_classes_is_no_class(serial, tmp_path):
    root = write_images(tmp_path / "source", "train")
    (root / "test").mkdir()
    (root / "test" / "1.jpg").write_bytes(jpeg(1))
    with pytest.raises(ValueError, match=r"several splits: test, train"):
        converted(root, tmp_path / "set")
    assert len(converted(root, tmp_path / "set", split="train")) == 18


def test_the_only_split_needs_no_choice(serial, tmp_path):
    root = write_images(tmp_path / "source", "train")
    (root / "annotations").mkdir()
    assert set(labels_of(converted(root, tmp_path / "set")).values()) == {"cat", "dog"}


def test_a_class_may_be_called_as_a_split_is(serial, tmp_path):
    """Vehicles: a train stands beside a cat."""
    root = write_images(tmp_path / "source")
    (root / "train" / "steam").mkdir(parents=True)
    (root / "train" / "steam" / "1.jpg").write_bytes(jpeg(1))
    with pytest.raises(ValueError, match=r"they lie deeper, such as in '.*/train/steam'"):
        converted(root, tmp_path / "set")
    found = converted(root, tmp_path / "set", format="folder")
    assert set(labels_of(found).values()) == {"cat", "dog", "train"}
    with pytest.raises(ValueError, match=r"has no folders such as train and val"):
        converted(root, tmp_path / "other", split="train")


def test_a_folder_that_cannot_be_looked_into_is_an_error(serial, tmp_path, monkeypatch):
    """Nobody knows how many images it has; the superuser, who runs some tests, may look anyway."""
    root = write_images(tmp_path / "source")
    look = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("/dog"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return look(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ValueError, match=r"folder '.*/dog' cannot be read \(Permission denied\)"):
        converted(root, tmp_path / "set")


def test_a_pattern_may_stand_for_the_one_root(serial, tmp_path):
    found = converted(f"{write_images(tmp_path / 'source')}*", tmp_path / "set")
    assert {key: image for key, (image, _) in found.items()} == IMAGES


def test_folders_of_folders_are_not_taken_for_classes(serial, tmp_path):
    for part in ("part-1", "part-2"):
        write_images(tmp_path / "source", part)
    source = f"{tmp_path}/source/part-*"
    with pytest.raises(ValueError, match=r"they lie deeper, such as in '.*/part-1/cat'"):
        converted(source, tmp_path / "set")
    both = f"{tmp_path}/source/part-{{1,2}}/*"
    assert set(labels_of(converted(both, tmp_path / "all")).values()) == {"cat", "dog"}


def write_each(root: Path, *names: str) -> str:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(number))
    return f"{root}/*"


def test_an_image_beside_the_classes_of_a_split_makes_no_class_of_it(serial, tmp_path):
    source = write_each(tmp_path / "s", "train/cat/1.jpg", "train/preview.jpg", "val/cat/2.jpg")
    with pytest.raises(ValueError, match=r"has several splits: train, validation"):
        converted(source, tmp_path / "set")
    found = converted(source, tmp_path / "set", split="train", max_rejected_fraction=0.5)
    assert labels_of(found) == {"cat/1.jpg": "cat"}


@pytest.mark.parametrize(
    "names",
    [
        ("train/cat/1.jpg", "val/cat/2.jpg", "examples/e.jpg"),
        ("part-1/cat/1.jpg", "part-1/preview.jpg", "part-2/cat/2.jpg"),
        ("train/cat/1.jpg", "train/preview.jpg", "dog/3.jpg"),
        ("part-1/cover.jpg", "part-1/cat/1.jpg", "part-2/3.jpg"),
    ],
)
def test_folders_of_images_beside_folders_of_folders_are_refused(serial, tmp_path, names):
    source = write_each(tmp_path / "s", *names)
    with pytest.raises(ValueError, match=r"they lie deeper, such as in '.*/(train|part-[12])/cat'"):
        convert(source, tmp_path / "set")


def test_class_folders_that_a_pattern_names_have_no_split(tmp_path):
    source = write_each(tmp_path / "s", "cat/1.jpg", "cat/more/2.jpg", "dog/3.jpg")
    assert [unit.name for unit in units(source)] == ["cat", "dog"]
    with pytest.raises(ValueError, match=r"split='nonsense'.* leave convert.split out"):
        units(source, split="nonsense")
