"""Conversions without Ray: the same code, its tasks one after another in this process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def one_by_one(work: Callable[[Any], Any], items: Sequence[Any], num_cpus: float) -> list[Any]:
    return [work(item) for item in items]


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a conversion run here."""
    for module in ("conversion", "source_index"):
        monkeypatch.setattr(f"vit_ray.data.prepare.{module}.run_tasks", one_by_one)
