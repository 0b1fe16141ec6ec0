"""Spikes: steps whose loss or gradient norm is finite, but far above those just before them.

The logarithm is judged. Both numbers vary in proportion to their size, and a gradient norm that
rises tenfold over the first hundred steps, as it does in ViTs, is not a spike at any step: on the
linear scale such runs had a z of up to 22, on the logarithmic scale of 5 at most
(`benchmarks/results/spikes_cpu_2026-11-26.md`).
"""

import math
import statistics
from typing import Final, NamedTuple

import numpy as np

from vit_ray.checkpoints.checkpoint import Progress

WINDOW: Final = 128
"""Steps that the next one is compared with; 5 KiB of a checkpoint."""
LEAST_STEPS: Final = 32
"""Steps in the window before the first judgement."""
THRESHOLD: Final = 6.0
"""Robust standard deviations above the median. The largest z of 4,700 ordinary steps was 4.9."""
LEAST_DEVIATION: Final = 0.05
"""Least deviation of the logarithm: a rise of less than exp(6 x 0.05) = 1.35 on a steady curve is
not a spike."""
MOST_NEAR: Final = 3
NEAR_STEPS: Final = 16
"""Of this many steps, this many may be spikes. A further one is a new level, which is not caused by
a batch: it is not counted, and the window starts again with it."""

_LARGEST_LOG: Final = 88.0
"""Largest logarithm of an fp32 number."""


class Judged(NamedTuple):
    """A number of a step, compared with those before."""

    value: float
    usual: float
    """Median of the window."""
    z: float | None
    """Robust standard deviations above the median, of logarithms; None if it is not judged."""

    def __str__(self) -> str:
        if self.z is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} (usual {self.usual:.4g}, z {self.z:.1f})"


class Spike(NamedTuple):
    """A step with at least one of the two above its limit."""

    loss: Judged
    grad_norm: Judged
    is_refused: bool
    """Its gradient norm was above the limit of the step, which was not applied."""

    def __str__(self) -> str:
        return f"loss {self.loss}, gradient norm {self.grad_norm}"


class _Level(NamedTuple):
    """Median and robust deviation (1.4826 x MAD) of logarithms."""

    median: float
    deviation: float

    @classmethod
    def of(cls, recent: list[float]) -> "_Level | None":
        if len(recent) < LEAST_STEPS:
            return None
        median = statistics.median(recent)
        mad = statistics.median([abs(value - median) for value in recent])
        return cls(median, max(1.4826 * mad, LEAST_DEVIATION))

    @property
    def limit(self) -> float:
        """Rounded to fp32, so that the device and the host judge the same."""
        log = min(self.median + THRESHOLD * self.deviation, _LARGEST_LOG)
        return float(np.float32(math.exp(log)))


class Usual(NamedTuple):
    """What the next step is compared with."""

    loss: _Level | None
    grad_norm: _Level | None
    is_near_others: bool
    """Whether another spike would be one too many, and so a new level."""

    @classmethod
    def of(cls, progress: Progress) -> "Usual":
        near = [step for step in progress.recent_spikes if progress.step + 1 - step < NEAR_STEPS]
        return cls(
            _Level.of(progress.log_losses),
            _Level.of(progress.log_grad_norms),
            len(near) >= MOST_NEAR,
        )

    @property
    def grad_norm_limit(self) -> float | None:
        """The gradient norm above which the step is a spike; None = any."""
        return None if self.grad_norm is None or self.is_near_others else self.grad_norm.limit


def note_step(
    progress: Progress, usual: Usual, loss: float, grad_norm: float, *, is_refused: bool = False
) -> Spike | None:
    """Add the last completed step, of finite numbers, to the window; returns a spike.

    Losses that are not positive, such as a user's own loss may have, are not judged.
    """
    found, is_spike = [], False
    for value, level in ((loss, usual.loss), (grad_norm, usual.grad_norm)):
        z = None
        if level is not None and value > 0:
            z = (math.log(value) - level.median) / level.deviation
            is_spike |= value > level.limit
        found.append(Judged(value, math.exp(level.median) if level else value, z))
    windows = progress.log_losses, progress.log_grad_norms
    if is_spike and usual.is_near_others:
        is_spike = False
        for window in (*windows, progress.recent_spikes):
            window.clear()
    for value, window in zip((loss, grad_norm), windows, strict=True):
        if value > 0:
            window.append(math.log(value))
            del window[:-WINDOW]
    if not is_spike:
        return None
    progress.spikes += 1
    progress.recent_spikes.append(progress.step)
    del progress.recent_spikes[:-MOST_NEAR]
    return Spike(found[0], found[1], is_refused)


def losses_file(step: int) -> str:
    """Name of the file with the losses per image of a 0-based step that was a spike."""
    return f"spike-step-{step:08d}.parquet"
