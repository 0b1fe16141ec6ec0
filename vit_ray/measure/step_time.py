"""Time and traffic of a training before it starts: what one step moves, and how long it computes.

Traffic is what DeepSpeed 0.19.8 does, in bytes that each worker sends by ring algorithms: an
all-reduce of S bytes over n workers sends 2 (n-1)/n S, a reduce-scatter or an all-gather
(n-1)/n S (Rajbhandari et al., arXiv:1910.02054, section 7; NVIDIA nccl-tests, PERFORMANCE.md).
"""

from dataclasses import dataclass

from vit_ray.measure import zero_settings
from vit_ray.measure.memory import StateShape

DAY_S = 86_400.0


@dataclass(frozen=True)
class Traffic:
    """Bytes that one worker sends in one optimizer step.

    Attributes:
        gradients: to sum gradients over workers.
        weights: to give all workers the new weights, or the weights of the layer at work (stage 3).
    """

    gradients: float
    weights: float

    @property
    def total(self) -> float:
        return self.gradients + self.weights


def traffic_per_step(shape: StateShape, accumulation_steps: int) -> Traffic:
    """Bytes of one optimizer step.

    Stages 0 and 1 all-reduce gradients once a step. Stage 2 does so in every pass: DeepSpeed
    0.19.8 reduces its buckets by all-reduce and keeps a part
    (`stage_1_and_2.py: allreduce_and_copy_with_multiple_ranks`), although a reduce-scatter, half
    of that, is all it needs; its other way, a reduction to each rank, has the host wait in each.
    Stages 1 and 2 then all-gather the new weights. Stage 3 reduce-scatters gradients and gathers
    weights in every pass; weights that do not stay gathered from the forward to the backward pass
    are gathered again.

    Args:
        accumulation_steps: passes per step.
    """
    if shape.world_size == 1:
        return Traffic(0.0, 0.0)
    ring = (shape.world_size - 1) / shape.world_size
    trained = ring * shape.num_parameters * shape.weight_bytes
    passes = accumulation_steps if shape.stage >= 2 else 1
    if shape.stage == 3:
        count = shape.num_parameters + shape.num_frozen
        gathered = count + max(0, count - zero_settings.HELD)
        weights = ring * gathered * shape.weight_bytes
        return Traffic(trained * passes, weights * passes)
    return Traffic(2 * trained * passes, trained if shape.stage else 0.0)


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
            macs: multiply-adds of one image in a step, what is recomputed included.
            images: per worker and step.
        """
        return 2 * macs * images / (self.mfu * self.peak_flops)

    def device_hours(self, exaflops: float) -> float:
        """Hours of one device for this many 10^18 model FLOPs."""
        return exaflops * 1e18 / (self.mfu * self.peak_flops) / 3600
