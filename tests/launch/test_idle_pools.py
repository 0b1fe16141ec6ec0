"""Worker pools that wait between trainings: which is taken, started and closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from vit_ray.launch import worker_pool as pool
from vit_ray.launch.worker_pool import borrowed_pool, kept_pools, start_kept_pool


@dataclass
class FakePool:
    shape: Any
    is_private: bool
    is_open: bool = True

    def __post_init__(self) -> None:
        opened.append(self)

    def close(self) -> None:
        self.is_open = False


opened: list[FakePool] = []


pytestmark = pytest.mark.usefixtures("own_pools")


def test_a_pool_that_is_started_has_the_place_of_idle_ones_of_other_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "WorkerPool", FakePool)
    opened.clear()
    cell, trial, busy = (object() for _ in range(3))
    kinds: Any = (cell, trial, busy)
    with kept_pools():
        with borrowed_pool(kinds[0], is_private=True), borrowed_pool(kinds[2], is_private=True):
            pass  # the one is idle from here on
        with borrowed_pool(kinds[2], is_private=True) as running:
            start_kept_pool(kinds[1], is_private=True)
            assert [one.shape for one in opened if one.is_open] == [busy, trial]
            start_kept_pool(kinds[1], is_private=True)  # it is there
            with borrowed_pool(kinds[1], is_private=True) as taken:
                assert taken.shape is trial
            assert running.is_open
        assert len(opened) == 3
    assert not any(one.is_open for one in opened)
