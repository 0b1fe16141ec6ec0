"""Conversions without Ray: the same code, its tasks one after another in this process."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vit_ray.data import prepare
from vit_ray.data.prepare.progress import Shown

STEPS = ("convert.conversion", "convert.commit", "convert.make_shards", "conversion_plan")


def one_by_one(
    work: Callable[..., Any],
    items: Sequence[Any],
    num_cpus: float,
    *shared: Any,
    shown: Shown | None = None,
) -> list[Any]:
    return [work(item, *shared) for item in items]


def run_in_this_process(
    monkeypatch: pytest.MonkeyPatch, run_tasks: Callable[..., list[Any]] = one_by_one
) -> None:
    for found in pkgutil.walk_packages(prepare.__path__, f"{prepare.__name__}."):
        if hasattr(module := importlib.import_module(found.name), "run_tasks"):
            monkeypatch.setattr(module, "run_tasks", run_tasks)


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a conversion run here."""
    run_in_this_process(monkeypatch)


def module_with(step: str) -> Any:
    """The module that calls a step of a conversion by this name."""
    modules = [importlib.import_module(f"vit_ray.data.prepare.{name}") for name in STEPS]
    return next(module for module in modules if hasattr(module, step))
