"""The engine that the loop drives: DeepSpeed under any ZeRO stage, on GPU or CPU.

The loop needs three methods of an engine: `backward` for each micro-batch, `step` once per
global batch, and `predict`. Everything that depends on the stage stays in this file, in
`fragments.py` and in `deepspeed_internals.py`.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_ray.checkpoints.checkpoint import (
    AVERAGE,
    WEIGHT,
    Checkpoint,
    Position,
    Snapshot,
    take_snapshot,
)
from vit_ray.checkpoints.fragments import (
    Fragment,
    Parts,
    create_state,
    exchange_weights,
    frozen_fragments,
    innermost,
    local_fragments,
    names_of_tensors,
    optimizer_state,
    owned_fragments,
    set_weights,
    stepped_tensors,
    weights_by_name,
)
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import (
    compile_backend,
    import_deepspeed,
    keep_host_ahead,
    keep_norms_on_device,
    round_norms_alike,
    sum_no_gradients,
    watch_norm,
)
from vit_ray.measure.meters import DeviceTimes
from vit_ray.measure.zero_settings import zero_settings
from vit_ray.models.layers import Head
from vit_ray.train.adafactor import Adafactor
from vit_ray.train.compiling import compile_failures, compile_model, compile_s
from vit_ray.train.deepspeed_config import deepspeed_config
from vit_ray.train.ema import WeightAverage
from vit_ray.train.layer_sizes import activation_sizes
from vit_ray.train.loop import StepResult
from vit_ray.train.objective import LossFunction
from vit_ray.train.optim import build_optimizer, set_rate, state_types
from vit_ray.train.replicated import ReplicatedOptimizer
from vit_ray.train.step_guard import StepGuard


class DeepSpeedEngine:
    """One worker's part of a DeepSpeed run, with its state as fragments."""

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

        The process group must exist; every rank builds its engine together.
        """
        self._loss_function = loss_function
        self._train = train
        self._compile_s_before = compile_s()
        self._num_failures_before = len(compile_failures())
        self.stage = train.zero_stage
        state = state_types(optim)
        self._state_keys = tuple(state)
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._heads = [
            (head, self._names[head.bias])
            for head in model.modules()
            if isinstance(head, Head) and head.bias in self._names and train.precision == "bf16"
        ]
        # What an objective does not train itself is no part of a checkpoint, unlike frozen parts.
        self._frozen_names = {
            p: name for name, p in model.named_parameters() if optim.frozen and not p.requires_grad
        }
        # DeepSpeed's bf16 modes round the module in place; these keep what it was rounded from.
        exact = {n: p.detach() for p, n in (self._names | self._frozen_names).items()}
        self.shapes = {name: list(p.shape) for name, p in exact.items()}
        if train.activation_checkpointing:
            model.set_activation_checkpointing(train.activation_checkpointing)  # type: ignore[operator]
        self.device = torch.device("cpu")
        self._engine = self._initialize(model, optim, micro_batch_size, accumulation_steps)
        self.device = torch.device(self._engine.device)
        self.forward_times = DeviceTimes(self.device)
        self.dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        # A trial step at initialization leaves a step count behind in some stages only.
        optimizer_state(self._engine).clear()
        self._local = local_fragments(self._engine, self._names)
        set_weights(self._local, exact)
        self._owned = owned_fragments(self._local, self.rank, self.world_size, self.stage)
        self._frozen = frozen_fragments(self._engine, self._frozen_names, exact)
        create_state(self._engine, state)
        self._attach_fragments()
        self._show_exact_biases()
        self.average = None
        if train.averaging:
            self.average = WeightAverage(
                self._owned, train.averaging, warms_up=train.averaging_warmup
            )

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self._engine.global_rank)

    @property
    def world_size(self) -> int:
        """Workers."""
        return int(self._engine.world_size)

    @property
    def module(self) -> nn.Module:
        """What computes; under ZeRO 3 only its forward pass may touch its weights."""
        return self._engine

    def backward(self, images: Tensor, labels: Tensor, samples: Tensor, step: int = 0) -> Tensor:
        """Forward and backward pass of one micro-batch; returns its mean loss, detached.

        `step`: 0-based, for losses that change from step to step.
        """
        with self.forward_times.measured():
            loss = self._loss_function(self._engine, images, labels, samples, step)
        # A loss that is not finite must poison the gradients, so that all ranks skip together.
        factor = torch.where(torch.isfinite(loss.detach()), 1.0, float("nan"))
        self._engine.backward(loss * factor)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch
        return loss.detach()

    def compile_s(self) -> float:
        """Seconds that compiling this engine's model has taken so far."""
        return compile_s() - self._compile_s_before

    def compile_failure(self) -> str | None:
        """Why a part of the model that was to be compiled runs eagerly; None if none does."""
        failures = compile_failures()[self._num_failures_before :]
        return failures[0] if failures else None

    def take_forward_s(self) -> float:
        """Time of this rank's forward passes since the last call, which the device has ended.

        They wait for no other rank, but for weights under ZeRO 3.
        """
        return self.forward_times.take_s()

    def step(self, learning_rate: float) -> StepResult:
        """Apply the accumulated gradients, unless they are not finite."""
        set_rate(innermost(self._engine.optimizer), learning_rate)
        self._engine.step()
        self._show_exact_biases()
        if self.average is not None:
            applied_steps = self._engine.global_steps - self._guard.refused_steps
            self.average.update(self._guard.refused, applied_steps)
        return StepResult(self._guard.refused, self._guard.norm)

    @torch.no_grad()
    def predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Head inputs (B, D) and logits (B, K) in fp32, in evaluation mode; all ranks call it."""
        self._engine.eval()
        module: Any = self._engine.module
        # An objective around a model (masked patches) is not what predicts; its model is.
        predicts = getattr(module, "model", self._engine)
        captured: list[Tensor] = []
        hook = module.head.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
        try:
            logits = predicts(images)
        finally:
            hook.remove()
            self._engine.train()
        return captured[0].float(), logits.float()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The module computes with the averaged weights inside this block; all ranks enter it."""
        assert self.average is not None
        try:
            with self.average.applied(self._engine, self._names):
                self._show_exact_biases(self.average.by_name())
                yield
        finally:
            self._show_exact_biases()

    def snapshot(self, position: Position) -> Snapshot:
        """Host copy of the fragments that this rank owns."""
        averages = self.average.by_name() if self.average else None
        return take_snapshot(
            self._owned,
            optimizer_state(self._engine),
            self._state_keys,
            averages,
            position,
            self.rank,
            self.world_size,
            self._frozen,
            self._second_moments() if self.rank == 0 else [],
        )

    @property
    def applied_steps(self) -> int:
        """Steps that moved the weights."""
        state = optimizer_state(self._engine)
        counts = [int(entry["step"]) for entry in state.values() if "step" in entry]
        return counts[0] if counts else int(self._engine.global_steps - self._guard.refused_steps)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly from a checkpoint, whatever the module has; all ranks call it."""
        state = optimizer_state(self._engine)
        kinds = {WEIGHT: [(f, f.weight) for f in (*self._local, *self._frozen)]}
        for key in self._state_keys:
            kinds[key] = [(f, f.state(state, key)) for f in self._local]
        for kind, fragment in self._second_moments():
            kinds.setdefault(kind, []).append((fragment, fragment.weight))
        if self.average is not None and checkpoint.has_average():
            kinds[AVERAGE] = list(zip(self._owned, self.average.values, strict=True))
        checkpoint.fill(kinds)
        if self.average is not None and not checkpoint.has_average():
            self.average.restart()
        masters = weights_by_name(self._owned, [f.weight for f in self._owned])
        exchange_weights(self._engine, self._names, masters)
        self._show_exact_biases()
        frozen = weights_by_name(self._frozen, [f.weight for f in self._frozen])
        exchange_weights(self._engine, self._frozen_names, frozen)
        for entry in state.values():
            if "step" in entry:
                entry["step"].fill_(checkpoint.position.applied_steps)
        self._engine.global_steps = checkpoint.position.step
        refused = checkpoint.position.step - checkpoint.position.applied_steps
        self._guard.refused_steps.fill_(refused)

    @torch.no_grad()
    def _show_exact_biases(self, values: Parts | None = None) -> None:
        """Have heads in bf16 add their fp32 biases, by default the masters; all ranks call it."""
        if values is None:
            names = {name for _, name in self._heads}
            owned = [fragment for fragment in self._owned if fragment.name in names]
            values = weights_by_name(owned, [fragment.weight for fragment in owned])
        for head, name in self._heads:
            exact = torch.zeros(head.out_features, device=self.device)
            for start, part in values.get(name, []):
                exact.narrow(0, start, part.numel()).copy_(part)
            dist.all_reduce(exact)
            if head.exact_bias is None:
                head.exact_bias = exact
            else:
                head.exact_bias.copy_(exact)  # where compiled code has it

    def weight_norms(self) -> dict[str, float]:
        """Norm of every parameter's master weights; all ranks call it."""
        squares = torch.zeros(len(self.shapes), dtype=torch.float64)
        index = {name: i for i, name in enumerate(self.shapes)}
        for fragment in (*self._owned, *self._frozen):
            squares[index[fragment.name]] += float(fragment.weight.double().square().sum())
        squares = squares.to(self.device, torch.float32 if self.device.type != "cpu" else None)
        torch.distributed.all_reduce(squares)
        return {name: math.sqrt(float(squares[i])) for name, i in index.items()}

    def activation_sizes(self, images: Tensor) -> dict[str, float]:
        """See `layer_sizes`; all ranks call it."""
        module: Any = self._engine.module
        return activation_sizes(getattr(module, "model", module), lambda: self.predict(images))

    def fragments(self) -> list[Fragment]:
        """What this rank owns."""
        return self._owned

    def close(self) -> None:
        """Release DeepSpeed's hooks and memory."""
        self._engine.destroy()

    def _attach_fragments(self) -> None:
        optimizer = innermost(self._engine.optimizer)
        if not isinstance(optimizer, Adafactor):
            return

        def add_over_ranks(sums: Tensor) -> None:
            if self.stage == 0:
                return  # every rank has all of the gradient
            on_device = sums.to(self.device)
            torch.distributed.all_reduce(on_device)
            sums.copy_(on_device)

        owners = stepped_tensors(self._engine)
        names = zip(owners, names_of_tensors(self._local, owners), strict=True)
        optimizer.attach(self._local, list(names), self.shapes, add_over_ranks)

    def _second_moments(self) -> list[tuple[str, Fragment]]:
        """Those that are not kept for each element; every rank has all of them."""
        optimizer = innermost(self._engine.optimizer)
        return optimizer.second_moments() if isinstance(optimizer, Adafactor) else []

    def _initialize(
        self, model: nn.Module, optim: OptimConfig, micro_batch_size: int, accumulation_steps: int
    ) -> Any:
        deepspeed = import_deepspeed()
        optimizer = build_optimizer(model, optim)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        guard = self._guard = StepGuard(optimizer, device)
        weights = list(self._names)
        sizes = [weight.numel() for weight in weights]
        settings = zero_settings(sum(sizes), max(sizes))

        def replicated(_: Any) -> ReplicatedOptimizer:
            return ReplicatedOptimizer(
                weights,
                optimizer,
                guard,
                clip_norm=optim.clip_norm,
                bucket_elements=settings.reduce_bucket,
                is_last_pass=lambda: self._engine.is_gradient_accumulation_boundary(),
            )

        config = deepspeed_config(
            self._train, optim, settings, micro_batch_size, accumulation_steps
        )
        # Some of its stages print memory reports past its logger.
        with contextlib.redirect_stdout(io.StringIO()):
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer if self.stage else replicated,
                config=config,
                dist_init_required=False,
            )
        if self.stage:
            watch_norm(engine.optimizer, guard.note_norm)
            if self._train.offload:
                round_norms_alike(engine.optimizer, self.stage, device)
            else:  # with offload the host reads gradients
                keep_host_ahead(engine.optimizer, self.stage)
                if self.stage == 3:
                    keep_norms_on_device(engine.optimizer)
        else:
            sum_no_gradients(engine)
        if self._train.compiles(torch.cuda.is_available()):
            compile_model(model, compile_backend(), may_fail=self._train.compile == "auto")
        return engine
