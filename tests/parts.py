"""Parts as a user would write them.

Drivers import this module: it must not import `tests.conftest`, which takes the address of their
cluster from them, after which each starts a Ray of its own.
"""

import os
import platform
import time
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put
from torch import nn

from vit_ray import build_model

LOGGED: list[tuple[int, dict[str, float]]] = []
NOT_A_FUNCTION = 3


class Wrapped(nn.Module):
    """Our ViT in a module of the user's, with the head that it has."""

    def __init__(self, num_classes: int, image_size: tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.vit: Any = build_model("ViT", num_classes, image_size, **options)
        self.head, self.vit.head = self.vit.head, nn.Identity()

    def forward(self, images: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.vit(images, keys))


class ConvNet(nn.Module):
    def __init__(self, num_classes: int, image_size: tuple[int, int], width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.second = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(images)))).mean((2, 3)))


class Normed(ConvNet):
    def __init__(self, num_classes: int, image_size: tuple[int, int]) -> None:
        super().__init__(num_classes, image_size)
        self.norm = nn.BatchNorm2d(8)


class Headless(ConvNet):
    def __init__(self, num_classes: int, image_size: tuple[int, int]) -> None:
        super().__init__(num_classes, image_size)
        self.classifier = self.head
        del self.head


class Objective(ConvNet):
    """A submodule has the name that ours have for what they train."""

    def __init__(self, num_classes: int, image_size: tuple[int, int]) -> None:
        super().__init__(num_classes, image_size)
        self.model = nn.Linear(2, 2)


class Peeking(ConvNet):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images * float(images.mean()))


class Features(ConvNet):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.first(images)


def no_module(num_classes: int, image_size: tuple[int, int]) -> Any:
    return lambda images: images


def without_size(num_classes: int) -> nn.Module:
    return nn.Linear(1, num_classes)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels[:, 0], reduction="none", ignore_index=-1)


def hardest_half(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the images with the largest losses; it needs their values."""
    losses = cross_entropy(logits, labels)
    return torch.where(losses >= losses.median().item(), losses, 0 * losses)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels).mean()


def loss_of_logits(logits: torch.Tensor) -> torch.Tensor:
    return logits.sum(1)


def top3(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    best = logits.topk(3, dim=1).indices
    return (best[:, :, None] == labels[:, None, :]).any(2).any(1).float()


def images_of_pass(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.full((len(logits),), float(len(logits)))


def largest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.amax(1)


def brighter(crop: Any, random: Any) -> Any:
    crop[:] = crop // 2 + random.below(128)
    return crop


def as_floats(crop: Any, random: Any) -> Any:
    return crop / 255.0


class Lion(torch.optim.Optimizer):
    """Chen et al. (arXiv:2302.06675), algorithm 2; makes its state at the first step."""

    def __init__(self, groups: Any, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                update = torch.lerp(weight.grad, state["momentum"], beta1).sign_()
                weight.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                state["momentum"].lerp_(weight.grad, 1.0 - beta2)


def lion(groups: Any, config: Any) -> Lion:
    return Lion(groups, config.betas)


def adamw(groups: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, foreach=False)


class RowNorm(torch.optim.Optimizer):
    """Divides each row's gradient by its norm, which flat pieces of a tensor do not have."""

    def __init__(self, groups: Any, config: Any) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.update(weight, group["lr"])

    def update(self, weight: Any, lr: float) -> None:
        weight.sub_(lr * F.normalize(weight.grad, dim=-1))


class Anchored(RowNorm):
    """Keeps the first weights, which a state of zeros is not."""

    def update(self, weight: Any, lr: float) -> None:
        first = self.state[weight].setdefault("first", weight.clone())
        weight.sub_(lr * (weight.grad + weight - first))


class Noted(RowNorm):
    """Keeps what is neither of each element nor a count."""

    def update(self, weight: Any, lr: float) -> None:
        self.state[weight]["rows"] = weight.grad.norm(dim=-1)


def no_optimizer(groups: Any, config: Any) -> Any:
    return None


def note(step: int, metrics: dict[str, float]) -> None:
    LOGGED.append((step, dict(metrics)))


def meddle(step: int, metrics: dict[str, float]) -> None:
    torch.manual_seed(step)
    torch.rand(3)
    metrics.clear()
    metrics["train/loss"] = -1.0


def wait_before_restart(step: int, metrics: dict[str, float]) -> None:
    """Each logged step takes 5 s longer, until Slurm has started the job again."""
    if "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(5)


def wait_on_first_pods(step: int, metrics: dict[str, float]) -> None:
    """Each logged step takes 10 s longer on a host whose name ends in `-1`."""
    if platform.node().endswith("-1"):
        time.sleep(10)


def wait_for_two_jobs(step: int, metrics: dict[str, float]) -> None:
    """Until trainings of two jobs have each had a step while the other one was there."""
    own = ray.get_runtime_context().get_job_id()
    _internal_kv_put(f"two jobs {own}", "trains")
    deadline = time.monotonic() + 180
    while len(_internal_kv_list("two jobs ")) < 2:
        assert time.monotonic() < deadline, own
        time.sleep(0.2)


def fail(step: int, metrics: dict[str, float]) -> None:
    raise KeyError("a name that is not there")
