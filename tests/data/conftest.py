"""A private Ray, and small data sets of random images."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.data.pictures import write_class_folders
from vit_ray.data import open_dataset
from vit_ray.data.convert import convert
from vit_ray.data.manifest import Manifest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=512 << 20, log_to_driver=False
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 JPEG files in 3 class folders."""
    folder = tmp_path_factory.mktemp("pictures")
    write_class_folders(folder, num_classes=3, per_class=100)
    return folder


@pytest.fixture(scope="session")
def dataset(
    ray_cluster: None, image_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    """The 300 images in row groups of 16 and several shards."""
    path = str(tmp_path_factory.mktemp("dataset") / "set")
    convert(str(image_folder), path, rows_per_row_group=16, shard_mib=0.1, seed=3)
    return open_dataset(path)
