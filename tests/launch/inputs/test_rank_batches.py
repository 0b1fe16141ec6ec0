"""The list of a recipe's batches is what its training reads, for any world size, without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from tests.conftest import Digits
from tests.data.stream.reading import read_training
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.launch.inputs.dataset import open_dataset
from vit_ray.launch.inputs.rank_batches import training_batches
from vit_ray.launch.inputs.streams import resolve_run


@pytest.fixture
def recipe(digits: Digits, tmp_path: Path) -> Recipe:
    return small_recipe("batches", digits, tmp_path, data={"shuffle_window": "auto"}, seed=5)


def test_each_world_size_has_the_same_global_batches_and_an_epoch_has_each_image_once(
    recipe: Recipe,
) -> None:
    recipe = recipe.with_changes(optim={"steps": None, "epochs": 2.0, "warmup_steps": 1})
    alone = training_batches(recipe)
    ranks = [training_batches(recipe, rank, 4) for rank in range(4)]
    for step in (0, 7, len(alone) - 1):
        joined = [one[step] for one in ranks]
        for name, column in alone[step].items():
            together = np.concatenate([part[name] for part in joined])
            by_sample = np.argsort(np.concatenate([part["sample"] for part in joined]))
            ordered = np.argsort(alone[step]["sample"])
            np.testing.assert_array_equal(together[by_sample], column[ordered], err_msg=name)
    num_images = resolve_run(recipe).num_images
    seen = np.concatenate([batch["sample"] for batch in alone])
    assert sorted(seen[:num_images].tolist()) == list(range(num_images))


CROPS: dict[str, Any] = {"flip": False, "min_area": 0.5}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("world", "start", "stop"), [(4, 3, 9), (1, 0, 16)])
def test_a_stream_gives_every_world_the_crops_of_a_step(
    recipe: Recipe, world: int, start: int, stop: int
) -> None:
    size, spec = recipe.train.global_batch_size, resolve_run(recipe).streams["train"]
    ranks = read_training(spec, world, size // world, start * size, stop * size)
    for rank, streamed in enumerate(ranks):
        listed = training_batches(recipe, rank, world)[start:stop]
        assert len(streamed) == stop - start
        for batch, expected in zip(streamed, listed, strict=True):
            for name in expected:
                np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)


@pytest.mark.usefixtures("ray_cluster")
def test_it_is_what_the_stream_of_a_run_gives(recipe: Recipe, digits: Digits) -> None:
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


def test_a_loader_of_torch_keeps_the_order_and_resumes(recipe: Recipe) -> None:
    batches = training_batches(recipe, 1, 2)
    loaded = list(DataLoader(batches[3:8], batch_size=None, num_workers=2))
    assert len(loaded) == 5
    for step, batch in enumerate(loaded, 3):
        assert batch["image"].dtype == torch.uint8
        for name, column in batches[step].items():
            np.testing.assert_array_equal(batch[name].numpy(), column, err_msg=name)
    with pytest.raises(IndexError):
        _ = batches[len(batches)]


@pytest.mark.parametrize(
    ("rank", "world_size", "told"),
    [(2, 2, "give 0 <= rank < world_size"), (0, 5, "use a divisor of 64")],
)
def test_a_world_that_cannot_be_is_refused(
    recipe: Recipe, rank: int, world_size: int, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        training_batches(recipe, rank, world_size)


def test_neither_ray_nor_torch_is_imported(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.written()))
    script = (
        "import sys, vit_ray;"
        "batch = vit_ray.training_batches(vit_ray.load_recipe(sys.argv[1]))[0];"
        "print(batch['image'].shape, {'ray', 'torch'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "(64, 16, 16, 3) set()\n", done.stderr
