"""A user's own parts: a model, loss, augmentation, optimizer, metric or callback by dotted name.

A part is a callable of a Python module, such as `train.loss: mymodule.focal_loss`. Its arguments
are listed here, and its return value in docs/python.md; `own_part` finds parts of all kinds.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

DOTTED: Final = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
_TRUSTED: Final[set[str]] = set()
_OPTIONS: Final[Mapping[str, Any]] = {}


PARAMETERS: Final = {
    "model.name": ("num_classes", "image_size"),
    "train.loss": ("logits", "labels"),
    "evaluate.metrics": ("logits", "labels"),
    "data.augment.own": ("crop", "random"),
    "optim.name": ("groups", "config"),
    "train.callbacks": ("step", "metrics"),
}
"""What the part of each key is called with, by position."""

Part = Callable[..., Any]


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


def own_part(name: str, key: str, options: Mapping[str, Any] = _OPTIONS) -> Part:
    """The part with a dotted name.

    Args:
        name: module and attribute.
        key: of `PARAMETERS`.
        options: further arguments, by name.

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
    part: Part | None = getattr(module, attribute, None)
    if not callable(part):
        others = [other for other in vars(module) if callable(vars(module)[other])]
        near = difflib.get_close_matches(attribute, others, n=3)
        what = "not callable" if part is None else f"a {type(part).__name__}"
        hint = f"did you mean {', '.join(near)}?" if near else "give a function or class"
        raise ValueError(f"{where}: {attribute} in {module.__file__} is {what}; {hint}")
    wanted = PARAMETERS[key]
    try:
        inspect.signature(part).bind(*wanted, **options)
    except TypeError as error:
        call = ", ".join([*wanted, *(f"{option}=..." for option in options)])
        raise ValueError(
            f"{where}: it does not take {attribute}({call}), as docs/python.md requires: {error}"
        ) from None
    return part
