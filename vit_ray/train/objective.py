"""Losses: from a batch of uint8 images and padded label lists to one fp32 number.

Labels are int (B, L), padded with -1; L is 1 for single-label data sets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_ray.config.training import TrainConfig


def normalize(images: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 (B, H, W, 3) in [0, 255] to `dtype` (B, 3, H, W) in [-1, 1], on the images' device."""
    scaled = images.to(torch.float32).mul_(2.0 / 255.0).sub_(1.0)
    return scaled.permute(0, 3, 1, 2).to(dtype)


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Padded label lists (B, L) to float32 (B, K) of zeros and ones."""
    padded = torch.where(labels < 0, num_classes, labels)
    hot = torch.zeros(len(labels), num_classes + 1, device=labels.device)
    return hot.scatter_(1, padded, 1.0)[:, :num_classes]


def classification_loss(logits: Tensor, labels: Tensor, config: TrainConfig) -> Tensor:
    """Per-image loss, float32 (B,); 0 with softmax for an image without any label.

    Softmax: cross-entropy against the labels, which share the probability evenly, with label
    smoothing. Sigmoid: binary cross-entropies summed over classes (big_vision `sigmoid_xent`).
    """
    logits = logits.float()
    if config.loss == "sigmoid":
        targets = multi_hot(labels, logits.shape[1])
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    if labels.shape[1] == 1:
        return F.cross_entropy(
            logits,
            labels[:, 0],
            reduction="none",
            ignore_index=-1,
            label_smoothing=config.label_smoothing,
        )
    targets = multi_hot(labels, logits.shape[1])
    targets = targets / targets.sum(dim=1, keepdim=True).clamp(min=1.0)
    return F.cross_entropy(
        logits, targets, reduction="none", label_smoothing=config.label_smoothing
    )
