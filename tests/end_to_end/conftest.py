"""One undisturbed training, for tests that compare with it or need some finished run."""

from pathlib import Path

import pytest

from tests.conftest import Digits, Head
from tests.end_to_end.runs import Finished, constant_recipe
from vit_ray.launch.run import train


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end_to_end")


@pytest.fixture(scope="session")
def straight(ray_cluster: Head, digits: Digits, folder: Path) -> Finished:
    """A run of 24 steps without a stop."""
    recipe = constant_recipe("straight", digits, folder)
    return recipe, train(recipe)
