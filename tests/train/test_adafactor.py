"""AdamW with a bf16 first moment and Adafactor: against torch and optax, and under ZeRO."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.train.engine_runs as runs
from tests.train import adafactor_by_optax as by_optax
from tests.train.engine_runs import Run, StraightRuns, resumed, straight_and_saved
from tests.train.ranks import run_ranks
from vit_ray.checkpoints.checkpoint import Checkpoint
from vit_ray.checkpoints.checkpoint_format import Shard
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.models import build_model
from vit_ray.models.weights import load_weights
from vit_ray.storage import locate
from vit_ray.train.engine.fragments import Fragment
from vit_ray.train.optim import adafactor, guarded
from vit_ray.train.optim.optimizers import (
    build_optimizer,
    bytes_per_element,
    shapes_by_head,
    state_types,
)

RATE, DECAY = 1e-2, 0.1
ALONE = guarded.Ranks(0, 1, torch.device("cpu"))
SHAPES = {"matrix": (48, 40), "vector": (70,), "kernel": (64, 3, 4, 4), "small": (5, 40)}


class Weights(torch.nn.Module):
    """Parameters of all kinds of shape."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(values))


def gradients(step: int) -> dict[str, Tensor]:
    """Of very different sizes from row to row, as those of a model are."""
    generator = torch.Generator().manual_seed(100 + step)
    found = {}
    for name, shape in SHAPES.items():
        rows = torch.rand(shape[:1], generator=generator) * 4 - 4
        noise = torch.randn(shape, generator=generator)
        found[name] = noise * 10 ** rows.view(-1, *[1] * (len(shape) - 1))
    return found


def prepared(config: OptimConfig) -> tuple[Weights, Any]:
    """An optimizer as the engine prepares it, on whole parameters."""
    model = Weights()
    optimizer: Any = build_optimizer(model, config)
    named = dict(model.named_parameters())
    for parameter in named.values():
        state = {k: torch.zeros_like(parameter, dtype=t) for k, t in state_types(config).items()}
        optimizer.state[parameter] = {**state, "step": torch.zeros(())}
    if config.name == "adafactor":
        parts = [Fragment(n, 0, p.data.view(-1), p, 0) for n, p in named.items()]
        names = [(p, [n]) for n, p in named.items()]
        optimizer.attach(parts, names, SHAPES, ALONE)
    for group in optimizer.param_groups:
        group["lr"] = RATE
    return model, optimizer


def set_gradients(model: Weights, step: int) -> None:
    for name, gradient in gradients(step).items():
        getattr(model, name).grad = gradient


def config(name: str, first_moment: str) -> OptimConfig:
    return OptimConfig(name=name, first_moment=first_moment, weight_decay=DECAY)  # type: ignore[arg-type]


UNKNOWN = 2.0**60
KEPT = json.loads(by_optax.KEPT.read_text())


def of_vit(arrays: dict[str, np.ndarray], folder: Path) -> dict[str, Tensor]:
    """A small ViT's parameters that the published layout has with these values."""
    np.savez(folder / "weights.npz", **arrays)
    size = {"depth": 1, "width": 64, "mlp_dim": 96, "num_heads": 2, "patch_size": 4}
    model = build_model("ViT", 40, 24, **size)
    load_weights(model, folder / "weights.npz")
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Ours:
    """Our optimizer at a rate of 1 on the parameters that optax had, all of zeros."""

    def __init__(self, folder: Path, first_moment: str) -> None:
        self.folder = folder
        size = {"depth": 1, "width": 64, "mlp_dim": 96, "num_heads": 2, "patch_size": 4}
        self.model = build_model("ViT", 40, 24, **size)
        kernels = {n: (s[3], s[2], *s[:2]) for n, s in by_optax.CONVOLUTIONS.items()}
        self.kernels = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in kernels.items()}
        self.parameters = dict(self.model.named_parameters()) | self.kernels
        for parameter in self.parameters.values():
            parameter.data.zero_()
        moment = torch.bfloat16 if first_moment == "bfloat16" else torch.float32
        groups = [{"params": list(self.parameters.values()), "weight_decay": 0.0}]
        self.optimizer = adafactor.Adafactor(groups, (0.9, 0.999))
        for parameter in self.parameters.values():
            state = {"exp_avg": torch.zeros_like(parameter, dtype=moment), "step": torch.zeros(())}
            self.optimizer.state[parameter] = state
        parts = [Fragment(n, 0, p.data.view(-1), p, 0) for n, p in self.parameters.items()]
        names = [(p, [n]) for n, p in self.parameters.items()]
        shapes = {n: tuple(p.shape) for n, p in self.parameters.items()}
        shapes = shapes_by_head(self.model, shapes)
        self.optimizer.attach(parts, names, shapes, ALONE)
        self.optimizer.param_groups[0]["lr"] = 1.0

    def step(self, number: int) -> None:
        slopes = {n: by_optax.gradient(n, s, number) for n, s in by_optax.SHAPES.items()}
        for name, slope in of_vit(slopes, self.folder).items():
            self.parameters[name].grad = slope
        for name, shape in by_optax.CONVOLUTIONS.items():
            slope = torch.from_numpy(by_optax.gradient(name, shape, number))
            self.kernels[name].grad = slope.permute(3, 2, 0, 1).contiguous()
        for parameter in self.parameters.values():
            parameter.data.zero_()
        self.optimizer.step()

    def differences(self, momentum: str, number: int) -> dict[str, float]:
        """By parameter, the largest over the root mean square of optax's updates."""
        shapes = by_optax.SHAPES | by_optax.CONVOLUTIONS
        marked, expected = {}, {}
        for name, shape in shapes.items():
            flat = np.full(math.prod(shape), UNKNOWN, np.float32)
            flat[by_optax.sampled(flat.size)] = KEPT[momentum][name][number]
            marked[name] = flat.reshape(shape)
        expected = of_vit({n: marked[n] for n in by_optax.SHAPES}, self.folder)
        for name in by_optax.CONVOLUTIONS:
            expected[name] = torch.from_numpy(marked[name]).permute(3, 2, 0, 1)
        found = {}
        for name, theirs in expected.items():
            known = theirs != UNKNOWN
            theirs, ours = theirs[known], -self.parameters[name].detach()[known]
            scale = theirs.square().mean().sqrt()
            found[name] = float((ours - theirs).abs().max() / scale)
        return found


@pytest.mark.parametrize(("momentum", "most"), [("float32", 1e-5), ("bfloat16", 2**-5)])
def test_adafactor_is_optaxs_with_big_visions_arguments(
    momentum: str, most: float, tmp_path: Path
) -> None:
    """optax multiplies a momentum kept in bf16 by the bf16 neighbour of 0.9; we do so in fp32."""
    ours = Ours(tmp_path, momentum)
    for step in range(by_optax.STEPS):
        ours.step(step)
        differences = ours.differences(momentum, step)
        assert len(differences) == len(ours.parameters)
        assert max(differences.values()) < most, (step, differences)
    kinds: dict[str, set[str]] = {}
    for kind, fragment in ours.optimizer.second_moments():
        kinds.setdefault(fragment.name, set()).add(kind.removeprefix("exp_avg_sq"))
    summed = {name for name, found in kinds.items() if found == {"_by_row", "_by_column"}}
    attention = {f"blocks.0.attention.{layer}.weight" for layer in ("qkv", "out")}
    mlp = {f"blocks.0.mlp.{layer}.weight" for layer in ("expand", "contract")}
    assert summed == {"positions.0.table", "head.weight", *attention, *mlp, *ours.kernels}
    assert all(kinds[name] == {""} for name in kinds.keys() - summed)


def test_the_decay_of_adafactors_second_moment_stops_at_its_cap() -> None:
    model, optimizer = prepared(config("adafactor", "fp32"))
    entry = optimizer.state[model.vector]
    for count in (5000, 8000):  # 1 - t^-0.8 passes 0.999 at 0.001^-1.25 = 5623.4
        entry["step"].fill_(count - 1)
        (before,) = (f.weight.clone() for k, f in optimizer.second_moments() if f.name == "vector")
        set_gradients(model, count)
        optimizer.step()
        (after,) = (f.weight for k, f in optimizer.second_moments() if f.name == "vector")
        square = gradients(count)["vector"].double().square()
        share = (after.double() - before) / (square - before)
        expected = max(count**-0.8, 0.001)
        assert float(share.median()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_bf16_first_moment_is_rounded_only_where_it_is_kept(name: str) -> None:
    """One step from the rounded moment is that of the fp32 optimizer from the same moment."""
    model, optimizer = prepared(config(name, "bf16"))
    exact, reference = prepared(config(name, "fp32"))
    for step in range(6):
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            with torch.no_grad():
                theirs.copy_(ours)
            reference.state[theirs]["exp_avg"].copy_(optimizer.state[ours]["exp_avg"])
        set_gradients(model, step)
        set_gradients(exact, step)
        optimizer.step()
        reference.step()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)
            kept, unrounded = optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"]
            assert kept.dtype == torch.bfloat16
            assert bool(((kept.float() - unrounded).abs() <= 1.01 * 2**-8 * unrounded.abs()).all())


def test_a_large_tensor_is_stepped_in_pieces_as_if_it_were_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for piece in (guarded.PIECE, 7):  # which divides none of the sizes but one
        monkeypatch.setattr(guarded, "PIECE", piece)
        model, optimizer = prepared(config("adamw", "bf16"))
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    for whole, pieces in zip(*found, strict=True):
        assert torch.equal(whole, pieces)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_refused_step_changes_no_bit(name: str) -> None:
    model, optimizer = prepared(config(name, "bf16"))
    other, undisturbed = prepared(config(name, "bf16"))
    for step in range(3):
        for bad in (math.nan, math.inf, 1e30):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, bad)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
        set_gradients(model, step)
        set_gradients(other, step)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        undisturbed.step()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            for key, value in undisturbed.state[theirs].items():
                assert torch.equal(optimizer.state[ours][key], value)


@pytest.mark.parametrize(
    ("name", "first_moment", "expected"),
    [
        ("adamw", "fp32", 8),
        ("adamw", "bf16", 6),
        ("adafactor", "fp32", 4),
        ("adafactor", "bf16", 2),
        ("sgd", "fp32", 4),
    ],
)
def test_bytes_of_state_are_those_of_what_is_kept(
    name: str, first_moment: str, expected: int
) -> None:
    assert bytes_per_element(config(name, first_moment)) == expected


def test_a_momentum_that_bf16_would_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"to bf16's rounding; use at most 0\.95"):
        OptimConfig(betas=(0.99, 0.999), first_moment="bf16")


def test_momentum_in_bf16_is_refused() -> None:
    with pytest.raises(ValueError, match="first_moment=bf16 is for name=adamw, name=adafactor"):
        config("sgd", "bf16")


# --- under ZeRO -----------------------------------------------------------------------------------

WORLD = 2


def wider_model() -> torch.nn.Module:
    """Its matrices are factored, by head in attention, and two ranks cut them within rows."""
    torch.manual_seed(0)
    size = {"depth": 2, "width": 64, "mlp_dim": 50, "num_heads": 2, "patch_size": 4}
    return build_model("ViT", 5, image_size=8, head_bias=-1.0, **size)


def run_config(name: str, stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    optim = {"name": name, "first_moment": "bf16", "learning_rate": 1e-2, "weight_decay": 0.1}
    train = {"zero_stage": stage, "precision": precision, "averaging": 0.9, **more}
    offload = "-offload" if more else ""
    label = f"{name}-{precision}-{stage}{offload}"
    return {"name": label, "micro": 2, "train": train, "optim": optim}


NAMES = ("adafactor", "adamw")
CONFIGS = {name: [run_config(name, stage) for stage in range(4)] for name in NAMES}
CONFIGS["adafactor"] += [run_config("adafactor", stage, "bf16") for stage in (1, 3)]
CONFIGS["adafactor"].append(run_config("adafactor", 2, offload=True))


def straight_of_wider(rank: int, configs: list[dict[str, Any]], folder: str) -> dict[str, Run]:
    runs.small_model = wider_model
    return straight_and_saved(rank, configs, folder)


def resumed_of_wider(rank: int, configs: list[dict[str, Any]], folder: str) -> dict[Any, Run]:
    runs.small_model = wider_model
    return resumed(rank, configs, folder)


@pytest.fixture(scope="module")
def straight(folder: str) -> StraightRuns:
    return StraightRuns(folder, straight_of_wider)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", NAMES)
def test_every_stage_takes_the_same_steps(straight: StraightRuns, name: str) -> None:
    found = straight.of(WORLD, CONFIGS[name])
    first = found[f"{name}-fp32-0"].losses
    assert len(set(first)) == len(first)
    for label, run in found.items():
        if label.startswith(f"{name}-fp32"):
            # The rounded moment of a weight in many hundreds is the other of two bf16 neighbours.
            assert run.losses == pytest.approx(first, rel=1e-4), label
        else:
            assert run.losses == pytest.approx(first, rel=2e-2), label


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_bit_for_bit_and_under_another_stage(
    straight: StraightRuns, folder: str, name: str
) -> None:
    expected = straight.of(WORLD, CONFIGS[name])
    configs = [{**c, "from": f"{WORLD}/{c['name']}"} for c in CONFIGS[name]]
    if name != "adamw":
        configs += [
            {**run_config(name, s), "from": f"{WORLD}/{name}-fp32-{(s + 2) % 4}"} for s in range(4)
        ]
    again = run_ranks(WORLD, resumed_of_wider, configs, folder)[0]
    for (label, place), run in again.items():
        source = place.partition("/")[2]
        if label == source:
            assert run.losses == expected[label].losses[2:], label
            assert torch.equal(run.averaged, expected[label].averaged), label
        else:
            losses = expected[source].losses[2:]
            assert run.losses == pytest.approx(losses, rel=1e-4), (label, source)


def test_a_checkpoint_has_rows_and_columns_once(straight: StraightRuns, folder: str) -> None:
    straight.of(WORLD, CONFIGS["adafactor"])
    checkpoint = newest_checkpoint(locate(folder).child(str(WORLD)).child("adafactor-fp32-2"))
    assert checkpoint is not None
    rows = {name: len(values) for name, _, values in checkpoint.parts("exp_avg_sq_by_row")}
    columns = {name: len(values) for name, _, values in checkpoint.parts("exp_avg_sq_by_column")}
    assert rows["blocks.0.attention.qkv.weight"] == 3 * 2 * 32
    assert columns["blocks.0.attention.qkv.weight"] == 3 * 2 * 64
    assert rows["blocks.0.attention.out.weight"] == 2 * 64
    whole = {name for name, _, _ in checkpoint.parts("exp_avg_sq")}
    assert "norm.weight" in whole
    assert not whole & rows.keys()
    assert whole | rows.keys() == checkpoint.position.shapes.keys()


def refused_of_an_older_version(rank: int) -> str:
    config = run_config("adafactor", 0)
    train = TrainConfig.model_validate(config["train"])
    engine = runs.build_engine(train, 1, 2, runs.optim_of(config))
    shard = Shard("file", 1, "", {"weight|head.weight|0": 5, "exp_avg_sq_rows|head.weight|0": 5})
    checkpoint = Checkpoint(locate("/nothing"), [shard], runs.position(engine, 1))
    try:
        engine.restore(checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def test_sums_of_a_version_that_had_other_matrices_are_refused() -> None:
    (text,) = run_ranks(1, refused_of_an_older_version)
    assert "treats queries, keys and values as one matrix" in text
