"""What DeepSpeed is given: its configuration, and its import ahead of the first step."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import torch

from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import import_deepspeed
from vit_ray.measure.zero_settings import ZeroSettings


def deepspeed_config(
    train: TrainConfig,
    optim: OptimConfig,
    settings: ZeroSettings,
    micro_batch_size: int,
    accumulation_steps: int,
) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe."""
    stage = train.zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            "overlap_comm": torch.cuda.is_available(),
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": settings.reduce_bucket,
        }
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": settings.persistence,
            "stage3_prefetch_bucket_size": settings.prefetch,
            "stage3_max_live_parameters": settings.held,
            "stage3_max_reuse_distance": settings.reuse_distance,
        }
    if train.offload:
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()}}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": optim.clip_norm if stage else 0.0,
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
    """Import what the first steps would import in their time; for a process that only trains.

    What is there by then is no garbage: DeepSpeed collects it at every start of an engine, which
    took half a second each time.
    """
    import_deepspeed()
    importlib.import_module("torch._dynamo")  # by the first step of any optimizer
    gc.freeze()
