"""The export job: weights of a run as a file that other programs read."""

from __future__ import annotations

from vit_ray.config import ExportConfig, Recipe
from vit_ray.launch.trained_model import load_trained_model
from vit_ray.models.weights import LoadReport, save_weights


def export(recipe: Recipe) -> int:
    """Write `export.path`, and print what was loaded and where it went. Needs no GPU.

    Raises:
        ValueError: nothing to export is given, it does not fit the model, its head does not, or
            the layout has no names for it.
    """
    config = _export_of(recipe)
    model, report = load_trained_model(recipe, config.averaged)
    print(report)
    _check_head(report)
    save_weights(model, config.path, config.layout)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {config.path}: {count:,} parameters, layout {config.layout}")
    return 0


def _check_head(report: LoadReport) -> None:
    """A head that was left out stood behind other layers: a zero one is not an export of it.

    Raises:
        ValueError: the source has a head, and the model did not take it.
    """
    if not ("head.weight" in report.new and "head.weight" in report.ignored):
        return
    has_layer = "representation.weight" in report.ignored
    raise ValueError(
        f"the head of {report.source} was trained {'behind' if has_layer else 'without'} a "
        f"representation layer, and model.representation={str(not has_layer).lower()} builds "
        f"another; set model.representation={str(has_layer).lower()} to export the trained head"
    )


def _export_of(recipe: Recipe) -> ExportConfig:
    if recipe.export is None:
        raise ValueError(
            "export is not set; give export.path and export.layout, such as "
            "export='{path: model.npz, layout: jax}'"
        )
    return recipe.export
