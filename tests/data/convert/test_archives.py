"""Tar shards and TFRecord files: what is in them, and where they are damaged."""

import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.convert.archives import (
    converted,
    example,
    labels_of,
    record,
    rejections,
    tar_of,
    write_files,
)
from tests.data.converting import config_of, units
from tests.data.pictures import encoded, jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert import archives
from vit_ray.data.convert.archives import features_of, masked_crc32c
from vit_ray.data.convert.rows import Row, Unit
from vit_ray.data.convert.sources import rows_of

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 30, 40) for i in range(20)]
FILES = [
    (f"{i:02d}.{suffix}", content)
    for i, image in enumerate(IMAGES)
    for suffix, content in (("jpg", image), ("cls", str(i % 3).encode()))
]
SHARD = tar_of(FILES)


def member_offsets() -> dict[str, int]:
    """Where the header of each member begins, as tarfile itself tells."""
    with tarfile.open(fileobj=io.BytesIO(SHARD)) as tar:
        return {member.name: member.offset for member in tar}


def test_samples_are_read_as_webdataset_has_them(tmp_path):
    """In any order of files, in several shards, and with what is no image beside them."""
    images = {f"{i:03d}": image for i, image in enumerate(IMAGES)}
    for shard in range(2):
        names = list(images)[shard::2]
        files = [(f"./a/{name}.jpg", images[name]) for name in names]
        files += [(f"./a/{name}.cls", b"%d" % (int(name) % 3)) for name in reversed(names)]
        files += [(f"./a/{name}.mask.png", b"a mask") for name in names]
        write_files(tmp_path / "source", {f"train-{shard}.tar": tar_of(files)})
    assert converted(tmp_path / "source", tmp_path / "set") == {
        f"train-{int(name) % 2}/./a/{name}": (image, [str(int(name) % 3)])
        for name, image in images.items()
    }


def test_labels_are_texts_numbers_or_lists_of_a_file_or_of_json(tmp_path):
    values = [3, "3, three", ["a", "b"]]
    labels = [("json", json.dumps({"label": value}).encode()) for value in values]
    labels += [
        ("cls", b"\xef\xbb\xbftench, Tinca tinca"),
        ("cls", b"tench, Tinca tinca\n"),
        ("cls", b"cock; rooster"),
    ]
    files = []
    for i, (suffix, content) in enumerate(labels):
        files += [(f"{i}.jpeg", IMAGES[i]), (f"{i}.{suffix}", content)]
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    found = labels_of(converted(tmp_path / "a.tar", tmp_path / "set"))
    assert [found[f"a/{i}"] for i in range(6)] == [
        "3", "3, three", ["a", "b"], "tench, Tinca tinca", "tench, Tinca tinca", "cock; rooster",
    ]  # fmt: skip
    assert open_dataset(str(tmp_path / "set")).max_labels == 2


INSIDE_HEADERS = [
    member_offsets()[name] + at for name in ("00.jpg", "07.cls", "10.jpg") for at in (1, 150, 511)
]


@pytest.mark.slow(after=20)
@pytest.mark.parametrize("cut", [*range(0, len(SHARD), 512), *INSIDE_HEADERS])
def test_a_cut_archive_is_never_taken_for_a_whole_one(tmp_path, cut):
    """Cut before each of its blocks: at headers, in data, and in the end marker; and in headers."""
    file = tmp_path / "a.tar"
    file.write_bytes(SHARD[:cut])
    end = SHARD.rindex(b"19.cls")
    if cut > end + 2 * 512:  # one block of the end marker is there
        assert len(converted(file, tmp_path / "set")) == 20
        return
    with pytest.raises(ValueError, match=r"a.tar is damaged at byte [\d,]+: .*replace them"):
        converted(file, tmp_path / "set")


@pytest.mark.parametrize("name", ["00.jpg", "19.cls"])
@pytest.mark.parametrize("at", [0, 124, 148, 257])
def test_a_bad_header_byte_is_found(tmp_path, name, at):
    content = bytearray(SHARD)
    content[member_offsets()[name] + at] ^= 0x01
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=r"a.tar is damaged at byte"):
        converted(tmp_path / "a.tar", tmp_path / "set")


REJECTED: dict[str, dict[str, bytes]] = {
    "can't decode": {"cls": "caf\xe9".encode("latin-1")},
    "it needs one field for the label (label or": {"jpg.cls": b"a"},
    "its .json is not a JSON object": {"json": b"{broken"},
    "'list' object is not a mapping": {"json": b"[1]"},
    "limit": {"json": b'{"label":' + b"1" * 9999 + b"}"},
    "its label is ['a', 1], not text, an integer": {"json": b'{"label": ["a", 1]}'},
    "has a line break": {"cls": b"cat\ndog\n"},
    ".cls is not a plain file in the archive, or has more than": {"cls": b"x" * (1 << 21)},
    ".json is not a plain file in the archive, or has more than": {"json": b" " * (1 << 21)},
    "the sample needs one image, and has ['cls', 'jpg', 'png']": {"png": IMAGES[1], "cls": b"1"},
    "not decodable": {
        "jpg": IMAGES[0][: IMAGES[0].index(b"\xff\xc0") + 9] + b"\xff\xd9",
        "cls": b"1",
    },
}


@pytest.mark.parametrize("reason", REJECTED)
def test_one_bad_sample_is_one_rejected_row(tmp_path, reason):
    files = {"jpg": IMAGES[0]} | REJECTED[reason]
    bad = [(f"x.{suffix}", content) for suffix, content in files.items()]
    (tmp_path / "a.tar").write_bytes(tar_of([*FILES, *bad]))
    assert len(converted(tmp_path / "a.tar", tmp_path / "set")) == 20
    ((key, found),) = rejections(tmp_path / "set").items()
    assert (key, reason in found) == ("a/x", True), found


def test_links_sparse_members_and_names_that_are_not_utf8_are_rejected(tmp_path):
    """A sparse label of 3 GiB takes 512 bytes on disk, and must take no more in memory."""
    link = tarfile.TarInfo("y.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "00.jpg"
    sparse = sparse_header("x.cls", 3 << 30) + b"1".ljust(512, b"\0")
    latin = tarfile.TarInfo("caf\xe9.jpg").tobuf(tarfile.GNU_FORMAT, "latin-1")
    files = tar_of([("x.jpg", IMAGES[0]), *FILES])
    (tmp_path / "a.tar").write_bytes(link.tobuf() + latin + sparse + files)
    rows = converted(tmp_path / "a.tar", tmp_path / "set", max_rejected_fraction=0.2)
    assert len(rows) == 20
    reasons = rejections(tmp_path / "set")
    assert set(reasons) == {"a/x", "a/y", "a/caf\\udce9"}
    assert "a link, a sparse or a special file" in reasons["a/y"]
    assert "not a plain file in the archive" in reasons["a/x"]


def sparse_header(name: str, real_size: int) -> bytes:
    """A header of GNU's old sparse format: one stored byte, the rest a hole."""
    member = tarfile.TarInfo(name)
    member.size, member.type = 1, tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[386 : 386 + 24] = b"%011o\0%011o\0" % (0, 1)
    block[483:495] = b"%011o\0" % real_size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_an_image_of_joined_archives_does_not_get_the_label_of_another(tmp_path):
    """A sample without its label, and later one of its name that has one; and one twice."""
    files = [*FILES, ("x.jpg", IMAGES[0]), ("y.jpg", IMAGES[1]), ("y.cls", b"1")]
    files += [("x.cls", b"1"), ("x.jpg", IMAGES[2]), ("00.jpg", IMAGES[1]), ("00.cls", b"2")]
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    rows = converted(tmp_path / "a.tar", tmp_path / "set", max_rejected_fraction=0.3)
    assert set(rows) == {"a/y", *(f"a/{i:02d}" for i in range(1, 20))}
    assert rows["a/y"] == (IMAGES[1], ["1"])
    rejected = pq.read_table(tmp_path / "set" / "rejected.parquet").to_pylist()
    assert sorted(row["key"] for row in rejected) == ["a/00", "a/00", "a/x", "a/x"]
    assert all("is in the archive again" in row["reason"] for row in rejected)


def test_names_of_several_dots_are_rejected_one_by_one(tmp_path):
    """As WebDataset reads them, all are files of one sample; so each is counted."""
    names = [f"img.{i:04d}.{suffix}" for i in range(2) for suffix in ("jpg", "cls")]
    dotted = [(name, IMAGES[0] if name.endswith("jpg") else b"0") for name in names]
    (tmp_path / "a.tar").write_bytes(tar_of([*FILES, *dotted]))
    assert len(converted(tmp_path / "a.tar", tmp_path / "set")) == 20
    found = rejections(tmp_path / "set")
    assert set(found) == {"a/img.0000.jpg", "a/img.0001.jpg"}
    assert all("its name has several dots" in reason for reason in found.values())


# TensorFlow's tutorial "TFRecord and tf.train.Example": `serialize_example(False, 4, b'goat',
# 0.9876)` as it prints it.
TUTORIAL = (
    b"\nR\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?\n\x14\n\x08feature2\x12\x08\n\x06\n"
    b"\x04goat\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
)


def test_the_example_of_tensorflows_tutorial_is_read():
    found = features_of(TUTORIAL)
    assert {k: found[k] for k in ("feature0", "feature1", "feature3")} == {
        "feature0": [0], "feature1": [4], "feature3": [pytest.approx(0.9876)],
    }  # fmt: skip
    assert found["feature2"] == [b"goat"]
    assert features_of(example(one=[-1])) == {"one": [-1]}


@pytest.mark.parametrize(("content", "crc"), [(bytes(32), 0x8A9136AA), (b"123456789", 0xE3069283)])
def test_checksums_are_castagnolis_under_tensorflows_mask(content, crc):
    # RFC 3720, appendix B.4, and the usual check value; `Unmask` of TensorFlow's crc32c.h.
    rotated = (masked_crc32c(content) - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc


def test_a_folder_of_tfds_is_converted_with_its_names(tmp_path):
    folder, names = tmp_path / "pets" / "4.0.0", ("cat", "dog", "frog")
    write_files(folder, {"label.labels.txt": "cat\ndog\nfrog\n", "dataset_info.json": "{}"})
    for split, shard in itertools.product(("train", "test"), range(2)):
        records = [
            record(example(file_name=b"%d.jpg" % k, image=jpeg(k), label=[k % 3]))
            for k in range(shard, 6, 2)
        ]
        name = f"pets-{split}.tfrecord-{shard:05d}-of-00002"
        write_files(folder, {name: b"".join(records)})
    rows = converted(folder, tmp_path / "set", split="test", columns=("file_name",))
    assert rows == {
        f"pets-test-{k % 2:05d}-of-00002/{k // 2:08d}": (jpeg(k), [names[k % 3]]) for k in range(6)
    }
    assert open_dataset(str(tmp_path / "set")).classes == list(names)
    # From the folder above, too; and without the choice of a split it is asked for.
    assert len(units(str(tmp_path / "pets"), split="train")) == 2
    with pytest.raises(ValueError, match="has several splits: test, train"):
        units(str(tmp_path / "pets"))


def indexed(path: Path, content: bytes, label_field: str | None = None) -> list[Row]:
    path.write_bytes(content)
    return list(rows_of(unit_of(path, label_field=label_field)))


def unit_of(path: Path, **options: Any) -> Unit:
    return Unit("tfrecord", str(path), str(path.parent), config_of(path, "set", **options))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (example(label=[1]), r"it needs one field for the image .* and has label"),
        (example(image=b"x"), r"it needs one field for the label .* and has image"),
        (example(image=b"x", label=b"\xff"), "can't decode"),
        (example(image=[7], label=[1]), "its 'image' is not an encoded image"),
        (b"\xff" * 40, "not a tf.train.Example"),
        (TUTORIAL[:-3], "not a tf.train.Example"),
        (b"\x0b", "not a tf.train.Example"),
    ],
)
def test_a_record_that_is_no_image_with_a_label_is_rejected_alone(content, problem, tmp_path):
    good = record(example(image=jpeg(1), label=[2]))
    before, wrong, after = indexed(tmp_path / "a.tfrecord", good + record(content) + good)
    assert (before.problem, after.problem, before.labels) == (None, None, ("2",))
    assert before.read() == after.read() == jpeg(1)
    with pytest.raises(ValueError, match=problem):
        wrong.read()


@pytest.mark.parametrize("place", ["picture", "label", "checksum", "size"])
def test_a_record_that_is_damaged_or_too_large_is_rejected_alone(place, tmp_path, monkeypatch):
    good = record(example(image=jpeg(1), label=[2]))
    at = {"picture": good.index(jpeg(1)) + 300, "label": good.index(b"label") + 11, "checksum": -1}
    wrong = bytearray(good)
    if place == "size":
        monkeypatch.setattr(archives, "MOST_IMAGE_BYTES", len(good))
        wrong = bytearray(record(example(image=bytes(3 << 20), label=[2])))
    else:
        wrong[at[place]] ^= 1
    if place == "label":  # what could be read of it is another class
        (entry,) = indexed(tmp_path / "b.tfrecord", record(bytes(wrong[12:-4])))
        assert entry.labels == ("3",)
    before, damaged, after = indexed(tmp_path / "a.tfrecord", good + wrong + good)
    assert before.read() == after.read() == jpeg(1)
    with pytest.raises(ValueError, match=r"the record is damaged, .* or has more than [\d,]+ b"):
        damaged.read()


def test_another_feature_may_be_the_label_with_its_own_names(tmp_path):
    files = {"label.labels.txt": "cat\ndog\n", "label_sex.labels.txt": "female\nmale\n"}
    source = write_files(tmp_path / "a", files)
    rows = [record(example(image=jpeg(k), label=[0], label_sex=[k], age=[7])) for k in (0, 1)]
    (source / "pets-train.tfrecord-00000-of-00001").write_bytes(b"".join(rows))
    # Features without names are classes by their numbers.
    expected = {"label_sex": [["female"], ["male"]], None: [["cat"]] * 2, "age": [["7"]] * 2}
    for field, labels in expected.items():
        labels_are = "names" if field == "age" else "auto"
        target = tmp_path / f"by {field}"
        rows_found = converted(source, target, label_field=field, labels_are=labels_are)
        assert sorted(found for _, found in rows_found.values()) == labels


def binary_picture() -> bytes:
    """White on black as TFDS keeps dSprites: the pixels are 1 and 0."""
    pixels = np.zeros((8, 8), np.uint8)
    pixels[2:4] = 1
    return encoded(pixels, "PNG")


def by_thresholds(values: list[float], bounds: list[float]) -> int:
    """As task_adaptation has it: `tf.reduce_max(tf.where((thrs - dist) < 0))`."""
    return int(np.max(np.where((np.array(bounds, np.float32) - np.min(values)) < 0)))


def label_of(path: Path, task: str, **features: Any) -> int:
    (entry,) = indexed(path, record(example(image=binary_picture(), **features)), task)
    (label,) = entry.labels
    return int(label)


@pytest.mark.parametrize("number", range(20))
def test_tasks_of_vtab_have_the_labels_that_its_authors_compute(tmp_path, number):
    random, path = np.random.default_rng(number), tmp_path / "a.tfrecord"
    depths = np.float32(random.uniform(5.5, 12, random.integers(3, 11)))
    coordinates = np.stack([np.full_like(depths, 99), depths * 0, depths], 1).ravel()
    clevr = {
        "objects/size": [1] * len(depths),
        "objects/pixel_coords": coordinates.tolist(),
    }
    bounds = [0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0]
    assert label_of(path, "clevr-count", **clevr) == len(depths) - 3
    assert label_of(path, "clevr-dist", **clevr) == by_thresholds(depths.tolist(), bounds)
    kinds = random.integers(0, 8, number)  # of the first image there is nothing
    depths = np.float32(random.uniform(0, 60, number))
    places = np.stack([depths * 0, depths * 0 - 9, depths], 1).ravel()
    kitti = {"objects/type": kinds.tolist(), "objects/location": places.tolist()}
    vehicles = [*depths[kinds < 3].tolist(), 1000.0]
    bounds = [-100.0, 8.0, 20.0, 999.0]
    assert label_of(path, "kitti-dist", **kitti) == by_thresholds(vehicles, bounds)
    label = int(random.integers(0, 32))
    for task, feature, value, expected in [
        ("dspr-loc", "label_x_position", label, np.floor_divide(np.float32(label), 32 / 16)),
        ("dspr-ori", "label_orientation", label, np.floor_divide(np.float32(label), 40 / 16)),
        ("snorb-azim", "label_azimuth", label % 18, label % 18),
        ("snorb-elev", "label_elevation", label % 9, label % 9),
    ]:
        assert label_of(path, task, **{feature: [value]}) == int(expected), task


def test_pictures_of_ones_and_zeros_are_made_visible(tmp_path):
    bright = encoded(np.full((8, 8), 7, np.uint8), "PNG")
    images = [binary_picture(), b"no picture", bright]
    content = b"".join(record(example(image=i, label_x_position=[3])) for i in images)
    found = indexed(tmp_path / "a.tfrecord", content, "dspr-loc")
    assert [entry.problem is None for entry in found] == [True, False, True]
    pixels = np.asarray(Image.open(io.BytesIO(found[0].read())))
    assert pixels.tolist() == [[255 if row in (2, 3) else 0] * 8 for row in range(8)]
    assert found[2].read() == bright


@pytest.mark.parametrize(
    ("task", "features", "problem"),
    [
        ("clevr-count", {"label": [1]}, r"features \['image', 'label'\]: KeyError 'objects/size'"),
        ("clevr-count", {"objects/size": [1] * 11}, "is 8, not one of 0 to 7"),
        ("kitti-dist", {"objects/type": [1], "objects/location": []}, "shorter|longer"),
        ("snorb-azim", {"label_azimuth": b"three"}, "invalid literal for int"),
    ],
)
def test_an_image_without_what_its_label_is_made_of_is_rejected(task, features, problem, tmp_path):
    content = record(example(image=jpeg(1), **features))
    (entry,) = indexed(tmp_path / "a.tfrecord", content, task)
    with pytest.raises(ValueError, match=problem):
        entry.read()
