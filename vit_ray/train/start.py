"""Weights to start from: another run's checkpoint, or an exported or published file."""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

from torch import nn

from vit_ray.models.weights import LoadReport, NewHead, fit_state_dict, load_weights
from vit_ray.storage import locate
from vit_ray.train.checkpoint import find_weights

WEIGHT_FILES = (".npz", ".safetensors")


def initialize_weights(
    model: nn.Module, path: str, *, new_head: NewHead, averaged: bool | None = None
) -> LoadReport:
    """Load weights, positions resized to the model's resolution; tells what became of each tensor.

    Args:
        path: run folder, checkpoint folder, or a `.npz` or `.safetensors` file; local or `s3://`.
        new_head: True keeps the model's fresh head and drops the saved one (fine-tuning), False
            demands the saved one, "auto" takes it if it fits.
        averaged: take the averaged weights of a checkpoint; None = if it has any.

    Raises:
        ValueError: there is nothing to load at `path`, or it does not fit the model.
    """
    if path.endswith(WEIGHT_FILES):
        return _load_file(model, path, new_head)
    checkpoint = find_weights(path)
    takes_average = checkpoint.has_average() if averaged is None else averaged
    weights = checkpoint.weights(averaged=takes_average)
    return fit_state_dict(model, weights, new_head=new_head)


def _load_file(model: nn.Module, path: str, new_head: NewHead) -> LoadReport:
    location = locate(path)
    if location.is_local:
        return load_weights(model, location.path, new_head=new_head)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PurePosixPath(location.path).name
        copy.write_bytes(location.read())
        return load_weights(model, copy, new_head=new_head)
