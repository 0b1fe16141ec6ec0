"""The few names that users have and that were renamed: the present one first, then earlier ones."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch


def first_of(*names: str) -> Any:
    """The first of these `module:name` that exists."""
    for name in names:
        try:
            return pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(names)} exists")


def learning_rates(optim: Any, total_steps: int) -> list[float]:
    """The rate of each step of a section `optim`."""
    lr_at = first_of(
        "vit_ray.training.schedule:lr_at",
        "vit_ray.training.optim.schedule:lr_at",
        "vit_ray.train.optim.schedule:lr_at",
    )
    return [lr_at(step, optim, total_steps) for step in range(total_steps)]


def dev_split(source: str, destination: str, fraction: float, seed: int) -> tuple[str, str]:
    """Write the two data sets of a sweep's dev split; returns their addresses."""
    split = first_of("vit_ray.data.prepare.dev_split:dev_split")
    rest, dev = split(source, destination, fraction, seed)
    return rest, dev


def randaugment(layers: int, magnitude: float) -> dict[str, Any]:
    """Keys of `data.augment`."""
    return {
        "randaugment": "tensorflow",
        "randaugment_layers": layers,
        "randaugment_magnitude": magnitude,
    }


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """Commands for data sets do their tasks one after another in this process."""

    def run_tasks(
        work: Callable[..., Any], items: Sequence[Any], *shared: Any, shown: Any = None
    ) -> list[Any]:
        return [work(item, *shared) for item in items]

    stand_ins = {"run_tasks": run_tasks, "connect": lambda _: None, "check_shared": lambda *_: None}
    prepare = importlib.import_module("vit_ray.data.prepare")
    modules = [one.name for one in pkgutil.walk_packages(prepare.__path__, "vit_ray.data.prepare.")]
    with contextlib.ExitStack() as patches:
        for module in [*modules, "vit_ray.commands.convert", "vit_ray.commands.datasets"]:
            for name in stand_ins.keys() & vars(importlib.import_module(module)).keys():
                patches.enter_context(patch(f"{module}.{name}", stand_ins[name]))
        yield
