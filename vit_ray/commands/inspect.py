"""The inspection job: figures of a trained model over a folder of images, in files and MLflow."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from pyarrow import fs

from vit_ray.commands.trained_model import load_trained_model
from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import InspectConfig
from vit_ray.data.images.crops import BadImageError, UInt8Array, training_crop
from vit_ray.evaluate.inspection_figures import inspect_model
from vit_ray.launch.run_metadata import trained_params
from vit_ray.launch.streams import augmentation_of
from vit_ray.storage import Location, locate
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")

logger = logging.getLogger(__name__)


def inspect(recipe: Recipe) -> int:
    """Draw the figures, print where they are, and keep them with an MLflow run of their own.

    Raises:
        ValueError: weights or images are not given, missing or unreadable.
    """
    config = _inspect_of(recipe)
    images = read_images(recipe, config)
    place = _local_place(config)
    model, report = load_trained_model(recipe, config.averaged)
    print(report)
    folder = _made_folder(place, config)
    results = inspect_model(model, images, folder)
    for name, result in results.items():
        print(f"{name}: {result}" if isinstance(result, Path) else f"{name}: none; {result}")
    _keep(recipe, folder, [file for file in results.values() if isinstance(file, Path)])
    return 0


def _local_place(config: InspectConfig) -> Location:
    """Where the figures go.

    Raises:
        ValueError: it is remote, or a file is there.
    """
    location = locate(config.path)
    if not location.is_local:
        raise ValueError(
            f"inspect.path={config.path!r} is remote; give a local folder: MLflow keeps the figures"
        )
    location.refuse_file_in_its_place("inspect.path")
    return location


def _made_folder(place: Location, config: InspectConfig) -> Path:
    """The folder of a place, made where it is missing.

    Raises:
        ValueError: no folder can be there.
    """
    try:
        Path(place.path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"inspect.path={config.path!r} cannot be made a folder: {error}") from None
    return Path(place.path)


def read_images(recipe: Recipe, config: InspectConfig) -> UInt8Array:
    """Images of the folder as evaluation sees them: uint8 (B, H, W, 3).

    Taken at equal distances from the list by name, so that folders of classes are all seen.

    Raises:
        ValueError: the folder holds no image that can be decoded.
    """
    augmentation = augmentation_of(recipe.model, recipe.data.eval_augment)
    crops = []
    for file in _spread(_image_files(locate(config.images)), config.num_images):
        try:
            crops.append(training_crop(file.read(), augmentation, (0, 0, 0)))
        except BadImageError as error:
            logger.warning("%s is left out: %s", file.uri, error)
    if not crops:
        raise ValueError(
            f"inspect.images={config.images!r} holds no readable image "
            f"({', '.join(IMAGE_SUFFIXES)}); give a folder of images"
        )
    return np.stack(crops)


def _image_files(folder: Location) -> list[Location]:
    """Images by name; none where there is no such folder."""
    if folder.info().type == fs.FileType.File:
        return []
    paths = [info.path for info in folder.list_files()]
    images = sorted(path for path in paths if path.lower().endswith(IMAGE_SUFFIXES))
    return [Location(folder.filesystem, path) for path in images]


def _spread(files: list[Location], count: int) -> list[Location]:
    count = min(count, len(files))
    return [files[index * len(files) // count] for index in range(count)]


def _keep(recipe: Recipe, folder: Path, files: list[Path]) -> None:
    tracker = Tracker.start(
        RunOpening(
            recipe.tracking,
            f"{recipe.name}-inspection",
            folder / ".mlflow.jsonl",
            params=trained_params(recipe),
            tags={"vit_ray.kind": "inspection"},
        )
    )
    for file in files:
        tracker.log.artifact(file, "inspection")
    tracker.finish()
    print(f"MLflow page: {tracker.hint}")


def _inspect_of(recipe: Recipe) -> InspectConfig:
    hint = "inspect.images, such as inspect='{images: pictures/}'"
    return require(recipe.inspect, "inspect", hint)
