import io
import json
import struct
import tarfile

import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import converted, labels_of, rejections, samples, tar_of
from tests.data.pictures import jpeg

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


def test_numbers_beside_given_classes_that_are_numbers_must_be_explained(serial, tmp_path):
    file = tmp_path / "a.tar"
    file.write_bytes(SHARD)
    with pytest.raises(ValueError, match=r"may be names or indices .*convert.labels_are=names"):
        converted(file, tmp_path / "set", classes=["2", "0", "1"])
    options = {"classes": ["2", "0", "1"]}
    rows = converted(file, tmp_path / "names", labels_are="names", **options)
    assert labels_of(rows) == {f"a/{i:02d}": str(i % 3) for i in range(20)}
    rows = converted(file, tmp_path / "indices", labels_are="indices", **options)
    assert labels_of(rows) == {f"a/{i:02d}": options["classes"][i % 3] for i in range(20)}
    rows = converted(file, tmp_path / "words", classes=["cat", "dog", "eel"])
    assert labels_of(rows)["a/01"] == "dog"


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


@pytest.mark.parametrize("name", ["00.jpg", "07.cls", "10.jpg", "19.cls"])
@pytest.mark.parametrize("at", [0, 100, 124, 130, 148, 156, 257, 345])
def test_a_bad_header_byte_is_found(serial, tmp_path, name, at):
    content = bytearray(SHARD)
    content[member_offsets()[name] + at] ^= 0x01
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=r"a.tar is damaged at byte"):
        converted(tmp_path / "a.tar", tmp_path / "set")


def test_a_mended_archive_is_indexed_anew(serial, tmp_path):
    file = tmp_path / "source" / "a.tar"
    file.parent.mkdir()
    file.write_bytes(SHARD[:9000])
    (file.parent / "b.tar").write_bytes(SHARD)
    with pytest.raises(ValueError, match=r"1 files of the source are damaged: .*a.tar"):
        converted(file.parent, tmp_path / "set")
    file.write_bytes(SHARD)
    assert len(converted(file.parent, tmp_path / "set")) == 40


def test_data_after_the_end_marker_are_damage(serial, tmp_path):
    """Archives that were joined by `cat`, whose second half tarfile passes over."""
    (tmp_path / "a.tar").write_bytes(SHARD + SHARD)
    with pytest.raises(ValueError, match=r"more data after an archive's end marker"):
        converted(tmp_path / "a.tar", tmp_path / "set")


REJECTED = {
    "empty": ([("x.jpg", IMAGES[0]), ("x.cls", b"")], "its label is empty"),
    "blank": ([("x.jpg", IMAGES[0]), ("x.cls", b" \n")], "its label is empty"),
    "latin1": ([("x.jpg", IMAGES[0]), ("x.cls", "caf\xe9".encode("latin-1"))], "can't decode"),
    "unlabelled": ([("x.jpg", IMAGES[0])], "no .cls or .json"),
    "list": ([("x.jpg", IMAGES[0]), ("x.json", b"[1]")], "a JSON list, not an object"),
    "deep": ([("x.jpg", IMAGES[0]), ("x.json", b"[" * 10**5)], "recursion"),
    "digits": ([("x.jpg", IMAGES[0]), ("x.json", b'{"label":' + b"1" * 9999 + b"}")], "limit"),
    "float": ([("x.jpg", IMAGES[0]), ("x.json", b'{"label": 1.5}')], "of type float"),
    "mixed": ([("x.jpg", IMAGES[0]), ("x.json", b'{"label": ["a", 1]}')], "of type int, str"),
    "of two lines": ([("x.jpg", IMAGES[0]), ("x.cls", b"cat\ndog\n")], "has a line break"),
    "unseen": ([("x.jpg", IMAGES[0]), ("x.cls", b"ca\x00t")], "control character"),
    "large": ([("x.jpg", IMAGES[0]), ("x.cls", b"x" * (1 << 21))], "more than 1,048,576"),
    "large json": ([("x.jpg", IMAGES[0]), ("x.json", b" " * (1 << 21))], "more than 1,048,576"),
    "two images": (
        [("x.jpg", IMAGES[0]), ("x.png", IMAGES[1]), ("x.cls", b"1")],
        "several images among ['cls', 'jpg', 'png']",
    ),
    "cut in its frame header": (
        [("x.jpg", IMAGES[0][: IMAGES[0].index(b"\xff\xc0") + 9] + b"\xff\xd9"), ("x.cls", b"1")],
        "not decodable",
    ),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_one_bad_sample_is_one_rejected_row(serial, tmp_path, kind):
    files, reason = REJECTED[kind]
    (tmp_path / "a.tar").write_bytes(tar_of([*FILES, *files]))
    assert len(converted(tmp_path / "a.tar", tmp_path / "set")) == 20
    found = rejections(tmp_path / "set")
    assert list(found) == ["a/x"]
    assert reason in found["a/x"]


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
    sink = io.BytesIO(tar_of(FILES)[: -2 * 512])
    sink.seek(0, io.SEEK_END)
    content = bytearray(sink.getvalue().rstrip(b"\0"))
    content += bytes(-len(content) % 512)
    link = tarfile.TarInfo("y.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "00.jpg"
    image = tarfile.TarInfo("x.jpg")
    image.size = len(IMAGES[0])
    content += link.tobuf() + image.tobuf(tarfile.GNU_FORMAT)
    content += IMAGES[0] + bytes(-len(IMAGES[0]) % 512)
    content += sparse_header("x.cls", 3 << 30) + b"1".ljust(512, b"\0") + bytes(1024)
    (tmp_path / "a.tar").write_bytes(content)
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
    block[483:495] = b"%011o\0" % real_size if real_size < 8**11 else _binary(real_size)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _binary(number: int) -> bytes:
    return b"\x80" + struct.pack(">xxxQ", number)


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


def test_json_tells_text_from_numbers(serial, tmp_path):
    values = [3, "3, three", ["a", "b"]]
    fields = [json.dumps({"label": value}).encode() for value in values]
    (tmp_path / "a.tar").write_bytes(tar_of(samples(IMAGES[:3], fields, "json")))
    found = labels_of(converted(tmp_path / "a.tar", tmp_path / "set"))
    assert found == {"a/0": "3", "a/1": "3, three", "a/2": ["a", "b"]}


def test_names_of_several_dots_are_rejected_one_by_one(serial, tmp_path):
    """As WebDataset reads them, all are files of one sample; so each is counted."""
    dotted = [
        (f"img.{i:04d}.{suffix}", content)
        for i in range(2)
        for suffix, content in (("jpg", IMAGES[i]), ("cls", b"0"))
    ]
    beside = [("x.jpg", IMAGES[0]), ("x.mask.png", IMAGES[1]), ("x.cls", b"1")]
    (tmp_path / "a.tar").write_bytes(tar_of([*FILES, *dotted, *beside]))
    rows = converted(tmp_path / "a.tar", tmp_path / "set")
    assert rows["a/x"] == (IMAGES[0], ["1"])
    found = rejections(tmp_path / "set")
    assert set(found) == {"a/img.0000.jpg", "a/img.0001.jpg"}
    assert all("its name has several dots" in reason for reason in found.values())


def test_text_is_one_label_without_what_is_around_it(serial, tmp_path):
    texts = [b"\xef\xbb\xbftench, Tinca tinca", b"tench, Tinca tinca\n", b"cock; rooster"]
    (tmp_path / "a.tar").write_bytes(tar_of(samples(IMAGES[:3], texts)))
    found = labels_of(converted(tmp_path / "a.tar", tmp_path / "set"))
    assert list(found.values()).count("tench, Tinca tinca") == 2
    assert found["a/2"] == "cock; rooster"


def test_of_several_files_of_a_sample_the_user_chooses(serial, tmp_path):
    fields = b'{"kind": "dog", "label": "cat", "class": "cow"}'
    files = {"left.jpg": IMAGES[0], "right.jpg": IMAGES[1], "json": fields, "breed": b"pug"}
    (tmp_path / "a.tar").write_bytes(tar_of([(f"0.{k}", v) for k, v in files.items()]))
    source, options = tmp_path / "a.tar", {"image_field": "right.jpg"}
    with pytest.raises(ValueError, match=r"field for the label .* and has class, kind, label"):
        converted(source, tmp_path / "none", **options)
    for field, label in (("kind", "dog"), ("breed", "pug")):
        rows = converted(source, tmp_path / field, **options, label_field=field)
        assert labels_of(rows) == {"a/0": label}
        assert rows["a/0"][0] == IMAGES[1]
