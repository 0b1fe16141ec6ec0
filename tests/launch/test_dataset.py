"""A data set in Python: its rows are those that were written, its batches those of a run."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.data.damage import damage
from tests.data.pictures import encoded, jpeg, picture
from tests.data.small_sets import CLASSES, SHARD, write_encoded
from tests.data.stream.reading import read_training
from tests.recipes import recipe_with, small_recipe
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.crops import crop_of
from vit_ray.data.shard_writer import EncodedImage
from vit_ray.launch import dataset
from vit_ray.launch.resolved_run import resolve_run

COUNT = 10
MANY, BATCH = 52, 8


def write(folder: Path, rows: list[tuple[bytes, list[int], str]]) -> None:
    images = [EncodedImage(image, tuple(labels), key, 8, 8) for image, labels, key in rows]
    write_encoded(folder, SHARD, images, CLASSES, rows=4)


def test_numbers_and_slices_give_the_rows_as_they_were_written(tmp_path):
    labels = [[number % 3] for number in range(COUNT)]
    labels[4], labels[5] = [0, 2], []
    rows = [(jpeg(number), labels[number], f"<key {number}>") for number in range(COUNT)]
    write(tmp_path, rows)
    found = dataset.open_dataset(str(tmp_path))
    assert len(found) == COUNT
    assert [(list(one.labels), one.key) for one in found] == [row[1:] for row in rows]
    for number in (3, -1):
        expected = np.asarray(Image.open(io.BytesIO(rows[number][0])))
        assert np.array_equal(np.asarray(found[number].image), expected)
    assert [one.key for one in found[-2:1:-3]] == [row[2] for row in rows[-2:1:-3]]
    with pytest.raises(IndexError):
        found[COUNT]
    # Rows that a set leaves out, as deduplication and a nested part do, have no number.
    left_out: dict[str, Any] = {"rows": np.array([2, 4, 2]), "dropped": {0: np.array([0, 2])}}
    part = dataset.Dataset(replace(found.manifest, **left_out))
    assert [one.key for one in part] == [f"<key {number}>" for number in (1, 3, 4, 5, 6, 7, 8, 9)]


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


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """52 images of 8 x 8 pixels, which PNG keeps as they are."""
    write(tmp_path, [(encoded(picture(i, 8, 8), "PNG"), [i % 3], f"{i}") for i in range(MANY)])
    return tmp_path


def assert_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, column in other.items():
            np.testing.assert_array_equal(np.asarray(one[name]), column, err_msg=name)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_loader_of_torch_gives_the_batches_in_order_and_resumes(many, num_workers):
    opened = dataset.open_dataset(str(many))
    batches = list(opened.iter_batches(BATCH, 8, epochs=3))
    assert len(batches) == round(3 * MANY / BATCH)
    assert len({batch["image"].tobytes() for batch in batches}) == len(batches)
    for step in (0, 5, len(batches) - 1):  # the middle of an epoch, and the last batch
        stream = opened.torch_dataset(BATCH, 8, epochs=3, start=step * BATCH)
        loaded = list(DataLoader(stream, batch_size=None, num_workers=num_workers))
        assert loaded[0]["image"].dtype == torch.uint8
        assert_equal(loaded, batches[step:])
    stream = opened.torch_dataset(BATCH, 8, epochs=3, start=len(batches) * BATCH)
    assert not list(DataLoader(stream, batch_size=None, num_workers=num_workers))


def test_an_evaluation_of_a_held_out_part_has_the_images_that_no_training_batch_has(many):
    opened = dataset.open_dataset(str(many))
    options: dict[str, Any] = {"held_out_fraction": 0.25, "seed": 5}

    def seen(**more: Any) -> list[int]:
        batches = opened.iter_batches(BATCH, 8, **options, **more)
        samples = np.concatenate([batch["sample"] for batch in batches])
        return samples[samples >= 0].tolist()

    trained, held_out = seen(epochs=3), seen(training=False)
    assert len(held_out) == MANY // 4
    assert sorted([*{*trained}, *held_out]) == list(range(MANY))
    data = {"train": str(many), "held_out_fraction": 0.25}
    recipe = recipe_with(seed=5, data=data, train={"global_batch_size": BATCH}, optim={"steps": 1})
    stream = resolve_run(recipe).streams["eval"]
    assert held_out == [
        sample
        for group in np.flatnonzero(stream.manifest.rows).tolist()
        for sample in stream.manifest.samples_of(group).tolist()
    ]


def test_too_many_bad_images_stop_a_loader_as_they_stop_a_run(tmp_path):
    images = [b"no image" if number == 3 else jpeg(0, 8, 8) for number in range(8)]
    write(tmp_path, [(image, [0], f"{number}") for number, image in enumerate(images)])
    data = dataset.open_dataset(str(tmp_path))
    options: dict[str, Any] = {"epochs": 2, "shuffle_window": 0}
    stream = data.torch_dataset(4, 8, max_bad_fraction=0.125, **options)
    assert len(list(DataLoader(stream, batch_size=None, num_workers=0))) == 4
    for training in (True, False):
        stream = data.torch_dataset(4, 8, max_bad_fraction=0.12, training=training, **options)
        with pytest.raises(ValueError, match=r"1 of 8 images cannot be decoded, above data"):
            list(DataLoader(stream, batch_size=None, num_workers=0))


@pytest.mark.parametrize(("options", "told"), [
    ({"agment": {}}, r"unknown key data.agment; did you mean data.augment"),
    ({"start": 3}, r"start=3; .* a multiple of global_batch_size"),
    ({"train": "other"}, "train is this data set"),
    ({"eval": "other"}, "eval is this data set"),
    ({"world_size": 3}, r"a divisor of train.global_batch_size=8"),
])  # fmt: skip
def test_what_cannot_work_is_refused(many, options, told):
    opened = dataset.open_dataset(str(many))
    with pytest.raises(ValueError, match=told):
        opened.torch_dataset(BATCH, 8, **options)
    marked = dataset.Dataset(replace(opened.manifest, origin={"evaluation_only": True}))
    with pytest.raises(ValueError, match="is for evaluation only"):
        marked.iter_batches(BATCH, 8)
    assert len(marked.iter_batches(BATCH, 8, training=False)) == 7


@pytest.mark.usefixtures("ray_cluster")
def test_the_list_of_a_recipes_batches_is_what_the_stream_of_its_run_gives(digits, tmp_path):
    recipe = small_recipe("batches", digits, tmp_path, data={"shuffle_window": "auto"}, seed=5)
    size, (start, stop) = recipe.train.global_batch_size, (5, 9)
    spec = resolve_run(recipe).streams["train"]
    crops: dict[str, Any] = {"flip": False, "min_area": 0.5}
    ranks = read_training(spec, 2, size // 2, start * size, stop * size)
    for rank, streamed in enumerate(ranks):
        listed = dataset.training_batches(recipe, rank, 2)[start:stop]
        opened = dataset.open_dataset(digits.train).iter_batches(
            size, 16, seed=5, rank=rank, world_size=2, start=start * size, epochs=3, augment=crops
        )
        for batch, opened_batch, expected in zip(
            listed, opened[: stop - start], streamed, strict=True
        ):
            for name in expected:
                np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)
                np.testing.assert_array_equal(opened_batch[name], expected[name], err_msg=name)
    with pytest.raises(ValueError, match="give 0 <= rank < world_size"):
        dataset.training_batches(recipe, 2, 2)


def test_a_row_tells_the_stored_image_and_its_crop(sets):
    recipe = recipe_on(sets, data={"held_out_fraction": 0.2, "shuffle_window": 32})
    pixels, rows = dataset.read_batch(resolve_run(recipe), 7)
    np.testing.assert_array_equal(pixels, dataset.training_batches(recipe)[7]["image"])
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
    batches, bad = dataset.training_batches(recipe), 2 * 8 + 5
    step = next(step for step in range(20) if bad in batches.planned(step))
    (place,) = np.flatnonzero(batches.planned(step) == bad).tolist()
    _, rows = dataset.read_batch(resolve_run(recipe), step)
    assert [row["place"] for row in rows if row["instead_of"] is not None] == [place]
    assert rows[place]["instead_of"] == bad
    assert rows[place]["sample"] == batches[step]["sample"][place] != bad
