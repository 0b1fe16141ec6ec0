"""Parts that recipes name, so that a fault comes at a known step."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

_passes = 0


def hold(step: int, metrics: Mapping[str, float]) -> None:
    """A callback: from step 12 on, wait while the file `hold` in `NET_HOLD` exists."""
    folder = Path(os.environ["NET_HOLD"])
    if step >= 12 and (folder / "hold").exists():
        (folder / "held").write_text(str(os.getpid()))
        while (folder / "hold").exists():
            time.sleep(0.02)


def not_finite_once(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss: cross-entropy, but for the 41st pass of a process in training."""
    global _passes
    losses = torch.nn.functional.cross_entropy(logits, labels[:, 0], reduction="none")
    if torch.is_grad_enabled():
        _passes += 1
    return losses * torch.nan if _passes == 41 and torch.is_grad_enabled() else losses
