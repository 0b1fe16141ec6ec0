"""What a worker builds before its first step: micro-batch, model, engine."""

import zlib
from collections.abc import Callable

import torch
from torch import nn

from vit_ray.checkpoints.init_weights import initialize_weights
from vit_ray.measure.devices import peak_flops
from vit_ray.measure.meters import Compute
from vit_ray.outcomes import EventKind
from vit_ray.training.collectives import all_max
from vit_ray.training.memory_estimate import step_macs, tried_micro_batch
from vit_ray.training.objective import build_objective, part_of
from vit_ray.training.steps import CPU_LIMIT, micro_batch_size
from vit_ray.worker.job import (
    SmallerMicroBatchError,
    TrainJob,
    UnrecoverableError,
)
from vit_ray.worker.run_link import RunLink


def choose_micro_batch(job: TrainJob, world_size: int, agree: Callable[[int], int]) -> int:
    """Images per pass: as in the recipe, or at most what fits.

    Args:
        agree: the fewest images over all ranks: ranks with different GPUs must do the same number
            of passes.
    """
    limit = job.micro_batch_limit
    if job.recipe.train.micro_batch_size == "auto" and limit is None:
        limit = CPU_LIMIT
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            limit = tried_micro_batch(job.recipe, job.num_classes, world_size, device)
    return agree(micro_batch_size(job.recipe, world_size, limit))


def smaller_micro_batch(job: TrainJob, failed: int) -> SmallerMicroBatchError:
    """The error that ends this attempt, after which the next one takes half the images.

    Raises:
        UnrecoverableError: the fewest images did not fit.
    """
    least = job.recipe.train.least_pass
    if failed <= least:
        few = "one image per pass does" if least == 1 else "a pair of images per pass does"
        raise UnrecoverableError(
            f"{few} not fit into device memory; use train.zero_stage=3, "
            "train.activation_checkpointing=1 or train.offload=true, or a smaller model",
            is_agreed=False,
        )
    limit = max(least, failed // 2)
    return SmallerMicroBatchError(
        f"{failed} images per pass do not fit; trying at most {limit}", limit
    )


def initial_model(
    job: TrainJob, link: RunLink, device: torch.device, *, loads_weights: bool
) -> nn.Module:
    """The model with its initial weights, whose source becomes an event; all ranks call it.

    Args:
        loads_weights: start from `init_from`; False if a checkpoint is restored afterwards.

    Raises:
        UnrecoverableError: the weights do not fit the model, or do not exist.
        RuntimeError: as `check_same_on_all_ranks`.
    """
    recipe = job.recipe
    torch.manual_seed(recipe.seed)
    try:
        model = build_objective(recipe, job.num_classes)
    except ValueError as error:  # a module of the user's that this host lacks
        raise UnrecoverableError(str(error), is_agreed=False) from None
    if recipe.init_from is None or not loads_weights:
        return model
    try:
        report = initialize_weights(model, recipe.init_from, new_head=job.new_head)
    except ValueError as error:
        raise UnrecoverableError(f"init_from: {error}", is_agreed=False) from None
    is_new = any(part_of(name) == "head" for name in report.new)
    if job.kind == "train" and is_new and "head" in recipe.optim.frozen:
        # A kernel of zeros gives the same logits for every image, and would stay zero.
        raise UnrecoverableError(
            f"optim.frozen has head, but {report.source} has no matching head: the new one of "
            "zeros would never learn; remove head from optim.frozen"
        )
    check_same_on_all_ranks(str(report), device)
    link.note(EventKind.WEIGHTS, str(report), 0)
    return model


def check_same_on_all_ranks(report: str, device: torch.device) -> None:
    """A run that still trains, or a file that is damaged on one host, may give ranks other weights.

    Raises:
        RuntimeError: they differ; the next attempt reads them again.
    """
    digest = float(zlib.crc32(report.encode()))
    greatest, least = all_max([digest, -digest], device)
    if greatest != -least:
        raise RuntimeError(f"the workers have read different weights; this one: {report}")


def work_per_image(job: TrainJob) -> Compute:
    """Multiply-adds of the model, and the peak of this worker's GPU, for rates."""
    recipe, peak = job.recipe, None
    if torch.cuda.is_available():
        peak = peak_flops(torch.cuda.get_device_name(), recipe.train.precision)
    return Compute(step_macs(recipe, job.num_classes), peak)
