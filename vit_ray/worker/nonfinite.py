"""A step whose loss or gradient is not finite, or whose norm is an outlier: reported.

The engine has refused such a step, so weights and optimizer are as before it.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config.training_sections import TrainConfig
from vit_ray.outcomes import EventKind
from vit_ray.training.collectives import all_max, all_rows
from vit_ray.training.engine import DeepSpeedEngine
from vit_ray.training.loop import Batch, SkippedStep, as_tensor
from vit_ray.training.objective import normalize
from vit_ray.worker.job import DivergedError
from vit_ray.worker.run_link import RunLink

MOST_IN_A_ROW: Final = 3
"""Refused steps in a row at which a run stops with any setting: the weights no longer train."""
MOST_LISTED: Final = 64
"""Samples, or steps, named in a report."""


def report_refused(train: TrainConfig, link: RunLink, progress: Progress, batch: str) -> None:
    """Report the refused step before `progress.step`.

    Args:
        batch: as `describe_batch` returns.

    Raises:
        DivergedError: the recipe says to stop, or there were too many in a row.
    """
    step = progress.step
    text = f"loss or gradient of step {step - 1} is not finite; the step was not applied. {batch}"
    link.note(EventKind.NOT_FINITE, text, step)
    if train.nonfinite == "stop" or progress.nonfinite_steps >= MOST_IN_A_ROW:
        raise DivergedError(
            f"{text}. train.nonfinite={train.nonfinite} with {progress.nonfinite_steps} such "
            "steps in a row; lower optim.learning_rate (with resume=changed), or set "
            "train.nonfinite to skip"
        )


def report_skipped(
    train: TrainConfig,
    link: RunLink,
    progress: Progress,
    largest: SkippedStep,
    steps: Sequence[int],
    batch: str,
) -> None:
    """Name the steps that `train.skip_above` has skipped since the last report.

    Args:
        largest: the one of them with the largest norm.
        batch: its own, as `describe_batch` returns.
    """
    text = (
        f"steps not applied: {_listed(steps)}; {progress.skipped_steps} since the run began. "
        f"The gradient norm of step {largest.step} is {largest.grad_norm:.3g}, above the limit of "
        f"{largest.norm_limit:.3g} (train.skip_above={train.skip_above:g} x the median). {batch}"
    )
    link.note(EventKind.SKIPPED, text, progress.step)


def describe_batch(engine: DeepSpeedEngine, batch: Batch, micro_batch_size: int) -> str:
    """Samples of the global batch, sizes of activations by layer, and the first layer that is not
    finite; all ranks call it.
    """
    numbers = np.asarray(batch["sample"], np.int64)
    samples = np.unique(all_rows(numbers, engine.device)).tolist()
    pieces = [
        engine.activation_sizes(normalize(piece.to(engine.device), engine.dtype))
        for piece in torch.split(as_tensor(batch["image"]), micro_batch_size)
    ]
    names = list(pieces[0])
    sizes = all_max([max(piece[n] for piece in pieces) for n in names], engine.device)
    activations = dict(zip(names, sizes, strict=True))
    bad = next((name for name, size in activations.items() if not math.isfinite(size)), None)
    largest_layer = max(activations, key=lambda name: activations[name])
    finite = f"finite when the model is evaluated, largest in {largest_layer}"
    where = f"first not finite in {bad}" if bad else finite
    by_layer = ", ".join(f"{name} {size:.3g}" for name, size in activations.items())
    return f"Samples {_listed(samples)}. Activations are {where}; their size by layer: {by_layer}"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MOST_LISTED]))
    return shown if len(numbers) <= MOST_LISTED else f"{shown}, ... ({len(numbers)} in total)"
