"""The inspection command: figures of a trained model for a folder of images."""

import logging
from pathlib import Path

import numpy as np

from vit_ray.commands.train import print_link
from vit_ray.commands.trained_model import load_trained_model
from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import InspectConfig
from vit_ray.config.keys import KIND
from vit_ray.data.augment import augmentation_of
from vit_ray.data.crops import crop_of
from vit_ray.data.images import IMAGE_SUFFIXES, BadImageError, UInt8Array, is_image_name
from vit_ray.evaluation.inspection import inspect_model
from vit_ray.launch.run_record import trained_params
from vit_ray.storage import Location, locate
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


def inspect(recipe: Recipe) -> int:
    """Draw the figures, print where they are, and keep them in a separate MLflow run.

    Raises:
        ValueError: weights or images are not given, missing or unreadable; or `inspect.path` cannot
            be a local folder.
    """
    config = require(recipe.inspect, "inspect", "inspect.images")
    images = read_images(recipe, config)
    place = locate(config.path)
    if not place.is_local:
        raise ValueError(
            f"inspect.path={config.path!r} is remote; give a local folder: MLflow keeps the figures"
        )
    place.refuse_file_in_its_place("inspect.path")
    model, report, _ = load_trained_model(recipe)
    print(report)
    folder = Path(place.path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"inspect.path={config.path!r} cannot be created: {error}; give another local folder"
        ) from None
    opening = RunOpening(
        recipe.tracking,
        f"{recipe.name}-inspection",
        folder / ".mlflow.jsonl",
        params=trained_params(recipe),
        tags={KIND: "inspection"},
    )
    results = inspect_model(model, images, folder)
    tracker = Tracker.begin(opening)
    for name, result in results.items():
        print(f"{name}: {result}" if isinstance(result, Path) else f"{name}: none; {result}")
        if isinstance(result, Path):
            tracker.log.artifact(result, "inspection")
    tracker.finish()
    print_link(tracker.hint, tracker.run_id)
    return 0


def read_images(recipe: Recipe, config: InspectConfig) -> UInt8Array:
    """Images of the folder with the evaluation crop: uint8 (B, H, W, 3).

    Taken at equal distances from the list by name, so that every class folder is covered.

    Raises:
        ValueError: the folder holds no image that can be decoded.
    """
    augmentation = augmentation_of(recipe.model, recipe.data.eval_augment)
    folder, crops = locate(config.images), []
    images = sorted(info.path for info in folder.list_files() if is_image_name(info.path))
    count = min(config.num_images, len(images))
    for index in range(count):
        file = Location(folder.protocol, images[index * len(images) // count])
        try:
            crops.append(crop_of(file.read(), augmentation, (0, 0, 0)))
        except BadImageError as error:
            logger.warning("%s is left out: %s", file.uri, error)
    if not crops:
        raise ValueError(
            f"inspect.images={config.images!r} holds no readable image "
            f"({', '.join(sorted(IMAGE_SUFFIXES))}); give a folder of images"
        )
    return np.stack(crops)
