"""A data set that earlier code converted: every row is read as it was, and verified.

`earlier_set/` is of eight PNG files of random pixels in two class folders, and one broken file. It
has no checksums of footers and none of the files beside the shards.
"""

import hashlib
import shutil
from pathlib import Path

from tests.data.format.test_rot import used_rows
from vit_ray.data.format.manifest import open_dataset
from vit_ray.data.prepare.verify import check_file

FOLDER = Path(__file__).with_name("earlier_set")
FINGERPRINT = "26020594930d629f"  # that its checkpoints and MLflow runs have recorded
ROWS = [  # as the code that wrote it read them: key, label, start of the image's SHA-256
    ("dog/3.png", 1, "554673da0b23a4c0"),
    ("dog/1.png", 1, "099db7f5efa087ba"),
    ("cat/0.png", 0, "1488c667f65671f1"),
    ("dog/2.png", 1, "6e03906f44585f0a"),
    ("cat/2.png", 0, "8588d27b5ffabaed"),
    ("cat/3.png", 0, "c4e200206744a49b"),
    ("cat/1.png", 0, "272cc635ca0a1b60"),
    ("dog/0.png", 1, "331f6faeb129a501"),
]


def test_its_rows_and_its_fingerprint_are_as_they_were() -> None:
    dataset = open_dataset(str(FOLDER))
    assert (dataset.fingerprint, dataset.num_images) == (FINGERPRINT, 8)
    assert list(dataset.classes) == ["cat", "dog"]
    rows, is_refused = used_rows(dataset)
    found = [
        (key, *labels, hashlib.sha256(image).hexdigest()[:16])
        for _, (image, labels, key) in sorted(rows.items())
    ]
    assert (found, is_refused) == (ROWS, False)


def test_it_is_verified() -> None:
    checked = check_file(open_dataset(str(FOLDER)), 0, 1.0)
    assert (checked.images, checked.decoded, checked.problems) == (8, 8, [])


def test_a_changed_image_of_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER, folder)
    file = folder / "part-00000-of-00001.parquet"
    content = bytearray(file.read_bytes())
    content[content.index(b"IDAT") + 8] ^= 1
    file.write_bytes(content)
    rows, is_refused = used_rows(open_dataset(str(folder)))
    assert is_refused
    assert len(rows) < 8
