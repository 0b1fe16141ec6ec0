"""A model on smaller images than it was built for: positions are resampled as for fine-tuning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vit_ray.models import build_model
from vit_ray.models.weights.load_save import Origin, fit_state_dict

SIZE: dict[str, Any] = {"depth": 2, "width": 32, "mlp_dim": 48, "num_heads": 2, "patch_size": 4}


def built(image_size: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_model("ViT", 5, image_size, **SIZE, **options)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"pool": "gap"}, {"registers": 2}, {"pool": "map"},
        {"positions_at": "every_layer"}, {"positions_at": "every_layer_shared"},
    ],
)  # fmt: skip
def test_it_computes_what_the_model_of_that_size_does_with_its_weights(
    options: dict[str, Any], images: Tensor
) -> None:
    whole, small = built(24, **options), built(16, **options)
    whole.let_in_other_sizes()
    fit_state_dict(small, whole.state_dict(), resize="bilinear", origin=Origin((6, 6)))
    torch.testing.assert_close(whole(images), small(images))


def test_the_whole_table_learns_from_small_images(images: Tensor) -> None:
    whole = built(24)
    whole.let_in_other_sizes()
    torch.nn.init.normal_(whole.head.weight)  # of zeros at first
    whole(images).square().sum().backward()
    assert (whole.positions[0].table.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("positions", ["sincos_2d", "rope_2d", "none"])
def test_fixed_positions_and_none_take_other_sizes(positions: str, images: Tensor) -> None:
    whole = built(24, positions=positions)
    whole.let_in_other_sizes()
    assert whole(images).isfinite().all()


def test_other_sizes_are_squares(images: Tensor) -> None:
    whole = built(24)
    whole.let_in_other_sizes()
    with pytest.raises(ValueError, match="built for 6x6"):
        whole(images[..., :8])


def test_a_model_that_was_not_told_refuses_other_sizes(images: Tensor) -> None:
    with pytest.raises(ValueError, match="built for 6x6"):
        built(24)(images)


@pytest.mark.parametrize("positions", ["learned_2d", "relative"])
def test_positions_that_cannot_be_resampled_are_refused(positions: str) -> None:
    with pytest.raises(ValueError, match=f"positions of {positions} are for one image size"):
        built(24, positions=positions).let_in_other_sizes()
