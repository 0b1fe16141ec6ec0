"""Models as programs of torch.export, for batches of any size."""

from typing import Any

import pytest
import torch
from torch.export import Dim

from tests.models.small import FAMILIES, POSITION_VARIANTS, small_model, some_images

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES if family != "ViT"),
    ("ViT", {"representation": True, "dropout": 0.1, "stochastic_depth": 0.1}),
    ("ViT", {}),
    ("ViT", {"pool": "gap", "positions": "sincos_2d"}),
    *(("ViT", {"positions": kind, "positions_at": where}) for kind, where in POSITION_VARIANTS),
]


@pytest.mark.slow(after=6)
@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_an_exported_model_gives_the_logits_of_any_number_of_images(
    family: str, options: dict[str, Any]
) -> None:
    model = small_model(family, **options).eval()
    batch = ({0: Dim("batch")},)
    program = torch.export.export(model, (some_images(2),), dynamic_shapes=batch).module()
    for count in (1, 2, 5):
        images = some_images(count)
        torch.testing.assert_close(program(images), model(images), rtol=1e-5, atol=1e-5)
