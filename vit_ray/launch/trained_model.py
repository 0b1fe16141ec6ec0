"""A trained model on the CPU of the driver, for jobs that read weights: no Ray, no DeepSpeed."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vit_ray.config import Recipe
from vit_ray.models import build_model
from vit_ray.models.weights import LoadReport, fit_state_dict, load_weights, num_classes_in
from vit_ray.train.checkpoint import find_weights
from vit_ray.train.start import WEIGHT_FILES, grid_of

# A model that was pre-trained without labels, or published without a head, has no classes; its
# fresh head of one class is zero.
_NO_CLASSES = 1


def load_trained_model(recipe: Recipe, averaged: bool | None) -> tuple[nn.Module, LoadReport]:
    """The recipe's model with the weights of `init_from`, as many classes as these have.

    Args:
        recipe: `model` and `init_from` (a run, a checkpoint, or a weight file or folder).
        averaged: take the averaged weights of a checkpoint; None = if it has any.

    Raises:
        ValueError: nothing is given, or it is not whole, or it does not fit the model.
    """
    path = recipe.init_from
    if path is None:
        raise ValueError("init_from is not set; give the run, checkpoint or weight file to read")
    if path.endswith(WEIGHT_FILES) or (Path(path) / "model.safetensors").is_file():
        model = _build(recipe, num_classes_in(path))
        return model, load_weights(model, path)
    checkpoint = find_weights(path)
    head = checkpoint.position.shapes.get("head.bias")
    model = _build(recipe, head[0] if head else None)
    takes_average = checkpoint.has_average() if averaged is None else averaged
    weights = checkpoint.weights(averaged=takes_average)
    report = fit_state_dict(model, weights, source_grid=grid_of(checkpoint.position))
    kind = "averaged weights" if takes_average else "weights"
    report.source = f"{checkpoint.folder.path} ({kind} of step {checkpoint.position.step})"
    return model, report


def _build(recipe: Recipe, num_classes: int | None) -> nn.Module:
    config = recipe.model
    classes = num_classes or _NO_CLASSES
    return build_model(config.name, classes, config.image_size, **config.options()).eval()
