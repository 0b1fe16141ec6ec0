"""The optimizers of the papers, by `optim.name`; weight decay acts on kernels only."""

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from vit_ray.config.training_sections import OptimConfig
from vit_ray.own_parts import is_own, own_part

NamedParameters = list[tuple[str, nn.Parameter]]

# Key of the number of steps in an optimizer's state; everything else in it is by element.
STEP_COUNT: Final = "step"


class UncompiledOptimizer(torch.optim.Optimizer):
    """torch's base class, without a decorator for compiled code, which imports torch's compiler.

    Nothing here compiles optimizers, and the import takes a training worker 1.6 CPU seconds and
    68 MiB (torch 2.13, AMD EPYC, 2026-11-27).
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class AdamW(UncompiledOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW`."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(UncompiledOptimizer, torch.optim.SGD):
    """`torch.optim.SGD`."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Optimizer over two groups: kernels, which decay, and everything else, which does not.

    The learning rate starts at 0: the loop sets `lr_at(step)` before each step, and an engine that
    takes a trial step to create state must not move the weights.

    torch's optimizers are fused, also on a CPU: one pass over the state, in all threads. With
    offload, DeepSpeed's optimizer for CPUs takes 0.87 to 0.95 of the time on one thread, 0.98 to
    1.10 on two (`benchmarks/results/offload_step_cpu_2026-11-22.md`), and is first compiled for
    three minutes. All optimizers take a refusal as a number (`found_inf`).
    """
    decayed, rest = decayed_parameters(model)
    groups = [
        {"params": [parameter for _, parameter in named], "weight_decay": by}
        for named, by in ((decayed, config.weight_decay), (rest, 0.0))
        if named
    ]
    if is_own(config.name):
        return _own_optimizer(groups, config)
    if config.name == "adamw":
        return AdamW(groups, lr=0.0, betas=config.betas, eps=1e-8, fused=True)
    return SGD(groups, lr=0.0, momentum=config.momentum, fused=True)


def decayed_parameters(model: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """Trainable parameters with weight decay, and those without.

    Decay acts on kernels only: the matrices of linear layers and the kernels of convolutions, head
    and patch embedding included; not on biases, norms, class and mask tokens, or positions
    (google-research/big_vision decays tensors named `kernel`).
    """
    kernels = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)
    }
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [(name, p) for name, p in trainable if id(p) in kernels]
    return decayed, [(name, p) for name, p in trainable if id(p) not in kernels]


def _own_optimizer(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """A custom optimizer, whose refusals take a host-device sync."""
    optimizer = own_part(config.name, "optim.name")(groups, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optim.name={config.name} returned a {type(optimizer).__name__}; return a "
            "torch.optim.Optimizer"
        )
    set_rate(optimizer, 0.0)
    apply = optimizer.step

    def step(closure: Any = None) -> None:
        if not vars(optimizer).pop("found_inf", 0.0):  # some of torch's optimizers do not know it
            apply(closure)

    optimizer.step = step  # type: ignore[method-assign,assignment]
    return optimizer


@functools.lru_cache(maxsize=8)
def _own_state(config: OptimConfig) -> dict[str, torch.dtype]:
    """A custom optimizer's state by element, and `step` if the optimizer counts steps.

    Raises:
        ValueError: the state has something else, does not start with zeros, or mixes elements: ZeRO
            gives each rank flat pieces of tensors, and a checkpoint stores state by element.
    """
    shape = (16, 64)
    expected, state = _own_steps(config, shape, {})
    is_by_element = all(
        key == STEP_COUNT or getattr(value, "shape", ()) == shape for key, value in state.items()
    )
    types = {key: getattr(value, "dtype", torch.float32) for key, value in state.items()}
    if not is_by_element or not torch.allclose(
        _own_steps(config, (1024,), types)[0], expected, rtol=1e-5, atol=1e-7
    ):
        raise ValueError(
            f"optim.name={config.name} does not treat each element alike, as ZeRO and checkpoints "
            f"need; give it a state ({', '.join(state) or 'none'}) of tensors of a weight's shape "
            f"that start with zeros, and {STEP_COUNT!r} for the number of steps"
        )
    return types


def _own_steps(
    config: OptimConfig, shape: tuple[int, ...], types: Mapping[str, torch.dtype]
) -> tuple[Tensor, dict[str, Any]]:
    """1,024 weights after three steps, flat, and the optimizer's state.

    Args:
        types: of a state that starts with zeros; empty = the optimizer creates the state.
    """
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 1024).view(shape))
    groups = [{"params": [weight], "weight_decay": config.weight_decay}]
    optimizer = _own_optimizer(groups, config)
    optimizer.state[weight].update(zero_state(weight, types))
    set_rate(optimizer, 1e-2)
    for factor in (1.0, -0.5, 2.0):
        weight.grad = torch.linspace(-1.0, 2.0, 1024).mul_(factor).view(shape)
        optimizer.step()
    return weight.detach().flatten(), optimizer.state[weight]


def zero_state(weight: Tensor, types: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """An optimizer's state of one tensor before its first step; `types` from `state_types`."""
    return {
        key: torch.zeros((), device=weight.device)
        if key == STEP_COUNT
        else torch.zeros_like(weight.data, dtype=dtype)
        for key, dtype in types.items()
    }


class StepGuard:
    """Norm and refusal of the last step of an optimizer that takes `found_inf`.

    DeepSpeed 0.19.8 makes the host read the gradient's norm in the middle of every step, while the
    device idles. torch's fused optimizers take the answer on the device, as a number (`found_inf`,
    made for gradient scaling): 1 leaves weights, moments and step counts unchanged.

    Attributes:
        norm: of the gradient, before clipping.
        refused: 1 if the gradient was not finite or too large, else 0.
        refused_steps: number of refusals in all steps so far.
        norm_limit: norm above which the next step is refused.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer: Any = optimizer
        self.norm = torch.zeros((), device=device)
        self.refused = torch.zeros((), device=device)
        self.refused_steps = torch.zeros((), device=device)
        self.norm_limit = math.inf

    def note_norm(self, norm: Tensor) -> None:
        """Called before the optimizer steps: the norm before clipping, the same on all ranks."""
        self.norm = norm
        is_refused = ~torch.isfinite(norm)
        if self.norm_limit < math.inf:
            is_refused |= norm > self.norm_limit
        self.refused = self._optimizer.found_inf = is_refused.float()
        self.refused_steps += self.refused


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group a step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def state_types(config: OptimConfig) -> dict[str, torch.dtype]:
    """Keys and precision of the optimizer's state; `STEP_COUNT` only if it counts steps."""
    if is_own(config.name):
        return _own_state(config)
    kinds = ("momentum_buffer",) if config.name == "sgd" else ("exp_avg", "exp_avg_sq", STEP_COUNT)
    return dict.fromkeys(kinds, torch.float32)
