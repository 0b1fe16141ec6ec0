"""Pictures of a model's first layer, read back."""

from __future__ import annotations

import io

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.small import small_model
from vit_ray.evaluation.inspection import position_similarity, position_vectors
from vit_ray.evaluation.weight_pictures import FirstLayer


def test_a_tile_shows_the_similarity_of_its_patch_in_matplotlibs_colours() -> None:
    model = small_model("ViT")  # 32 pixels in patches of 8
    torch.nn.init.normal_(model.positions[0].table)
    picture = Image.open(io.BytesIO(FirstLayer.of(model).files()["position_similarity.png"]))
    pixels = np.asarray(picture)[-picture.width :]  # below the title
    scale = picture.width // (4 * 5 - 1)
    vectors = position_vectors(model)
    assert vectors is not None
    similarity = position_similarity(vectors)
    viridis = matplotlib.colormaps["viridis"]
    for row, column, other_row, other_column in ((0, 0, 0, 0), (1, 3, 2, 0), (3, 2, 0, 1)):
        place = [5 * row + other_row, 5 * column + other_column]
        y, x = (scale * one + scale // 2 for one in place)
        expected = viridis((similarity[row, column, other_row, other_column] + 1) / 2)[:3]
        assert (
            np.abs(pixels[y, x] - 255 * np.array(expected)).max() < 16
        )  # between nine of its colours
    between = scale * 4 + scale // 2
    assert (pixels[between] == 255).all()


def test_pictures_are_of_the_weights_that_were_evaluated() -> None:
    """The averaged ones, which leave the model before the pictures are drawn."""
    model = small_model("ViT")
    layer = FirstLayer.of(model)
    before = layer.files()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    assert layer.files() == before
    assert FirstLayer.of(model).files() != before


@pytest.mark.parametrize(("family", "options"), [("ResNet", {}), ("ViT", {"positions": "none"})])
def test_a_model_without_positions_has_its_filters_alone(
    family: str, options: dict[str, str]
) -> None:
    assert FirstLayer.of(small_model(family, **options)).files().keys() == {"filters.png"}
