"""Files beside the shards: each flipped bit of each is found."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.data.small_sets import flips
from vit_ray.data.format.schema import CHECKSUMS_FILE
from vit_ray.data.format.sidecars import problems_of_sidecars, write_checksums
from vit_ray.storage import locate

FILES = {"report.json": b'{"num_images": 3}', "rejected.parquet": bytes(range(256))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    write_checksums(locate(str(tmp_path)), FILES)
    return tmp_path


@pytest.mark.parametrize("name", [*FILES, CHECKSUMS_FILE])
def test_every_flipped_bit_beside_the_shards_is_found(folder: Path, name: str) -> None:
    assert problems_of_sidecars(locate(str(folder))) == {}
    for flip in flips(folder / name, bits_per_byte=8):
        assert problems_of_sidecars(locate(str(folder))), flip
    assert problems_of_sidecars(locate(str(folder))) == {}


@pytest.mark.parametrize("size", [0, 70])
def test_a_file_of_checksums_that_is_cut_is_damaged(folder: Path, size: int) -> None:
    file = folder / CHECKSUMS_FILE
    file.write_bytes(file.read_bytes()[:size])
    assert CHECKSUMS_FILE in problems_of_sidecars(locate(str(folder)))


def test_a_file_that_is_gone_is_missing(folder: Path) -> None:
    (folder / "report.json").unlink()
    assert problems_of_sidecars(locate(str(folder))) == {"report.json": "the file is missing"}


def test_data_sets_without_them_have_no_problem(tmp_path: Path) -> None:
    assert problems_of_sidecars(locate(str(tmp_path))) == {}


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum on this machine")
def test_sha256sum_reads_them(folder: Path) -> None:
    command = ["sha256sum", "--strict", "--check", CHECKSUMS_FILE]
    assert subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 0
    (folder / "report.json").write_bytes(b"other")
    assert subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 1
