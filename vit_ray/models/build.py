"""Models from their names in the catalog."""

from typing import Any

from torch import nn
from torch.nn import Parameter

from vit_ray.model_aliases import resolved_model
from vit_ray.models.axial import AxialResNet, AxialViT
from vit_ray.models.catalog import ImageSize, as_grid, find_spec
from vit_ray.models.hybrid import ResNetEmbedding
from vit_ray.models.resnet import BitResNet
from vit_ray.models.vit import PatchEmbedding, VisionTransformer


def build_model(
    name: str, num_classes: int, image_size: ImageSize = 224, **options: Any
) -> nn.Module:
    """A model with fresh weights from torch's generator.

    Args:
        name: one of `model_names()`, or timm's or Hugging Face's name of one, whose size in pixels
            is then that of `image_size`.
        num_classes: K, width of the logits.
        image_size: side in pixels, or (height, width).
        **options: the fields of `VitOptions` for ViTs and hybrids (`positions`, `positions_at`,
            `pool`, `representation`, `head_bias`, `dropout`, `stochastic_depth`, `registers`), of
            `AxialVitOptions` or of `ResNetOptions`; and, for a family, its size in full: depth,
            width, mlp_dim, num_heads, patch_size; stages, width_factor.

    Returns:
        A module from float (B, 3, H, W) in [-1, 1] to float32 logits (B, K), with `features`,
        `head` and `set_activation_checkpointing`.

    Raises:
        ValueError: for an unknown name or option, or sizes that do not fit.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} must be at least 1; raise num_classes")
    name, _ = resolved_model(name, image_size)
    spec, sides = find_spec(name, options), as_grid(image_size)
    encoder, resnet = spec.encoder, spec.resnet
    if encoder is None:
        assert resnet is not None
        resnet.grid(sides)  # refuses what is too small
        if spec.is_axial:
            return AxialResNet(resnet, num_classes, sides, spec.options)
        return BitResNet(resnet, num_classes, spec.options)
    embedding = (
        ResNetEmbedding(resnet, encoder.width, sides)
        if resnet
        else PatchEmbedding(spec.patch_size, encoder.width, sides)
    )
    kind = AxialViT if spec.is_axial else VisionTransformer
    return kind(embedding, encoder, num_classes, spec.options)


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
    return decayed, [(name, p) for name, p in trainable if id(p) not in kernels]
