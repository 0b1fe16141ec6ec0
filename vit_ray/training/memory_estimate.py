"""Parameters, operations and memory of a recipe's training, and the largest batch that fits.

Estimates allocate nothing. The only trial on the device runs before the training starts, on each
rank separately, with only the model and no collective operation, so that a rank that runs out of
memory does not block the other ranks. The memory of ZeRO's state and of the batches is added by
arithmetic.
"""

import bisect
import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from vit_ray.config import Recipe
from vit_ray.measure.devices import peak_flops
from vit_ray.measure.memory import (
    GIB,
    MemoryEstimate,
    StateShape,
    drop_gradients,
    gpu_kernels,
    peak_bytes,
    state_memory,
)
from vit_ray.measure.meters import Compute, unless_out_of_memory
from vit_ray.models.build import recompute
from vit_ray.models.flops import count_exaflops, count_macs, forward_macs
from vit_ray.own_parts import is_own
from vit_ray.training.objective import build_objective, make_loss
from vit_ray.training.optimizers import STEP_COUNT, state_types
from vit_ray.training.steps import micro_batch_size, pass_sizes

META: Final = torch.device("meta")
# Reserved for the CUDA context, NCCL's buffers and fragmentation: an assumption, not measured.
RESERVED_FRACTION: Final = 0.05
# Images per pass on a CPU; larger passes are no faster there and only take memory.
_CPU_LIMIT: Final = 64


def count_parameters(recipe: Recipe, num_classes: int) -> int:
    """Trained parameters of the recipe's model."""
    return sum(_parameter_sizes(recipe, num_classes)[0])


@functools.lru_cache(maxsize=256)
def _parameter_sizes(recipe: Recipe, num_classes: int) -> tuple[list[int], list[int]]:
    """Elements of each trained parameter, and of each frozen parameter."""
    with META:
        parameters = list(build_objective(recipe, num_classes).parameters())
    return (
        [p.numel() for p in parameters if p.requires_grad],
        [p.numel() for p in parameters if not p.requires_grad],
    )


def run_exaflops(recipe: Recipe, num_classes: int, images_seen: float) -> float:
    """Operations of training by the paper's count, in units of 10^18."""
    model = recipe.model
    macs = forward_macs(model.name, num_classes, model.image_size, **model.options())
    return count_exaflops(macs, images_seen)


@functools.lru_cache(maxsize=256)
def step_macs(recipe: Recipe, num_classes: int) -> int:
    """Multiply-adds that a step needs for one image: forward and backward pass, for MFU.

    Recomputed operations do not count. Frozen parts need no gradients of weights, and layers before
    the first trained part no backward pass.
    """
    recipe = recipe.with_changes(train={"activation_checkpointing": 0})
    model, batch_size = prepared_model(recipe, num_classes), recipe.train.pass_multiple
    forward = forward_pass(model, recipe, batch_size)
    macs = count_macs(lambda: forward().backward())  # type: ignore[no-untyped-call]
    return macs // batch_size


def compute_per_image(recipe: Recipe, num_classes: int) -> Compute:
    """Work of a step for one image, and the peak of this process's GPU, if it has one."""
    peak = None
    if torch.cuda.is_available():
        peak = peak_flops(torch.cuda.get_device_name(), recipe.train.precision)
    return Compute(step_macs(recipe, num_classes), peak)


@functools.lru_cache(maxsize=256)
def activation_bytes(recipe: Recipe, num_classes: int, batch_size: int) -> int:
    """Bytes of one micro-batch that are alive at the worst moment of forward and backward pass.

    Attention is a fused kernel, which saves queries, keys, values, output and one fp32 number per
    head and token, and no N x N matrix. A recomputed block saves its input. The loss is included.
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
    by_element = [kind for key, kind in state_types(recipe.optim).items() if key != STEP_COUNT]
    return StateShape(
        num_parameters=sum(trained),
        num_frozen=sum(frozen),
        largest_parameter=max(trained, default=0),
        stage=stage,
        world_size=world_size,
        precision=recipe.train.precision,
        moment_bytes=sum(kind.itemsize for kind in by_element),
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
    if device == META and is_own(recipe.train.loss):  # a custom loss may need values
        recipe = recipe.with_changes(train={"loss": "softmax"})
    loss = make_loss(recipe)

    def forward() -> Tensor:
        with device:
            images = torch.zeros((batch_size, height, width, 3), dtype=torch.uint8)
            numbers = torch.zeros(batch_size, dtype=torch.int64)
        return loss(model, images, numbers[:, None], numbers, 0)

    return forward


def prepared_model(recipe: Recipe, num_classes: int, device: torch.device = META) -> nn.Module:
    """The recipe's model in the recipe's precision, with recomputation as in the recipe."""
    with device:
        model = build_objective(recipe, num_classes)
    if recipe.train.precision == "bf16":
        model = model.to(torch.bfloat16)
    recompute(model, recipe.train.activation_checkpointing)
    return model


def largest_micro_batch(
    recipe: Recipe, num_classes: int, world_size: int, memory_gib: float, stage: int | None = None
) -> int | None:
    """The largest divisor of a worker's share of the global batch whose estimate fits.

    Args:
        memory_gib: of the device; 5 % of it are reserved.
        stage: ZeRO stage; None = the recipe's.

    Returns:
        Images per pass, or None if not even the smallest size fits.

    Raises:
        ValueError: as `pass_sizes`.
    """
    sizes = pass_sizes(recipe, world_size)
    fitting = bisect.bisect_right(
        sizes,
        memory_gib * (1 - RESERVED_FRACTION),
        key=lambda size: estimate_memory(recipe, num_classes, size, world_size, stage).total,
    )
    return sizes[fitting - 1] if fitting else None


def chosen_micro_batch(
    recipe: Recipe, num_classes: int, world_size: int, limit: int | None = None
) -> int:
    """Images per pass on this worker: as in the recipe, or at most what fits.

    Args:
        limit: the largest size to take; None = for `auto`, try what fits on this process's GPU.
    """
    if recipe.train.micro_batch_size == "auto" and limit is None:
        limit = _CPU_LIMIT
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            limit = tried_micro_batch(recipe, num_classes, world_size, device)
    return micro_batch_size(recipe, world_size, limit)


def tried_micro_batch(
    recipe: Recipe, num_classes: int, world_size: int, device: torch.device
) -> int:
    """Images per pass: the estimate for this GPU, halved until a trial of it fits.

    The smallest size is not tried: if it does not fit, the first pass of the training reports that.

    Raises:
        ValueError: as `pass_sizes`.
    """
    free_gib, total_gib = (size_bytes / GIB for size_bytes in torch.cuda.mem_get_info(device))
    sizes = pass_sizes(recipe, world_size)
    size = largest_micro_batch(recipe, num_classes, world_size, total_gib) or sizes[0]
    shape = state_shape(recipe, num_classes, world_size)
    while size > sizes[0]:
        peak = pass_bytes(recipe, num_classes, size, device)
        max_gib = free_gib * (1 - RESERVED_FRACTION)
        if peak is not None and state_memory(shape, peak).total <= max_gib:
            break
        size = max(half for half in sizes if half <= max(size // 2, sizes[0]))
    return size


def pass_bytes(
    recipe: Recipe, num_classes: int, batch_size: int, device: torch.device
) -> int | None:
    """Peak bytes of a forward and backward pass, without weights and gradients.

    The pass is eager; that a compiled pass takes no more is assumed, not measured. On a CPU, which
    has no such count, 0.

    Returns:
        None if the pass ran out of memory.
    """

    def measured() -> int:
        model = prepared_model(recipe, num_classes, device)
        drop_gradients(model.parameters())  # `state_memory` counts them
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if is_gpu else 0
        forward = forward_pass(model, recipe, batch_size, device)
        forward().backward()  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated(device) - before if is_gpu else 0

    return unless_out_of_memory(measured, device)
