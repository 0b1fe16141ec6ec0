"""A step whose loss or gradient is not finite: reported, then stopped at, skipped or rolled back.

The engine has refused such a step, so weights and optimizer are as before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from vit_ray.checkpoints.checkpoint import Checkpoint, Progress
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config.training_sections import TrainConfig
from vit_ray.outcomes import EventKind
from vit_ray.storage import Location
from vit_ray.train.collectives import all_max, all_rows, all_sum, read_by_first
from vit_ray.train.loop import Batch, as_tensor
from vit_ray.train.objective import normalize
from vit_ray.worker.job import DivergedError, UnrecoverableError
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.saving import CheckpointSaver, open_chosen_checkpoint
from vit_ray.worker.watchdog import Watchdog

MOST_IN_A_ROW: Final = 3
"""Refused steps at which a run stops whatever the recipe says: the weights no longer train."""


class MeasuresLayers(Protocol):
    """What the report needs of an engine; all ranks call these."""

    device: torch.device
    dtype: torch.dtype

    def activation_sizes(self, images: Tensor) -> dict[str, float]: ...
    def weight_norms(self) -> dict[str, float]: ...


class RestoresState(Protocol):
    """What rolling back needs of an engine."""

    device: torch.device

    def restore(self, checkpoint: Checkpoint) -> None: ...


class NonfinitePolicy:
    """What `train.nonfinite` says."""

    def __init__(
        self,
        train: TrainConfig,
        link: RunLink,
        describe: Callable[[Batch], str],
        roll_back: Callable[[], int],
    ) -> None:
        """
        Args:
            describe: names the batch's samples and where it stops being finite; all ranks call it.
            roll_back: restores the newest checkpoint and returns its step; all ranks call it.
        """
        self._train, self._link = train, link
        self._describe, self._roll_back = describe, roll_back

    def handle(self, progress: Progress, batch: Batch) -> None:
        """Report the refused step before `progress.step`; then return, or roll back.

        Raises:
            DivergedError: the recipe says to stop, or there were too many in a row.
        """
        train, step = self._train, progress.step
        text = (
            f"loss or gradient of step {step - 1} is not finite; the step was not applied. "
            f"{self._describe(batch)}"
        )
        self._link.note(EventKind.NOT_FINITE, text, step)
        if train.nonfinite == "stop" or progress.nonfinite_steps >= MOST_IN_A_ROW:
            raise DivergedError(
                f"{text}. train.nonfinite={train.nonfinite} with {progress.nonfinite_steps} such "
                "steps in a row; lower optim.learning_rate (with resume=changed), or set "
                "train.nonfinite to skip or rollback"
            )
        if train.nonfinite == "rollback":
            restored = self._roll_back()
            text = f"weights of step {restored}, the data continue at step {step}"
            self._link.note(EventKind.ROLLED_BACK, text, step)


def describe_batch(engine: MeasuresLayers, batch: Batch, micro_batch_size: int) -> str:
    """Samples of the global batch, and sizes by layer of activations and weights."""
    samples = np.sort(all_rows(np.asarray(batch["sample"], np.int64), engine.device))
    return f"Samples {_abridged(samples.tolist())}. {_layers_of(engine, batch, micro_batch_size)}"


def roll_back(
    engine: RestoresState, run_folder: Location, saver: CheckpointSaver, watchdog: Watchdog
) -> int:
    """Restore weights and optimizer of the newest checkpoint; the data order continues where it is.

    Returns:
        The checkpoint's step.

    Raises:
        UnrecoverableError: there is none.
    """
    watchdog.pause()
    # Until every rank has written, ranks could see another one as the newest.
    saver.wait_until_written()
    all_sum([0.0], engine.device)

    def newest_step() -> int | None:
        newest = newest_checkpoint(run_folder)
        return None if newest is None else newest.position.step

    step: int | None = read_by_first(newest_step, engine.device)
    if step is None:
        raise UnrecoverableError("there is no checkpoint to roll back to; the run stops")
    engine.restore(open_chosen_checkpoint(run_folder, step))
    watchdog.resume()
    return step


def _layers_of(engine: MeasuresLayers, batch: Batch, micro_batch_size: int) -> str:
    pieces = [
        engine.activation_sizes(normalize(piece.to(engine.device), engine.dtype))
        for piece in torch.split(as_tensor(batch["image"]), micro_batch_size)
    ]
    names = list(pieces[0])
    sizes = all_max([max(piece[n] for piece in pieces) for n in names], engine.device)
    activations = dict(zip(names, sizes, strict=True))
    bad = next((name for name, size in activations.items() if not math.isfinite(size)), None)
    where = f"first not finite in {bad}" if bad else "finite when the model is evaluated"
    return (
        f"Activations are {where}; their size by layer: {_listed(list(activations.items()))}. "
        f"Largest weight norms: {_listed(_largest(engine.weight_norms()))}"
    )


def _abridged(numbers: list[int], most: int = 64) -> str:
    shown = ", ".join(str(n) for n in numbers[:most])
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > most else shown


def _listed(sizes: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {size:.3g}" for name, size in sizes)


def _largest(norms: dict[str, float], most: int = 8) -> list[tuple[str, float]]:
    return sorted(norms.items(), key=lambda item: -item[1])[:most]
