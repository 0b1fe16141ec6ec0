"""Sizes of a model's activations by layer, which show where a value stops being finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def activation_sizes(model: nn.Module, predict: Callable[[], object]) -> dict[str, float]:
    """Root mean square of each layer's output, the largest of the images of `predict`.

    The layers are the model's blocks and its modules outside of them, in the order of the forward
    pass; infinite where an output is not finite.
    """
    sizes: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                size = output.float().flatten(1).square().mean(1).sqrt().amax()
                largest = float(torch.nan_to_num(size, nan=math.inf, posinf=math.inf))
                sizes[name] = max(sizes.get(name, 0.0), largest)

        return hook

    lists = (nn.ModuleList, nn.Sequential)
    hooks = []
    for name, layer in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        is_outside = parent is model or isinstance(parent, lists)
        if name and is_outside and not isinstance(layer, lists):
            hooks.append(layer.register_forward_hook(watch(name)))
    try:
        # Hooks are not called by code that torch.compile has made.
        with torch.compiler.set_stance("force_eager"):
            predict()
    finally:
        for hook in hooks:
            hook.remove()
    return sizes
