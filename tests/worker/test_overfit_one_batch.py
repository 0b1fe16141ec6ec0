"""`train.overfit_one_batch`: the first batch again and again, also after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.fakes import BATCH, TOTAL, batches, make_job
from vit_ray.worker.worker import _training_batches


class RankOne:
    """The second of two ranks: its half of each batch."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Any]:
        self.asked.append((start, stop))
        for batch in itertools.islice(batches(start // BATCH), (stop - start) // BATCH):
            yield {name: column[share:] for name, column in batch.items()}


@pytest.mark.parametrize("samples_seen", [0, 3 * BATCH])
def test_each_step_has_the_first_batch(tmp_path: Path, samples_seen: int) -> None:
    job = make_job(tmp_path, train={"overfit_one_batch": True})
    streams: Any = RankOne()
    found = _training_batches(job, 2, streams, samples_seen, torch.device("cpu"))
    taken = [batch["sample"].tolist() for batch in itertools.islice(found, TOTAL)]
    assert taken == [[4, 5, 6, 7]] * TOTAL
    assert streams.asked == [(0, BATCH)]  # nothing else is read


def test_without_it_each_step_has_its_own(tmp_path: Path) -> None:
    streams: Any = RankOne()
    found = _training_batches(make_job(tmp_path), 2, streams, 3 * BATCH, torch.device("cpu"))
    assert [batch["sample"].tolist()[0] for batch in found] == [
        step * BATCH + 4 for step in range(3, TOTAL)
    ]
