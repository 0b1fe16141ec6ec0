"""DeepSpeed's engine: its configuration, our changes, and its import before the first step."""

import contextlib
import gc
import importlib
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vit_ray.config.training_sections import TrainConfig
from vit_ray.deepspeed_internals import (
    import_deepspeed,
    keep_norms_on_device,
    round_norms_alike,
    sum_no_gradients,
    watch_norm,
)
from vit_ray.measure import memory
from vit_ray.training.optimizers import StepGuard
from vit_ray.training.replicated import ReplicatedOptimizer


def initialize(
    model: nn.Module,
    weights: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    guard: StepGuard,
    train: TrainConfig,
    clip_norm: float,
    micro_batch_size: int,
    accumulation_steps: int,
) -> Any:
    """DeepSpeed's engine around a model and its optimizer, under the stage of `train`.

    Args:
        weights: the trained ones.
    """
    deepspeed = import_deepspeed()
    sizes = [weight.numel() for weight in weights]
    bucket = memory.reduce_bucket(sum(sizes), max(sizes))

    def replicated(_: Any) -> ReplicatedOptimizer:
        return ReplicatedOptimizer(
            weights,
            optimizer,
            guard,
            clip_norm=clip_norm,
            bucket_elements=bucket,
            is_last_pass=lambda: engine.is_gradient_accumulation_boundary(),
        )

    config = deepspeed_config(train, clip_norm, bucket, micro_batch_size, accumulation_steps)
    # Some of its stages print memory reports without its logger.
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer if train.zero_stage else replicated,
            config=config,
            dist_init_required=False,
        )
    if train.zero_stage == 0:
        sum_no_gradients(engine)
        return engine
    watch_norm(engine.optimizer, guard.note_norm)
    if train.offload:  # the host reads gradients
        round_norms_alike(engine.optimizer, train.zero_stage, guard.norm.device)
    elif train.zero_stage == 3:
        keep_norms_on_device(engine.optimizer)
    return engine


def deepspeed_config(
    train: TrainConfig,
    clip_norm: float,
    reduce_bucket: int,
    micro_batch_size: int,
    accumulation_steps: int,
) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe."""
    stage = train.zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            # With overlap DeepSpeed has the host wait after every pass, which one worker does not
            # need; stage 3 waits either way.
            "overlap_comm": torch.cuda.is_available() and dist.get_world_size() > 1,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": reduce_bucket,
        }
    if stage == 3:
        zero |= {
            # No tensor stays whole on every rank: a norm or a bias is gathered in one operation
            # with the matrices that are prefetched beside it, so that whole copies would save no
            # operation, and would have to be gathered again after every step.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": memory.PREFETCH,
            "stage3_max_live_parameters": memory.HELD,
            # To the end of the forward pass and back, for all that is held. DeepSpeed 0.19.8 holds
            # more: gathering ahead in every module, it soon has all that `held` allows, and keeps
            # what it has found gathered.
            "stage3_max_reuse_distance": 2 * memory.HELD,
        }
    if train.offload:
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()}}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": clip_norm if stage else 0.0,  # at stage 0 it would clip twice
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes the device twice a pass
    }
    if train.precision == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": False}
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # a bf16 sum of 256 is 2.4 % off
    return config


def warm_up_process() -> None:
    """Import what the first steps would otherwise import; for a process that only trains.

    Objects that exist by then are excluded from garbage collection: DeepSpeed collects at every
    start of an engine, which took half a second each time.
    """
    import_deepspeed()
    if torch.cuda.is_available():  # where blocks are compiled, unless a recipe says otherwise
        importlib.import_module("torch._dynamo")
    gc.freeze()
