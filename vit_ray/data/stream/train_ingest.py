"""Streams for Ray Train, which says only at the start of a worker group how many ranks there are.

Apart from `stream`, so that reading tasks do not import Ray Train.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray.data
import ray.train

from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.ray_datasets import evaluation_stream, split_stream, training_stream


@dataclass(frozen=True)
class PendingStream:
    """A training stream that waits for the world size; `StreamConfig` makes the Dataset of it.

    `batch_size_per_rank` may be a function of the world size, for groups that change size.
    """

    spec: StreamSpec
    batch_size_per_rank: int | Callable[[int], int]
    start: int
    stop: int

    def dataset(self, world_size: int) -> ray.data.Dataset:
        """The stream for this many ranks."""
        size = self.batch_size_per_rank
        return training_stream(
            self.spec,
            world_size=world_size,
            batch_size_per_rank=size if isinstance(size, int) else size(world_size),
            start=self.start,
            stop=self.stop,
        )


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation stream that waits for the world size."""

    spec: StreamSpec
    batch_size: int

    def dataset(self, world_size: int) -> ray.data.Dataset:
        """The stream for this many ranks."""
        return evaluation_stream(self.spec, world_size=world_size, batch_size=self.batch_size)


class StreamConfig(ray.train.DataConfig):
    """Builds each stream for exactly the workers of each worker-group start.

    A data set of the trainer is a `PendingStream`, a `PendingEvaluation`, or a callable that
    returns one, which Ray Train calls at every start; a plain Dataset is split as it is.
    """

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: Any = None,
        worker_node_ids: Any = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """One dict of iterators per rank."""
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, source in datasets.items():
            is_pending = isinstance(source, PendingStream | PendingEvaluation)
            dataset = source.dataset(world_size) if is_pending else source
            for rank, shard in enumerate(split_stream(dataset, world_size)):
                shards[rank][name] = shard
        return shards
