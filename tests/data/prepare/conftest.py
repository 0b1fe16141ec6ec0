"""Conversions without Ray: the same code, its tasks one after another in this process."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

WITH_TASKS = (
    "convert.compare_source",
    "in_place",
    "plan",
    "sources.source_index",
    "convert.make_shards",
    "subset",
)
STEPS = ("convert.conversion", "convert.commit", "convert.make_shards", "plan")


def one_by_one(
    work: Callable[..., Any], items: Sequence[Any], num_cpus: float, *shared: Any
) -> list[Any]:
    return [work(item, *shared) for item in items]


def run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in WITH_TASKS:
        monkeypatch.setattr(f"vit_ray.data.prepare.{module}.run_tasks", one_by_one)


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a conversion run here."""
    run_in_this_process(monkeypatch)


def module_with(step: str) -> Any:
    """The module that calls a step of a conversion by this name."""
    modules = [importlib.import_module(f"vit_ray.data.prepare.{name}") for name in STEPS]
    return next(module for module in modules if hasattr(module, step))
