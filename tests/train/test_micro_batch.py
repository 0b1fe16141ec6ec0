"""Images per pass: divisors of the share, under a limit that only falls."""

from pathlib import Path

import pytest

from vit_ray.config import Recipe
from vit_ray.config.schema import recipe_from_dict
from vit_ray.storage import locate
from vit_ray.train.micro_batch import (
    lower_limit,
    micro_batch_size,
    read_limit,
)


def recipe(micro: int | str, workers: int | list[int] = 4) -> Recipe:
    train = {"global_batch_size": 96, "micro_batch_size": micro}
    return recipe_from_dict(
        {"name": "a", "train": train, "workers": {"num_workers": workers}}, "test"
    )


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
    assert micro_batch_size(recipe(micro), world, limit) == images


def test_a_number_that_does_not_divide_is_an_error_for_a_fixed_group() -> None:
    with pytest.raises(ValueError, match="nearest valid"):
        micro_batch_size(recipe(5), 4)


def test_a_number_is_the_most_for_an_elastic_group() -> None:
    assert [micro_batch_size(recipe(20, [1, 4]), world) for world in (1, 2, 3, 4)] == [
        16,
        16,
        16,
        12,
    ]


def test_the_limit_falls_and_is_kept_in_the_runs_folder(tmp_path: Path) -> None:
    folder = locate(str(tmp_path / "run"))
    assert read_limit(folder) is None
    assert lower_limit(folder, 24) == 18
    assert read_limit(folder) == 18
    with pytest.raises(ValueError, match="one image per pass does not fit"):
        lower_limit(folder, 1)


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
    images = [micro_batch_size(recipe("auto", world), world)]
    while images[-1] > 1:
        limit = lower_limit(folder, images[-1])
        assert micro_batch_size(recipe("auto", world), world, read_limit(folder)) <= limit
        images.append(micro_batch_size(recipe("auto", world), world, limit))
    assert images == tried
