"""The sizes of crops over a run as arithmetic, and what they are refused for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes import recipe_with
from vit_ray.config.crop_sizes import crop_sizes

TINY: dict[str, Any] = {
    "name": "ViT", "image_size": 32, "depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2,
    "patch_size": 4,
}  # fmt: skip
SIZES = ((0.0, 16), (0.5, 24), (0.75, 32))


def test_shares_of_the_steps_become_first_steps() -> None:
    sizes = crop_sizes(SIZES, 32, 10)
    assert sizes.pieces == ((0, 16), (5, 24), (8, 32))
    assert sizes.lengths(10) == [(16, 5), (24, 3), (32, 2)]
    assert sizes.lengths(7) == [(16, 5), (24, 2)]


def test_a_size_without_a_step_is_left_out() -> None:
    sizes = crop_sizes(((0.0, 16), (0.2, 24), (0.25, 32), (0.9, 24)), 32, 4)
    assert str(sizes) == "16 from step 0, 32 from step 1"
    assert sizes.lengths(4) == [(16, 1), (32, 3)]
    assert sizes == crop_sizes(((0.0, 16), (0.25, 32)), 32, 4)


def test_a_size_that_does_not_change_is_one_piece() -> None:
    assert crop_sizes(((0.0, 16), (0.5, 16), (0.75, 32)), 32, 4).lengths(4) == [(16, 3), (32, 1)]


def test_shares_of_steps_that_were_rounded_to_one_make_a_recipe() -> None:
    sizes = crop_sizes(((0.0, 16), (0.001, 32), (0.5, 24)), 32, 20)
    shares = sizes.shares(40)
    assert shares == [[0.0, 32], [0.25, 24]]
    recipe = recipe_with("r", model=TINY, data={"augment": {"sizes": shares}})
    assert crop_sizes(recipe.data.augment.sizes, 32, 40) == sizes


def test_without_sizes_all_steps_have_the_models() -> None:
    assert crop_sizes((), (32, 48), 10).lengths(4) == [((32, 48), 4)]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([[0.1, 16]], "must begin at 0"),
        ([[0, 16], [0.5, 24], [0.5, 32]], "go up in progress"),
        ([[0, 16], [0.5, 24], [0.2, 32]], "go up in progress"),
        ([[0, 16], [1.0, 32]], "less than 1"),
        ([[0, 0]], "greater than 0"),
    ],
)
def test_sizes_that_make_no_schedule_are_refused(sizes: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        recipe_with("r", data={"augment": {"sizes": sizes}})


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"model": {"name": "ViT-B/16", "image_size": 64}}, "multiple of patches of 16 pixels"),
        ({"model": {**TINY, "image_size": 16}}, "squares of at most model.image_size=16"),
        ({"model": {**TINY, "image_size": (32, 48)}}, "must be squares"),
        ({"model": {**TINY, "positions": "learned_2d"}}, "positions=learned_2d.* rope_2d"),
        ({"model": {**TINY, "name": "Axial-ViT"}}, "model.name=Axial-ViT: its axial attention"),
        ({"model": TINY, "train": {"loss": "masked_patch"}}, "train.loss=masked_patch"),
        ({"model": TINY, "train": {"overfit_one_batch": True}}, "overfit_one_batch"),
    ],
)  # fmt: skip
def test_sizes_that_the_model_cannot_take_are_refused_with_the_recipe(
    sections: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=rf"data\.augment\.sizes=\[\[0.0, 24\]\].*{told}"):
        recipe_with("r", data={"augment": {"sizes": [[0, 24]]}}, **sections)


def test_a_resize_of_one_size_is_refused() -> None:
    augment = {"kind": "resize_crop", "resize": 256, "sizes": [[0, 24]]}
    with pytest.raises(ValueError, match=r"with data\.augment\.resize, which is one size"):
        recipe_with("r", model=TINY, data={"augment": augment})


def test_equal_sides_are_a_square() -> None:
    model = {**TINY, "image_size": (32, 32)}
    assert recipe_with("r", model=model, data={"augment": {"sizes": [[0, 24]]}})
