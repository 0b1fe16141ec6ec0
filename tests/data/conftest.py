"""Small data sets of random images."""

from pathlib import Path

import hypothesis
import pytest

from tests.data.converting import convert, in_this_process, run_in_this_process
from tests.data.pictures import write_class_folders
from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest

# A busy machine may take any time; no test here is about time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a conversion run here, without Ray."""
    run_in_this_process(monkeypatch)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_class_folders(folder, num_classes=3, per_class=100)
    return folder


@pytest.fixture(scope="session")
def dataset(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The 300 images in row groups of 16 and several shards."""
    path = str(tmp_path_factory.mktemp("dataset") / "set")
    with in_this_process():
        convert(str(image_folder), path, rows_per_row_group=16, shard_mib=0.1, seed=3)
    return open_dataset(path)
