"""Conversions without Ray."""

import importlib
from typing import Any

import pytest

from tests.data.converting import run_in_this_process

STEPS = ("convert.conversion", "convert.commit", "convert.make_shards", "conversion_plan")


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a conversion run here."""
    run_in_this_process(monkeypatch)


def module_with(step: str) -> Any:
    """The module that calls a step of a conversion by this name."""
    modules = [importlib.import_module(f"vit_ray.data.prepare.{name}") for name in STEPS]
    return next(module for module in modules if hasattr(module, step))
