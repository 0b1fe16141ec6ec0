"""ZeRO stage 0: every rank steps the full state; gradients are summed during the backward pass.

DeepSpeed 0.19.8 would all-reduce after the backward pass; in bf16 it would also sum passes in bf16
and step tensor by tensor, with several host-device syncs for each.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_ray.training.optimizers import StepGuard


class ReplicatedOptimizer:
    """Steps fp32 masters of all weights by torch's optimizer; DeepSpeed takes it as an optimizer.

    The master of an fp32 weight is the weight. Masters collect the gradients of the passes.

    Args:
        weights: of the groups of `optimizer`, in the order of the forward pass.
        optimizer: without a step so far; the groups' weights are replaced by masters.
        bucket_elements: maximum of one all-reduce, unless a single weight has more.
        is_last_pass: whether the current pass is the last one before a step.
    """

    def __init__(
        self,
        weights: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        guard: StepGuard,
        *,
        clip_norm: float,
        bucket_elements: int,
        is_last_pass: Callable[[], bool],
    ) -> None:
        self.optimizer = optimizer
        self.masters: dict[nn.Parameter, Tensor] = {
            w: w if w.dtype == torch.float32 else w.detach().float() for w in weights
        }
        self._guard, self._clip_norm, self._is_last_pass = guard, clip_norm, is_last_pass
        for group in optimizer.param_groups:
            group["params"] = [self.masters[weight] for weight in group["params"]]
        self._hooks = [w.register_post_accumulate_grad_hook(self._collect) for w in weights]  # type: ignore[no-untyped-call]
        # The backward pass reaches the last weights first. All ranks must send in the same order.
        self._buckets: list[list[nn.Parameter]] = []
        size = 0
        for weight in reversed(weights):
            if not self._buckets or size + weight.numel() > bucket_elements:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(weight)
            size += weight.numel()
        self._ready: set[nn.Parameter] = set()
        self._sent: list[tuple[list[nn.Parameter], Tensor, Any]] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: `step` removes gradients."""

    def destroy(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def step(self) -> None:
        """Apply the mean gradient of all ranks, unless it is not finite."""
        self._send(len(self._buckets))
        for bucket, flat, work in self._sent:
            # no limit: the process group's timeout
            work.wait()  # on a GPU the stream waits, not the host
            flat.div_(dist.get_world_size())
            parts = torch.split(flat, [weight.numel() for weight in bucket])
            for weight, part in zip(bucket, parts, strict=True):
                self._gradient(weight).copy_(part.view_as(weight))
        self._sent.clear()
        self._ready.clear()
        gradients = [self._gradient(weight) for weight in self.masters]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._guard.note_norm(norm)
        if self._clip_norm:  # at stages 1 to 3 DeepSpeed clips
            torch._foreach_mul_(gradients, torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        rounded = [pair for pair in self.masters.items() if pair[0].dtype != pair[1].dtype]
        if rounded:
            torch._foreach_copy_([weight for weight, _ in rounded], [m for _, m in rounded])

    @torch.no_grad()
    def _collect(self, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        master = self.masters[weight]
        if weight is not master:
            assert weight.grad is not None
            if master.grad is None:
                master.grad = weight.grad.to(master.dtype)
            else:
                master.grad.add_(weight.grad)
            weight.grad = None
        if self._is_last_pass():
            self._ready.add(weight)
            count = len(self._sent)
            while count < len(self._buckets) and self._ready.issuperset(self._buckets[count]):
                count += 1
            self._send(count)

    def _send(self, count: int) -> None:
        """Start summing the first `count` buckets over all ranks, in the weights' precision."""
        if dist.get_world_size() == 1:
            return
        for bucket in self._buckets[len(self._sent) : count]:
            flat = torch.cat([self._gradient(w).flatten().to(w.dtype) for w in bucket])
            self._sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def _gradient(self, weight: nn.Parameter) -> Tensor:
        # Zeros if no pass reached the weight on this rank, as in ZeRO's other stages.
        master = self.masters[weight]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad
