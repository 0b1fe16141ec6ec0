"""Custom components: a user's model, loss, augmentation, optimizer, metric, callback by its name.

A part is a callable of a Python module, such as `train.loss: mymodule.focal_loss`. Its arguments
are listed here, and its return value in docs/python.md; `own_part` imports parts of all kinds.

Importing a module runs its code. A module is imported only if the user has named it: in the recipe
of a command, with `--module`, or with `trust_modules`. Recipes in checkpoints and MLflow runs also
name parts, but nothing is imported only because of these.
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
_NO_OPTIONS: Final[Mapping[str, Any]] = {}

# Positional arguments with which the part of each key is called.
PARAMETERS: Final = {
    "model.name": ("num_classes", "image_size"),
    "train.loss": ("logits", "labels"),
    "evaluate.metrics": ("logits", "labels"),
    "data.augment.own": ("crop", "random"),
    "optim.name": ("groups", "config"),
    "train.callbacks": ("step", "metrics"),
}

Part = Callable[..., Any]


def is_own(name: str) -> bool:
    """Whether a name is a custom component's: names of built-in parts have another form."""
    return re.fullmatch(DOTTED, name) is not None


def trust_modules(*names: str) -> None:
    """Allow modules with these names, and their submodules, to be imported for parts."""
    _TRUSTED.update(names)


def trust_named(tree: Any) -> None:
    """Allow the modules of all dotted names in plain data from the user."""
    trust_modules(*(name.rpartition(".")[0] for name in _texts(tree) if is_own(name)))


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _texts(part)


def own_part(name: str, key: str, options: Mapping[str, Any] = _NO_OPTIONS) -> Part:
    """The part with a dotted name.

    Args:
        name: module and attribute.
        key: of `PARAMETERS`.
        options: further arguments, by name.

    Raises:
        ValueError: the module is not trusted or does not exist, or it has no such callable with
            these parameters.
    """
    where, (module_name, _, attribute) = f"{key}={name}", name.rpartition(".")
    if not any(f"{module_name}.".startswith(f"{trusted}.") for trusted in _TRUSTED):
        raise ValueError(
            f"{where}: module {module_name} is only named by a checkpoint or a run, and importing "
            f"it runs its code; add --module {module_name} to the command if you trust it, or call "
            f"vit_ray.trust_modules({module_name!r})"
        )
    if os.getcwd() not in sys.path:  # for an installed command it is not
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{where}: there is no module {error.name} in {os.getcwd()} or on the Python path; "
            "install it, run the command in the folder that has it, or submit that folder with "
            "`ray job submit --working-dir`"
        ) from error
    part: Part | None = getattr(module, attribute, None)
    if not callable(part):
        similar = difflib.get_close_matches(attribute, vars(module), n=3)
        hint = f"did you mean {', '.join(similar)}?" if similar else "give a function or class"
        what = f"is a {type(part).__name__}, which cannot be called"
        if not hasattr(module, attribute):
            what = "is not there"
        raise ValueError(f"{where}: {attribute} in {module.__file__} {what}; {hint}")
    parameters = PARAMETERS[key]
    try:
        inspect.signature(part).bind(*parameters, **options)
    except TypeError as error:
        call = ", ".join([*parameters, *(f"{option}=..." for option in options)])
        raise ValueError(
            f"{where}: it does not take {attribute}({call}), as docs/python.md requires: {error}"
        ) from None
    return part
