"""What axial models show of their attention, and the images that they refuse."""

import pytest
import torch

from tests.models.small import attention_weights, small_model, some_images


def test_an_axial_vit_shows_the_weights_of_rows_and_of_columns():
    model = small_model("Axial-ViT", image_size=(24, 40)).eval()
    weights = attention_weights(model, some_images(2, (24, 40)))
    assert [tuple(w.shape) for w in weights] == [(2 * 3, 4, 5, 5), (2 * 5, 4, 3, 3)] * 2
    for each in weights:
        torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:-1]))


def test_an_axial_vit_without_positions_refuses_images_of_another_grid():
    model = small_model("Axial-ViT", positions="none")
    with pytest.raises(ValueError, match="grid of 2x8, but the model was built for 4x4"):
        # As many tokens, of other lines.
        model(some_images(2, (16, 64)))
