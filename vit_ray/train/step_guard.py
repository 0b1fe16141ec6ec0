"""Steps whose gradient is not finite move nothing, and the host need not wait to know it.

DeepSpeed 0.19.8 has the host ask for the gradient's norm in the middle of every step, while the
device stands idle. torch's fused optimizers take the answer on the device, as a number
(`found_inf`, made for gradient scaling): 1 leaves weights, moments and step counts as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StepGuard:
    """Norm and refusal of the last step of a fused optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer: Any = optimizer
        self.norm = torch.zeros((), device=device)
        self.refused = torch.zeros((), device=device)
        """1 if the gradient was not finite, else 0."""
        self.refused_steps = torch.zeros((), device=device)
        """Of all steps so far."""

    def note_norm(self, norm: Tensor) -> None:
        """Before the optimizer steps: the norm before clipping, the same on all ranks."""
        self.norm = norm
        self.refused = self._optimizer.found_inf = (~torch.isfinite(norm)).float()
        self.refused_steps += self.refused
