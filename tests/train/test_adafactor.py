"""AdamW with a bf16 first moment and Adafactor: against torch and transformers, and under ZeRO."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import optimization

import tests.train.engine_runs as runs
from tests.train.engine_runs import Run, resumed, straight_and_saved
from tests.train.ranks import run_ranks
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config.training_sections import OptimConfig
from vit_ray.models import build_model
from vit_ray.storage import locate
from vit_ray.train import adafactor
from vit_ray.train.fragments import Fragment
from vit_ray.train.optim import build_optimizer, bytes_per_element, state_types

RATE, DECAY = 1e-2, 0.1
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
        optimizer.attach(parts, names, SHAPES, lambda sums: None)
    for group in optimizer.param_groups:
        group["lr"] = RATE
    return model, optimizer


def set_gradients(model: Weights, step: int) -> None:
    for name, gradient in gradients(step).items():
        getattr(model, name).grad = gradient


def config(name: str, first_moment: str) -> OptimConfig:
    return OptimConfig(name=name, first_moment=first_moment, weight_decay=DECAY)  # type: ignore[arg-type]


class Peer:
    """transformers' Adafactor of fp32 momentum; our matrices are its last two axes."""

    def __init__(self, model: Weights, decays: dict[int, float]) -> None:
        self.parameters = {}
        for name, parameter in model.named_parameters():
            whole = parameter.detach().clone()
            # What has a side below 32 is not factored by us, nor a vector by transformers.
            flat = whole.flatten(1) if name in ("matrix", "kernel") else whole.flatten()
            self.parameters[name] = torch.nn.Parameter(flat)
        groups = [
            {"params": [p], "weight_decay": decays[id(getattr(model, name))]}
            for name, p in self.parameters.items()
        ]
        self.optimizer = optimization.Adafactor(
            groups, lr=RATE, eps=(1e-30, 1e-3), clip_threshold=1e30, decay_rate=-0.8, beta1=0.9,
            scale_parameter=False, relative_step=False, warmup_init=False,
        )  # fmt: skip

    def step(self, number: int) -> None:
        for name, gradient in gradients(number).items():
            parameter = self.parameters[name]
            parameter.grad = gradient.reshape(parameter.shape)
        self.optimizer.step()


def test_adafactor_is_transformers() -> None:
    model, optimizer = prepared(config("adafactor", "fp32"))
    groups = optimizer.param_groups
    peer = Peer(model, {id(p): g["weight_decay"] for g in groups for p in g["params"]})
    for step in range(12):
        set_gradients(model, step)
        optimizer.step()
        peer.step(step)
    for name, parameter in model.named_parameters():
        expected = peer.parameters[name].view_as(parameter)
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    kinds = [(kind, fragment.name) for kind, fragment in optimizer.second_moments()]
    factored = [("exp_avg_sq_rows", n) for n in ("matrix", "kernel")]
    assert set(kinds) >= {*factored, ("exp_avg_sq", "vector"), ("exp_avg_sq", "small")}
    assert len(kinds) == 6
    # transformers' names of them, by ours.
    theirs = {"rows": "exp_avg_sq_row", "columns": "exp_avg_sq_col", "sq": "exp_avg_sq"}
    for kind, fragment in optimizer.second_moments():
        state = peer.optimizer.state[peer.parameters[fragment.name]]
        torch.testing.assert_close(fragment.weight, state[theirs[kind.rpartition("_")[2]]])


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
    for piece in (adafactor.PIECE, 7):  # which divides none of the sizes but one
        monkeypatch.setattr(adafactor, "PIECE", piece)
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
    with pytest.raises(ValueError, match=r"lost in bf16's rounding; use at most 0\.95"):
        OptimConfig(betas=(0.99, 0.999), first_moment="bf16")


def test_momentum_in_bf16_is_refused() -> None:
    with pytest.raises(ValueError, match="first_moment=bf16 is for name=adamw"):
        config("sgd", "bf16")


# --- under ZeRO -----------------------------------------------------------------------------------

WORLD = 2


def wider_model() -> torch.nn.Module:
    """Its matrices are factored, and two ranks cut them in the middle of rows."""
    torch.manual_seed(0)
    size = {"depth": 2, "width": 36, "mlp_dim": 50, "num_heads": 3, "patch_size": 4}
    return build_model("ViT", 5, image_size=8, head_bias=-1.0, **size)


def run_config(name: str, stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    optim = {"name": name, "first_moment": "bf16", "learning_rate": 1e-2, "weight_decay": 0.1}
    train = {"zero_stage": stage, "precision": precision, "averaging": 0.9, **more}
    offload = "-offload" if more else ""
    label = f"{name}-{precision}-{stage}{offload}"
    return {"name": label, "micro": 2, "train": train, "optim": optim}


CONFIGS = [run_config(name, stage) for name in ("adafactor", "adamw") for stage in range(4)]
CONFIGS += [run_config("adafactor", stage, "bf16") for stage in (1, 3)]
CONFIGS += [run_config("adafactor", 2, offload=True)]


def straight_of_wider(rank: int, configs: list[dict[str, Any]], folder: str) -> dict[str, Run]:
    runs.small_model = wider_model
    return straight_and_saved(rank, configs, folder)


def resumed_of_wider(rank: int, configs: list[dict[str, Any]], folder: str) -> dict[Any, Run]:
    runs.small_model = wider_model
    return resumed(rank, configs, folder)


@pytest.fixture(scope="module")
def straight(folder: str) -> dict[str, Run]:
    return run_ranks(WORLD, straight_of_wider, CONFIGS, folder)[0]


@pytest.fixture(scope="module")
def again(straight: dict[str, Run], folder: str) -> dict[Any, Run]:
    own = [{**c, "from": c["name"]} for c in CONFIGS]
    crossed = [
        {**run_config("adafactor", s), "from": f"adafactor-fp32-{(s + 2) % 4}"} for s in range(4)
    ]
    return run_ranks(WORLD, resumed_of_wider, own + crossed, folder)[0]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_every_stage_takes_the_same_steps(straight: dict[str, Run], name: str) -> None:
    first = straight[f"{name}-fp32-0"].losses
    assert len(set(first)) == len(first)
    for label, run in straight.items():
        if label.startswith(f"{name}-fp32"):
            # The rounded moment of a weight in many hundreds is the other of two bf16 neighbours.
            assert run.losses == pytest.approx(first, rel=1e-4), label
        elif label.startswith(name):
            assert run.losses == pytest.approx(first, rel=2e-2), label


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_under_another_stage(
    straight: dict[str, Run], again: dict[Any, Run]
) -> None:
    for (name, source), run in again.items():
        if name == source:
            assert run.losses == straight[name].losses[2:], name
            assert torch.equal(run.averaged, straight[name].averaged), name
        else:
            expected = straight[source].losses[2:]
            assert run.losses == pytest.approx(expected, rel=1e-4), (name, source)


def test_a_checkpoint_has_rows_and_columns_once(straight: dict[str, Run], folder: str) -> None:
    checkpoint = newest_checkpoint(locate(folder).child("adafactor-fp32-2"))
    assert checkpoint is not None
    rows = {name: len(values) for name, _, values in checkpoint.parts("exp_avg_sq_rows")}
    columns = {name: len(values) for name, _, values in checkpoint.parts("exp_avg_sq_columns")}
    assert rows["blocks.0.attention.qkv.weight"] == 108
    assert columns["blocks.0.attention.qkv.weight"] == 36
    whole = {name for name, _, _ in checkpoint.parts("exp_avg_sq")}
    assert "norm.weight" in whole
    assert not whole & rows.keys()
    assert whole | rows.keys() == checkpoint.position.shapes.keys()
