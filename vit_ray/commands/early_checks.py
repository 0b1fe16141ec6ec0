"""What is wrong with a recipe by itself, found before torch, Ray or MLflow is imported.

One function a kind of key: values, what is read, what is written.
"""

import importlib.util
import os
import platform
import sys
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
from vit_ray.config.help import keys_below
from vit_ray.launch.cluster.ray_address import host_and_port
from vit_ray.measure.devices import require_device
from vit_ray.models.catalog import find_spec
from vit_ray.own_parts import is_own

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


def check_values(command: Command, recipe: Recipe) -> None:
    """Check that the keys which the command needs are set, and that their values can be used here.

    Raises:
        ValueError: a key is not set; the model or the plan's device is not known; the batch does
            not divide among the workers; `RAY_ADDRESS` is not an address; or a package that a
            training imports is not installed.
    """
    for name in command.needs:
        if _value(recipe, name) is None:
            (key,) = [key for key in keys_below(name) if key.name == name]
            raise ValueError(
                f"{name} is not set; give {key.meaning[:1].lower()}{key.meaning[1:]} "
                f"For example: `vit-ray {command.name} {command.example}`"
            )
    if "model" in command.reads and not is_own(recipe.model.name):
        find_spec(recipe.model.name, recipe.model.options())
    if command.name == "plan":
        require_device(recipe.plan.device, "plan.device")
    if command.name in ("pretrain", "finetune"):
        recipe.check_shares()
    if command.opens and (address := os.environ.get("RAY_ADDRESS")):
        host_and_port(address)
    missing = [name for name in _IMPORTED if importlib.util.find_spec(name) is None]
    if command.starts_workers and missing:  # workers on a cluster would fail later
        raise ValueError(
            f"{sys.executable} on {platform.node()} cannot import {', '.join(missing)}; use an "
            "image or environment with all dependencies of vit_ray (cluster/Dockerfile, or `pip "
            "install` of this package)"
        )


def check_inputs(command: Command, recipe: Recipe) -> None:
    """Check that what a command reads on this machine exists; S3 and the hub are checked later.

    Raises:
        ValueError: it does not exist, or is of another kind.
    """
    for key in command.opens:
        found = _value(recipe, key) or ()
        for path in (found,) if isinstance(found, str) else found:
            if "://" not in path:
                _check_local(command, recipe, key, path)
            elif key != "init_from":
                check_address(path)


def _check_local(command: Command, recipe: Recipe, key: str, path: str) -> None:
    place = with_home(path)
    where, copied = f"{key}={path!r} ({place.absolute()})", ""
    if _UPLOADED in Path.cwd().parts and not place.is_absolute():
        copied = (
            "; this job runs in a copy of the submitted folder, without ignored files: give a full "
            "path that all nodes share, or s3://"
        )
    if key == "init_from":
        if place.is_file() and place.suffix not in _WEIGHTS:
            raise ValueError(
                f"{where}: only {' and '.join(_WEIGHTS)} are read, because other formats can run "
                "code; convert the file first"
            )
        if place.exists() or (command.name in _RESUMED and _has_begun(recipe)):
            return  # a continued run does not read it
        steps = ", ".join(sorted(one.name for one in place.parent.glob("step-*")))
        held = f" ({place.parent} has {steps})" if steps else ""
        raise ValueError(
            f"{where} does not exist{held}; give a run folder, one of its step-* folders, or a "
            f".npz or .safetensors file{copied}"
        )
    if key == "convert.source" and _IN_PATTERNS & set(path):
        return
    if not place.exists():
        raise ValueError(f"{where} does not exist; check the path, or convert first{copied}")
    if key == "inspect.images":
        if not place.is_dir():
            raise ValueError(f"{where} is not a folder; give a folder of images")
    elif key == "convert.source":
        is_chosen = recipe.convert is not None and recipe.convert.split is not None
        manifest = place / _MANIFEST
        if not is_chosen and manifest.is_file() and _MANIFEST_MARK in manifest.read_bytes():
            raise ValueError(
                f"{where} is a converted data set already; use it as data.train or data.eval, or "
                "give the images that it was made from"
            )
    elif key == "subset.keys":
        if not place.is_file():
            raise ValueError(f"{where} is not a file; give a text file with a key per line")
    elif not (place / _MANIFEST).exists():
        is_run = key == "verify.path" and any(place.glob("step-*"))
        if not is_run:  # it says what is there instead; imports pyarrow, but not Ray
            importlib.import_module("vit_ray.data").open_dataset(path)


def check_outputs(command: Command, recipe: Recipe) -> None:
    """Check the places that a command writes to.

    Raises:
        ValueError: `tracking.uri` is a folder, or results would be in a submitted job's copy of its
            folder: Ray deletes it, and each node has its own.
    """
    uri = recipe.tracking.uri
    store = sqlite_file(uri)
    if "tracking" in command.reads and store is not None and store.is_dir():
        raise ValueError(
            f"tracking.uri={uri} is a folder; give a file, such as sqlite:///{store}/mlflow.db"
        )
    if _UPLOADED not in Path.cwd().parts or command.name == "plan":
        return
    places = "the full path of a folder that all nodes share, or s3://BUCKET/FOLDER"
    written = []
    for key in _WRITTEN:
        if given := _value(recipe, key):
            place = local_folder(given)
            written.append((key, given, place and with_home(str(place)), places))
    written.append(("tracking.uri", uri, store, "a server, or sqlite:/// with a full path"))
    for key, given, place, allowed in written:
        is_copied = place is not None and _UPLOADED in place.absolute().parts
        if key.split(".")[0] in command.reads and is_copied:
            raise ValueError(
                f"{key}={given} would be in this job's copy of the submitted folder, which Ray "
                f"deletes; give {allowed}"
            )


def check_store(recipe: Recipe) -> None:
    """
    Raises:
        ValueError: as `require_store`.
    """
    require_store(recipe.tracking.uri)


def _value(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key; None also where its section is not set."""
    section, _, name = key.rpartition(".")
    holder = attrgetter(section)(recipe) if section else recipe
    return None if holder is None else getattr(holder, name)


def _has_begun(recipe: Recipe) -> bool:
    folder = recipe.run_folder
    if "://" not in folder:
        return with_home(folder).exists()
    if is_placeholder(folder):
        return False
    storage = importlib.import_module("vit_ray.storage")  # pyarrow, which help does not wait for
    return bool(storage.locate(folder).exists())
