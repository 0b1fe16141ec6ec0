"""Small instances of every family, and images for them."""

from typing import Any

import torch
from torch import Tensor, nn

from vit_ray.models import build_model
from vit_ray.models.vit import Attention

TINY_ENCODER = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 4}
TINY_VIT = {**TINY_ENCODER, "patch_size": 8}

# Name, and its size in full: every kind of model that the catalog builds.
FAMILIES: dict[str, dict[str, Any]] = {
    "ViT": TINY_VIT,
    "Axial-ViT": TINY_VIT,
    "R+ViT": {**TINY_ENCODER, "stages": (1, 2), "width_factor": 1},
    "ResNet": {"stages": (1, 2), "width_factor": 1},
    "AxialResNet": {"stages": (1, 2), "width_factor": 1},
}


def small_model(
    family: str, num_classes: int = 5, image_size: int | tuple[int, int] = 32, **options: Any
) -> nn.Module:
    """A seeded model whose every parameter has random values, so that no term is hidden by a 0."""
    torch.manual_seed(0)
    model = build_model(family, num_classes, image_size, **{**FAMILIES[family], **options})
    shake(model)
    return model


def shake(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype), alpha=0.05)


def some_images(batch: int = 2, size: tuple[int, int] = (32, 32)) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(batch, 3, *size, generator=generator) * 2 - 1


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@torch.no_grad()
def attention_weights(model: nn.Module, images: Tensor) -> list[Tensor]:
    weights: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda m, args: weights.append(m.weights(args[0])))
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return weights


def other_model(family: str, **options: Any) -> Any:
    """A fresh model of the same size as `small_model`, with other values."""
    torch.manual_seed(11)
    arguments = {"num_classes": 5, "image_size": 32, **FAMILIES[family], **options}
    return build_model(family, **arguments)
