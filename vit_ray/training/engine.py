"""The engines: DeepSpeed under any ZeRO stage, on GPU or CPU, and the weights alone for evaluation;
and compiled models.

The loop calls `backward` for each micro-batch and `step` once per global batch; evaluations call
`predict`. Only `initialize`, `deepspeed_config`, `training_state.py` and `deepspeed_internals.py`
depend on the stage.
"""

import contextlib
import gc
import importlib
import io
import logging
import math
import sys
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import (
    compile_backend,
    import_deepspeed,
    keep_norms_on_device,
    round_norms_alike,
    sum_no_gradients,
    watch_norm,
)
from vit_ray.measure import memory
from vit_ray.measure.meters import DeviceTimes
from vit_ray.models.build import recompute
from vit_ray.models.resnet import ResNetEmbedding
from vit_ray.models.vit import VisionTransformer
from vit_ray.training.loop import StepResult
from vit_ray.training.objective import LossFunction
from vit_ray.training.optimizers import StepGuard, build_optimizer, set_rate
from vit_ray.training.replicated import ReplicatedOptimizer
from vit_ray.training.training_state import TrainingState

# Compiled variants of a block: train and evaluate, all tokens or only the first, two batch sizes.
_MAX_VARIANTS: Final = 32
# Why parts could not be compiled in this process so far, and run eagerly.
COMPILE_FAILURES: Final[list[str]] = []


class DeepSpeedEngine:
    """One worker's part of a DeepSpeed run, around a model with the weights to start from.

    The process group must exist; all ranks build their engines together.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainConfig,
        optim: OptimConfig,
        *,
        micro_batch_size: int,
        accumulation_steps: int,
        loss_function: LossFunction,
    ) -> None:
        self._loss_function = loss_function
        # A checkpoint has frozen parts, but no modules that an objective does not train.
        names = {p: name for name, p in model.named_parameters()}
        self._names = {p: name for p, name in names.items() if p.requires_grad}
        frozen = {p: name for p, name in names.items() if optim.frozen and not p.requires_grad}
        # The values before rounding: DeepSpeed's bf16 modes round the module in place.
        exact = {n: p.detach() for p, n in (self._names | frozen).items()}
        has_gpu = torch.cuda.is_available()
        self._optimizer = build_optimizer(model, optim)
        self._guard = StepGuard(self._optimizer, torch.device("cuda" if has_gpu else "cpu"))
        self._engine = initialize(
            model,
            list(self._names),
            self._optimizer,
            self._guard,
            train,
            optim.clip_norm,
            micro_batch_size,
            accumulation_steps,
        )
        if train.compiles(has_gpu):
            compile_model(model, compile_backend(), may_fail=train.compile == "auto")
        recompute(model, train.activation_checkpointing)
        self.rank, self.world_size = int(self._engine.global_rank), int(self._engine.world_size)
        self.device = torch.device(self._engine.device)
        self.forward_times = DeviceTimes(self.device)
        self.dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        self.state = TrainingState(
            self._engine, self._names, frozen, exact, self._optimizer, train, optim, self._guard
        )
        self.average, self.averaged = self.state.average, self.state.averaged

    def backward(self, images: Tensor, labels: Tensor, samples: Tensor, step: int = 0) -> Tensor:
        """Forward and backward pass of one micro-batch; returns its mean loss, detached.

        `step`: 0-based, for losses that change over the steps.
        """
        with self.forward_times.measured():
            loss = self._loss_function(self._engine, images, labels, samples, step)
        # So a loss that is not finite makes the gradients not finite, and all ranks skip the step.
        factor = torch.where(torch.isfinite(loss.detach()), 1.0, float("nan"))
        self._engine.backward(loss * factor)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch
        return loss.detach()

    def step(self, learning_rate: float, norm_limit: float = math.inf) -> StepResult:
        """Apply the accumulated gradients if they are finite with a norm up to `norm_limit`."""
        set_rate(self._optimizer, learning_rate)
        self._guard.norm_limit = norm_limit
        self._engine.step()
        if self.average is not None:
            applied_steps = self._engine.global_steps - self._guard.refused_steps
            self.average.update(self._guard.refused, applied_steps)
        return StepResult(self._guard.refused, self._guard.norm)

    def predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Head inputs (B, D) and logits (B, K) in fp32, in evaluation mode; all ranks call it."""
        self._engine.eval()
        module: Any = self._engine.module
        try:
            # Inside an objective (masked patches) the model predicts.
            return predicted(getattr(module, "model", self._engine), module.head, images)
        finally:
            self._engine.train()

    @torch.no_grad()
    def activation_sizes(self, images: Tensor) -> dict[str, float]:
        """Root mean square of each layer's output, the maximum over images; all ranks call it.

        Infinite if an output is not finite, so it shows the first layer with such an output. Layers
        are the model's blocks and the modules outside of blocks, in the order of the forward pass.
        """
        sizes: dict[str, float] = {}
        module: Any = self._engine.module
        model: nn.Module = getattr(module, "model", module)

        lists = (nn.ModuleList, nn.Sequential)
        names: dict[nn.Module, str] = {}
        for name, layer in model.named_modules():
            parent = model.get_submodule(name.rpartition(".")[0])
            is_outside = parent is model or isinstance(parent, lists)
            if name and is_outside and not isinstance(layer, lists):
                names[layer] = name

        def watch(layer: nn.Module, _: Any, output: Any) -> None:
            if layer in names and isinstance(output, Tensor):
                size = output.float().flatten(1).square().mean(1).sqrt().amax()
                largest = float(torch.nan_to_num(size, nan=math.inf, posinf=math.inf))
                sizes[names[layer]] = max(sizes.get(names[layer], 0.0), largest)

        # Code made by torch.compile does not call hooks.
        with register_module_forward_hook(watch), torch.compiler.set_stance("force_eager"):
            self.predict(images)
        return sizes

    def close(self) -> None:
        self._engine.destroy()


class Predictor:
    """The model on this worker's device, in the recipe's precision, for evaluation only.

    Without masters, moments, averages and gradients.
    """

    average = None

    def __init__(self, model: nn.Module, train: TrainConfig, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        self._model: Any = getattr(model, "model", model).to(device, self.dtype).eval()
        if train.compiles(device.type == "cuda"):
            compile_model(self._model, compile_backend(), may_fail=train.compile == "auto")

    def predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Head inputs (B, D) and logits (B, K) in fp32."""
        return predicted(self._model, self._model.head, images)


@torch.no_grad()
def predicted(model: Any, head: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The input of `head` (B, D) and the output of `model` (B, K), in fp32."""
    captured: list[Tensor] = []
    with head.register_forward_pre_hook(lambda _, args: captured.append(args[0])):
        logits = model(images)
    return captured[0].float(), logits.float()


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
        weights: the trained parameters.
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

    # Some of DeepSpeed's stages print memory reports, not through the logger.
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer if train.zero_stage else replicated,
            config=deepspeed_config(train, clip_norm, bucket, micro_batch_size, accumulation_steps),
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
            # No parameter stays unsharded: a norm or a bias is gathered in one operation with the
            # matrices prefetched with it, so unsharded copies would save no operation, and would
            # have to be gathered again after every step.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": memory.PREFETCH_ELEMENTS,
            "stage3_max_live_parameters": memory.GATHERED_ELEMENTS,
            # To the end of the forward pass and back, for all gathered parameters. DeepSpeed 0.19.8
            # holds more: it prefetches in every module until `stage3_max_live_parameters`, and does
            # not release parameters that it finds gathered.
            "stage3_max_reuse_distance": 2 * memory.GATHERED_ELEMENTS,
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

    Existing objects are then excluded from garbage collection: DeepSpeed collects garbage at every
    start of an engine, which took half a second each time.
    """
    import_deepspeed()
    if torch.cuda.is_available():  # where blocks are compiled, unless a recipe says otherwise
        importlib.import_module("torch._dynamo")
    gc.freeze()


def compile_model(model: nn.Module, backend: str, *, may_fail: bool) -> None:
    """Compile a model's calls, each variant at the first call.

    A ViT's blocks are compiled one by one and share code: compile time of the full graph would grow
    with depth. The few operations between blocks stay eager. The ResNet of a hybrid, and a plain
    ResNet, are compiled as a whole, because hardly two of the units have the same shapes.

    Args:
        model: a model, or an objective around one.
        backend: as for `torch.compile`.
        may_fail: fall back to eager, with a warning, if a part cannot be compiled.
    """
    import torch._dynamo

    # A logger has a filter only once, however often it is added.
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_note_failure)
    torch._dynamo.config.suppress_errors = may_fail
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    inner = getattr(model, "model", model)
    if not isinstance(inner, VisionTransformer):
        model.compile(backend=backend)
        return
    if isinstance(inner.embedding, ResNetEmbedding):
        inner.embedding.compile(backend=backend)
    for block in inner.blocks:
        # Only `forward`, which `recompute` may wrap later.
        block.forward = torch.compile(block.forward, backend=backend)


def _note_failure(record: logging.LogRecord) -> bool:
    # Store why a part runs eagerly; torch 2.13 reports it only in the log.
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The first line names the backend, the second has the backend's error.
        COMPILE_FAILURES.append(f"{type(error).__name__}: {' '.join(lines[:2])}"[:300])
    return True


def compile_s() -> float:
    """Seconds that this process has spent compiling forward and backward code."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])
