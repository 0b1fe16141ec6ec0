"""Spikes: steps whose loss or gradient norm is finite, and far above those just before them.

Judged is the logarithm. Both numbers vary in proportion to their size, and a gradient norm that
rises tenfold in the first hundred steps, as it does in ViTs, is no spike at any step: on the linear
scale such runs had a z of 22, on this one of 5 at most
(`benchmarks/results/spikes_cpu_2026-11-26.md`).
"""

from __future__ import annotations

import math
import statistics
from typing import Final, NamedTuple

import numpy as np

from vit_ray.checkpoints.checkpoint import Progress

WINDOW: Final = 128
"""Steps that the next one is compared with; 5 KiB of a checkpoint."""
LEAST_STEPS: Final = 32
"""Of the window before the first judgement."""
THRESHOLD: Final = 6.0
"""Robust standard deviations above the median. The largest z of 4,700 ordinary steps was 4.9."""
LEAST_DEVIATION: Final = 0.05
"""Of the logarithm: what rises by less than exp(6 x 0.05) = 1.35 is no spike of a steady curve."""
MOST_IN_A_ROW: Final = 3
"""Spikes in a row that are acted on. A level that lasts is no fault of a batch; training goes on,
and the window gets used to it."""


class Judged(NamedTuple):
    """A number of a step, and how it compares with those before."""

    value: float
    usual: float
    """Median of the window."""
    z: float
    """Robust standard deviations above the median, of logarithms; 0 while it is not judged."""

    def __str__(self) -> str:
        return f"{self.value:.4g} (usual {self.usual:.4g}, z {self.z:.1f})"


class Spike(NamedTuple):
    """A step of which one of the two is above its limit."""

    loss: Judged
    grad_norm: Judged
    is_refused: bool
    """Its gradient norm was above the limit of the step, which was not applied."""

    def __str__(self) -> str:
        return f"loss {self.loss}, gradient norm {self.grad_norm}"


class _Usual(NamedTuple):
    """Median and robust deviation (1.4826 x MAD) of logarithms."""

    median: float
    deviation: float

    @classmethod
    def of(cls, recent: list[float]) -> _Usual | None:
        if len(recent) < LEAST_STEPS:
            return None
        median = statistics.median(recent)
        mad = statistics.median([abs(value - median) for value in recent])
        return cls(median, max(1.4826 * mad, LEAST_DEVIATION))

    @property
    def limit(self) -> float:
        """Rounded to fp32, so that the device and the host judge alike."""
        return float(np.float32(math.exp(self.median + THRESHOLD * self.deviation)))

    def judge(self, value: float) -> Judged:
        z = (math.log(value) - self.median) / self.deviation if value > 0 else 0.0
        return Judged(value, math.exp(self.median), z)


def grad_norm_limit(progress: Progress) -> float | None:
    """The gradient norm above which the next step is a spike that may be acted on; None = any."""
    if progress.spikes_in_a_row >= MOST_IN_A_ROW:
        return None
    usual = _Usual.of(progress.log_grad_norms)
    return usual.limit if usual else None


def note_step(
    progress: Progress, loss: float, grad_norm: float, *, is_refused: bool = False
) -> Spike | None:
    """Take a step with finite numbers into the window; returns the spike, if it is one.

    Losses that are not positive, such as a loss of the user's own may have, are not judged.
    """
    found, is_spike = [], False
    for value, recent in ((loss, progress.log_losses), (grad_norm, progress.log_grad_norms)):
        usual = _Usual.of(recent)
        is_spike |= usual is not None and value > usual.limit
        found.append(usual.judge(value) if usual else Judged(value, value, 0.0))
        if value > 0:
            recent.append(math.log(value))
            del recent[:-WINDOW]
    progress.spikes_in_a_row = progress.spikes_in_a_row + 1 if is_spike else 0
    progress.spikes += is_spike
    return Spike(found[0], found[1], is_refused) if is_spike else None


def losses_file(step: int) -> str:
    """Name of the file with the losses per image of a 0-based step that was a spike."""
    return f"spike-step-{step:08d}.parquet"
