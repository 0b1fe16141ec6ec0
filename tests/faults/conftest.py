"""One undisturbed run, that the disturbed ones are compared with."""

from pathlib import Path

import pytest

from tests.conftest import Digits, Head
from tests.faults.runs import long_recipe
from vit_ray.config import Recipe
from vit_ray.launch.run import train


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def undisturbed(ray_cluster: Head, digits: Digits, folder: Path) -> Recipe:
    recipe = long_recipe("undisturbed", digits, folder)
    assert train(recipe).is_complete
    return recipe
