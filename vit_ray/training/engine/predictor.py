"""A model for evaluation: its weights alone, without masters, moments, averages and gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from vit_ray.config.training_sections import TrainConfig
from vit_ray.deepspeed_internals import compile_backend
from vit_ray.training.compiling import compile_model


class Predictor:
    """The weights on this worker's device, in the recipe's precision."""

    average = None

    def __init__(self, model: nn.Module, train: TrainConfig, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        self._model: Any = getattr(model, "model", model).to(device, self.dtype).eval()
        if train.compiles(device.type == "cuda"):
            compile_model(self._model, compile_backend(), may_fail=train.compile == "auto")

    def predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Head inputs (B, D) and logits (B, K) in fp32."""
        return predicted(self._model, self._model.head, images)


@torch.no_grad()
def predicted(model: Any, head: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """What `head` gets (B, D) and `model` returns (B, K), in fp32."""
    captured: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    try:
        logits = model(images)
    finally:
        hook.remove()
    return captured[0].float(), logits.float()
