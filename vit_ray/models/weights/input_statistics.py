"""The input normalisation that published weights were trained with, folded into their first layer.

Our models take pixels in [-1, 1], as those of the paper and BiT do. timm and Hugging Face store in
a model's folder the mean and deviation by which its inputs were normalised; if these differ, the
first layer gets another kernel and bias that compute the same function from inputs in [-1, 1].
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vit_ray.models.vit import PatchEmbedding, VisionTransformer
from vit_ray.models.weights.folder_config import (
    FOLDER_CONFIG,
    FOLDER_INDEX,
    FOLDER_WEIGHTS,
    read_settings,
)
from vit_ray.models.weights.name_maps import Tensors

FOLDER_PREPROCESSOR: Final = "preprocessor_config.json"
_KERNEL, _BIAS = "embedding.projection.weight", "embedding.projection.bias"


@dataclass(frozen=True)
class InputStatistics:
    """For each channel, with pixels in [0, 1]: inputs are (pixel - mean) / std."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def is_ours(self) -> bool:
        """Whether inputs are in [-1, 1]."""
        return all(math.isclose(value, 0.5, abs_tol=1e-6) for value in (*self.mean, *self.std))

    def __str__(self) -> str:
        return f"mean {list(self.mean)} and deviation {list(self.std)}"


OURS: Final = InputStatistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def statistics_beside(path: Path) -> InputStatistics | None:
    """The statistics in the folder of a published model; None if there are none.

    Args:
        path: the folder, or the weight file in it.

    Raises:
        ValueError: they are not a mean and deviation of three channels, or not JSON.
    """
    if not path.is_dir() and path.name not in (FOLDER_WEIGHTS, FOLDER_INDEX):
        return None
    folder = path if path.is_dir() else path.parent
    timm = read_settings(folder / FOLDER_CONFIG)
    inner = timm.get("pretrained_cfg")
    timm = inner if isinstance(inner, dict) else timm
    hub = read_settings(folder / FOLDER_PREPROCESSOR)
    if hub.get("do_normalize") is False:
        return InputStatistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    for settings, names in ((hub, ("image_mean", "image_std")), (timm, ("mean", "std"))):
        if all(name in settings for name in names):
            mean, std = (_three(settings[name], name, folder) for name in names)
            return InputStatistics(mean, std)
    return None


def _three(values: Any, name: str, folder: Path) -> tuple[float, float, float]:
    numbers = values if isinstance(values, list) else []
    if len(numbers) != 3 or not all(isinstance(value, (int, float)) for value in numbers):
        raise ValueError(
            f"{folder}: {name}={values!r} is not a number for each of three channels; fetch the "
            "folder again"
        )
    if name.endswith("std") and not all(value > 0 for value in numbers):
        raise ValueError(f"{folder}: {name}={values!r} must be above zero")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def with_our_inputs(
    state: Tensors, model: nn.Module, statistics: InputStatistics, source: str
) -> Tensors:
    """Weights of the same function for inputs in [-1, 1].

    Args:
        state: with our own names.

    Raises:
        ValueError: the first layer pads its inputs, so there is no such kernel.
    """
    if statistics.is_ours:
        return state
    is_vit = isinstance(model, VisionTransformer) and isinstance(model.embedding, PatchEmbedding)
    if not is_vit or _KERNEL not in state or _BIAS not in state:
        raise ValueError(
            f"{source} takes inputs normalised by {statistics}; models here take pixels in [-1, 1] "
            "(0.5 and 0.5), and only a ViT on patches of the image can be converted to that"
        )
    if state[_KERNEL].is_meta:  # only values would change
        return state
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)
        for values in (statistics.mean, statistics.std)
    )
    kernel = state[_KERNEL].double()
    # An input of ours, x, is the pixel 0.5 x + 0.5.
    bias = state[_BIAS].double() + (kernel * (0.5 - mean) / std).sum(dim=(1, 2, 3))
    changed = {_KERNEL: kernel * (0.5 / std), _BIAS: bias}
    return {**state, **{name: t.to(state[name].dtype) for name, t in changed.items()}}
