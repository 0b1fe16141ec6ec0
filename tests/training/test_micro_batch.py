"""Images per pass: divisors of the share, under a limit that only falls."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.storage import locate
from vit_ray.training.memory.micro_batch import (
    LIMIT_FILE,
    known_images,
    limit_key,
    lower_limit,
    micro_batch_size,
    note_images,
    trial_key,
)


def batch_recipe(micro: int | str, workers: int | list[int] = 4) -> Recipe:
    train = {"global_batch_size": 96, "micro_batch_size": micro}
    return recipe_with("a", train=train, workers={"num_workers": workers})


KEY = limit_key(batch_recipe("auto"), 4, "GPU, 80 MiB")


@pytest.mark.parametrize(
    ("micro", "world", "limit", "images"),
    [
        ("auto", 4, None, 24),
        ("auto", 4, 10, 8),
        ("auto", 3, 31, 16),
        (12, 4, None, 12),
        (12, 4, 5, 4),
    ],
)
def test_it_is_the_largest_divisor_of_the_share_within_the_limit(
    micro: int | str, world: int, limit: int | None, images: int
) -> None:
    assert micro_batch_size(batch_recipe(micro), world, limit) == images


def test_a_number_that_does_not_divide_is_an_error_for_a_fixed_group() -> None:
    with pytest.raises(ValueError, match="nearest valid"):
        micro_batch_size(batch_recipe(5), 4)


def test_a_number_is_the_most_for_an_elastic_group() -> None:
    assert [micro_batch_size(batch_recipe(20, [1, 4]), world) for world in (1, 2, 3, 4)] == [
        16,
        16,
        16,
        12,
    ]


def test_the_limit_falls_and_is_kept_in_the_runs_folder(tmp_path: Path) -> None:
    folder = locate(str(tmp_path / "run"))
    assert known_images(folder, "limits", KEY) is None
    assert lower_limit(folder, KEY, 24) == 18
    assert known_images(folder, "limits", KEY) == 18
    with pytest.raises(ValueError, match="one image per pass does not fit"):
        lower_limit(folder, KEY, 1)


@pytest.mark.parametrize(
    ("world", "tried"),
    [
        (1, [96, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]),
        (3, [32, 16, 8, 4, 2, 1]),
        (8, [12, 6, 4, 3, 2, 1]),
    ],
)
def test_what_fails_is_followed_by_the_next_smaller_divisor_of_note(
    tmp_path: Path, world: int, tried: list[int]
) -> None:
    folder = locate(str(tmp_path / "run"))
    images = [micro_batch_size(batch_recipe("auto", world), world)]
    while images[-1] > 1:
        limit = lower_limit(folder, KEY, images[-1])
        assert (
            micro_batch_size(
                batch_recipe("auto", world), world, known_images(folder, "limits", KEY)
            )
            <= limit
        )
        images.append(micro_batch_size(batch_recipe("auto", world), world, limit))
    assert images == tried


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"image_size": 384}},
        {"train": {"precision": "fp32"}},
        {"train": {"zero_stage": 3}},
        {"train": {"activation_checkpointing": 1}},
        {"train": {"offload": True}},
        {"optim": {"name": "sgd"}},
        {"optim": {"frozen": ["embedding"]}},
        {"train": {"mixup": 0.8}},
        {"train": {"cutmix": 1.0}},
    ],
)
def test_a_limit_is_of_what_decides_memory(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = locate(str(tmp_path / "run"))
    lower_limit(folder, KEY, 24)
    other = limit_key(batch_recipe("auto").with_changes(**changes), 4, "GPU, 80 MiB")
    assert known_images(folder, "limits", other) is None
    lower_limit(folder, other, 8)
    assert (known_images(folder, "limits", KEY), known_images(folder, "limits", other)) == (18, 6)


def test_a_limit_is_of_a_world_size_and_a_device_and_of_no_learning_rate() -> None:
    rate = batch_recipe("auto").with_changes(optim={"learning_rate": 0.1, "steps": 9})
    assert limit_key(rate, 4, "GPU, 80 MiB") == KEY
    assert limit_key(rate, 2, "GPU, 80 MiB") != KEY
    assert limit_key(rate, 4, "GPU, 40 MiB") != KEY


def test_a_trial_is_kept_beside_the_limits_and_is_none(tmp_path: Path) -> None:
    folder = locate(str(tmp_path / "run"))
    lower_limit(folder, "other", 8)
    note_images(folder, "trials", trial_key(KEY, 24), 12)
    lower_limit(folder, "another", 16)
    assert known_images(folder, "trials", trial_key(KEY, 24)) == 12
    assert (
        known_images(folder, "trials", trial_key(KEY, 48)) is None
    )  # the next larger divisor of 48 is 16, of 24 it is 24
    assert [known_images(folder, "limits", key) for key in (KEY, "other", "another")] == [
        None,
        6,
        12,
    ]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"images": 4}', '{"limits": [4]}'])
def test_a_file_that_says_nothing_usable_stops_no_start(tmp_path: Path, content: str) -> None:
    folder = locate(str(tmp_path))
    folder.child(LIMIT_FILE).write(content.encode())
    assert known_images(folder, "limits", KEY) is None
    assert lower_limit(folder, KEY, 24) == 18
    assert known_images(folder, "limits", KEY) == 18
