"""The export job: weights of a run as a file that other programs read."""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

from torch import nn

from vit_ray.commands.trained_model import load_trained_model
from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import ExportConfig
from vit_ray.models.weights.files import check_suffix
from vit_ray.models.weights.load_save import save_weights
from vit_ray.models.weights.state_dicts import LoadReport
from vit_ray.storage import locate


def export(recipe: Recipe) -> int:
    """Write `export.path`, and print what was loaded and where it went. Needs no GPU.

    Raises:
        ValueError: nothing to export is given, it does not fit the model, its head does not, or
            the layout has no names for it.
    """
    config = _export_of(recipe)
    check_suffix(Path(config.path), config.layout)
    model, report = load_trained_model(recipe, config.averaged)
    print(report)
    _check_head(report)
    _write(model, config)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {config.path}: {count:,} parameters, layout {config.layout}")
    return 0


def _write(model: nn.Module, config: ExportConfig) -> None:
    target = locate(config.path)
    if target.is_local:
        save_weights(model, target.path, config.layout)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PurePosixPath(target.path).name
        save_weights(model, copy, config.layout)
        for file in sorted(copy.iterdir()) if copy.is_dir() else [copy]:
            place = target if file == copy else target.child(file.name)
            place.write(file.read_bytes())


def _check_head(report: LoadReport) -> None:
    """A head that was left out stood behind other layers: a zero one is not an export of it.

    Raises:
        ValueError: the source has a head, and the model did not take it.
    """
    if not ("head.weight" in report.new and "head.weight" in report.ignored):
        return
    if "class_token.token" in report.ignored:
        how, change = "on the class token", "pool=cls"
    elif "representation.weight" in report.ignored:
        how, change = "behind a representation layer", "representation=true"
    else:
        how, change = "without a representation layer", "representation=false"
    raise ValueError(
        f"the head of {report.source} was trained {how}, and the recipe's model is built "
        f"otherwise; set model.{change} to export the trained head"
    )


def _export_of(recipe: Recipe) -> ExportConfig:
    hint = "export.path and export.layout, such as export='{path: model.npz, layout: jax}'"
    return require(recipe.export, "export", hint)
