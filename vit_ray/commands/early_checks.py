"""What a recipe alone tells is wrong, found before torch, Ray or MLflow is imported."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from vit_ray.commands.job_list import Command
from vit_ray.config import Recipe
from vit_ray.launch.cluster.ray_address import host_and_port

_RESUMED = frozenset({"pretrain", "finetune", "sweep", "vtab"})
_TRAINS = frozenset({"pretrain", "finetune", "sweep", "scaling_study", "vtab", "evaluate"})
_IMPORTED = (
    "cv2", "deepspeed", "google_crc32c", "mlflow", "numpy", "pyarrow", "ray", "safetensors",
    "torch",
)  # fmt: skip
"""By drivers, workers and reading tasks, which have one image."""
_IN_PATTERNS = frozenset("*?[{")


def check_packages(command: Command) -> None:
    """Look for what a training imports; on a cluster its workers would miss it on their GPUs.

    Raises:
        ValueError: some of it is not installed.
    """
    missing = [name for name in _IMPORTED if importlib.util.find_spec(name) is None]
    if missing and command.name in _TRAINS:
        raise ValueError(
            f"{', '.join(missing)} cannot be imported by {sys.executable} on {platform.node()}; "
            "use an image or environment with all dependencies of vit_ray (cluster/Dockerfile, or "
            "`pip install` of this package)"
        )


def check_places(command: Command, recipe: Recipe) -> None:
    """Look for what a command opens on this machine; what lies on S3 or the hub is asked later.

    Raises:
        ValueError: it is not there; the batch does not divide among the workers; or `RAY_ADDRESS`
            is not an address.
    """
    for key in command.opens:
        for path in _paths(attrgetter(key)(recipe)):
            if "://" in path or Path(path).expanduser().exists():
                continue
            if key == "convert.source":
                if not _IN_PATTERNS & set(path):
                    raise ValueError(f"{key}={path!r}: no such folder or file; check the path.")
            elif key == "init_from":
                if command.name in _RESUMED and _has_begun(recipe):
                    continue  # a run that is continued does not read it
                if path.endswith((".npz", ".safetensors")):
                    raise ValueError(
                        f"init_from: weights {path!r} do not exist; give a .npz or .safetensors "
                        "file, or the folder of a run"
                    )
                raise ValueError(
                    f"init_from: {path!r} holds no whole checkpoint; give a run folder, one of "
                    "its step-* folders, or an exported weight file"
                )
            else:
                raise ValueError(
                    f"no data set at {path!r}: the folder does not exist; check the path or "
                    f"convert first ({key})"
                )
    if command.name in ("pretrain", "finetune"):
        recipe.check_shares()
    if command.opens and (address := os.environ.get("RAY_ADDRESS")):
        host_and_port(address)


def _has_begun(recipe: Recipe) -> bool:
    folder = recipe.run_folder
    if "://" not in folder:
        return Path(folder).expanduser().exists()
    storage = importlib.import_module("vit_ray.storage")  # pyarrow, which help does without
    return not storage.is_placeholder(folder) and bool(storage.locate(folder).exists())


def note_unread(command: Command, overrides: list[str]) -> None:
    """Say which keys of a command line the command does not read.

    `manifest` hands the whole recipe to the job that it is for.
    """
    if command.name == "manifest":
        return
    parts = [word.partition("=")[0] for word in overrides]
    unread = [
        key
        for key in parts
        if not any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.")
                   for one in command.reads)
    ]  # fmt: skip
    if unread:
        print(f"note: {command.name} does not read {', '.join(unread)}", file=sys.stderr)


def _paths(value: Any) -> Iterator[str]:
    """Of one data set, several with names, or several with weights."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield from (one if isinstance(one, str) else one.path for one in value or ())
