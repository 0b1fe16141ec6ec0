"""The engine that the loop drives: DeepSpeed under any ZeRO stage, on GPU or CPU.

The loop calls `backward` for each micro-batch and `step` once per global batch; evaluations call
`predict`. Code that depends on the stage is in `elastic_state.py`, `deepspeed_setup.py`,
`training/engine/fragments.py` and `deepspeed_internals.py`.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import compile_backend
from vit_ray.measure.meters import DeviceTimes
from vit_ray.models.build import recompute
from vit_ray.training.compiling import compile_model
from vit_ray.training.engine import initialize, predicted
from vit_ray.training.loop import StepResult
from vit_ray.training.objective import LossFunction
from vit_ray.training.optimizers import StepGuard, build_optimizer, set_rate
from vit_ray.training.training_state import TrainingState


class DeepSpeedEngine:
    """One worker's part of a DeepSpeed run."""

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
        """Wrap `model`, whose weights must already be those to start from.

        The process group must exist; all ranks build their engines together.
        """
        self._loss_function = loss_function
        # Modules that an objective does not train are left out of a checkpoint, unlike frozen
        # parts.
        named = [(p, name) for name, p in model.named_parameters()]
        self._names = {p: name for p, name in named if p.requires_grad}
        frozen = {p: name for p, name in named if optim.frozen and not p.requires_grad}
        # DeepSpeed's bf16 modes round the module in place; these keep the values before rounding.
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
        names = self._names | frozen
        self.state = TrainingState(
            self._engine, names, exact, self._optimizer, train, optim, self._guard
        )
        self.average = self.state.average

    def backward(self, images: Tensor, labels: Tensor, samples: Tensor, step: int = 0) -> Tensor:
        """Forward and backward pass of one micro-batch; returns its mean loss, detached.

        `step`: 0-based, for losses that change over the steps.
        """
        with self.forward_times.measured():
            loss = self._loss_function(self._engine, images, labels, samples, step)
        # A loss that is not finite must make the gradients not finite, so that all ranks skip
        # together.
        factor = torch.where(torch.isfinite(loss.detach()), 1.0, float("nan"))
        self._engine.backward(loss * factor)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch
        return loss.detach()

    def take_forward_s(self) -> float:
        """Time of this rank's forward passes since the last call; the device must have finished
        them.

        They wait for no other rank, except for weights under ZeRO 3.
        """
        return self.forward_times.take_s()

    def step(self, learning_rate: float, norm_limit: float = math.inf) -> StepResult:
        """Apply the accumulated gradients, unless they are not finite or their norm is above."""
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
            # An objective around a model (masked patches) does not predict; its model does.
            return predicted(getattr(module, "model", self._engine), module.head, images)
        finally:
            self._engine.train()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """As `WeightAverage.applied`."""
        assert self.average is not None
        with self.average.applied(self._engine, self._names):
            yield

    @torch.no_grad()
    def activation_sizes(self, images: Tensor) -> dict[str, float]:
        """Root mean square of each layer's output, the largest over the images; all ranks call it.

        They show where a value stops being finite: infinite if an output is not. The layers are the
        model's blocks and its modules outside of them, in the order of the forward pass.
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
