"""Sources that are refused at once: what is in them, and the words that the error must have."""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from tests.data.convert.archives import example, parquet, record, samples, tar_of, write_files
from tests.data.converting import convert
from tests.data.pictures import jpeg

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 20, 24) for i in range(6)]
STRUCTS = [{"bytes": image} for image in IMAGES]
FILES = {f"{i}.jpg": image for i, image in enumerate(IMAGES)}
CLASSES = {"cat/1.jpg": IMAGES[1], "dog/2.jpg": IMAGES[2]}
TAR = tar_of(samples(IMAGES, [b"0", b"1", b"2"] * 2))
RECORD = record(example(image=IMAGES[0], label=[0]))
HUB = parquet({"image": STRUCTS, "label": [0, 1, 2] * 2})
NO_ROWS = parquet(pa.table({"image": STRUCTS, "label": [0] * 6}).slice(0, 0))

Case = tuple[str, Mapping[str, Any], str, dict[str, Any]]


def case(told: str, files: Mapping[str, Any], source: str = "", **options: Any) -> Case:
    """Words of the error, files in a folder, what is converted of it, and keys of `convert`."""
    return told, files, source, options


def csv(text: str | bytes, told: str, **options: Any) -> Case:
    return case(told, {"a.csv": text, **FILES}, "/a.csv", **options)


def hub(table: Any, told: str, **options: Any) -> Case:
    return case(told, {"a.parquet": parquet(table)}, "/a.parquet", **options)


def tar(files: dict[str, bytes], told: str) -> Case:
    return case(rf"a\.tar.*{told}", {"a.tar": tar_of([*files.items()])}, "/a.tar")


def class_label(names: Any) -> dict[str, Any]:
    return {"label": {"names": names, "_type": "ClassLabel"}}


def named(names: Any, told: str) -> Case:
    """By the metadata of a parquet file."""
    columns = {"image": STRUCTS, "label": [0, 1] * 3}
    return case(told, {"a.parquet": parquet(columns, class_label(names))})


# Begins like a file of bzip2.
BZIP2_BY_NAME = tar_of([("BZh.jpg", IMAGES[0]), ("BZh.cls", b"0")])
TWO_SETS = ("00000-of-00001", "00000-of-00002", "00001-of-00002")
FORMATS = [
    case("no such folder", {}, "/nothing"),
    case("has no files of the format", {}),
    case("holds no images", {"cat/.hidden": b""}),
    case("holds no images", {"a.parquet": NO_ROWS}),
    case("row group 0 has no rows", {"a.parquet": NO_ROWS}, in_place=True),
    case("formats unknown; .*unpack other archives", {"a.tar.gz": b""}, "/a.tar.gz"),
    case("formats image; .*a folder of class folders", FILES, "/0.jpg"),
    case("formats csv, webdataset; .*convert.format", {"a.csv": "path,label\n", "a.tar": TAR}),
    case(r"list \(csv\) next to folders .*cat, dog", {**CLASSES, "a.csv": "id,label\n"}),
    case("folders of data: large, small", {"small/train.parquet": HUB, "large/train.parquet": HUB}),
    case(r"\(files without a split\), train", {"train.parquet": HUB, "b.parquet": HUB}),
    case("split='test' is not in", {"train/a/1.jpg": b"", "val/a/2.jpg": b""}, split="test"),
    case(r"001\.tar'; .* 1 of the 3", {"000.tar": TAR, "002.tar": TAR}, "/{000..002}.tar"),
    case(r"x\*\.tar'; nothing matches 1 of the 1", {"0.tar": TAR}, "/x*.tar"),
    case("more than 100,000 files", {}, "/{0..9999}{0..9999}"),
    case("are missing, .*, the first 00000", {"pets-train.tfrecord-00001-of-00002": RECORD}),
    case("another number, the first 00000-of-00001", {f"a-{n}.parquet": HUB for n in TWO_SETS}),
    csv("path,label\n0.jpg,cat\n".encode("utf-16"), "UTF-16; save it as UTF-8"),
    case(r"b\.parquet is damaged at byte .*footer", {"a.parquet": HUB, "b.parquet": HUB[:-100]}),
    case(r"a\.tar is damaged", {"a.tar": BZIP2_BY_NAME[: BZIP2_BY_NAME.rindex(b"BZh") + 9]}),
    case("or more data after an end marker", {"a.tar": TAR + TAR}),
    case("line break", {"c\nat/1.jpg": IMAGES[0]}),
    csv("path,label\nhttps://x.org/1.jpg,a\nhttp://x.org/2.jpg,b\n", "a URL; download the images"),
    hub({"image": [{"bytes": None, "path": "a"}], "label": [0]}, "its path is 'a'; .*embed_tab"),
    tar(CLASSES, "If its folders are classes, unpack"),
    tar({"n01_1.JPEG": IMAGES[0]}, "tar -xf CLASS.tar -C CLASS"),
    tar({"n01.tar": b"x"}, "or other archives. .*unpack it and those in it"),
    case("in_place=True is not for the format .*folder", CLASSES, in_place=True),
    case("in_place=true with shrink_to", {"a.parquet": HUB}, in_place=True, shrink_to=9),
    case("with .*apply_orient", {"a.parquet": HUB}, in_place=True, apply_orientation=True),
]

PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zlib": zlib.compress}
PACKED = [
    case(rf"{name}' is compressed with {kind}; decompress it", {name: pack(content)}, f"/{name}")
    for name, content in (("a.tar", TAR), ("a.tfrecord", RECORD))
    for kind, pack in PACKERS.items()
]
SHARDS = {f"train-{number:05d}-of-00003.parquet": HUB for number in (0, 2)}
MISSING = [
    case("1 of the 3 shards of .*, the first 00001", SHARDS, source, in_place=in_place)
    for source in ("", "/*.parquet")
    for in_place in (False, True)
]

TWO_LABELS = pa.Table.from_arrays(
    [pa.array(STRUCTS), *[pa.array([0] * 6)] * 2], names=["image", "label", "label"]
)
TWO_IDS = TWO_LABELS.rename_columns(["image", "id", "id"]).append_column("label", [[0] * 6])
LINE = json.dumps({"path": "0.jpg", "label": "x"})
CAPTIONS = "path,label,caption\n0.jpg,a,text\n"
FIELDS = [
    csv("name,label\n", "field for the image"),
    csv("path,kind\n", "field for the label"),
    csv("path,label,label\n", "and has label, label"),
    hub(TWO_LABELS, "and has image, label, label"),
    hub({"image": ["a.jpg"], "label": [1]}, "its image is str, not encoded bytes"),
    hub({"image": [b"x"], "label": [1.5]}, "is double, not integers, text"),
    hub({"image": [b"x"], "label": [[[1]]]}, "is list.*, not integers, text"),
    hub({"image": [b"x"], "caption": ["a cat"]}, "label .* and has caption, image; choose"),
    hub({"image": STRUCTS, "label": [0] * 6}, "no image .* 'captoin'", columns=["captoin"]),
    hub(TWO_IDS, "no image .* field 'id'", columns=["id"]),
    csv(CAPTIONS, "no image .* field 'captoin'", columns=["captoin"]),
    case("no image .* field 'captoin'", {"a.jsonl": LINE, **FILES}, columns=["captoin"]),
    case("no image .* field 'captoin'", {"a.tar": TAR}, columns=["captoin"]),
    csv(CAPTIONS, "all data sets have columns .*image", columns=["image"]),
    csv(CAPTIONS, "has caption twice", columns=["caption", "caption"]),
    case(r"image_pattern='x\{\}' is not for the format", {"a.parquet": HUB}, image_pattern="x{}"),
]
FIELDS += [
    case(rf"convert\.{key}=.* is not for the format .*'folder'", CLASSES, **{key: value})
    for key, value in {
        "columns": ["caption"],
        "label_field": "breed",
        "image_field": "picture",
        "image_pattern": "{}.jpg",
    }.items()
]

CAT_AND_DOG, DOG_AND_CAT = (
    parquet({"image": STRUCTS, "label": [0] * 6}, class_label(names))
    for names in (["cat", "dog"], ["dog", "cat"])
)
MANY = "path,label\n" + "".join(f"{i}.jpg,caption {i}\n" for i in range(1000))
NAMES = [
    named(["cat", "cat\0"], r"a\.parquet' has the class name 'cat\\x00'"),
    named(["cat", " cat"], "has the class name 'cat' twice"),
    named("cd", r"a\.parquet': its class names are not a list of texts: cd"),
    named(["cat", 1], r"not a list of texts: \['cat', 1\]"),
    case(r"convert\.classes has .*'cat'", {"a.tar": TAR}, classes=["cat", " cat"]),
    case("different class names", {"a.parquet": CAT_AND_DOG, "b.parquet": DOG_AND_CAT}),
    case(r"\['2'\] are not indices of the 2 classes", {"a.parquet": HUB}, classes=["a", "b"]),
    csv("path,label\n0.jpg,cat\n1.jpg,cta\n", r"\['cta'\] are not in the classes", classes=["cat"]),
    csv(MANY, r"1,000 different labels, .*check convert\.label_field"),
    case("names or indices .*labels_are=names", {"a.tar": TAR}, classes=["2", "0", "1"]),
]

REFUSED = [*FORMATS, *PACKED, *MISSING, *FIELDS, *NAMES]


@pytest.mark.parametrize(
    ("told", "files", "source", "options"), REFUSED, ids=[told for told, *_ in REFUSED]
)
def test_a_source_that_cannot_be_converted_is_refused(tmp_path, told, files, source, options):
    write_files(tmp_path / "s", files)
    with pytest.raises(ValueError, match=told):
        convert(f"{tmp_path}/s{source}", tmp_path / "set", **options)
    assert not (tmp_path / "set" / "manifest.parquet").exists()
