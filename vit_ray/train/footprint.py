"""What a model weighs: parameters, and bytes that its forward pass keeps, without allocating."""

from __future__ import annotations

import torch
from torch import Tensor

from vit_ray.config import Recipe
from vit_ray.measure.memory import MemoryEstimate, StateShape, state_memory
from vit_ray.models import build_model


def count_parameters(recipe: Recipe, num_classes: int) -> int:
    """Trained parameters of the recipe's model."""
    return sum(p.numel() for p in _meta_model(recipe, num_classes).parameters())


def activation_bytes(recipe: Recipe, num_classes: int, batch_size: int) -> int:
    """Bytes kept for the backward pass of one micro-batch, counted on a model without memory.

    What autograd saves is counted once per storage; the model's own weights do not count.
    """
    model = _meta_model(recipe, num_classes)
    if recipe.train.precision == "bf16":
        model = model.to(torch.bfloat16)
    if recipe.train.activation_checkpointing:
        model.set_activation_checkpointing(recipe.train.activation_checkpointing)  # type: ignore[operator]
    size = recipe.model.image_size
    height, width = (size, size) if isinstance(size, int) else size
    dtype = next(model.parameters()).dtype
    images = torch.empty(batch_size, 3, height, width, device="meta", dtype=dtype)
    kept: dict[int, Tensor] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            kept[storage] = tensor  # holding it keeps its address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def estimate_memory(
    recipe: Recipe,
    num_classes: int,
    micro_batch_size: int,
    world_size: int,
    stage: int | None = None,
) -> MemoryEstimate:
    """Memory of one worker for this micro-batch, under the recipe's ZeRO stage or another."""
    shape = StateShape(
        num_parameters=count_parameters(recipe, num_classes),
        stage=recipe.train.zero_stage if stage is None else stage,
        world_size=world_size,
        precision=recipe.train.precision,
        moments=2 if recipe.optim.name == "adamw" else 1,
        has_average=recipe.train.averaging > 0,
        offload=recipe.train.offload,
    )
    return state_memory(shape, activation_bytes(recipe, num_classes, micro_batch_size))


def _meta_model(recipe: Recipe, num_classes: int) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model(
            recipe.model.name, num_classes, recipe.model.image_size, **recipe.model.options()
        )
