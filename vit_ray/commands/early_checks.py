"""What is wrong with a recipe by itself, found before torch, Ray or MLflow is imported."""

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from vit_ray.addresses import (
    check_address,
    is_placeholder,
    local_folder,
    require_store,
    sqlite_file,
    with_home,
)
from vit_ray.commands.job_list import Command
from vit_ray.config import Recipe
from vit_ray.launch.cluster.ray_address import host_and_port
from vit_ray.measure.devices import require_device
from vit_ray.models.catalog import find_spec
from vit_ray.own_parts import is_own

_STARTS_NOTHING = frozenset({"plan", "doctor"})
_RESUMED = frozenset({"pretrain", "finetune", "sweep", "vtab"})
_IMPORTED = (
    "cv2", "deepspeed", "google_crc32c", "mlflow", "numpy", "pyarrow", "ray", "safetensors",
    "torch",
)  # fmt: skip
"""Packages of drivers, workers and reading tasks, which share one image."""
_MANIFEST = "manifest.parquet"
_MANIFEST_MARK = b'"fingerprint": "'
_WEIGHTS = (".npz", ".safetensors")
_IN_PATTERNS = frozenset("*?[{")
_UPLOADED = "working_dir_files"
"""Ray's folder for the copies of what `ray job submit --working-dir` uploads."""
_WRITTEN = (
    "output", "convert.destination", "subset.destination", "deduplicate.destination",
    "export.path", "inspect.path",
)  # fmt: skip
"""Keys of the places that commands write to, next to `tracking.uri`."""


def check_packages(command: Command, recipe: Recipe) -> None:
    """Check that everything a training imports is installed; workers on a cluster would fail later.

    Raises:
        ValueError: a package is not installed.
    """
    if "workers" not in command.reads or command.name in _STARTS_NOTHING:
        return
    missing = [name for name in _IMPORTED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{sys.executable} on {platform.node()} cannot import {', '.join(missing)}; use an "
            "image or environment with all dependencies of vit_ray (cluster/Dockerfile, or `pip "
            "install` of this package)"
        )


def check_places(command: Command, recipe: Recipe) -> None:
    """Check that what a command opens on this machine exists; S3 and the hub are checked later.

    Raises:
        ValueError: it does not exist; `tracking.uri` is a folder; the model or the plan's device
            is not known; the batch does not divide among the workers; `RAY_ADDRESS` is not an
            address; or results would be written into a submitted job's copy of its folder.
    """
    _refuse_uploaded(command, recipe)
    if "model" in command.reads and not is_own(recipe.model.name):
        find_spec(recipe.model.name, recipe.model.options())
    store = sqlite_file(recipe.tracking.uri)
    if "tracking" in command.reads and store is not None and store.is_dir():
        raise ValueError(
            f"tracking.uri={recipe.tracking.uri} is a folder; give a file, such as "
            f"sqlite:///{store}/mlflow.db"
        )
    if command.name == "plan":
        require_device(recipe.plan.device, "plan.device")
    for key in command.opens:
        for path in _paths(attrgetter(key)(recipe)):
            if "://" in path:
                if key != "init_from":
                    check_address(path)
                continue
            place = with_home(path)
            copied = ""
            if _UPLOADED in Path.cwd().parts and not place.is_absolute():
                copied = (
                    "; this job runs in a copy of the submitted folder, without ignored files: "
                    "give a full path that all nodes share, or s3://"
                )
            if key == "inspect.images":
                if not place.is_dir():
                    raise ValueError(f"{key}={path!r} is not a folder; give a folder of images")
            elif key == "convert.source":
                if not (place.exists() or _IN_PATTERNS & set(path)):
                    raise ValueError(f"{key}={path!r}: no such folder or file; check the path")
                is_chosen = recipe.convert is not None and recipe.convert.split is not None
                if not is_chosen and _is_own_manifest(place / _MANIFEST):
                    raise ValueError(
                        f"{key}={path!r} is a converted data set already; use it as data.train or "
                        "data.eval, or give the images that it was made from"
                    )
            elif key == "subset.keys":
                if not place.is_file():
                    raise ValueError(
                        f"{key}={path!r}: no such file; give a text file with a key per line"
                    )
            elif key == "init_from":
                if place.is_file() and place.suffix not in _WEIGHTS:
                    raise ValueError(
                        f"init_from: weights {path!r} end in {place.suffix!r}; only "
                        f"{' and '.join(_WEIGHTS)} are read, because other formats can run code; "
                        "convert the file first"
                    )
                if place.exists() or (command.name in _RESUMED and _has_begun(recipe)):
                    continue  # a continued run does not read it
                if path.endswith(_WEIGHTS):
                    raise ValueError(
                        f"init_from: weights {path!r} do not exist; give a .npz or .safetensors "
                        "file, or the folder of a run"
                    )
                steps = sorted(one.name for one in place.parent.glob("step-*") if one.is_dir())
                held = f" ({place.parent} has {', '.join(steps)})" if steps else ""
                raise ValueError(
                    f"init_from: {path!r} does not exist{held}; give a run folder, one of its "
                    f"step-* folders, or an exported weight file{copied}"
                )
            elif not place.exists():
                raise ValueError(
                    f"no data set at {path!r}: the folder does not exist; check the path or "
                    f"convert first ({key}){copied}"
                )
            elif not (place / _MANIFEST).exists():
                is_run = key == "verify.path" and any(place.glob("step-*"))
                if not is_run:  # it says what is there instead; imports pyarrow, but not Ray
                    importlib.import_module("vit_ray.data").open_dataset(path)
    if command.name in ("pretrain", "finetune"):
        recipe.check_shares()
    if command.opens and (address := os.environ.get("RAY_ADDRESS")):
        host_and_port(address)


def _refuse_uploaded(command: Command, recipe: Recipe) -> None:
    """Ray deletes a job's copy of its folder, and each node has its own."""
    if _UPLOADED not in Path.cwd().parts or command.name in _STARTS_NOTHING:
        return
    stores = "a server such as http://mlflow:5000, or sqlite:/// with a full path"
    places = "the full path of a folder that all nodes share, or s3://BUCKET/FOLDER"
    written = []
    for key in _WRITTEN:
        section = attrgetter(key.split(".")[0])(recipe)
        if section is not None:
            given = attrgetter(key)(recipe)
            place = local_folder(given)
            written.append((key, given, place and with_home(str(place)), places))
    uri = recipe.tracking.uri
    written.append(("tracking.uri", uri, sqlite_file(uri), stores))
    for key, given, place, allowed in written:
        is_copied = place is not None and _UPLOADED in place.absolute().parts
        if key.split(".")[0] in command.reads and is_copied:
            raise ValueError(
                f"{key}={given} would be in this job's copy of the submitted folder, which Ray "
                f"deletes; give {allowed}"
            )


def _is_own_manifest(file: Path) -> bool:
    """Whether it is that of a data set, and no other file of this name."""
    return file.is_file() and _MANIFEST_MARK in file.read_bytes()


def note_start(command: Command, recipe: Recipe) -> None:
    """Print the first line of a command that starts workers: the next one takes seconds."""
    if "workers" in command.reads and command.name not in _STARTS_NOTHING:
        address = os.environ.get("RAY_ADDRESS")
        ray = f"joining the Ray at {address}" if address else "starting Ray here"
        text = f"{recipe.name}: {command.name}: opening data and {ray}"
        print(text, file=sys.stderr, flush=True)


def check_store(recipe: Recipe) -> None:
    """
    Raises:
        ValueError: as `require_store`.
    """
    require_store(recipe.tracking.uri)


def _has_begun(recipe: Recipe) -> bool:
    folder = recipe.run_folder
    if "://" not in folder:
        return with_home(folder).exists()
    if is_placeholder(folder):
        return False
    storage = importlib.import_module("vit_ray.storage")  # pyarrow, which help does not wait for
    return bool(storage.locate(folder).exists())


def note_unread(command: Command, overrides: list[str]) -> None:
    """Print which given keys the command does not read."""
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
    """Paths of one data set, of several with names, or of several with weights."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield from (one if isinstance(one, str) else one.path for one in value or ())
