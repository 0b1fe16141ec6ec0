"""Weights to start from: another run's checkpoint, or an exported or published file."""

from __future__ import annotations

from torch import nn

from vit_ray.models.weights import LoadReport, fit_state_dict, load_weights
from vit_ray.train.checkpoint import find_weights

WEIGHT_FILES = (".npz", ".safetensors")


def initialize_weights(
    model: nn.Module, path: str, *, is_new_head: bool, averaged: bool | None = None
) -> LoadReport:
    """Load weights, positions resized to the model's resolution; tells what became of each tensor.

    Args:
        path: run folder, checkpoint folder, or a `.npz` or `.safetensors` file.
        is_new_head: keep the model's fresh head and drop the saved one (fine-tuning).
        averaged: take the averaged weights of a checkpoint; None = if it has any.

    Raises:
        ValueError: there is nothing to load at `path`, or it does not fit the model.
    """
    if path.endswith(WEIGHT_FILES):
        return load_weights(model, path)
    checkpoint = find_weights(path)
    takes_average = checkpoint.has_average() if averaged is None else averaged
    weights = checkpoint.weights(averaged=takes_average)
    return fit_state_dict(model, weights, new_head=is_new_head)
