"""Commands for a trained model on the driver's CPU, without Ray: export and inspect_model."""

import json
import logging
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch import nn

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.init_weights import SCHEME, open_weights
from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import InspectConfig
from vit_ray.config.recipe import used_sections
from vit_ray.config.schema import errors_of
from vit_ray.data.boxes import Augmentation, evaluation_augmentation
from vit_ray.data.crops import crop_of
from vit_ray.data.images import IMAGE_SUFFIXES, BadImageError, UInt8Array, is_image_name
from vit_ray.launch.trained_model import class_names, training_set
from vit_ray.models import build_model
from vit_ray.models.fitting import LoadReport
from vit_ray.models.published import FOLDER_CONFIG, FOLDER_PREPROCESSOR, USE, weights_file
from vit_ray.models.weights import save_weights
from vit_ray.outcomes import KIND
from vit_ray.storage import Location, absolute, locate
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker

_CARD = "README.md"

logger = logging.getLogger(__name__)


def load_trained_model(
    recipe: Recipe, averaged: bool | None = None
) -> tuple[nn.Module, LoadReport, Position | None]:
    """The recipe's model with the weights of `init_from` and their number of classes.

    Args:
        recipe: its `model`, and `init_from`, as `open_weights` reads it.
        averaged: take the averaged weights of a checkpoint; None = if it has any.

    Returns:
        The model, what was loaded, and the position of the checkpoint (None for a weight file).

    Raises:
        ValueError: no weights are given, or they are incomplete, or do not fit the model.
    """
    source = require(recipe.init_from, "init_from", "the run, checkpoint or weight file to read")
    config = recipe.model
    with errors_of("init_from"):
        weights = open_weights(source, averaged)
    # Weights without a head (trained without labels, or published so) get a zero head of one class.
    classes = weights.num_classes or 1
    model = build_model(config.name, classes, config.image_size, **config.options()).eval()
    with errors_of("init_from"):
        return model, weights.load_into(model, "auto"), weights.position


def export(recipe: Recipe) -> None:
    """Write the weights to `export.path`, and print what was loaded and written. Needs no GPU.

    A path without a suffix is a folder with weights, class names, image processor and model card,
    which can be pushed to the hub.

    Raises:
        ValueError: no weights are given; they or their head do not fit the model, or the layout
            has no names for them; or the hub refuses the upload.
    """
    from vit_ray.launch.model_card import image_processor, model_card

    config = require(recipe.export, "export", "export.path and export.layout")
    target, is_folder = locate(config.path), not PurePosixPath(config.path).suffix
    if absolute(config.path) == absolute(str(recipe.init_from)):
        raise ValueError(
            f"export.path={config.path} is init_from itself, which would be overwritten; choose "
            "another path"
        )
    if config.push and not is_folder:
        raise ValueError(
            f"export.push={config.push} needs a folder: give export.path without a suffix, not "
            f"{config.path}"
        )
    model, report, position = load_trained_model(recipe, config.averaged)
    print(report)
    _check_head(report)
    source = str(recipe.init_from)
    count = sum(parameter.numel() for parameter in model.parameters())
    num_classes = int(model.get_parameter("head.bias").numel())
    classes = class_names(source, training_set(source, position, recipe.data.train), num_classes)
    with tempfile.TemporaryDirectory() as folder:
        # A local export is written in place: a temporary folder's disk may be too small.
        copy = Path(target.path if target.is_local else f"{folder}/{target.path.split('/')[-1]}")
        save_weights(model, copy, config.layout, classes)
        files = [copy]
        if is_folder:
            crop = evaluation_augmentation(recipe.model, recipe.data.eval_augment)
            (copy / FOLDER_PREPROCESSOR).write_text(
                json.dumps(image_processor(crop), indent=2) + "\n"
            )
            recorded = recipe.recorded()
            trained = position.recipe if position else {"train": {"precision": "fp32"}}
            use = used_sections({**trained, "model": recorded["model"], "data": recorded["data"]})
            _complete_config(copy / FOLDER_CONFIG, crop, use)
            if (copy / _CARD).exists() or target.child(_CARD).exists():
                print(f"kept {target.child(_CARD).uri}, which exists; delete it to get a new card")
            else:
                sizes = count, num_classes
                card = model_card(recipe, config, sizes, classes, position, config.layout)
                (copy / _CARD).write_text(card)
            written = (weights_file(config.layout), FOLDER_CONFIG, FOLDER_PREPROCESSOR, _CARD)
            files = [copy / name for name in written if (copy / name).exists()]
        if not target.is_local:
            for file in files:
                (target.child(file.name) if is_folder else target).write(file.read_bytes())
        print(f"wrote {config.path}: {count:,} parameters, layout {config.layout}")
        if not classes:
            print("class names are not known; set data.train to the run's data set")
        if config.push:
            names = [file.name for file in files]
            print(f"pushed {_push(config.push, config.path, copy, names)}")


def _check_head(report: LoadReport) -> None:
    """
    Raises:
        ValueError: the source has a head that the model did not load.
    """
    if "head.weight" in report.new and "head.weight" in report.ignored:
        # Without the trained head, which follows other layers, a zero head would be exported.
        has_layer = str("representation.weight" in report.ignored).lower()
        has_token = "class_token.token" in report.ignored
        raise ValueError(
            f"the head of {report.source} was trained on other layers than the recipe's model has; "
            f"set model.{'pool=cls' if has_token else f'representation={has_layer}'} to export the "
            "trained head"
        )


def _complete_config(file: Path, crop: Augmentation, use: dict[str, Any]) -> None:
    """Add how the model is used: our sections, and timm's crop as a fraction of a side."""
    settings = {**json.loads(file.read_text()), USE: use}
    if "pretrained_cfg" in settings:
        is_centre = crop.kind == "center_crop"
        settings["pretrained_cfg"].update(
            crop_pct=max(crop.shape[:2]) / crop.resize if is_centre else 1.0,
            crop_mode="center" if is_centre else "squash",
            interpolation=crop.interpolation,
        )
    file.write_text(json.dumps(settings, indent=2) + "\n")


def _push(address: str, path: str, folder: Path, names: list[str]) -> str:
    """Upload the files to the repository, which is created if it is missing.

    Returns:
        The address of the commit.

    Raises:
        ValueError: the hub refuses the upload, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api, repository = HfApi(), address.removeprefix(SCHEME)
    try:
        api.create_repo(repository, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=names,
            commit_message="Export from vit_ray",
        )
    except Exception as error:  # of an HTTP library that changes with the hub's versions
        raise ValueError(
            f"export.push={address!r}: the hub did not accept the files "
            f"({type(error).__name__}: {error}); they are in {path}: set HF_TOKEN to a "
            f"token that may write there, and run `hf upload {repository} {path}`"
        ) from error
    return str(commit)


def inspect(recipe: Recipe) -> None:
    """Draw the figures, print their paths, and keep them in a separate MLflow run.

    Raises:
        ValueError: weights or images are not given, missing or unreadable; or `inspect.path` is no
            local folder.
    """
    config = require(recipe.inspect, "inspect", "inspect.images")
    images = read_images(recipe, config)
    target = locate(config.path)
    if not target.is_local:
        raise ValueError(
            f"inspect.path={config.path!r} is remote; give a local folder: MLflow keeps the figures"
        )
    target.refuse_file_in_its_place("inspect.path")
    # Wrong keys are reported first: Ray, matplotlib and scikit-learn take seconds.
    from vit_ray.commands.trainings import print_link
    from vit_ray.evaluation.inspection import inspect_model
    from vit_ray.launch.run_record import trained_params

    model, report, _ = load_trained_model(recipe)
    print(report)
    folder = Path(target.path)
    folder.mkdir(parents=True, exist_ok=True)
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


def read_images(recipe: Recipe, config: InspectConfig) -> UInt8Array:
    """Evaluation crops of images in the folder: uint8 (B, H, W, 3).

    The images are equally spaced in the list sorted by name, so that all class folders are covered.

    Raises:
        ValueError: the folder holds no image that can be decoded.
    """
    augmentation = evaluation_augmentation(recipe.model, recipe.data.eval_augment)
    folder, crops = locate(config.images), []
    paths = sorted(info.path for info in folder.list_files() if is_image_name(info.path))
    count = min(config.num_images, len(paths))
    for index in range(count):
        file = Location(folder.protocol, paths[index * len(paths) // count])
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
