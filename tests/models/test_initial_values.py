"""Initial values tensor by tensor, against the reference code's distributions."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import FAMILIES
from vit_ray.models import build_model
from vit_ray.models.masked import MaskedPatchObjective

WIDTH, MLP = 192, 768


# ParentRun and name of parameters, and how they start; the first that matches counts.
STARTS: list[tuple[str, Callable[[Tensor], bool]]] = [
    (r"mlp\.(expand|contract)\.bias$", lambda values: has_std(values, 1e-6)),
    (r"bias$|class_token|(head|prediction)\.weight$", lambda values: not values.any()),
    (r"attention\.qkv\.weight$", lambda values: all(map(is_xavier, values.chunk(3)))),
    (r"\.(qk|v|out|expand|contract)\.weight$", lambda values: is_xavier(values)),
    (r"\.(projection|representation|conv\d?|root|shortcut)\.weight$", lambda v: is_lecun(v)),
    (r"(table|rows|columns|class_position|mask\.token)$", lambda v: has_std(v, 0.02)),
    # Units of the hybrids' backbone start as identities, BiT's do not.
    (r"^(R\+ViT|AxialResNet).*\.norm3\.weight$", lambda values: not values.any()),
    (r"norm\d?\.weight$", lambda values: bool((values == 1).all())),
]


def has_std(values: Tensor, std: float) -> bool:
    """Within six deviations of what so many numbers of mean 0 have."""
    return abs(values.square().mean().sqrt().item() / std - 1) < 6 / math.sqrt(2 * values.numel())


def is_xavier(kernel: Tensor) -> bool:
    limit = math.sqrt(6 / sum(kernel.shape))
    return bool(kernel.abs().max() <= limit) and has_std(kernel, limit / math.sqrt(3))


def is_lecun(kernel: Tensor) -> bool:
    std = math.sqrt(1 / kernel[0].numel())
    return bool(kernel.abs().max() <= 2.28 * std) and has_std(kernel, std)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ViT", {"representation": True}),
        ("ViT", {"positions": "learned_2d", "positions_at": "every_layer"}),
        ("ViT", {"positions": "relative"}),
        ("R+ViT", {}),
        ("ResNet", {}),
        ("Axial-ViT", {}),
        ("AxialResNet", {}),
    ],
)
def test_every_tensor_of_every_family_starts_as_its_kind_does(family, options):
    torch.manual_seed(0)
    model = build_model(family, 10, 64, head_bias=-10.0, **FAMILIES[family], **options)
    if family == "ViT":
        model = MaskedPatchObjective(model)
    for name, parameter in model.named_parameters():
        place = f"{family}.{name}"
        start = next(start for pattern, start in STARTS if re.search(pattern, place))
        assert start(parameter.detach()), name


@pytest.mark.parametrize(("family", "eps"), [("R+ViT", 1e-6), ("ResNet", 1e-5)])
def test_group_norms_have_32_groups_and_the_epsilon_of_their_family(family, eps):
    model = build_model(family, 1, 32, **FAMILIES[family])
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {(norm.num_groups, norm.eps) for norm in norms} == {(32, eps)}
