"""Parameters, activations and memory of a recipe's training, without allocating them."""

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from vit_ray.config import Recipe
from vit_ray.measure.memory import MemoryEstimate, StateShape, gpu_kernels, peak_bytes, state_memory
from vit_ray.models.build import recompute
from vit_ray.models.flops import count_exaflops, count_macs, forward_macs
from vit_ray.own_parts import is_own
from vit_ray.training.objective import build_objective, make_loss
from vit_ray.training.optimizers import bytes_per_element

META: Final = torch.device("meta")


def count_parameters(recipe: Recipe, num_classes: int) -> int:
    """Trained parameters of the recipe's model."""
    trained, _ = _parameter_sizes(recipe, num_classes)
    return sum(trained)


@functools.lru_cache(maxsize=256)
def _parameter_sizes(recipe: Recipe, num_classes: int) -> tuple[list[int], list[int]]:
    """Elements of each trained parameter, and of each frozen one."""
    with META:
        parameters = list(build_objective(recipe, num_classes).parameters())
    return (
        [p.numel() for p in parameters if p.requires_grad],
        [p.numel() for p in parameters if not p.requires_grad],
    )


def run_exaflops(recipe: Recipe, num_classes: int, images_seen: float) -> float:
    """10^18 operations of training by the paper's count."""
    model = recipe.model
    macs = forward_macs(model.name, num_classes, model.image_size, **model.options())
    return count_exaflops(macs, images_seen)


@functools.lru_cache(maxsize=256)
def step_macs(recipe: Recipe, num_classes: int) -> int:
    """Multiply-adds that a step needs for one image: forward and backward pass, for MFU.

    What is recomputed does not count. Frozen parts need no gradients, and the layers below them
    none at all.
    """
    recipe = recipe.with_changes(train={"activation_checkpointing": 0})
    model, batch_size = prepared_model(recipe, num_classes), recipe.train.least_pass
    forward = forward_pass(model, recipe, batch_size)
    macs = count_macs(lambda: forward().backward())  # type: ignore[no-untyped-call]
    return macs // batch_size


@functools.lru_cache(maxsize=256)
def activation_bytes(recipe: Recipe, num_classes: int, batch_size: int) -> int:
    """Bytes of one micro-batch that are alive at the worst moment of forward and backward pass.

    Attention is a fused kernel, which keeps queries, keys, values, output and one fp32 number per
    head and token, and no N x N matrix. A recomputed block keeps its input. The loss is included.
    """
    model = prepared_model(recipe, num_classes)
    with gpu_kernels():
        return peak_bytes(forward_pass(model, recipe, batch_size), list(model.parameters()))


def state_shape(
    recipe: Recipe, num_classes: int, world_size: int, stage: int | None = None
) -> StateShape:
    """The sizes behind the memory of the training state, under some ZeRO stage."""
    stage = recipe.train.zero_stage if stage is None else stage
    trained, frozen = _parameter_sizes(recipe, num_classes)
    height, width = recipe.model.sides
    return StateShape(
        num_parameters=sum(trained),
        num_frozen=sum(frozen),
        largest_parameter=max(trained, default=0),
        stage=stage,
        world_size=world_size,
        precision=recipe.train.precision,
        moment_bytes=bytes_per_element(recipe.optim),
        has_average=recipe.train.averaging > 0,
        offload=recipe.train.offload and stage > 0,
        batch_bytes=recipe.train.global_batch_size // world_size * height * width * 3,
    )


def estimate_memory(
    recipe: Recipe,
    num_classes: int,
    micro_batch_size: int,
    world_size: int,
    stage: int | None = None,
) -> MemoryEstimate:
    """Memory of one worker for this micro-batch, under the recipe's ZeRO stage or another."""
    shape = state_shape(recipe, num_classes, world_size, stage)
    return state_memory(shape, activation_bytes(recipe, num_classes, micro_batch_size))


def forward_pass(
    model: nn.Module,
    recipe: Recipe,
    batch_size: int,
    device: torch.device = META,
) -> Callable[[], Tensor]:
    """The loss of one micro-batch, from uint8 images on, as the engine computes it."""
    height, width = recipe.model.sides
    if device == META and is_own(recipe.train.loss):  # the user's may need values
        recipe = recipe.with_changes(train={"loss": "softmax"})
    loss = make_loss(recipe)

    def forward() -> Tensor:
        with device:
            images = torch.zeros((batch_size, height, width, 3), dtype=torch.uint8)
            numbers = torch.zeros(batch_size, dtype=torch.int64)
        return loss(model, images, numbers[:, None], numbers, 0)

    return forward


def prepared_model(recipe: Recipe, num_classes: int, device: torch.device = META) -> nn.Module:
    """In the recipe's precision, with its recomputation."""
    with device:
        model = build_objective(recipe, num_classes)
    if recipe.train.precision == "bf16":
        model = model.to(torch.bfloat16)
    recompute(model, recipe.train.activation_checkpointing)
    return model
