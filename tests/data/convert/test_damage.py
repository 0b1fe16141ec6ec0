"""Seeded damage: each item is an image or a rejected row, or the error is clear.

`FUZZ_ROUNDS` in the environment makes it more.
"""

import json
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import example, parquet, record, samples, tar_of, write_files
from tests.data.converting import config_of, convert, units
from tests.data.made_up import crafted_jpeg
from tests.data.pictures import encoded, jpeg, picture
from vit_ray.data import open_dataset
from vit_ray.data.convert import checks
from vit_ray.data.convert.shards import ConvertReport
from vit_ray.data.convert.sources import rows_of
from vit_ray.data.images import BadImageError, decode
from vit_ray.data.restart_markers import restart_writer

COUNT = 8
IMAGES = [jpeg(i, 20, 24) for i in range(COUNT)]
FILES = {f"{i}.jpg": image for i, image in enumerate(IMAGES)}
LABELS = ["tench, Tinca", "caf\xe9", "cat", "cat", "dog", "1", "01", "x"]


DEEP = "\u00fc" * 60 + "/" + "n" * 90
TEXTS = [label.encode() for label in LABELS]
JSONS = [json.dumps({"label": label}).encode() for label in LABELS]
# Names of many letters and alphabets stand in headers of their own, which have no checksum.
PAX = [(f"{DEEP}/{name}", content) for name, content in samples(IMAGES, JSONS, "json")]
ROWS = [f'{i}.jpg,"{label}"' for i, label in enumerate(LABELS)]
LINES = [json.dumps({"path": f"{i}.jpg", "label": label}) for i, label in enumerate(LABELS)]
RECORDS = [record(example(image=i, label=t)) for i, t in zip(IMAGES, TEXTS, strict=True)]
STRUCTS = [{"bytes": image, "path": f"{i}.jpg"} for i, image in enumerate(IMAGES)]
# The file that is damaged, and what is in it; of classes the middle one of three images.
SOURCES: dict[str, tuple[str, bytes]] = {
    "tar": ("a.tar", tar_of(samples(IMAGES, TEXTS))),
    "pax tar": ("a.tar", tar_of(PAX, tarfile.PAX_FORMAT)),
    "parquet": ("a.parquet", parquet({"image": STRUCTS, "label": LABELS}, rows=5)),
    "tfrecord": ("a.tfrecord", b"".join(RECORDS)),
    "csv": ("a.csv", "\n".join(["path,label", *ROWS, ""]).encode()),
    "jsonl": ("a.jsonl", "\n".join([*LINES, ""]).encode()),
    "classes": ("classes/cat/1.jpg", IMAGES[1]),
}


def flip(content: bytes, choice: random.Random) -> bytes:
    at = choice.randrange(len(content) * 8)
    return content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8]) + content[at // 8 + 1 :]


def cut(content: bytes, choice: random.Random) -> bytes:
    return content[: choice.randrange(len(content))]


def erase(content: bytes, choice: random.Random) -> bytes:
    """A block of zeros, as a disk gives for one that is lost."""
    at, length = choice.randrange(len(content)), choice.choice([1, 16, 512])
    return content[:at] + bytes(len(content[at : at + length])) + content[at + length :]


def splice(content: bytes, choice: random.Random) -> bytes:
    at, other = choice.randrange(len(content)), choice.randrange(len(content))
    length = choice.choice([1, 7, 512])
    return content[:at] + content[other : other + length] + content[at:]


DAMAGES = {"flip": flip, "cut": cut, "erase": erase, "splice": splice}


@pytest.mark.slow(after=6)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", SOURCES)
def test_nothing_is_lost_without_a_word(serial, tmp_path, kind, damage):
    name, content = SOURCES[kind]
    others = {f"classes/cat/{i}.jpg": IMAGES[i] for i in range(3)} if kind == "classes" else FILES
    for seed in range(int(os.environ.get("FUZZ_ROUNDS", "6"))):
        damaged = DAMAGES[damage](content, random.Random(f"{kind}{damage}{seed}"))
        folder = write_files(tmp_path / str(seed), others | {name: damaged})
        check_conversion(folder / name.partition("/")[0], folder, kind)


def outcome_of(source: Path, target: Path) -> ConvertReport | ValueError:
    try:
        return convert(source, target, rows_per_row_group=4, max_rejected_fraction=1.0)
    except ValueError as error:
        return error


def check_conversion(source: Path, folder: Path, kind: str) -> None:
    target = folder / "set"
    report = outcome_of(source, target)
    if isinstance(report, ValueError):
        assert type(report) is ValueError, repr(report)
        assert "convert" in str(report) or source.name in str(report), report
        return
    rejected = pq.read_table(target / "rejected.parquet").to_pylist()
    assert report.num_images + len(rejected) == len(indexed(source))
    assert open_dataset(str(target)).num_images == report.num_images
    assert all(row["reason"] for row in rejected)
    is_told = any("damaged" in row["reason"] for row in rejected)
    expected = 3 if kind == "classes" else COUNT
    assert is_told or report.num_images + len(rejected) >= expected - lines_joined(source)


def indexed(source: Path) -> list[str]:
    """Every item of the source, and one for damage that hides how many there are."""
    keys = []
    for unit in units(str(source)):
        try:
            for entry in rows_of(unit):
                keys.append(entry.key)  # those before the damage count
        except ValueError:
            keys.append(unit.name)
    return keys


def lines_joined(source: Path) -> int:
    """Lines that a list lacks, its ends of lines being all that tells one row from another."""
    if source.suffix not in (".csv", ".jsonl"):
        return 0
    lines = [line for line in source.read_bytes().split(b"\n") if line.strip(b"\r \t")]
    return COUNT + (source.suffix == ".csv") - len(lines)


NUM_JPEGS = int(os.environ.get("FUZZ_ROUNDS", "250"))


def mutated_jpeg(seed: int) -> bytes:
    """A made-up file, or Pillow's, as it is or with damage; half of the damage leaves its end."""
    choice = random.Random(seed)
    pixels = picture(seed, choice.randint(1, 70), choice.randint(1, 90))
    image = choice.choice([
        lambda: crafted_jpeg(seed),
        lambda: encoded(pixels, quality=choice.randint(5, 100), progressive=choice.random() < 0.5),
        lambda: encoded(pixels[..., 0], restart_marker_blocks=choice.choice([0, 2])),
    ])()  # fmt: skip
    for _ in range(choice.choice([0, 1, 1, 2])):
        if len(image) < 4:
            break
        kept = choice.choice([0, 2])
        damaged = DAMAGES[choice.choice(list(DAMAGES))](image[: len(image) - kept], choice)
        image = damaged + image[len(image) - kept :]
    return image


def test_what_is_accepted_without_being_decoded_decodes_to_its_size(monkeypatch):
    """JPEG files that libjpeg alone has checked are those that the decoder of training takes."""
    libjpeg, config = restart_writer(), config_of("a", "b", index_jpeg=False, damaged="keep")
    decoded: list[bytes] = []

    def noted(image: bytes) -> Any:
        decoded.append(image)
        return decode(image)

    monkeypatch.setattr(checks, "decode", noted)
    undecoded = rejected = 0
    for seed in range(NUM_JPEGS):
        image = mutated_jpeg(seed)
        decoded.clear()
        try:
            row = checks.checked(image, "key", (0,), config, libjpeg)
            found = row.height, row.width
        except ValueError as error:
            if not isinstance(error, BadImageError):
                continue  # for its number of pixels or of scans
            found = None
        try:
            expected = decode(image).shape[:2]
        except BadImageError:
            expected = None
        assert found == expected, seed
        undecoded += found is not None and not decoded
        rejected += found is None
    assert undecoded > NUM_JPEGS / 4
    assert rejected > NUM_JPEGS / 10
