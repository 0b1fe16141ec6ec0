"""The export job: weights of a run as a file that other programs read."""

from __future__ import annotations

from vit_ray.config import ExportConfig, Recipe
from vit_ray.launch.trained_model import load_trained_model
from vit_ray.models.weights import save_weights


def export(recipe: Recipe) -> int:
    """Write `export.path`, and print what was loaded and where it went. Needs no GPU.

    Raises:
        ValueError: nothing to export is given, it does not fit the model, or the layout has no
            names for it.
    """
    config = _export_of(recipe)
    model, report = load_trained_model(recipe, config.averaged)
    print(report)
    save_weights(model, config.path, config.layout)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {config.path}: {count:,} parameters, layout {config.layout}")
    return 0


def _export_of(recipe: Recipe) -> ExportConfig:
    if recipe.export is None:
        raise ValueError(
            "export is not set; give export.path and export.layout, such as "
            "export='{path: model.npz, layout: jax}'"
        )
    return recipe.export
