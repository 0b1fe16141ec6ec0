"""Time and traffic of a training before it starts: what one step moves, and how long a run takes.

Traffic is what DeepSpeed 0.19.8 does, in bytes that each worker sends by ring algorithms: an
all-reduce of S bytes over n workers sends 2 (n-1)/n S, a reduce-scatter or an all-gather
(n-1)/n S (Rajbhandari et al., arXiv:1910.02054, section 7; NVIDIA nccl-tests, PERFORMANCE.md).
"""

import math
from dataclasses import dataclass

from vit_ray.measure import zero_settings
from vit_ray.measure.memory import StateShape
from vit_ray.measure.network import Network

DAY_S = 86_400.0
LAUNCH_S = 5e-6
"""What the host needs to start one kernel: assumed, not measured."""
LAUNCHES_PER_TENSOR = 4
"""Kernels of a pass for each parameter tensor, forward and backward: 3.8 in the paper's ViTs."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one worker sends in one optimizer step.

    Attributes:
        gradients: to sum gradients over workers.
        weights: to give all workers the new weights, or the weights of the layer at work (stage 3).
        sums: all-reduces that carry them.
        rings: reduce-scatters and all-gathers that carry them.
    """

    gradients: float
    weights: float
    sums: int = 0
    rings: int = 0

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
    buckets = math.ceil(shape.num_parameters / shape.reduce_bucket)
    passes = accumulation_steps if shape.stage >= 2 else 1
    if shape.stage == 3:
        count = shape.num_parameters + shape.num_frozen
        gathered = count + max(0, count - zero_settings.HELD)
        weights = ring * gathered * shape.weight_bytes
        ahead = max(zero_settings.PREFETCH, shape.largest_parameter, 1)
        rings = buckets + math.ceil(gathered / ahead)
        return Traffic(trained * passes, weights * passes, 0, rings * passes)
    # The new weights: of what decays, and of what does not.
    rings, weights = (2, trained) if shape.stage else (0, 0.0)
    return Traffic(2 * trained * passes, weights, buckets * passes, rings)


@dataclass(frozen=True)
class Pace:
    """How fast a cluster is assumed to work.

    Attributes:
        peak_flops: dense peak of one worker's device in FLOP/s.
        mfu: share of the peak that model FLOPs reach while a worker computes.
    """

    peak_flops: float
    mfu: float
    network: Network

    def step_time(
        self,
        macs: int,
        images: float,
        traffic: Traffic,
        num_gpus: int,
        launches: int = 0,
    ) -> "StepTime":
        """Expected time of one optimizer step.

        Args:
            macs: multiply-adds of one image in a step, what is recomputed included.
            images: per worker and step.
            launches: kernels that the host starts in the step.
        """
        network, sent_s = self.network, 0.0
        if num_gpus > 1:
            sent_s = traffic.total / (network.bus_gb_per_s(num_gpus) * 1e9)
        starts_s = traffic.sums * network.start_s(num_gpus, is_sum=True)
        starts_s += traffic.rings * network.start_s(num_gpus, is_sum=False)
        device_s = 2 * macs * images / (self.mfu * self.peak_flops)
        return StepTime(device_s, launches * LAUNCH_S, sent_s, starts_s)

    def device_hours(self, exaflops: float) -> float:
        """Hours of one device for this many 10^18 model FLOPs, communication aside."""
        return exaflops * 1e18 / (self.mfu * self.peak_flops) / 3600


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one optimizer step.

    Attributes:
        device_s: computing.
        launch_s: the host starts kernels, beside the device; the longer one counts.
        sent_s: bytes on their way.
        starts_s: of collective operations.
    """

    device_s: float
    launch_s: float
    sent_s: float
    starts_s: float

    @property
    def compute_s(self) -> float:
        """The device, or the host where it cannot start kernels as fast as they end."""
        return max(self.device_s, self.launch_s)

    @property
    def communication_s(self) -> float:
        return self.sent_s + self.starts_s

    @property
    def least_s(self) -> float:
        """All communication hidden behind computing."""
        return max(self.compute_s, self.communication_s)

    @property
    def most_s(self) -> float:
        """None of it hidden."""
        return self.compute_s + self.communication_s
