"""Memory of a device in a training step by part, before anything is started.

Bytes per parameter follow the ZeRO paper (Rajbhandari et al., arXiv:1910.02054, section 3): bf16
weights 2, gradients 4 (the paper's 2 are of bf16; a step's passes are summed in fp32), fp32 master
weights and the optimizer's moments 12 (Adam); stage 1 shards the optimizer's part over the workers,
stage 2 the gradients too, stage 3 the weights too.
DeepSpeed 0.19.8 needs buffers in the backward pass and in the step, too.
"""

from dataclasses import dataclass
from typing import Final

from vit_ray.measure import memory

GIB = 1024**3
# One in use, one whose turn is next, and one that waits for a place (`worker/prefetch.py`).
BATCHES_ON_DEVICE: Final = 3


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB per worker at the worst moment of a step.

    Attributes:
        optimizer: fp32 master weights and moments.
        batches: a worker's whole share of the step's images, and of those that are read ahead.
        activations: alive at the worst moment of forward and backward pass, temporaries included.
        buffers: DeepSpeed's, in the backward pass or in the step.
    """

    weights: float
    gradients: float
    optimizer: float
    averages: float
    batches: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class StateShape:
    """What decides the memory of the training state.

    Attributes:
        num_parameters: trained ones.
        moment_bytes: that the optimizer keeps per parameter: 8 for Adam in fp32, 4 for momentum.
        num_frozen: parameters without gradient and optimizer state.
        largest_parameter: elements of the largest trained parameter.
        batch_bytes: images of one batch on a worker, as pixels.
    """

    num_parameters: int
    stage: int
    world_size: int
    precision: str
    moment_bytes: int
    has_average: bool
    offload: bool
    num_frozen: int = 0
    largest_parameter: int = 0
    batch_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight as the model computes with it."""
        return 2 if self.precision == "bf16" else 4

    @property
    def reduce_bucket(self) -> int:
        """Gradients that are summed at a time, as the engine sets it."""
        return memory.reduce_bucket(self.num_parameters, self.largest_parameter)


def state_memory(shape: StateShape, activation_bytes: int = 0) -> MemoryEstimate:
    """Memory of the state, and of one micro-batch on top of it.

    Activations are gone when gradients are unpacked for the optimizer's step, so of the two
    kinds of buffers only the larger excess counts.

    Args:
        activation_bytes: most that are alive in forward and backward pass.
    """
    trained, stage, size = shape.num_parameters, shape.stage, shape.world_size
    everything, sent = trained + shape.num_frozen, shape.weight_bytes
    # fp32 without ZeRO steps the weights themselves; everything else keeps masters apart.
    masters = 4 if shape.precision == "bf16" or stage > 0 else 0
    share = [1.0 if stage < sharded_from else 1 / size for sharded_from in range(4)]
    optimizer = trained * (shape.moment_bytes + masters) * share[1]
    if stage == 0:
        backward = trained * sent if size > 1 else 0.0
    elif stage < 3:  # buckets that gradients are summed in; of two, one is filled meanwhile
        held = 4 if stage == 1 else sent  # stage 1 fills its buckets from fp32 sums
        copied = held + (sent if held != sent else 0)
        backward = shape.reduce_bucket * (held * min(size, 2) + copied)
    else:  # and the gathered weights; a single worker computes with its shard directly
        gathered = min(everything, memory.HELD + shape.largest_parameter) if size > 1 else 0
        backward = (2 * shape.reduce_bucket + gathered) * sent
    # Copies of a worker's share of the gradients, in fp32 to apply.
    in_step = 0.0 if stage == 0 or shape.offload else 4 * trained / size
    # Averages are sharded under every stage (`training/ema.py`).
    averages = 4 * trained / size if shape.has_average and not shape.offload else 0.0
    return MemoryEstimate(
        weights=everything * sent * share[3] / GIB,
        gradients=trained * 4 * share[2] / GIB,
        optimizer=0.0 if shape.offload else optimizer / GIB,
        averages=averages / GIB,
        batches=shape.batch_bytes * BATCHES_ON_DEVICE / GIB,
        activations=activation_bytes / GIB,
        buffers=max(backward, in_step - activation_bytes) / GIB,
    )
