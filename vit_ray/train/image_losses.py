"""The losses of single images, kept on the device until a spike needs them.

Kept for the current step, the previous one, and a few ordinary steps for comparison.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_ORDINARY: Final = 8
"""Earlier steps of this attempt, each with the same chance to be kept (reservoir sampling); the
same ones on all ranks. A step of 4,096 images takes 48 KiB over all ranks together."""


class ImageLosses:
    """This rank's losses per image, by 0-based step; only `take` waits for the device."""

    def __init__(self, seed: int = 0) -> None:
        self._random, self._num_noted = np.random.default_rng(seed), 0
        self._ordinary: list[tuple[int, list[Tensor]]] = []
        self._before: tuple[int, list[Tensor]] = (-1, [])
        self._now: tuple[int, list[Tensor]] = (-1, [])

    def note(self, samples: Tensor, losses: Tensor, step: int) -> None:
        """Samples and losses of one pass, in the order of the global batch: int64 (b,) and (b,)."""
        if step != self._now[0]:
            passed = self._before
            self._before, self._now = self._now, (step, [])
            if passed[0] >= 0:
                self._num_noted += 1
                if len(self._ordinary) < NUM_ORDINARY:
                    self._ordinary.append(passed)
                elif (slot := self._random.integers(self._num_noted)) < NUM_ORDINARY:
                    self._ordinary[slot] = passed
        # Copies: a view would hold the memory of a whole block of images.
        self._now[1].append(torch.stack([samples.double(), losses.detach().double()], dim=1))

    def take(self) -> dict[int, NDArray[np.float64]]:
        """Sample number and loss of each image, float64 (b, 2), by step; the newest is the last.

        The newest step is not one of the ordinary ones afterwards.
        """
        kept = sorted([*self._ordinary, self._before, self._now], key=lambda item: item[0])
        self._now = (-1, [])
        return {step: torch.cat(parts).cpu().numpy() for step, parts in kept if step >= 0}
