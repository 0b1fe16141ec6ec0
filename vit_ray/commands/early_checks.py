"""What is wrong with a recipe by itself, found before torch, Ray or MLflow is imported.

One function a kind of key: values, what is read, what is written.
"""

import importlib
import os
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from vit_ray.addresses import (
    UPLOADED,
    check_address,
    is_placeholder,
    local_folder,
    require_store,
    sqlite_file,
    with_home,
)
from vit_ray.commands.job_list import Command
from vit_ray.config import Recipe
from vit_ray.config.keys import keys_below
from vit_ray.config.schema import errors_of
from vit_ray.launch.ray_address import host_and_port
from vit_ray.measure.devices import require_device
from vit_ray.models.catalog import find_spec
from vit_ray.own_parts import is_own
from vit_ray.training.steps import micro_batch_size

_RESUMED = frozenset({"pretrain", "finetune", "sweep", "vtab", "scaling_study", "quickstart"})
_MANIFEST = "manifest.parquet"
_MANIFEST_MARK = b'"fingerprint": "'
_IN_PATTERNS = frozenset("*?[{")
_WRITTEN = (
    "output", "convert.destination", "subset.destination", "deduplicate.destination",
    "export.path", "inspect.path",
)  # fmt: skip
"""Keys of the places that commands write to, next to `tracking.uri`."""


def _are_weights(place: Path) -> bool:
    return place.is_dir() or (place.is_file() and place.suffix in (".npz", ".safetensors"))


_KINDS: dict[str, tuple[Callable[[Path], bool], str]] = {
    "init_from": (_are_weights, "a run folder, a step-* folder, or a .npz or .safetensors file"),
    "convert.source": (Path.exists, "a folder or file with images"),
    "benchmark.label_file": (Path.exists, "the published file or folder of labels"),
    "benchmark.model_classes": (Path.exists, "a converted set, or a .txt or .json with classes"),
    "inspect.images": (Path.is_dir, "a folder of images"),
    "vtab.data": (Path.is_dir, "a folder with TASK/train and TASK/test"),
    "subset.keys": (Path.is_file, "a text file with a key per line"),
}
"""What is at the place of a key, and how that is called; of all others a converted data set."""


def check_values(command: Command, recipe: Recipe) -> None:
    """Check that the keys which the command needs are set, and that their values can be used here.

    Raises:
        ValueError: a key is not set; the model or the plan's device is not known; the batch does
            not divide among the workers; or `RAY_ADDRESS` is not an address.
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
    if command.name == "report":
        require_store(recipe.tracking.uri)
    if command.name in ("pretrain", "finetune", "quickstart"):
        for world_size in recipe.group_sizes:
            micro_batch_size(recipe, world_size)
    if command.opens and (address := os.environ.get("RAY_ADDRESS")):
        host_and_port(address)


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
    if command.name == "convert":  # imports pyarrow, but not Ray
        importlib.import_module("vit_ray.data.convert.checks").check_conversion(recipe)


def _check_local(command: Command, recipe: Recipe, key: str, path: str) -> None:
    with errors_of(key):
        place = with_home(path)
    is_there, kind = _KINDS.get(
        key, (Path.exists, "a converted data set (`vit-ray convert` makes one)")
    )
    if key == "convert.source" and _IN_PATTERNS & set(path):
        return
    if not is_there(place):
        if key == "init_from" and command.name in _RESUMED and _has_begun(recipe):
            return  # a continued run does not read it
        copied = ""
        if UPLOADED in place.absolute().parts:
            copied = (
                "; this job runs in a copy of the submitted folder, without ignored files: give a "
                "full path that all nodes share, or s3://"
            )
        is_file = key == "init_from" and place.is_file()
        remedy = "convert it to .npz or .safetensors" if is_file else "check the path"
        raise ValueError(
            f"{key}={path!r}: {place.absolute()} does not exist, or is not {kind}; {remedy}{copied}"
        )
    has_manifest = (place / _MANIFEST).is_file()
    is_whole = key == "convert.source" and recipe.convert and not recipe.convert.split
    if is_whole and has_manifest and _MANIFEST_MARK in (place / _MANIFEST).read_bytes():
        raise ValueError(
            f"{key}={path!r} is a converted data set already; use it as data.train or data.eval, "
            "or give the images that it was made from"
        )
    is_run = key == "verify.path" and any(place.glob("step-*"))
    if not (key in _KINDS or has_manifest or is_run):
        importlib.import_module("vit_ray.data").open_dataset(path)  # says what is there instead


def _has_begun(recipe: Recipe) -> bool:
    folder = recipe.run_folder
    if "://" not in folder:
        return with_home(folder).exists()
    storage = importlib.import_module("vit_ray.storage")  # pyarrow, which help does not wait for
    return bool(storage.locate(folder).exists())


def check_outputs(command: Command, recipe: Recipe) -> None:
    """Check the places that a command writes to.

    Raises:
        ValueError: `tracking.uri` is a folder, or results would be in a submitted job's copy of its
            folder: Ray deletes it, and each node has its own.
    """
    uri = recipe.tracking.uri
    store = sqlite_file(uri)
    if command.starts_workers and is_placeholder(recipe.output):
        check_address(recipe.output)
    if "tracking" in command.reads and store is not None and store.is_dir():
        raise ValueError(
            f"tracking.uri={uri} is a folder; give a file, such as sqlite:///{store}/mlflow.db"
        )
    if UPLOADED not in Path.cwd().parts or command.name == "plan":
        return
    folders = {key: local_folder(given) for key in _WRITTEN if (given := _value(recipe, key))}
    written = {key: with_home(str(folder)) for key, folder in folders.items() if folder}
    for key, place in {**written, **({"tracking.uri": store} if store else {})}.items():
        if key.split(".")[0] in command.reads and UPLOADED in place.absolute().parts:
            raise ValueError(
                f"{key}={_value(recipe, key)} would be in this job's copy of the submitted folder, "
                "which Ray deletes; give a full path that all nodes share, s3://BUCKET/FOLDER, or "
                "as tracking.uri a server"
            )


def _value(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key; None also where its section is not set."""
    section, _, name = key.rpartition(".")
    holder = attrgetter(section)(recipe) if section else recipe
    return None if holder is None else getattr(holder, name)
