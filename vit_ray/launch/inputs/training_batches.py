"""The training batches of a recipe as a list: the run's own order and pixels, without Ray."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, overload

from vit_ray.config import Recipe
from vit_ray.data.order.partition import Partition
from vit_ray.data.order.samples import rows_per_group
from vit_ray.data.stream.batches import BatchReader, StreamJob
from vit_ray.data.stream.blocks import Batch
from vit_ray.launch.inputs.streams import resolve_run

_LOG: Final = logging.getLogger(__name__)


class TrainingBatches(Sequence[Batch]):
    """Item k is what one rank gets at step k of a training, bit for bit.

    A batch is {"image": uint8 (b, H, W, 3), "labels": int32 (b, L) padded with -1, "sample": int64
    (b,)} with b = global batch size / world size. An image that cannot be decoded is replaced by
    its neighbour, as in a run, with a warning.

    It is a map-style data set for torch, which makes tensors of the arrays and keeps the order:

        DataLoader(training_batches(recipe)[step:], batch_size=None, num_workers=8)

    A slice is a list from and to other steps, so `[step:]` resumes. Consecutive steps share row
    groups, which each process keeps (`data.task_memory_mib`): random access reads more.
    """

    def __init__(self, recipe: Recipe, rank: int = 0, world_size: int = 1) -> None:
        """Open and check the data sets; no image is read.

        Raises:
            ValueError: the recipe or its data cannot work, the rank is not below `world_size`, or
                the global batch does not divide by it.
        """
        size = recipe.train.global_batch_size
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}; give 0 <= rank < world_size")
        if size % world_size:
            raise ValueError(
                f"train.global_batch_size={size} is not divisible by world_size={world_size}; "
                f"use a divisor of {size}"
            )
        resolved = resolve_run(recipe)
        spec = replace(resolved.streams["train"], decode="host")
        counts = rows_per_group(spec.manifest, spec.rows)
        self._rank, self._share = rank, size // world_size
        self._job = StreamJob(spec, Partition(world_size, self._share), 0, True, counts)
        self._steps = range(resolved.total_steps)
        self._reader: tuple[int, BatchReader] | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, at: int) -> Batch: ...
    @overload
    def __getitem__(self, at: slice) -> TrainingBatches: ...
    def __getitem__(self, at: int | slice) -> Batch | TrainingBatches:
        if isinstance(at, slice):
            part = object.__new__(TrainingBatches)
            part.__dict__ = {**self.__getstate__(), "_steps": self._steps[at]}
            return part
        step = self._steps[at]
        # Of this process: open files of a parent are not shared with the workers of a DataLoader.
        if self._reader is None or self._reader[0] != os.getpid():
            self._reader = os.getpid(), BatchReader(self._job)
        batch, bad = self._reader[1].batch(self._rank, step * self._share, (step + 1) * self._share)
        for problem in bad.values():
            _LOG.warning("step %d: %s", step, problem)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


def training_batches(recipe: Recipe, rank: int = 0, world_size: int = 1) -> TrainingBatches:
    """The batches of a recipe's training on one rank, as a list and a data set for torch.

    Any world size that divides the global batch gives the same global batches.
    """
    return TrainingBatches(recipe, rank, world_size)
