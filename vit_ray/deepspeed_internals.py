"""Every private name of DeepSpeed that this project uses, in one file.

Each is here because no public name of DeepSpeed 0.19 works instead; a test checks that each exists.
Only the functions below use them: quiet imports, the norm and the host-device syncs of a step, and
where each ZeRO stage keeps master weights and optimizer state.

The public `safe_get_*` and `safe_set_*` functions are not sufficient. Those for whole parameters
all-reduce a zero-filled fp32 copy of each parameter, where reading a part costs nothing; under ZeRO
3 the setters read past the end of a parameter whose size the number of ranks does not divide. Those
for local partitions exist only for ZeRO 3, return copies instead of views with an offloaded
optimizer, and count padding as values. None supports ZeRO 0, and none says where a partition
starts. So this module reads the addresses from the same attributes as those functions.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from vit_ray.internals import Internal, hide_modules

# Version of DeepSpeed for which all of this was read and tested.
VERSION: Final = "0.19"
_ZERO: Final = "deepspeed.runtime.zero"
_SHARDS: Final = "Checkpoints and averages work on views of the part that a rank holds."
_NORM: Final = (
    "Steps refuse a gradient that is not finite on the device, without a host-device sync."
)

INTERNALS: Final = (
    Internal(
        f"{_ZERO}.stage_1_and_2", "DeepSpeedZeroOptimizer",
        f"{_SHARDS} {_NORM}", "",
        {
            "scaled_global_norm": ("self", "norm_type"),
            "complete_grad_norm_calculation_for_cpu_offload": ("self", "params"),
            "get_param_id": ("self", "param"),
        },
        ("single_partition_of_fp32_groups", "norm_for_param_grads"),
        (
            "is_invalid_grad_norm(scaled_global_grad_norm)",
            "mask_nan_or_inf_with_val_inplace(total_norm, device=self.device)",
        ),
    ),
    Internal(
        f"{_ZERO}.stage3", "DeepSpeedZeroOptimizer_Stage3",
        f"{_SHARDS} {_NORM}", "",
        {
            "get_param_id": ("self", "param"),
            "complete_grad_norm_calculation_for_cpu_offload": ("self", "params"),
            # These are decorated.
            "_get_norm_groups": ("args", "kwargs"),
            "get_grad_norm_direct": ("args", "kwargs"),
        },
        ("norm_for_param_grads", "fp32_partitioned_groups_flat", "grad_position"),
        (
            "is_invalid_grad_norm(scaled_global_grad_norm)",
            "combine_grad_norm_groups(norm_groups)",
            "self.get_grad_norm_direct(self.averaged_gradients[i], self.fp16_groups[i])",
        ),
    ),
    Internal(
        "deepspeed.runtime.engine", "DeepSpeedEngine",
        "bf16 accepts the optimizers that fp32 accepts, and stage 0 sums gradients by itself.", "",
        {
            "_do_optimizer_sanity_check": ("self", "basic_optimizer"),
            "empty_partition_cache": ("self",),
        },
        ("enable_backward_allreduce",),
    ),
    Internal(
        "deepspeed.runtime.engine", "ZERO_OPTIMIZATION", "What that check returns for ZeRO.", "",
    ),
    Internal(
        "deepspeed.utils.tensor_fragment", "fragment_address", _SHARDS, "",
        attributes=("numel", "start"),
    ),
    Internal(
        "deepspeed.utils.tensor_fragment", "tensor_fragment", _SHARDS, "",
        attributes=("lp_fragment_address", "hp_fragment_address", "param_group_index"),
    ),
    Internal(
        "deepspeed.utils.mixed_precision_linkage", "", _SHARDS, "",
        source=("lp_param._hp_mapping =",),
    ),
    Internal(
        f"{_ZERO}.partition_parameters", "", f"{_SHARDS} `safe_set_*` only write masters.",
        "#2056", source=("param.ds_numel =", "param.ds_tensor ="),
    ),
    Internal(
        "deepspeed.runtime.compiler", "compile",
        "DeepSpeed imports an optimizer whose kernels load torch's compiler, in 3 CPU seconds and "
        "150 MiB; it is not used here.", "",
    ),
    Internal(
        "deepspeed.ops", "_probe_compatible_ops",
        "Not called: it tries compilers and devices for about twenty kernels on every worker, and "
        "`__compatible_ops__` keeps the result.", "#6892",
        {"": ()}, source=("__compatible_ops__",),
    ),
)  # fmt: skip


def import_deepspeed() -> Any:
    """DeepSpeed, without its messages and without optional imports; takes a second or more.

    ZeRO skips its check of a norm, and bf16 accepts the optimizers that fp32 accepts.
    """
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed's autotuner imports MLflow, which takes longer than importing DeepSpeed.
    with hide_modules("mlflow"):
        import deepspeed
    # The import resets the level of DeepSpeed's logger.
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    # DeepSpeed's kernels are not used. Without this, it would try compilers and devices for each of
    # them, and then compile one for 25 s that only inference calls.
    deepspeed.ops.__compatible_ops__ = {}
    from deepspeed.runtime import compiler

    # This decorator is used only for one optimizer, whose class ZeRO compares with all others. It
    # would load torch's compiler, in 3 CPU seconds and 150 MiB.
    compiler.compile = lambda: lambda function: function
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    # For bf16 at stage 1 DeepSpeed would choose an optimizer that all-reduces after the backward
    # pass, and at stage 0 one that steps tensor by tensor.
    engine.DeepSpeedEngine._do_optimizer_sanity_check = lambda self, _: (
        engine.ZERO_OPTIMIZATION if self.zero_optimization() else None
    )
    # `StepGuard` refuses what is not finite.
    stage_1_and_2.is_invalid_grad_norm = stage3.is_invalid_grad_norm = lambda norm: False
    # This would copy a number to the device for each group of weights; the code that combines their
    # norms accepts values that are not finite.
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = lambda norm, device: None
    return deepspeed


def round_norms_alike(zero: Any, stage: int, device: torch.device) -> None:
    """Make the norm of offloaded gradients equal that of gradients on the device, bit by bit.

    From the same squares DeepSpeed takes the root in Python if the optimizer is offloaded, and else
    in torch, whose fp32 root differs in the last bit in one of seven cases; under stage 3 it adds
    them up in fp32 in one case and in fp64 in the other. Everything clipped by that norm would
    differ.
    """

    def complete(parameters: list[nn.Parameter]) -> Tensor:
        by_id, ids = zero.norm_for_param_grads, map(zero.get_param_id, parameters)
        norms = [torch.zeros((), dtype=torch.float64, device=device)]
        norms += [by_id[id_].to(device) for id_ in ids if id_ in by_id]
        return _norm_over_ranks(norms[1:] or norms, stage).cpu()

    zero.complete_grad_norm_calculation_for_cpu_offload = complete


def keep_norms_on_device(zero: Any) -> None:
    """Make stage 3 measure norms without a host-device sync.

    DeepSpeed copies a number to the device for each group of weights, to replace a norm that is not
    finite. The code that combines the groups' norms accepts such norms.
    """

    def norm(gradients: list[Tensor], _: list[nn.Parameter]) -> Tensor:
        return _norm_over_ranks([gradient.double().norm(2.0) for gradient in gradients], stage=3)

    zero.get_grad_norm_direct = norm


def _norm_over_ranks(norms: list[Tensor], stage: int) -> Tensor:
    """Norm over the norms of all ranks, in the stage's precision for sums."""
    precision = torch.float64 if stage == 3 else torch.float32
    squares = torch.stack(norms).pow(2.0).sum().to(precision)
    torch.distributed.all_reduce(squares)
    return squares.pow(0.5)


def compile_backend() -> str:
    """Name of torch.compile's backend for this device."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().get_compile_backend())


def watch_norm(zero: Any, note: Callable[[Tensor], None]) -> None:
    """Call `note` with the norm that ZeRO's optimizer measures in each step, before it steps."""
    is_global = hasattr(zero, "scaled_global_norm")
    name = "scaled_global_norm" if is_global else "_get_norm_groups"
    measure: Callable[[], Any] = getattr(zero, name)

    def measured() -> Any:
        norm = measure()
        # Stage 3 measures a norm for each group of weights.
        note(norm if is_global else torch.linalg.vector_norm(torch.stack(norm)))
        return norm

    setattr(zero, name, measured)


def sum_no_gradients(engine: Any) -> None:
    """For stage 0, whose optimizer sums gradients during the backward pass."""
    engine.enable_backward_allreduce = False


class Place(NamedTuple):
    """Where ZeRO keeps the master weights of consecutive elements of a parameter.

    Attributes:
        start: start in the flattened parameter.
        owner: the flat tensor that the optimizer steps, and key of the optimizer's state for it.
        offset: start in the flattened owner.
        size: number of elements, without padding.
    """

    start: int
    owner: Tensor
    offset: int
    size: int


def place_of(optimizer: Any, parameter: nn.Parameter, stage: int, rank: int) -> Place | None:
    """This rank's part of a parameter under stage 1, 2 or 3; None if it has no part."""
    if stage == 3:
        group, offset, per_rank = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * per_rank
        count = min(per_rank, parameter.ds_numel - start)  # type: ignore[attr-defined]
        owner = optimizer.fp32_partitioned_groups_flat[group]
        return Place(start, owner, offset, count) if count > 0 else None
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    address = mapping.hp_fragment_address
    owner = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    return Place(mapping.lp_fragment_address.start, owner, address.start, address.numel)


def flat_groups(optimizer: Any, stage: int) -> list[Tensor]:
    """The flat tensors that ZeRO's optimizer of stage 1, 2 or 3 steps."""
    if stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def forget_gathered(engine: Any) -> None:
    """Make stage 3 gather parameters again: a forward pass leaves them gathered."""
    engine.empty_partition_cache()


def shard_of(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter under stage 3, in the model's precision, with padding."""
    return parameter.ds_tensor.data  # type: ignore[attr-defined]
