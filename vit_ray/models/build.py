"""Models from their names in the catalog."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import Parameter

from vit_ray.models.axial import AxialResNet, AxialViT
from vit_ray.models.catalog import (
    HybridVit,
    ImageSize,
    ModelSpec,
    PlainAxialResNet,
    PlainAxialVit,
    PlainResNet,
    PlainVit,
    as_grid,
    checked_options,
    find_spec,
)
from vit_ray.models.hybrid import ResNetEmbedding
from vit_ray.models.resnet import BitResNet
from vit_ray.models.sizes import (
    AxialResNetOptions,
    AxialVitOptions,
    Grid,
    ResNetOptions,
    VitOptions,
)
from vit_ray.models.vit import PatchEmbedding, VisionTransformer


def build_model(
    name: str, num_classes: int, image_size: ImageSize = 224, **options: Any
) -> nn.Module:
    """A model with fresh weights from torch's generator.

    Args:
        name: one of `model_names()`.
        num_classes: K, width of the logits.
        image_size: side in pixels, or (height, width).
        **options: the fields of `VitOptions` for ViTs and hybrids (`positions`, `positions_at`,
            `pool`, `representation`, `head_bias`, `dropout`, `stochastic_depth`, `registers`), of
            `AxialVitOptions`, of `ResNetOptions` or of `AxialResNetOptions`; and, for a family, its
            size in full: depth, width, mlp_dim, num_heads, patch_size; stages, width_factor.

    Returns:
        A module from float (B, 3, H, W) in [-1, 1] to float32 logits (B, K), with `features`,
        `head` and `set_activation_checkpointing`.

    Raises:
        ValueError: for an unknown name or option, or sizes that do not fit.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} must be at least 1; raise num_classes.")
    spec, rest = find_spec(name, options)
    chosen = checked_options(name, spec, rest)
    return _BUILDERS[type(spec)](spec, num_classes, as_grid(image_size), chosen)


def _build_vit(
    spec: PlainVit, num_classes: int, image_size: Grid, options: VitOptions
) -> nn.Module:
    embedding = PatchEmbedding(spec.patch_size, spec.size.width, image_size)
    return VisionTransformer(embedding, spec.size, num_classes, options)


def _build_hybrid(
    spec: HybridVit, num_classes: int, image_size: Grid, options: VitOptions
) -> nn.Module:
    embedding = ResNetEmbedding(spec.backbone, spec.size.width, image_size)
    return VisionTransformer(embedding, spec.size, num_classes, options)


def _build_resnet(
    spec: PlainResNet, num_classes: int, image_size: Grid, options: ResNetOptions
) -> nn.Module:
    spec.size.grid(image_size)  # refuses what is too small
    return BitResNet(spec.size, num_classes, options)


def _build_axial_vit(
    spec: PlainAxialVit, num_classes: int, image_size: Grid, options: AxialVitOptions
) -> nn.Module:
    embedding = PatchEmbedding(spec.patch_size, spec.size.width, image_size)
    return AxialViT(embedding, spec.size, num_classes, options)


def _build_axial_resnet(
    spec: PlainAxialResNet, num_classes: int, image_size: Grid, options: AxialResNetOptions
) -> nn.Module:
    return AxialResNet(spec.size, num_classes, image_size, options)


_BUILDERS: dict[type[ModelSpec], Callable[..., nn.Module]] = {
    PlainVit: _build_vit,
    HybridVit: _build_hybrid,
    PlainResNet: _build_resnet,
    PlainAxialVit: _build_axial_vit,
    PlainAxialResNet: _build_axial_resnet,
}

NamedParameters = list[tuple[str, Parameter]]


def decayed_parameters(model: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """Trainable parameters that weight decay acts on, and those it does not.

    Decay acts on kernels only: the matrices of linear layers and the kernels of convolutions, head
    and patch embedding included; not on biases, norms, class and mask tokens, or positions
    (google-research/big_vision decays tensors named `kernel`).
    """
    kernels = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)
    }
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [(name, p) for name, p in trainable if id(p) in kernels]
    kept = [(name, p) for name, p in trainable if id(p) not in kernels]
    return decayed, kept
