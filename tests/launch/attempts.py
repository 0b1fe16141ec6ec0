"""A run whose worker groups end as a test says: no Ray."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.worker.fakes import FakeRun, make_job
from vit_ray.launch.failures import FailingNodes
from vit_ray.launch.placement import Place
from vit_ray.launch.workers import Ended, Run
from vit_ray.outcomes import Failure

PLACE = Place(2, {})
End = Exception | Ended | Callable[[], Exception]


class Attempts:
    """A run's groups: each ends with an error or in order."""

    def __init__(
        self, folder: Path, *ends: End, failure: Failure | None = None, **workers: Any
    ) -> None:
        self.run = FakeRun()
        self.run.failed = failure
        place = {"output": str(folder.parent), "name": folder.name}
        self.job = replace(make_job(folder, workers=workers, **place), record=self.run)
        self._ends: Iterator[End] = iter(ends)
        self.num_attempts = 0
        self.lost_since_s: list[float | None] = []

    def found(self, lost_since_s: float | None = None) -> Place:
        self.lost_since_s.append(lost_since_s)
        return PLACE

    def train(self, failing: FailingNodes | None = None) -> None:
        """The driver's decisions until the run ends; all ends must be met."""
        failing = failing or FailingNodes(None)
        finder: Any = self
        Run(self.job, finder, failing, self._attempt).train()
        assert next(self._ends, None) is None

    def _attempt(self, place: Place) -> Ended:
        assert place is PLACE
        self.num_attempts += 1
        end = next(self._ends)
        if callable(end):
            end = end()
        return end if isinstance(end, Ended) else Ended(end)
