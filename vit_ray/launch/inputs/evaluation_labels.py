"""The right answers of an evaluation, from the recipe's `benchmark` section and its files."""

import json
import logging
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from vit_ray.config import Recipe, require
from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest
from vit_ray.data.shards import all_first_labels, keys
from vit_ray.evaluation.ground_truth import (
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

_LABEL_FILE = "benchmark.label_file"


def answers_of(recipe: Recipe, eval_set: Manifest, model_set: Manifest) -> Answers:
    """What is right for the images of a test set.

    Args:
        model_set: whose classes the model has where the recipe does not name them.

    Raises:
        ValueError: a file is missing, not as published, or not of this test set.
    """
    config = recipe.benchmark
    classes = _model_classes(config.model_classes, model_set.classes, recipe.init_from)
    match config.kind:
        case "imagenet_real":
            file = locate(require(config.label_file, _LABEL_FILE, REAL_FILE))
            try:
                published = json.loads(_text(file, REAL_FILE, _LABEL_FILE))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file.uri} is not JSON ({error}); give {REAL_FILE}") from None
            lists = real_lists(published, eval_set.num_images, eval_set.num_classes, file.uri)
            own = all_first_labels(eval_set.path)
            names = [key for some in keys(eval_set) for key in some]
            return real_answers(lists, names, own, eval_set.classes, classes, file.uri)
        case "imagenet_v2":
            return numbered_answers(eval_set.classes, classes)
        case "objectnet":
            folder = locate(require(config.label_file, _LABEL_FILE, OBJECTNET_FOLDER))
            files = {
                name: _text(folder.child(name), OBJECTNET_FOLDER, _LABEL_FILE)
                for name in OBJECTNET_FILES
            }
            return objectnet_answers(files, eval_set.classes, classes)
    if tuple(eval_set.classes) == classes:
        return Answers(classes, len(classes))
    if config.kind != "class_names" and sorted(eval_set.classes) != sorted(classes):
        raise ValueError(
            f"data.eval: {eval_set.path} has {eval_set.num_classes} classes and the model has "
            f"{len(classes)}, and they are not the same; name the model's in "
            "benchmark.model_classes, and where the set has only some of them, give "
            "benchmark.kind=class_names"
        )
    return named_answers(eval_set.classes, classes)


def num_answered(answers: Answers, eval_set: Manifest) -> int:
    """Images of a test set with a right answer; those of ReaL and ObjectNet have some without."""
    labels_n1 = all_first_labels(eval_set.path)[:, None]
    answers_nl = answers.of_batch(labels_n1, np.arange(len(labels_n1)))
    return int((answers_nl >= 0).any(axis=1).sum())


def _model_classes(
    path: str | None, classes: Sequence[str], weights: str | None
) -> tuple[str, ...]:
    """The model's classes in the order of its outputs.

    Without `path`, the order of a published head where that names exactly these classes.
    """
    if path is not None:
        suffix = PurePosixPath(path).suffix
        if suffix not in (".txt", ".json"):
            return tuple(open_dataset(path).classes)
        what = "a list of the model's classes, such as LOC_synset_mapping.txt of ImageNet"
        text = _text(locate(path), what, "benchmark.model_classes")
        return parse_classes(text, suffix, f"benchmark.model_classes={path!r}")
    if weights is None:
        return tuple(classes)
    from vit_ray.checkpoints.init_weights import published_classes

    published = published_classes(weights)
    if published is None or sorted(published) == sorted(classes):
        return published or tuple(classes)
    logger.warning(
        "init_from: its folder names its %d classes otherwise than the data set (%r, not %r): its "
        "outputs are taken to be in the order of the data set; else name them in "
        "benchmark.model_classes",
        len(published),
        published[0],
        classes[0],
    )
    return tuple(classes)


def _text(file: Location, what: str, key: str) -> str:
    if not file.exists():
        raise ValueError(f"{key}: there is no file {file.uri}; give {what}")
    try:
        return file.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {file.uri} is no text ({error}); give {what}") from None
