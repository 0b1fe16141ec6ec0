"""A conversion by keywords, through Ray or in this process."""

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import vit_ray.data
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert import conversion
from vit_ray.data.convert.rows import Unit
from vit_ray.data.convert.shards import ConvertReport
from vit_ray.data.convert.sources import units_of


def config_of(source: Any, destination: Any, **options: Any) -> ConvertConfig:
    """A section `convert`; lists stand for tuples."""
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return ConvertConfig(source=str(source), destination=str(destination), **tuples)


def units(source: Any, **options: Any) -> list[Unit]:
    """The units that a conversion reads."""
    return units_of(config_of(source, "unused", **options))


def convert(source: Any, destination: Any, *, seed: int = 0, **options: Any) -> ConvertReport:
    return conversion.convert(config_of(source, destination, **options), seed)


def one_by_one(
    work: Callable[..., Any], items: Sequence[Any], *shared: Any, title: str
) -> list[Any]:
    return [work(item, *shared) for item in items]


def run_in_this_process(
    monkeypatch: pytest.MonkeyPatch, run_tasks: Callable[..., list[Any]] = one_by_one
) -> None:
    """The same code without Ray: its tasks one after another here."""
    for found in pkgutil.walk_packages(vit_ray.data.__path__, "vit_ray.data."):
        if hasattr(module := importlib.import_module(found.name), "run_tasks"):
            monkeypatch.setattr(module, "run_tasks", run_tasks)


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """As `run_in_this_process`, for fixtures of a wider scope than a test's."""
    with pytest.MonkeyPatch.context() as patch:
        run_in_this_process(patch)
        yield
