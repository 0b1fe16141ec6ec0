"""The export command: a run's weights as files for other programs, and on the hub."""

import json
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi

from vit_ray.checkpoints.init_weights import SCHEME
from vit_ray.commands.trained_model import load_trained_model
from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import ExportConfig
from vit_ray.config.keys import used_sections
from vit_ray.data.augment import augmentation_of
from vit_ray.data.boxes import Augmentation
from vit_ray.launch.model_card import image_processor, model_card
from vit_ray.launch.trained_model import class_names, training_set
from vit_ray.models.fitting import LoadReport
from vit_ray.models.published import FOLDER_CONFIG, FOLDER_PREPROCESSOR, USE, weights_file
from vit_ray.models.weights import check_suffix, save_weights
from vit_ray.storage import absolute, locate

_CARD = "README.md"


def export(recipe: Recipe) -> int:
    """Write `export.path`, and print what was loaded and where it was written. Needs no GPU.

    A path without a suffix is a folder with class names, image processor and a model card next to
    the weights; it can be pushed to the hub.

    Raises:
        ValueError: nothing to export is given, or to its own path; it or its head does not fit the
            model, or the layout has no names for it; or the hub refuses the upload.
    """
    config = require(recipe.export, "export", "export.path and export.layout")
    target, is_folder = locate(config.path), not PurePosixPath(config.path).suffix
    check_suffix(Path(config.path), config.layout)
    if config.push and not is_folder:
        raise ValueError(
            f"export.push={config.push} needs a folder: give export.path without a suffix, not "
            f"{config.path}"
        )
    if recipe.init_from is not None and absolute(recipe.init_from) == absolute(config.path):
        raise ValueError(
            f"export.path={config.path} is init_from itself, which would be overwritten; choose "
            "another path"
        )
    model, report, position = load_trained_model(recipe, config.averaged)
    print(report)
    _check_head(report)
    source = str(recipe.init_from)
    count = sum(parameter.numel() for parameter in model.parameters())
    num_classes = int(model.get_parameter("head.bias").numel())
    classes = class_names(source, training_set(source, position, recipe.data.train), num_classes)
    with tempfile.TemporaryDirectory() as folder:
        # At its final place from the start if that is local: weights may not fit elsewhere.
        copy = Path(target.path if target.is_local else f"{folder}/{target.path.split('/')[-1]}")
        save_weights(model, copy, config.layout, classes)
        files = [copy]
        if is_folder:
            weights = weights_file(config.layout)
            crop = augmentation_of(recipe.model, recipe.data.eval_augment)
            content = json.dumps(image_processor(crop), indent=2) + "\n"
            (copy / FOLDER_PREPROCESSOR).write_text(content)
            recorded = recipe.recorded()
            trained = position.recipe if position else {"train": {"precision": "fp32"}}
            use = used_sections({**trained, "model": recorded["model"], "data": recorded["data"]})
            _complete_config(copy / FOLDER_CONFIG, crop, use)
            if (card := copy / _CARD).exists() or target.child(_CARD).exists():
                print(f"kept {target.child(_CARD).uri}, which exists; delete it to get a new card")
            else:
                made = model_card(recipe, config, (count, num_classes), classes, position, "")
                card.write_text(str(made))
            names = (weights, FOLDER_CONFIG, FOLDER_PREPROCESSOR, _CARD)
            files = [copy / name for name in names if (copy / name).exists()]
        if not target.is_local:
            for file in files:
                place = target.child(file.name) if is_folder else target
                place.write(file.read_bytes())
        print(f"wrote {config.path}: {count:,} parameters, layout {config.layout}")
        if not classes:
            print("class names are not known; set data.train to the run's data set")
        if config.push:
            print(f"pushed {_push(config, copy, [file.name for file in files])}")
    return 0


def _complete_config(file: Path, crop: Augmentation, use: dict[str, Any]) -> None:
    """Write how the model is used; timm gives the crop as a share of a side."""
    settings = {**json.loads(file.read_text()), USE: use}
    if "pretrained_cfg" in settings:
        is_centre = crop.kind == "center_crop"
        share = max(crop.shape[:2]) / crop.resize if is_centre else 1.0
        how = {"crop_pct": share, "crop_mode": "center" if is_centre else "squash"}
        settings["pretrained_cfg"].update(how, interpolation=crop.interpolation)
    file.write_text(json.dumps(settings, indent=2) + "\n")


def _push(config: ExportConfig, folder: Path, names: list[str]) -> str:
    """Upload the files to the repository, which is created if it does not exist; returns its
    address.

    Raises:
        ValueError: the hub refuses the upload, or cannot be reached.
    """
    assert config.push is not None
    api, repository = HfApi(), config.push.removeprefix(SCHEME)
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
            f"export.push={config.push!r}: the hub did not accept the files "
            f"({type(error).__name__}: {error}); they are in {config.path}: set HF_TOKEN to a "
            f"token that may write there, and run `hf upload {repository} {config.path}`"
        ) from error
    return str(commit)


def _check_head(report: LoadReport) -> None:
    """A head that was left out came after other layers; exporting a zero head would be wrong.

    Raises:
        ValueError: the source has a head that the model did not load.
    """
    if not ("head.weight" in report.new and "head.weight" in report.ignored):
        return
    has_layer = "representation.weight" in report.ignored
    own = "pool=cls" if "class_token.token" in report.ignored else f"representation={has_layer}"
    raise ValueError(
        f"the head of {report.source} was trained on other layers than the recipe's model has; "
        f"set model.{own.lower()} to export the trained head"
    )
