"""Estimate of a device's memory in a training step, by part.

Bytes per parameter follow the ZeRO paper (Rajbhandari et al., arXiv:1910.02054, section 3): bf16
weights 2, gradients 4 (2 in the paper, in bf16; here a step's passes are summed in fp32), fp32
master weights and the optimizer's moments 12 (Adam). Stage 1 shards the optimizer's part over the
workers, stage 2 also the gradients, stage 3 also the weights. DeepSpeed 0.19.8 also needs buffers
in the backward pass and in the step.

Activations are counted on tensors without memory: on the meta device inside `gpu_kernels`, sizes,
views and lifetimes are those of a GPU, and a model of any size takes a second and no memory.

This module imports only torch, so that benchmarks run on a machine without other packages.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 1024**3
# One in use, the next one, and one that waits for a free place (`worker/prefetch.py`).
_BATCHES_ON_DEVICE: Final = 3

# Sizes of ZeRO's collectives, for the engine that sets them and for the estimate. Gradients are
# summed over workers in buckets during the backward pass. At the end of that pass, the step waits
# for the last bucket, so small buckets are better, until their starts cost more: for N parameters
# of w bytes, a bucket of B costs B 2w / bandwidth at the end and N / B starts. New weights of
# stages 1 and 2 need no size here: they are gathered after the step, in place and all at once
# (DeepSpeed 0.19.8 uses its `allgather_bucket_size` only where torch cannot do so).
#
# Start and bandwidth are those of an all-reduce over eight servers of eight H100 with eight
# adapters of 400 Gbit/s, by NCCL's model of its trees (src/graph/tuning.cc, LL128). They are used
# for any number of servers: the best bucket for one server is half as large, that for 64 a third
# larger, and this bucket costs both less than a millisecond of a step.
START_S: Final = 72.2e-6
LINK_BYTES_PER_S: Final = 352.5e9
# Weights that stage 3 gathers in advance in each module (about two blocks of ViT-H/14), up to
# `GATHERED_ELEMENTS` altogether.
PREFETCH_ELEMENTS: Final = 50_000_000
# Gathered weights that stage 3 keeps, in addition to those of one module: 2 GB in bf16, enough for
# every model of the paper. The backward pass uses those that are kept at the end of the forward
# pass, and gathers the others again.
GATHERED_ELEMENTS: Final = 1_000_000_000


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB per worker at the worst moment of a step.

    Attributes:
        optimizer: fp32 master weights and moments.
        batches: a worker's images of the step, and of the batches that are read in advance.
        activations: maximum in forward and backward pass, temporaries included.
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
    """Sizes and settings that decide the memory of the training state.

    Attributes:
        num_parameters: trained parameters.
        moment_bytes: of the optimizer per parameter: 8 for Adam in fp32, 4 for momentum.
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
        """Bytes of a weight in the precision of the forward pass."""
        return 2 if self.precision == "bf16" else 4


def state_memory(shape: StateShape, activation_bytes: int = 0) -> MemoryEstimate:
    """Memory of the training state and of one micro-batch.

    When gradients are unpacked for the optimizer's step, activations no longer exist, so the
    buffers of the step count without the bytes of activations, and only the larger of the two kinds
    of buffers counts.

    Args:
        activation_bytes: maximum in forward and backward pass.
    """
    trained, stage, size = shape.num_parameters, shape.stage, shape.world_size
    all_weights, weight_bytes = trained + shape.num_frozen, shape.weight_bytes
    bucket = reduce_bucket(trained, shape.largest_parameter)
    # Without ZeRO, fp32 weights are stepped directly; otherwise there are master weights.
    masters = 4 if shape.precision == "bf16" or stage > 0 else 0
    share = [1.0 if stage < sharded_from else 1 / size for sharded_from in range(4)]
    optimizer = trained * (shape.moment_bytes + masters) * share[1]
    if stage == 0:
        backward = trained * weight_bytes if size > 1 else 0.0
    elif stage < 3:  # with several workers, one bucket is filled while another is summed
        summed_bytes = 4 if stage == 1 else weight_bytes  # stage 1 fills its buckets from fp32 sums
        copied_bytes = summed_bytes + (weight_bytes if summed_bytes != weight_bytes else 0)
        backward = bucket * (summed_bytes * min(size, 2) + copied_bytes)
    else:  # buckets and gathered weights; a single worker computes with its shard directly
        gathered = min(all_weights, GATHERED_ELEMENTS + shape.largest_parameter) if size > 1 else 0
        backward = (2 * bucket + gathered) * weight_bytes
    # Copies of a worker's share of the gradients, in fp32 for the optimizer.
    in_step = 0.0 if stage == 0 or shape.offload else 4 * trained / size
    # Averages are sharded under every stage (`training/training_state.py`).
    averages = 4 * trained / size if shape.has_average and not shape.offload else 0.0
    return MemoryEstimate(
        weights=all_weights * weight_bytes * share[3] / GIB,
        gradients=trained * 4 * share[2] / GIB,
        optimizer=0.0 if shape.offload else optimizer / GIB,
        averages=averages / GIB,
        batches=shape.batch_bytes * _BATCHES_ON_DEVICE / GIB,
        activations=activation_bytes / GIB,
        buffers=max(backward, in_step - activation_bytes) / GIB,
    )


def reduce_bucket(num_parameters: int, largest_parameter: int) -> int:
    """Elements of a bucket, in which gradients are summed over any number of workers.

    DeepSpeed allocates the whole bucket. B/16 has 4 buckets, H/14 has 10. A bucket must hold the
    largest parameter: DeepSpeed 0.19.8 sums a larger gradient in place, and at stage 2 with overlap
    it frees that memory for the computing stream before the sum has read it (`stage_1_and_2.py:
    average_tensor`).

    Args:
        num_parameters: trained parameters; no bucket is larger.
        largest_parameter: elements of the largest parameter.
    """
    bytes_sent = 2 * 2  # per element: bf16, which an all-reduce sends twice
    best = math.sqrt(num_parameters * START_S * LINK_BYTES_PER_S / bytes_sent)
    return min(num_parameters, max(int(best), largest_parameter))


class ActivationMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations in this mode create, until they are freed.

    Args:
        uncounted: tensors whose storages do not count, such as the weights.

    Attributes:
        current: bytes that are allocated now.
        peak: maximum of `current`.
    """

    def __init__(self, uncounted: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = {_storage_key(tensor) for tensor in uncounted}
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := _storage_key(leaf)) not in self._seen:
                storage = leaf.untyped_storage()
                self._seen.add(key)
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.current -= num_bytes


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """Flash attention; memory-efficient attention for fp32 and for a bias. Neither stores N x N."""
    aten = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True)[0]


def _fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    # Stores a mask of one byte per element, as on CUDA.
    return torch.native_dropout(input, p, True)[0] if training and p > 0.0 else input


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """In the block, attention and dropout are the fused kernels of a GPU, on any device.

    torch's functions are replaced, because its modes do not apply in the backward pass, where
    blocks are recomputed.
    """
    originals = F.scaled_dot_product_attention, F.dropout
    functions: Any = F
    functions.scaled_dot_product_attention, functions.dropout = _fused_attention, _fused_dropout
    try:
        yield
    finally:
        functions.scaled_dot_product_attention, functions.dropout = originals


def peak_bytes(forward: Callable[[], Tensor], weights: list[Tensor]) -> int:
    """Maximum of allocated bytes in `forward()` and its backward pass.

    Weights do not count, and a weight's gradient only until it is complete: where it is kept then
    does not depend on the model. The model cannot be trained after this.
    """
    drop_gradients(weights)
    with ActivationMemory(weights) as memory:
        forward().backward()  # type: ignore[no-untyped-call]
    return memory.peak


def drop_gradients(weights: Iterable[Tensor]) -> None:
    """From now on, free each gradient as soon as it is complete."""

    def drop(weight: Tensor) -> None:
        weight.grad = None

    for weight in weights:
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
