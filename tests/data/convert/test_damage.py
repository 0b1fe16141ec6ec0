"""Damaged sources of every kind: each item is an image or a rejected row, or the error is clear."""

import json
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import samples, tar_of, write_hub_file
from tests.data.converting import convert, units
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert.shards import ConvertReport
from vit_ray.data.convert.sources import rows_of

COUNT = 8
IMAGES = [jpeg(i, 20, 24) for i in range(COUNT)]
LABELS = ["tench, Tinca", "caf\xe9", "cat", "cat", "dog", "1", "01", "x"]


def write_tar(folder: Path) -> Path:
    (folder / "a.tar").write_bytes(tar_of(samples(IMAGES, list(map(str.encode, LABELS)))))
    return folder / "a.tar"


DEEP = "\u00fc" * 60 + "/" + "n" * 90


def write_pax_tar(folder: Path) -> Path:
    """Names of many letters and alphabets, in headers of their own that have no checksum."""
    fields = [json.dumps({"label": label}).encode() for label in LABELS]
    pairs = [(f"{DEEP}/{name}", file) for name, file in samples(IMAGES, fields, "json")]
    (folder / "a.tar").write_bytes(tar_of(pairs, tarfile.PAX_FORMAT))
    return folder / "a.tar"


def write_parquet(folder: Path) -> Path:
    write_hub_file(folder / "a.parquet", list(IMAGES), LABELS)
    return folder / "a.parquet"


def write_csv(folder: Path) -> Path:
    rows = [f'{_image(folder, i)},"{LABELS[i]}"' for i in range(COUNT)]
    (folder / "a.csv").write_text("\n".join(["path,label", *rows]) + "\n", encoding="utf-8")
    return folder / "a.csv"


def write_jsonl(folder: Path) -> Path:
    rows = [json.dumps({"path": _image(folder, i), "label": LABELS[i]}) for i in range(COUNT)]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "a.jsonl"


def write_classes(folder: Path) -> Path:
    """The file to damage is the middle one of three images."""
    (folder / "classes" / "cat").mkdir(parents=True)
    for i in range(3):
        (folder / "classes" / "cat" / f"{i}.jpg").write_bytes(IMAGES[i])
    return folder / "classes" / "cat" / "1.jpg"


def _image(folder: Path, number: int) -> str:
    (folder / f"{number}.jpg").write_bytes(IMAGES[number])
    return f"{number}.jpg"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "tar": write_tar,
    "pax tar": write_pax_tar,
    "parquet": write_parquet,
    "csv": write_csv,
    "jsonl": write_jsonl,
    "classes": write_classes,
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
@pytest.mark.parametrize("kind", WRITERS)
def test_nothing_is_lost_without_a_word(serial, tmp_path, kind, damage):
    """Seeded damage; `FUZZ_ROUNDS` in the environment makes it more."""
    rounds = int(os.environ.get("FUZZ_ROUNDS", "6"))
    for seed in range(rounds):
        folder = tmp_path / str(seed)
        folder.mkdir()
        file = WRITERS[kind](folder)
        file.write_bytes(DAMAGES[damage](file.read_bytes(), random.Random(f"{kind}{damage}{seed}")))
        source = folder / "classes" if kind == "classes" else file
        check_conversion(source, folder, kind)


def check_conversion(source: Path, folder: Path, kind: str) -> None:
    target = folder / "set"
    outcome = outcome_of(source, target)
    if isinstance(outcome, ValueError):
        assert type(outcome) is ValueError, repr(outcome)
        assert "convert" in str(outcome) or source.name in str(outcome), outcome
        return
    rejected = pq.read_table(target / "rejected.parquet").to_pylist()
    assert outcome.num_images + len(rejected) == len(indexed(source, folder))
    assert open_dataset(str(target)).num_images == outcome.num_images
    assert all(row["reason"] for row in rejected)
    is_told = any("damaged" in row["reason"] for row in rejected)
    expected = 3 if kind == "classes" else COUNT
    assert is_told or outcome.num_images + len(rejected) >= expected - lines_joined(source)


def outcome_of(source: Path, target: Path) -> ConvertReport | ValueError:
    try:
        return convert(
            str(source), str(target), rows_per_row_group=4,
            max_rejected_fraction=1.0,
        )  # fmt: skip
    except ValueError as error:
        return error


def indexed(source: Path, folder: Path) -> list[str]:
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
