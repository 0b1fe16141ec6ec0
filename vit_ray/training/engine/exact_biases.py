"""Biases of heads that compute in bf16, kept and added in fp32."""

import torch
import torch.distributed as dist
from torch import nn

from vit_ray.config.training_sections import TrainConfig
from vit_ray.models.layers import Head
from vit_ray.training.engine.fragments import Fragment, Parts, weights_by_name


class ExactBiases:
    """Gives heads the fp32 values of their biases: at -10 a bf16 bias is off by up to 0.03."""

    def __init__(
        self,
        model: nn.Module,
        names: dict[nn.Parameter, str],
        owned: list[Fragment],
        device: torch.device,
        train: TrainConfig,
    ) -> None:
        """
        Args:
            names: of the trained parameters.
            owned: this rank's fragments.
        """
        self._heads = [
            (head, names[head.bias])
            for head in model.modules()
            if isinstance(head, Head) and head.bias in names and train.precision == "bf16"
        ]
        self._device = device
        heads = {name for _, name in self._heads}
        self._owned = [fragment for fragment in owned if fragment.name in heads]

    @torch.no_grad()
    def show(self, values: Parts | None = None) -> None:
        """Have heads add these biases, by default the masters; all ranks call it."""
        if values is None:
            values = weights_by_name(self._owned, [fragment.weight for fragment in self._owned])
        for head, name in self._heads:
            exact = torch.zeros(head.out_features, device=self._device)
            for start, part in values.get(name, []):
                exact.narrow(0, start, part.numel()).copy_(part)
            dist.all_reduce(exact)
            if head.exact_bias is None:
                head.exact_bias = exact
            else:
                head.exact_bias.copy_(exact)  # where compiled code reads it
