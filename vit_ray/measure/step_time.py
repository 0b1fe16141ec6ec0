"""Time of a training before it starts: FLOPs of a step at a measured share of the device's peak."""

from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True)
class Pace:
    """How fast a device is assumed to compute.

    Attributes:
        peak_flops: dense peak of one worker's device in FLOP/s.
        mfu: share of the peak that model FLOPs reach over a whole step, communication included.
    """

    peak_flops: float
    mfu: float

    def step_s(self, macs: int, images: float) -> float:
        """Expected seconds of one optimizer step.

        Args:
            macs: multiply-adds of one image in a step, without what is recomputed, as in `mfu`.
            images: per worker and step.
        """
        return 2 * macs * images / (self.mfu * self.peak_flops)

    def device_hours(self, exaflops: float) -> float:
        """Hours of one device for this many 10^18 model FLOPs."""
        return exaflops * 1e18 / (self.mfu * self.peak_flops) / 3600
