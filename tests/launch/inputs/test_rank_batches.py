"""The list of a recipe's batches is what its training reads, for any world size, without Ray."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Digits
from tests.data.stream.reading import read_training
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.launch.dataset import open_dataset, training_batches
from vit_ray.launch.resolved_run import resolve_run


@pytest.fixture
def recipe(digits: Digits, tmp_path: Path) -> Recipe:
    return small_recipe("batches", digits, tmp_path, data={"shuffle_window": "auto"}, seed=5)


CROPS: dict[str, Any] = {"flip": False, "min_area": 0.5}


@pytest.mark.usefixtures("ray_cluster")
def test_it_is_what_the_stream_of_a_run_gives(recipe, digits):
    size, (start, stop) = recipe.train.global_batch_size, (5, 9)
    spec = resolve_run(recipe).streams["train"]
    ranks = read_training(spec, 2, size // 2, start * size, stop * size)
    for rank, streamed in enumerate(ranks):
        listed = training_batches(recipe, rank, 2)[start:stop]
        opened = open_dataset(digits.train).iter_batches(
            size, 16, seed=5, rank=rank, world_size=2, start=start * size, epochs=3,
            augment=CROPS,
        )  # fmt: skip
        batches = zip(listed, opened[: stop - start], streamed, strict=True)
        for batch, without_recipe, expected in batches:
            for name in expected:
                np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)
                np.testing.assert_array_equal(without_recipe[name], expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("rank", "world_size", "told"),
    [(2, 2, "give 0 <= rank < world_size"), (0, 5, "use a divisor of 64")],
)
def test_a_world_that_cannot_be_is_refused(recipe, rank, world_size, told):
    with pytest.raises(ValueError, match=told):
        training_batches(recipe, rank, world_size)
