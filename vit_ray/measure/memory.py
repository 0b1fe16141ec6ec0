"""Memory of a device in a training step by part, before anything is started, and when it ran out.

Bytes per parameter follow the ZeRO paper (Rajbhandari et al., arXiv:1910.02054, section 3): bf16
weights 2, gradients 4 (the paper's 2 are of bf16; a step's passes are summed in fp32), fp32 master
weights and the optimizer's moments 12 (Adam); stage 1 shards the optimizer's part over the workers,
stage 2 the gradients too, stage 3 the weights too.
DeepSpeed 0.19.8 needs buffers in the backward pass and in the step, too.

Activations are counted on tensors without memory: on the meta device inside `gpu_kernels`, sizes,
views and lifetimes are those of a GPU, and a model of any size takes a second and no memory.

It imports only torch, so that benchmarks run on a machine without anything else.
"""

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 1024**3
# One in use, one whose turn is next, and one that waits for a place (`worker/prefetch.py`).
BATCHES_ON_DEVICE: Final = 3

# Sizes of ZeRO's collectives: for the engine that sets them, and for the plan. Gradients are summed
# over workers in buckets beside the backward pass. What is left to wait for at its end is the last
# bucket, so that small ones are better, until starting each costs more: for N parameters of w
# bytes, a bucket of B costs B 2w / bandwidth at the end and N / B starts. New weights of stages 1
# and 2 have no size here: they are gathered after the step, in place and all at once (DeepSpeed
# 0.19.8 heeds its `allgather_bucket_size` only where torch cannot do so).
#
# Start and bandwidth are those of an all-reduce over eight servers of eight H100 with eight
# adapters of 400 Gbit/s, by NCCL's own model of its trees (src/graph/tuning.cc, LL128). Eight
# servers stand for any number: the best bucket of one server is half as large, that of 64 a third
# larger, and this one costs both less than a millisecond of a step.
START_S: Final = 72.2e-6
LINK_BYTES_PER_S: Final = 352.5e9
# Weights that stage 3 gathers ahead in each module, up to `GATHERED_ELEMENTS` altogether: about two
# blocks of ViT-H/14.
PREFETCH_ELEMENTS: Final = 50_000_000
# Weights that stage 3 holds gathered, to which those of one module may come: 2 GB of bf16, every
# model of the paper whole. What is held when the forward pass ends, the backward pass uses; the
# others are gathered again.
GATHERED_ELEMENTS: Final = 1_000_000_000

# Messages of torch 2's allocators, and of the CUDA libraries that take memory without them:
# `RuntimeError`s.
_EXHAUSTED = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER
    "Failed to CUDA calloc",  # NCCL
)

T = TypeVar("T")


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


def state_memory(shape: StateShape, activation_bytes: int = 0) -> MemoryEstimate:
    """Memory of the state, and of one micro-batch on top of it.

    Activations are gone when gradients are unpacked for the optimizer's step, so of the two
    kinds of buffers only the larger excess counts.

    Args:
        activation_bytes: most that are alive in forward and backward pass.
    """
    trained, stage, size = shape.num_parameters, shape.stage, shape.world_size
    all_weights, weight_bytes = trained + shape.num_frozen, shape.weight_bytes
    bucket = reduce_bucket(trained, shape.largest_parameter)
    # fp32 without ZeRO steps the weights themselves; everything else keeps masters apart.
    masters = 4 if shape.precision == "bf16" or stage > 0 else 0
    share = [1.0 if stage < sharded_from else 1 / size for sharded_from in range(4)]
    optimizer = trained * (shape.moment_bytes + masters) * share[1]
    if stage == 0:
        backward = trained * weight_bytes if size > 1 else 0.0
    elif stage < 3:  # buckets that gradients are summed in; of two, one is filled meanwhile
        summed_bytes = 4 if stage == 1 else weight_bytes  # stage 1 fills its buckets from fp32 sums
        copied_bytes = summed_bytes + (weight_bytes if summed_bytes != weight_bytes else 0)
        backward = bucket * (summed_bytes * min(size, 2) + copied_bytes)
    else:  # and the gathered weights; a single worker computes with its shard directly
        gathered = min(all_weights, GATHERED_ELEMENTS + shape.largest_parameter) if size > 1 else 0
        backward = (2 * bucket + gathered) * weight_bytes
    # Copies of a worker's share of the gradients, in fp32 to apply.
    in_step = 0.0 if stage == 0 or shape.offload else 4 * trained / size
    # Averages are sharded under every stage (`training/training_state.py`).
    averages = 4 * trained / size if shape.has_average and not shape.offload else 0.0
    return MemoryEstimate(
        weights=all_weights * weight_bytes * share[3] / GIB,
        gradients=trained * 4 * share[2] / GIB,
        optimizer=0.0 if shape.offload else optimizer / GIB,
        averages=averages / GIB,
        batches=shape.batch_bytes * BATCHES_ON_DEVICE / GIB,
        activations=activation_bytes / GIB,
        buffers=max(backward, in_step - activation_bytes) / GIB,
    )


def reduce_bucket(num_parameters: int, largest_parameter: int) -> int:
    """Gradients that are summed over workers at a time, on any number of workers.

    DeepSpeed allocates it whole.

    B/16 has 4 buckets, H/14 has 10. The largest parameter fits into one: what does not, DeepSpeed
    0.19.8 sums in place of copying it, and at stage 2 with overlap it gives the memory to the
    computing stream before the sum has read it (`stage_1_and_2.py: average_tensor`).

    Args:
        num_parameters: of all together; no bucket is larger.
        largest_parameter: elements of the largest one.
    """
    bytes_sent = 2 * 2  # of each element: bf16, and an all-reduce sends it twice
    best = math.sqrt(num_parameters * START_S * LINK_BYTES_PER_S / bytes_sent)
    return min(num_parameters, max(int(best), largest_parameter))


class ActivationMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations inside it make, while they live.

    Args:
        known: storages that are not to be counted, such as those of the weights.

    Attributes:
        current: bytes alive now.
        peak: most bytes alive at a time.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_storage_key(tensor) for tensor in known}
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := _storage_key(leaf)) not in self._known:
                storage = leaf.untyped_storage()
                self._known.add(key)
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._forget, key, storage.nbytes())
        return result

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.current -= num_bytes


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """Flash attention; memory-efficient attention for fp32 and for a bias. Neither keeps N x N."""
    aten = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True)[0]


def _fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Keeps a mask of one byte per element, as on CUDA."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0.0 else input


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Inside, attention and dropout are the fused kernels of a GPU, whatever the device.

    torch's own functions are replaced for the while: its modes do not reach into the backward
    pass, where blocks are recomputed.
    """
    plain = F.scaled_dot_product_attention, F.dropout
    replaced: Any = F
    replaced.scaled_dot_product_attention, replaced.dropout = _fused_attention, _fused_dropout
    try:
        yield
    finally:
        replaced.scaled_dot_product_attention, replaced.dropout = plain


def peak_bytes(forward: Callable[[], Tensor], weights: list[Tensor]) -> int:
    """Most bytes alive at a time in `forward()` and its backward pass.

    Weights are not counted, and a weight's gradient only until it is whole: who keeps it, and
    how, is not the model's affair.
    """
    hooks = drop_gradients(weights)
    with ActivationMemory(weights) as memory:
        forward().backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return memory.peak


def drop_gradients(weights: Iterable[Tensor]) -> list[Any]:
    """Have each gradient go as soon as it is whole, until the hooks that it returns are removed."""

    def drop(weight: Tensor) -> None:
        weight.grad = None

    return [
        weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for weight in weights
        if weight.requires_grad
    ]


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a pass ran out of memory on this worker, whichever library raised the error.

    Errors of data tasks, which arrive through Ray, do not belong to the pass.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_of_torch = isinstance(error, RuntimeError) and not type(error).__module__.startswith("ray")
    return is_of_torch and any(words in str(error) for words in _EXHAUSTED)


def unless_out_of_memory(run: Callable[[], T], device: torch.device) -> T | None:
    """The result of `run`; None if it ran out of memory. Its memory is free afterwards."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        # The error's frames hold the tensors of the pass; nothing must keep it after this block.
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None
