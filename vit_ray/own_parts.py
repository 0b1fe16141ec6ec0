"""A user's own parts: a model, loss, augmentation, optimizer, metric or callback by dotted name.

A part is a callable of a Python module, such as `train.loss: mymodule.focal_loss`. Its arguments
and its return value are a Protocol here; `own_part` finds parts of all kinds.

Importing a module runs its code. A module is imported only if the user has named it: in the recipe
of a command, with `--module`, or with `trust_modules`. Recipes in checkpoints and in MLflow's runs
also name parts; that alone imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

DOTTED: Final = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
_TRUSTED: Final[set[str]] = set()
_OPTIONS: Final[Mapping[str, Any]] = {}


class BuildsModel(Protocol):
    """`model.name`: a class or function that makes a `torch.nn.Module`.

    The module turns float images (B, 3, H, W) in [-1, 1] into logits (B, K). It has a layer `head`
    with `weight` (K, D) and `bias` (K,), whose input (B, D) are the features of the images.

    Args:
        num_classes: K.
        image_size: (H, W) in pixels.
        **options: the other keys of `model` that the recipe sets, such as `depth` and `width`. With
            `dropout` or `stochastic_depth` the module is also called with `keys`, int64 (B,).
    """

    def __call__(self, num_classes: int, image_size: tuple[int, int]) -> nn.Module: ...


class Loss(Protocol):
    """`train.loss`: the loss of each image, (B,).

    Args:
        logits: float32 (B, K).
        labels: int64 (B, L), lists of classes padded with -1.
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor: ...


class Metric(Protocol):
    """An item of `evaluate.metrics`: a number for each image, (B,), whose mean is reported.

    Args:
        logits, labels: as in `Loss`.
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor: ...


class Random(Protocol):
    """Random numbers of one image, which depend only on seed, epoch and sample."""

    def draw(self) -> float:
        """The next number, uniform in [0, 1)."""

    def between(self, low: float, high: float) -> float:
        """The next number, scaled to [low, high)."""

    def below(self, bound: int) -> int:
        """The next number as an integer in [0, bound)."""


class Augments(Protocol):
    """`data.augment.own`: returns a changed training crop, uint8 (H, W, 3), of the same shape.

    Args:
        crop: uint8 (H, W, 3), cut, flipped and resized; it may be changed in place.
        random: the only source of random numbers with which a run is repeatable.
    """

    def __call__(self, crop: NDArray[np.uint8], random: Random) -> NDArray[np.uint8]: ...


class BuildsOptimizer(Protocol):
    """`optim.name`: makes a `torch.optim.Optimizer` that treats each element of a tensor alike.

    Args:
        groups: with `params` and `weight_decay`; the rate `lr` is set before each step.
        config: the section `optim` of the recipe.
    """

    def __call__(self, groups: list[dict[str, Any]], config: Any) -> torch.optim.Optimizer: ...


class Callback(Protocol):
    """An item of `train.callbacks`: is called on rank 0 with what is logged.

    Args:
        step: number of completed steps.
        metrics: a copy.
    """

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None: ...


Contract = TypeVar("Contract")


def is_own(name: str) -> bool:
    """Whether a name is that of a user's own part: no built-in part has such a name."""
    return re.fullmatch(DOTTED, name) is not None


def trust_modules(*names: str) -> None:
    """Allow modules with these names, and their submodules, to be imported for parts."""
    _TRUSTED.update(names)


def trust_named(tree: Any) -> None:
    """Allow the modules of all dotted names in plain data that the user has written."""
    trust_modules(*(name.rpartition(".")[0] for name in _texts(tree) if is_own(name)))


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _texts(part)


def own_part(
    name: str, key: str, contract: type[Contract], options: Mapping[str, Any] = _OPTIONS
) -> Contract:
    """The part with a dotted name.

    Args:
        name: module and attribute.
        key: of the recipe, for errors.
        contract: a Protocol of this module.
        options: further arguments in addition to the parameters of the contract.

    Raises:
        ValueError: the module is not trusted or does not exist, it has no such attribute, or that
            takes other parameters.
    """
    where, (module_name, _, attribute) = f"{key}={name}", name.rpartition(".")
    if not any(f"{module_name}.".startswith(f"{trusted}.") for trusted in _TRUSTED):
        raise ValueError(
            f"{where}: module {module_name} is only named by a checkpoint or a run, and importing "
            f"it runs its code; add --module {module_name} to the command if you trust it, or call "
            f"vit_ray.trust_modules({module_name!r})"
        )
    if os.getcwd() not in sys.path:  # of an installed command
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{where}: there is no module {error.name} in {os.getcwd()} or on the Python path; "
                "run the command in the folder that has it, or submit that folder with `ray job "
                "submit --working-dir`"
            ) from None
        raise ValueError(
            f"{where}: its module imports {error.name}, which is not installed; install it, or "
            "change the module"
        ) from error
    part = getattr(module, attribute, None)
    if not callable(part):
        others = [other for other in vars(module) if callable(vars(module)[other])]
        near = difflib.get_close_matches(attribute, others, n=3)
        what = "not callable" if part is None else f"a {type(part).__name__}"
        hint = f"did you mean {', '.join(near)}?" if near else "give a function or class"
        raise ValueError(f"{where}: {attribute} in {module.__file__} is {what}; {hint}")
    _, *wanted = inspect.signature(contract.__call__).parameters
    try:
        inspect.signature(part).bind(*wanted, **options)
    except TypeError as error:
        call = ", ".join([*wanted, *(f"{option}=..." for option in options)])
        raise ValueError(
            f"{where}: it does not take {attribute}({call}), as {contract.__name__} in "
            f"docs/python.md requires: {error}"
        ) from None
    return cast("Contract", part)
