"""The batches of one rank as a list: a run's own order and pixels, without Ray."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, overload

import cv2

from vit_ray.config import Recipe
from vit_ray.data.order import Partition
from vit_ray.data.stream.batches import (
    Batch,
    BatchReader,
    StreamJob,
    StreamSpec,
    refuse_too_many,
)
from vit_ray.launch.resolved_run import resolve_run

_LOG: Final = logging.getLogger(__name__)


class RankBatches(Sequence[Batch]):
    """Item k is what one rank gets at step k, bit for bit as in a run.

    A batch is {"image": uint8 (b, H, W, 3), "labels": int32 (b, L) padded with -1, "sample": int64
    (b,)} with b = global batch size / world size. An image that cannot be decoded is replaced by
    its neighbour, as in a run, with a warning, up to `data.max_bad_fraction` of the data set, which
    each process counts. Evaluation batches have "weight": float32 (b,), too,
    0.0 for padding.

    It is a map-style data set for torch, which makes tensors of the arrays and keeps the order:

        DataLoader(training_batches(recipe)[step:], batch_size=None, num_workers=8)

    A slice is a list from and to other steps, so `[step:]` resumes. Consecutive steps share row
    groups, which each process keeps (`StreamSpec.cache_mib`): random access reads more.
    """

    def __init__(
        self,
        spec: StreamSpec,
        global_batch_size: int,
        steps: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        start: int = 0,
        is_training: bool = True,
    ) -> None:
        """No image is read yet.

        Args:
            start: position of the first step's first sample, over all epochs joined.

        Raises:
            ValueError: the rank is not below `world_size`, or the global batch does not divide by
                it.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}; give 0 <= rank < world_size")
        if global_batch_size % world_size:
            raise ValueError(
                f"train.global_batch_size={global_batch_size} is not divisible by "
                f"world_size={world_size}; use a divisor of {global_batch_size}"
            )
        self._rank, self._share = rank, global_batch_size // world_size
        self._job = StreamJob(spec, Partition(world_size, self._share), start, is_training)
        self._steps = range(steps)
        self._reader: tuple[int, BatchReader] | None = None
        self._bad: dict[int, str] = {}
        """What this process found, by sample."""
        self.bad_folder: Path | None = None
        """Has a file for each bad image, where processes count them together."""

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, at: int) -> Batch: ...
    @overload
    def __getitem__(self, at: slice) -> RankBatches: ...
    def __getitem__(self, at: int | slice) -> Batch | RankBatches:
        if isinstance(at, slice):
            part = object.__new__(RankBatches)
            part.__dict__ = {**self.__getstate__(), "_steps": self._steps[at]}
            return part
        step = self._steps[at]
        # Of this process: open files of a parent are not shared with the workers of a DataLoader.
        if self._reader is None or self._reader[0] != os.getpid():
            if multiprocessing.parent_process() is not None:
                cv2.setNumThreads(0)  # a worker has one core, and no threads of a forked parent
            self._reader = os.getpid(), BatchReader(self._job)
        batch, bad = self._reader[1].batch(self._rank, step * self._share, (step + 1) * self._share)
        self._bad |= bad
        for sample, problem in bad.items():
            _LOG.warning("step %d: %s", step, problem)
            if self.bad_folder is not None:
                self.bad_folder.mkdir(parents=True, exist_ok=True)  # if a tidy /tmp removed it
                (self.bad_folder / str(sample)).touch()
        if bad:
            num_bad = len(os.listdir(self.bad_folder) if self.bad_folder else self._bad)
            spec = self._job.spec
            refuse_too_many(num_bad, spec.num_images, spec.max_bad_fraction, problem)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


def training_batches(recipe: Recipe, rank: int = 0, world_size: int = 1) -> RankBatches:
    """The batches of a recipe's training on one rank, as a list and a data set for torch.

    Any world size that divides the global batch gives the same global batches.

    Raises:
        ValueError: the recipe or its data cannot work, or as `RankBatches`.
    """
    run = resolve_run(recipe)
    size = recipe.train.global_batch_size
    return RankBatches(run.streams["train"], size, run.total_steps, rank, world_size)
