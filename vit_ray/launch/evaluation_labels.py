"""The right answers of an evaluation, from the recipe's `benchmark` section and its files."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import BenchmarkConfig
from vit_ray.data import open_dataset
from vit_ray.data.format.labels import all_first_labels, keys
from vit_ray.data.format.manifest import Manifest
from vit_ray.evaluate.ground_truth import (
    OBJECTNET_FILES,
    OBJECTNET_FOLDER,
    REAL_FILE,
    Answers,
    named_answers,
    numbered_answers,
    objectnet_answers,
    parse_classes,
    real_answers,
    real_lists,
)
from vit_ray.storage import Location, locate

logger = logging.getLogger(__name__)


def answers_of(recipe: Recipe, eval_set: Manifest, model_set: Manifest) -> Answers:
    """What is right for the images of a test set.

    Args:
        model_set: whose classes the model has where the recipe does not name them.

    Raises:
        ValueError: a file is missing, not as published, or not of this test set.
    """
    config = recipe.benchmark
    classes = _model_classes(config, model_set, recipe.init_from)
    if config.kind == "imagenet_real":
        file = _published(config, REAL_FILE)
        lists = real_lists(_json(file), eval_set.num_images, eval_set.num_classes, file.uri)
        own = all_first_labels(eval_set.path)
        names = [key for some in keys(eval_set) for key in some]
        return real_answers(lists, names, own, eval_set.classes, classes, file.uri)
    if config.kind == "imagenet_v2":
        return numbered_answers(eval_set.classes, classes)
    if config.kind == "objectnet":
        folder = _published(config, OBJECTNET_FOLDER)
        files = {name: _text(folder.child(name), OBJECTNET_FOLDER) for name in OBJECTNET_FILES}
        return objectnet_answers(files, eval_set.classes, classes)
    if config.kind == "class_names":
        return named_answers(eval_set.classes, classes)
    if tuple(eval_set.classes) == classes:
        return Answers(classes, len(classes))
    _require_same_names(eval_set, classes)
    return named_answers(eval_set.classes, classes)  # in another order


def _require_same_names(eval_set: Manifest, classes: tuple[str, ...]) -> None:
    if sorted(eval_set.classes) != sorted(classes):
        raise ValueError(
            f"data.eval: {eval_set.path} has {eval_set.num_classes} classes and the model has "
            f"{len(classes)}, and they are not the same; name the model's in "
            "benchmark.model_classes, and where the set has only some of them, say "
            "benchmark.kind=class_names"
        )


def _model_classes(
    config: BenchmarkConfig, model_set: Manifest, weights: str | None
) -> tuple[str, ...]:
    path = config.model_classes
    if path is None:
        return _told_by_weights(weights, model_set.classes) or tuple(model_set.classes)
    suffix = PurePosixPath(path).suffix
    if suffix in (".txt", ".json"):
        told = "a list of the model's classes, such as LOC_synset_mapping.txt of ImageNet"
        file = locate(path)
        text = _text(file, told, "benchmark.model_classes")
        return parse_classes(text, suffix, f"benchmark.model_classes={path!r}")
    return tuple(open_dataset(path).classes)


def _told_by_weights(weights: str | None, classes: Sequence[str]) -> tuple[str, ...] | None:
    """The order of a published head where it names exactly the classes of the set."""
    if weights is None:
        return None
    from vit_ray.checkpoints.weight_files import (
        published_classes,  # with torch, which takes seconds
    )

    told = published_classes(weights)
    if told is None or sorted(told) == sorted(classes):
        return told
    logger.warning(
        "init_from: its folder names its %d classes otherwise than the data set (%r, not %r): its "
        "outputs are taken to be in the order of the data set; else name them in "
        "benchmark.model_classes",
        len(told),
        told[0],
        classes[0],
    )
    return None


def _published(config: BenchmarkConfig, what: str) -> Location:
    return locate(require(config.label_file, "benchmark.label_file", what))


def _text(file: Location, what: str, key: str = "benchmark.label_file") -> str:
    if not file.exists():
        raise ValueError(f"{key}: there is no file {file.uri}; give {what}")
    try:
        return file.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {file.uri} is no text ({error}); give {what}") from None


def _json(file: Location) -> Any:
    try:
        return json.loads(_text(file, REAL_FILE))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file.uri} is not JSON ({error}); give {REAL_FILE}") from None
