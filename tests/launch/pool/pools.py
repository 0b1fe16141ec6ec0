"""Worker pools that end as a test says."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.fakes import FakeRun, make_job
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.pool import pool_training as worker_group
from vit_ray.launch.pool.pool_training import run_workers
from vit_ray.outcomes import Failure

CLUSTER = ClusterShape(1, 4, 0, 0.0)


class Pools:
    """Ends of the trainings, one for each pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exception | None) -> None:
        self._ends, self.events = list(ends), []
        monkeypatch.setattr(worker_group, "open_pool", self._pool)

    @contextlib.contextmanager
    def _pool(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(run=self._run)

    def _run(self, *_: Any) -> None:
        end = self._ends.pop(0)
        if end is not None:
            raise end

    def train(
        self, folder: Path, failure: Failure | None = None, away_at: str | None = None
    ) -> None:
        """`away_at`: the address of an MLflow that has not answered yet."""
        run = FakeRun()
        run.failed = failure
        run.events = self.events
        job = replace(make_job(folder), record=run, control=run)
        if away_at:
            run.run_id = lambda *_: None  # type: ignore[method-assign]
            job = replace(job, recipe=job.recipe.with_changes(tracking={"uri": away_at}))
        run_workers(job, {}, CLUSTER, use_gpu=False)
        assert self._ends == []
