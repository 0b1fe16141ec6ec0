"""What a step is said to see is what its training gets."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.damage import damage
from tests.data.pictures import jpeg
from tests.data.small_sets import write_encoded
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.crops import crop_of
from vit_ray.data.shard_writer import EncodedImage
from vit_ray.launch.dataset import read_batch, training_batches
from vit_ray.launch.resolved_run import resolve_run


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of photographs of several sizes, in row groups of 8."""
    folder = tmp_path_factory.mktemp("sets")
    for name, count in (("large", 70), ("small", 37)):
        (folder / name).mkdir()
        sizes = [(40 + i % 7, 50 + i % 5) for i in range(count)]
        images = [
            EncodedImage(jpeg(i, *size), (i % 3,), f"{name}/{i}.jpg", *size[::-1])
            for i, size in enumerate(sizes)
        ]
        write_encoded(folder / name, "part-0.parquet", images, ["cat", "dog", "emu"], 8)
    return folder


def recipe_on(sets: Path, **sections: Any) -> Recipe:
    """A tiny ViT on the large set, 20 steps of 16 images: over four epochs."""
    model = {
        "name": "ViT", "image_size": 16, "depth": 1, "width": 8, "mlp_dim": 8, "num_heads": 2,
        "patch_size": 4,
    }  # fmt: skip
    return recipe_with(
        "seen", model=model, data={"train": str(sets / "large"), "shuffle_window": 0},
        train={"global_batch_size": 16, "precision": "fp32"}, optim={"steps": 20},
    ).with_changes(**sections)  # fmt: skip


def test_a_row_tells_the_stored_image_and_its_crop(sets):
    recipe = recipe_on(sets, data={"held_out_fraction": 0.2, "shuffle_window": 32})
    pixels, rows = read_batch(resolve_run(recipe), 7)
    np.testing.assert_array_equal(pixels, training_batches(recipe)[7]["image"])
    spec = resolve_run(recipe).streams["train"]
    stored = pq.ParquetFile(sets / "large" / "part-0.parquet")
    for crop, row in zip(pixels, rows, strict=True):
        content = stored.read_row_group(row["row_group"])["image"][row["row"]].as_py()
        key = (recipe.seed, row["epoch"], row["sample"])
        np.testing.assert_array_equal(crop, crop_of(content, spec.augmentation, key))
        assert content == jpeg(row["sample"], row["height"], row["width"])
        assert row["key"] == f"large/{row['sample']}.jpg"
        assert row["labels"] == [row["sample"] % 3]
        assert 0 <= row["top"] <= row["top"] + row["crop_height"] <= row["height"]


def test_a_bad_row_is_named_where_its_neighbour_stands(sets, tmp_path):
    for file in (sets / "large").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(open_dataset(str(tmp_path)), group=2, rows=[5])
    recipe = recipe_on(sets, data={"train": str(tmp_path), "max_bad_fraction": 0.1})
    batches, bad = training_batches(recipe), 2 * 8 + 5
    step = next(step for step in range(20) if bad in batches.planned(step))
    (place,) = np.flatnonzero(batches.planned(step) == bad).tolist()
    _, rows = read_batch(resolve_run(recipe), step)
    assert [row["place"] for row in rows if row["instead_of"] is not None] == [place]
    assert rows[place]["instead_of"] == bad
    assert rows[place]["sample"] == batches[step]["sample"][place] != bad
