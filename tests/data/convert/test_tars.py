"""Tar shards of WebDataset: what is in them, and where they are damaged."""

import io
import json
import tarfile

import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import converted, labels_of, rejections, tar_of, write_files
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset

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


def test_samples_are_read_as_webdataset_has_them(serial, tmp_path):
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


def test_labels_are_texts_numbers_or_lists_of_a_file_or_of_json(serial, tmp_path):
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
def test_a_cut_archive_is_never_taken_for_a_whole_one(serial, tmp_path, cut):
    """Cut before each of its blocks: at headers, in data, and in the end marker; and in headers."""
    file = tmp_path / "a.tar"
    file.write_bytes(SHARD[:cut])
    end = SHARD.rindex(b"19.cls")
    if cut > end + 2 * 512:  # one block of the end marker is there
        assert len(converted(file, tmp_path / "set")) == 20
        return
    with pytest.raises(ValueError, match=r"a.tar is damaged at byte [\d,]+: .*replace them"):
        converted(file, tmp_path / "set")


@pytest.mark.parametrize("at", [0, 100, 124, 130, 148, 156, 257, 345])
def test_a_bad_header_byte_is_found(serial, tmp_path, at):
    for name in ("00.jpg", "07.cls", "19.cls"):
        content = bytearray(SHARD)
        content[member_offsets()[name] + at] ^= 0x01
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(ValueError, match=r"a.tar is damaged at byte"):
            converted(tmp_path / "a.tar", tmp_path / "set")


def test_a_mended_archive_is_indexed_anew(serial, tmp_path):
    root = write_files(tmp_path / "source", {"a.tar": SHARD[:9000], "b.tar": SHARD})
    with pytest.raises(ValueError, match=r"1 files of the source are damaged: .*a.tar"):
        converted(root, tmp_path / "set")
    (root / "a.tar").write_bytes(SHARD)
    assert len(converted(root, tmp_path / "set")) == 40


REJECTED: dict[str, dict[str, bytes]] = {
    "its label is empty": {"cls": b" \n"},
    "can't decode": {"cls": "caf\xe9".encode("latin-1")},
    "no .cls or .json label, only ['jpg', 'jpg.cls']": {"jpg.cls": b"a"},
    "its .json is not JSON": {"json": b"{broken"},
    "a JSON list, not an object": {"json": b"[1]"},
    "recursion": {"json": b"[" * 10**5},
    "limit": {"json": b'{"label":' + b"1" * 9999 + b"}"},
    "of type float": {"json": b'{"label": 1.5}'},
    "of type int, str": {"json": b'{"label": ["a", 1]}'},
    "has a line break": {"cls": b"cat\ndog\n"},
    "control character": {"cls": b"ca\x00t"},
    ".cls has more than 1,048,576": {"cls": b"x" * (1 << 21)},
    ".json has more than 1,048,576": {"json": b" " * (1 << 21)},
    "several images among ['cls', 'jpg', 'png']": {"png": IMAGES[1], "cls": b"1"},
    "not decodable": {
        "jpg": IMAGES[0][: IMAGES[0].index(b"\xff\xc0") + 9] + b"\xff\xd9",
        "cls": b"1",
    },
}


@pytest.mark.parametrize("reason", REJECTED)
def test_one_bad_sample_is_one_rejected_row(serial, tmp_path, reason):
    files = {"jpg": IMAGES[0]} | REJECTED[reason]
    bad = [(f"x.{suffix}", content) for suffix, content in files.items()]
    (tmp_path / "a.tar").write_bytes(tar_of([*FILES, *bad]))
    assert len(converted(tmp_path / "a.tar", tmp_path / "set")) == 20
    ((key, found),) = rejections(tmp_path / "set").items()
    assert (key, reason in found) == ("a/x", True), found


def test_a_name_that_is_not_utf8_is_one_rejected_row(serial, tmp_path):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        for name, content in [*FILES, ("caf\xe9.jpg", IMAGES[0]), ("caf\xe9.cls", b"1")]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (tmp_path / "a.tar").write_bytes(sink.getvalue())
    assert len(converted(tmp_path / "a.tar", tmp_path / "set")) == 20
    assert rejections(tmp_path / "set") == {
        "a/caf\\udce9": "its name or its label is not valid UTF-8"
    }


def test_links_and_sparse_members_are_rejected(serial, tmp_path):
    """A sparse label of 3 GiB takes 512 bytes on disk, and must take no more in memory."""
    content = tar_of([*FILES, ("x.jpg", IMAGES[0])]).rstrip(b"\0")
    content += bytes(-len(content) % 512)
    link = tarfile.TarInfo("y.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "00.jpg"
    content += link.tobuf() + sparse_header("x.cls", 3 << 30) + b"1".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    assert len(converted(tmp_path / "a.tar", tmp_path / "set")) == 20
    reasons = rejections(tmp_path / "set")
    assert set(reasons) == {"a/x", "a/y"}
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


def test_an_image_of_joined_archives_does_not_get_the_label_of_another(serial, tmp_path):
    """A sample without its label, and later one of its name that has one; and one twice."""
    files = [*FILES, ("x.jpg", IMAGES[0]), ("y.jpg", IMAGES[1]), ("y.cls", b"1")]
    files += [("x.cls", b"1"), ("x.jpg", IMAGES[2]), ("00.jpg", IMAGES[1]), ("00.cls", b"2")]
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    rows = converted(tmp_path / "a.tar", tmp_path / "set", max_rejected_fraction=0.3)
    assert set(rows) == {"a/y", *(f"a/{i:02d}" for i in range(1, 20))}
    assert rows["a/y"] == (IMAGES[1], ["1"])
    rejected = pq.read_table(tmp_path / "set" / "rejected.parquet").to_pylist()
    assert sorted(row["key"] for row in rejected) == ["a/00", "a/00", "a/x", "a/x"]
    assert all("stands in the archive again" in row["reason"] for row in rejected)


def test_names_of_several_dots_are_rejected_one_by_one(serial, tmp_path):
    """As WebDataset reads them, all are files of one sample; so each is counted."""
    names = [f"img.{i:04d}.{suffix}" for i in range(2) for suffix in ("jpg", "cls")]
    dotted = [(name, IMAGES[0] if name.endswith("jpg") else b"0") for name in names]
    (tmp_path / "a.tar").write_bytes(tar_of([*FILES, *dotted]))
    assert len(converted(tmp_path / "a.tar", tmp_path / "set")) == 20
    found = rejections(tmp_path / "set")
    assert set(found) == {"a/img.0000.jpg", "a/img.0001.jpg"}
    assert all("its name has several dots" in reason for reason in found.values())
