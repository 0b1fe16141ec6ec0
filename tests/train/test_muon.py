"""Muon against torch's; under ZeRO see `test_adafactor.py`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.training_sections import OptimConfig
from vit_ray.models import build_model
from vit_ray.train.engine.fragments import Fragment
from vit_ray.train.memory.memory_estimate import state_shape
from vit_ray.train.objective import build_objective
from vit_ray.train.optim import guarded, muon
from vit_ray.train.optim.optimizers import (
    build_optimizer,
    hidden_matrices,
    set_rate,
    shapes_by_head,
    state_types,
)

SIZE = {"depth": 2, "width": 24, "mlp_dim": 40, "num_heads": 2, "patch_size": 4}
RATE, DECAY, BETAS, STEPS = 1e-2, 0.1, (0.9, 0.98), 4


class Trained:
    """A small ViT whose weights are stepped with gradients that are given."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = build_model("ViT", 5, image_size=8, pool="map", **SIZE)
        config = OptimConfig(name=name, weight_decay=DECAY, betas=BETAS)  # type: ignore[arg-type]
        self.named = dict(self.model.named_parameters())
        for parameter in self.named.values():
            parameter.data.add_(torch.randn(parameter.shape) * 0.1)  # no tensor is zero
        self.before = {n: p.detach().clone() for n, p in self.named.items()}
        self.optimizer: Any = build_optimizer(self.model, config)
        parts = [Fragment(n, 0, p.data.view(-1), p, 0) for n, p in self.named.items()]
        owners = [(p, [n]) for n, p in self.named.items()]
        shapes = shapes_by_head(self.model, {n: p.shape for n, p in self.named.items()})
        self.optimizer.attach(parts, owners, shapes, guarded.Ranks(0, 1, torch.device("cpu")))
        for parameter in self.named.values():
            self.optimizer.state[parameter] = {"step": torch.zeros(())} | {
                kind: torch.zeros_like(parameter, dtype=dtype)
                for kind, dtype in state_types(config).items()
                if self.optimizer.keeps(parameter, kind)
            }
        set_rate(self.optimizer, RATE)

    def run(self) -> None:
        for step in range(STEPS):
            for name, slope in slopes(self.before, step).items():
                self.named[name].grad = slope
            self.optimizer.step()


def slopes(weights: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(w.shape, generator=generator) for n, w in weights.items()}


def decays(name: str, weight: Tensor) -> bool:
    return weight.ndim > 1 and not any(x in name for x in ("token", "table", "probe"))


@pytest.mark.parametrize("gathered", [muon.GATHERED, 1000])
def test_muon_is_torchs(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With queries, keys and values as three matrices, and AdamW on everything else."""
    monkeypatch.setattr(muon, "GATHERED", gathered)
    ours = Trained("muon")
    ours.run()
    hidden = {n for n, w in ours.before.items() if w.ndim == 2 and decays(n, w)}
    hidden -= {"head.weight"}
    assert len(hidden) == 4 * SIZE["depth"] + 6  # attention pooling has q, k, v, out and an MLP
    theirs = {n: list(w.clone().chunk(3 if "qkv" in n else 1)) for n, w in ours.before.items()}
    parameters = {n: [nn.Parameter(w) for w in parts] for n, parts in theirs.items()}
    matrices = [p for n in hidden for p in parameters[n]]
    others = {True: [], False: []}  # type: dict[bool, list[nn.Parameter]]
    for name in ours.before.keys() - hidden:
        others[decays(name, ours.before[name])] += parameters[name]
    optimizers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others[True], lr=RATE, betas=BETAS, weight_decay=DECAY),
        torch.optim.AdamW(others[False], lr=RATE, betas=BETAS, weight_decay=0.0),
    ]
    for step in range(STEPS):
        for name, slope in slopes(ours.before, step).items():
            for parameter, part in zip(
                parameters[name], slope.chunk(len(parameters[name])), strict=True
            ):
                parameter.grad = part
        for optimizer in optimizers:
            optimizer.step()
    for name, parts in parameters.items():
        found, expected = ours.named[name].detach(), torch.cat(list(parts)).detach()
        # A sum in another order may round to the other of two bf16 neighbours.
        most = RATE * 2**-7 if name in hidden else 1e-6
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=most, msg=name)


def test_muon_keeps_momentum_alone_of_hidden_matrices() -> None:
    ours = Trained("muon")
    kept = sum(
        value.nbytes
        for entry in ours.optimizer.state.values()
        for key, value in entry.items()
        if key != "step"
    )
    recipe = recipe_from_dict(
        {
            "name": "muon",
            "model": {"name": "ViT", "image_size": 8, "pool": "map", **SIZE},
            "optim": {"name": "muon", "steps": 1},
        },
        "muon",
    )
    shape = state_shape(recipe, 5, world_size=1)
    assert shape.moment_bytes * shape.num_parameters == pytest.approx(kept)


def test_muon_leaves_what_touches_pixels_and_classes_to_adamw() -> None:
    model = build_model("ViT", 5, image_size=8, distillation_token=True, **SIZE)
    masked = build_objective(objective("muon", loss="masked_patch"), 5)
    for trained in (model, masked):
        found = hidden_matrices(trained, OptimConfig(name="muon"))
        assert len(found) == 2 * 4
        assert all("blocks." in name for name in found)


def objective(name: str, loss: str = "softmax", **options: Any) -> Recipe:
    tree = {"name": "r", "model": {"name": "ViT", "image_size": 8, **SIZE, **options}}
    return recipe_from_dict({**tree, "optim": {"name": name}, "train": {"loss": loss}}, "test")


def test_muon_is_refused_without_hidden_matrices() -> None:
    model = build_model("ResNet", 5, 32, stages=(1, 1), width_factor=1)
    with pytest.raises(ValueError, match=r"optim\.name=muon is for the matrices of linear layers"):
        hidden_matrices(model, OptimConfig(name="muon"))
