"""Builds models by their names in the catalog, and recomputes blocks in the backward pass."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from vit_ray.models.axial import AxialResNet, AxialViT
from vit_ray.models.catalog import ImageSize, as_grid, find_spec
from vit_ray.models.resnet import BitResNet, ResNetEmbedding
from vit_ray.models.vit import PatchEmbedding, VisionTransformer
from vit_ray.own_parts import is_own, own_part
from vit_ray.paper import resolved_model


def build_model(
    name: str, num_classes: int, image_size: ImageSize = 224, **options: Any
) -> nn.Module:
    """A model with new weights from torch's generator.

    Args:
        name: one of `model_names()`; or timm's or Hugging Face's name of one, with which a size in
            pixels in the name must be `image_size`; or the dotted name of a custom model.
        num_classes: K, width of the logits.
        image_size: side in pixels, or (height, width).
        **options: the fields of `VitOptions` for ViTs and hybrids (`positions`, `positions_at`,
            `pool`, `representation`, `head_bias`, `dropout`, `stochastic_depth`, `activation`,
            `norm_eps`), of `AxialVitOptions` or of `ResNetOptions`; and, for a family, all its size
            keys: depth, width, mlp_dim, num_heads, patch_size; stages, width_factor. A custom model
            defines its options.

    Returns:
        A module from float (B, 3, H, W) in [-1, 1] to float32 logits (B, K), with `features`
        and `head`.

    Raises:
        ValueError: for an unknown name or option, or sizes that do not fit; a custom model does not
            exist, or does not fit `own_parts.PARAMETERS`.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} must be at least 1; raise num_classes")
    name, _ = resolved_model(name, image_size)
    sides = as_grid(image_size)
    if is_own(name):
        return _custom_model(name, num_classes, sides, options)
    spec = find_spec(name, options)
    encoder, resnet = spec.encoder, spec.resnet
    if encoder is None:
        assert resnet is not None
        resnet.grid(sides)  # raises if the image is too small
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


def _custom_model(
    name: str, num_classes: int, sides: tuple[int, int], options: dict[str, Any]
) -> nn.Module:
    model = own_part(name, "model.name", options)(num_classes, sides, **options)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model.name={name} returned a {type(model).__name__}; return a torch.nn.Module"
        )
    parameters = dict(model.named_parameters())
    shapes = [len(parameters[n]) for n in ("head.weight", "head.bias") if n in parameters]
    state = sorted(set(model.state_dict()) - set(parameters))
    problems = {
        f"its layer `head` has {shapes} outputs for weight and bias; give it a linear layer `head` "
        f"of {num_classes} outputs with a bias": shapes != [num_classes, num_classes],
        "it has a submodule `model`, a name that objectives use for what they train; rename it": (
            "model" in dict(model.named_children())
        ),
        f"it has untrained state ({', '.join(state)}), which checkpoints do not hold; use "
        "parameters, buffers with persistent=False, and no batch norm": bool(state),
    }
    for problem, is_present in problems.items():
        if is_present:
            raise ValueError(f"model.name={name}: {problem}")
    return model


_LISTS = (nn.ModuleList, nn.Sequential)


def recompute(model: nn.Module, every: int) -> None:
    """Recompute every n-th block of each chain in the backward pass.

    Dropout drops the same units both times: by keys, otherwise by torch's stored random state.

    Args:
        model: any model; compile it before this, so that blocks are recomputed in compiled code.
        every: n; 0 for no block.
    """
    for chain in chains(model) if every else ():
        for block in chain[every - 1 :: every]:
            block.forward = partial(_run, block.forward)


def chains(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Sequences of blocks: the items of each list of modules of one type that contain layers."""
    for child in model.children():
        items = list(child.children())
        are_alike = isinstance(child, _LISTS) and len({type(item) for item in items}) == 1
        if are_alike and not isinstance(items[0], _LISTS) and any(items[0].children()):
            yield items
        else:
            yield from chains(child)


def _run(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if not is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
