"""Device memory of a training step by part, before any device is taken.

Bytes per parameter follow the ZeRO paper (Rajbhandari et al., arXiv:1910.02054, section 3): bf16
weights 2, bf16 gradients 2, fp32 master weights and the optimizer's moments 12 (Adam); stage 1
shards the optimizer's part over the workers, stage 2 the gradients too, stage 3 the weights too.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3
BUCKET_ELEMENTS = 200_000_000  # DeepSpeed bucket of `train/engine.py`: reduce, and all-gather


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB per worker."""

    weights: float
    gradients: float
    optimizer: float
    averages: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All parts."""
        parts = (self.weights, self.gradients, self.optimizer, self.averages)
        return sum(parts) + self.activations + self.buffers

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in vars(self).items() if value)
        return f"{self.total:.2f} GiB ({parts})"


@dataclass(frozen=True)
class StateShape:
    """What decides the memory of the training state."""

    num_parameters: int
    stage: int
    world_size: int
    precision: str
    moments: int
    """Values that the optimizer keeps per parameter: 2 for Adam, 1 for momentum."""
    has_average: bool
    offload: bool


def state_memory(shape: StateShape, activation_bytes: int) -> MemoryEstimate:
    """Memory of the state and of the activations of one micro-batch.

    Args:
        activation_bytes: kept by the forward pass for the backward pass.
    """
    size, count = shape.world_size, shape.num_parameters
    width = 2 if shape.precision == "bf16" else 4
    sharded_from = {"optimizer": 1, "gradients": 2, "weights": 3}

    def share(part: str) -> float:
        return 1 / size if shape.stage >= sharded_from[part] else 1.0

    # fp32 without ZeRO steps the weights themselves; everything else keeps masters apart.
    has_masters = shape.precision == "bf16" or shape.stage > 0
    optimizer = count * 4 * (shape.moments + has_masters) * share("optimizer")
    bf16_stage1 = shape.precision == "bf16" and shape.stage == 1 and not shape.offload
    gradients = count * (width * share("gradients") + (4 if bf16_stage1 else 0))
    bucket = min(count, BUCKET_ELEMENTS) * width
    return MemoryEstimate(
        weights=count * width * share("weights") / GIB,
        gradients=gradients / GIB,
        optimizer=0.0 if shape.offload else optimizer / GIB,
        averages=4 * count / size / GIB if shape.has_average and not shape.offload else 0.0,
        activations=activation_bytes / GIB,
        buffers=(bucket * (2 if shape.stage else 1)) / GIB,
    )
