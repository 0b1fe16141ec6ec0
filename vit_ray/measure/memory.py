"""Device memory of a training step by part, before any device is taken.

Bytes per parameter follow the ZeRO paper (Rajbhandari et al., arXiv:1910.02054, section 3): bf16
weights 2, bf16 gradients 2 (4 where they are summed in fp32: under ZeRO), fp32 master weights and
the optimizer's moments 12 (Adam); stage 1 shards the optimizer's part over the workers, stage 2 the
gradients too, stage 3 the weights too.
What DeepSpeed 0.19.8 needs beside that is in `_backward_buffers` and `_step_buffers`.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3
# `train/engine.py` sets it. DeepSpeed allocates a bucket whole, however small the model.
BUCKET_ELEMENTS = 200_000_000
# Elements that DeepSpeed's `engine.buffered_allreduce_fallback` copies at a time.
FALLBACK_BUCKET_ELEMENTS = 500_000_000
# Weights that stage 3 leaves gathered from the forward to the backward pass: those within its
# reuse distance of 1e9 elements (`stage3_max_reuse_distance`), counted there and back.
STAGE3_REUSED_ELEMENTS = 500_000_000
# Weights that it gathers ahead (`stage3_prefetch_bucket_size`).
STAGE3_PREFETCH_ELEMENTS = 50_000_000


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB per worker at the worst moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    """fp32 master weights and moments."""
    averages: float
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
    moments: int
    """Values that the optimizer keeps per parameter: 2 for Adam, 1 for momentum."""
    has_average: bool
    offload: bool
    num_frozen: int = 0
    """Parameters without gradient and optimizer state."""
    overlaps: bool = True
    """Reduction runs beside the backward pass, with a second bucket (on GPUs)."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight as the model computes with it."""
        return 2 if self.precision == "bf16" else 4

    @property
    def uses_bf16_optimizer(self) -> bool:
        """DeepSpeed takes its BF16_Optimizer, with a whole fp32 gradient, for this case only."""
        return self.precision == "bf16" and self.stage == 1 and not self.offload

    def share(self, sharded_from: int) -> float:
        """Share that one worker holds of what is sharded from this stage on."""
        return 1 / self.world_size if self.stage >= sharded_from else 1.0


def sum_precision(precision: str, stage: int) -> str:
    """What a step's passes are summed in: fp32, but for bf16 without ZeRO.

    DeepSpeed 0.19.8 refuses `grad_accum_dtype` there. After 256 passes a bf16 sum is 2.4 % off.
    """
    return "fp32" if stage > 0 else precision


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
        activations=activations.kept / GIB,
        buffers=max(backward, in_step) / GIB,
    )


def _weights(shape: StateShape) -> float:
    count = shape.num_parameters + shape.num_frozen
    return count * shape.weight_bytes * shape.share(3)


def _gradients(shape: StateShape) -> float:
    count = shape.num_parameters
    if shape.precision == "bf16" and shape.stage == 1:
        return count * (2 + 4)  # fp32 sums beside the bf16 gradients of the backward pass
    return (
        count * (4 if sum_precision(shape.precision, shape.stage) == "fp32" else 2) * shape.share(2)
    )


def _optimizer(shape: StateShape) -> float:
    # fp32 without ZeRO steps the weights themselves; everything else keeps masters apart.
    has_masters = shape.precision == "bf16" or shape.stage > 0
    return shape.num_parameters * 4 * (shape.moments + has_masters) * shape.share(1)


def _averages(shape: StateShape) -> float:
    """Sharded under every stage (`train/polyak.py`)."""
    on_device = shape.has_average and not shape.offload
    return 4 * shape.num_parameters / shape.world_size if on_device else 0.0


def _backward_buffers(shape: StateShape) -> float:
    """Buckets that gradients are reduced in, and the weights that stage 3 has gathered."""
    if shape.stage == 0 or shape.uses_bf16_optimizer:
        return 0.0
    bucket = BUCKET_ELEMENTS * shape.weight_bytes
    reduced = min(shape.num_parameters, BUCKET_ELEMENTS) * shape.weight_bytes
    if shape.stage < 3:
        return bucket * (2 if shape.overlaps else 1) + reduced
    everything = shape.num_parameters + shape.num_frozen
    gathered = min(everything, STAGE3_REUSED_ELEMENTS + STAGE3_PREFETCH_ELEMENTS)
    # A single worker computes with its shard directly.
    return bucket + reduced + (gathered * shape.weight_bytes if shape.world_size > 1 else 0)


def _step_buffers(shape: StateShape) -> float:
    """Copies of gradients between backward pass and step: flattened to reduce, fp32 to apply."""
    count, width = shape.num_parameters, shape.weight_bytes
    flattened = min(count, FALLBACK_BUCKET_ELEMENTS)
    if shape.uses_bf16_optimizer:
        return flattened * (4 + 2)
    if shape.stage == 0:
        return max(flattened * width, count * 4 if shape.precision == "bf16" else 0)
    return 0.0 if shape.offload else 4 * count / shape.world_size
