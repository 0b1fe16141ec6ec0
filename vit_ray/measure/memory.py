"""Device memory of a training step by part, before any device is taken.

Bytes per parameter follow the ZeRO paper (Rajbhandari et al., arXiv:1910.02054, section 3): bf16
weights 2, gradients 4 (the paper's 2 are of bf16; a step's passes are summed in fp32), fp32 master
weights and the optimizer's moments 12 (Adam); stage 1 shards the optimizer's part over the workers,
stage 2 the gradients too, stage 3 the weights too.
What DeepSpeed 0.19.8 needs beside that is in `_backward_buffers` and `_step_buffers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vit_ray.measure.zero_settings import ZeroSettings, zero_settings

GIB = 1024**3
# One in use, one that waits for its turn, and one that waits for a place (`worker/prefetch.py`).
BATCHES_ON_DEVICE: Final = 3


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB per worker at the worst moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    """fp32 master weights and moments."""
    averages: float
    batches: float
    """A worker's whole share of the step's images, and of those that are read ahead."""
    activations: float
    """Kept by the forward pass for the backward pass."""
    buffers: float
    """Temporaries of the backward pass, recomputed blocks, and DeepSpeed's own buffers."""

    @property
    def total(self) -> float:
        """All parts."""
        return float(sum(vars(self).values()))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in vars(self).items() if value)
        return f"{self.total:.2f} GiB ({parts})"


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one worker."""

    kept: int
    """Alive when the forward pass ends."""
    peak: int
    """Alive at the worst moment of forward and backward pass."""


@dataclass(frozen=True)
class StateShape:
    """What decides the memory of the training state."""

    num_parameters: int
    """Trained ones."""
    stage: int
    world_size: int
    precision: str
    moment_bytes: int
    """That the optimizer keeps per parameter: 8 for Adam in fp32, 4 for momentum."""
    has_average: bool
    offload: bool
    num_frozen: int = 0
    """Parameters without gradient and optimizer state."""
    overlaps: bool = True
    """Reduction runs beside the backward pass, with a second bucket (on GPUs)."""
    largest_parameter: int = 0
    """Elements of the largest trained parameter."""
    batch_bytes: int = 0
    """Images of one batch on a worker, as pixels."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight as the model computes with it."""
        return 2 if self.precision == "bf16" else 4

    @property
    def settings(self) -> ZeroSettings:
        """Sizes of the collective operations, as the engine sets them."""
        return zero_settings(self.num_parameters, self.largest_parameter)

    def share(self, sharded_from: int) -> float:
        """Share that one worker holds of what is sharded from this stage on."""
        return 1 / self.world_size if self.stage >= sharded_from else 1.0


def state_memory(shape: StateShape, activations: Activations) -> MemoryEstimate:
    """Memory of the state, and of one micro-batch on top of it.

    Activations are gone when gradients are unpacked for the optimizer's step, so of the two
    kinds of buffers only the larger excess counts.
    """
    backward = _backward_buffers(shape) + activations.peak - activations.kept
    in_step = _step_buffers(shape) - activations.kept
    return MemoryEstimate(
        weights=_weights(shape) / GIB,
        gradients=_gradients(shape) / GIB,
        optimizer=0.0 if shape.offload else _optimizer(shape) / GIB,
        averages=_averages(shape) / GIB,
        batches=shape.batch_bytes * BATCHES_ON_DEVICE / GIB,
        activations=activations.kept / GIB,
        buffers=max(backward, in_step) / GIB,
    )


def _weights(shape: StateShape) -> float:
    count = shape.num_parameters + shape.num_frozen
    return count * shape.weight_bytes * shape.share(3)


def _gradients(shape: StateShape) -> float:
    return shape.num_parameters * 4 * shape.share(2)


def _optimizer(shape: StateShape) -> float:
    # fp32 without ZeRO steps the weights themselves; everything else keeps masters apart.
    has_masters = shape.precision == "bf16" or shape.stage > 0
    return shape.num_parameters * (shape.moment_bytes + 4 * has_masters) * shape.share(1)


def _averages(shape: StateShape) -> float:
    """Sharded under every stage (`train/ema.py`)."""
    on_device = shape.has_average and not shape.offload
    return 4 * shape.num_parameters / shape.world_size if on_device else 0.0


def _backward_buffers(shape: StateShape) -> float:
    """Buckets that gradients are summed in, and the weights that stage 3 has gathered."""
    settings, sent = shape.settings, shape.weight_bytes
    if shape.stage == 0:
        return shape.num_parameters * sent if shape.world_size > 1 else 0.0
    if shape.stage < 3:
        held = 4 if shape.stage == 1 else sent  # stage 1 fills its buckets from fp32 sums
        copied = held + (sent if held != sent else 0)
        buckets = 2 if shape.overlaps else 1
        return settings.reduce_bucket * (held * buckets + copied)
    everything = shape.num_parameters + shape.num_frozen
    gathered = min(everything, settings.held + shape.largest_parameter)
    # A single worker computes with its shard directly.
    whole = gathered if shape.world_size > 1 else 0
    return (2 * settings.reduce_bucket + whole) * sent


def _step_buffers(shape: StateShape) -> float:
    """Copies of a worker's share of the gradients, in fp32 to apply."""
    if shape.stage == 0 or shape.offload:
        return 0.0
    return 4 * shape.num_parameters / shape.world_size
