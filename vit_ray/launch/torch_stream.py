"""Batches as a data set of torch."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vit_ray.data.stream.batches import Batch


class TorchStream(IterableDataset[dict[str, Tensor]]):
    """The batches of one rank in order, as tensors, for any number of a DataLoader's workers.

        DataLoader(stream, batch_size=None, num_workers=8)

    Worker w of n makes batches w, w + n, ...; a DataLoader takes a batch from each in turn. Each
    worker caches its own row groups, so n workers read a shuffle window n times. The stream has no
    length: a loop that resumes would take the remaining length for the total length.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for batch in self._batches[start::step]:
            yield {name: torch.from_numpy(column) for name, column in batch.items()}
