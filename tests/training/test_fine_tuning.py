"""Frozen parts: against plain torch, and resumed."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.recipes import recipe_with
from tests.training.engine_runs import (
    PLAIN_LINEAR,
    Run,
    StraightRuns,
    batch,
    loss_of,
    resumed,
    small_model,
)
from tests.training.ranks import run_ranks
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config.training_sections import TrainConfig
from vit_ray.launch import prepared_run
from vit_ray.launch.resolved_run import check_head_is_trained, check_model
from vit_ray.storage import locate
from vit_ray.training.memory_estimate import count_parameters, state_shape, step_macs

FROZEN = ("embedding", "class_token", "blocks.0")
OPTIM = {"learning_rate": 1e-2, "weight_decay": 0.1, "frozen": FROZEN}


def config(stage: int, precision: str = "fp32") -> dict[str, Any]:
    train = {"zero_stage": stage, "precision": precision, "averaging": 0.9}
    return {"name": f"{precision}-{stage}", "micro": 2, "train": train, "optim": OPTIM}


def plain_losses() -> list[float]:
    """One AdamW group for each parameter; frozen ones are left out by hand."""
    torch.nn.functional.linear = PLAIN_LINEAR
    model = small_model()
    groups = []
    for name, parameter in model.named_parameters():
        if name.startswith(("embedding", "class_token", "blocks.0.")):
            parameter.requires_grad_(False)
            continue
        decays = parameter.ndim > 1 and "positions" not in name
        groups.append({"params": [parameter], "lr": 1e-2, "weight_decay": 0.1 * decays})
    optimizer = torch.optim.AdamW(groups, eps=1e-8)
    losses = []
    for step in range(5):
        images, labels = batch(step)
        loss = loss_of(TrainConfig(precision="fp32"))(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([g["params"][0] for g in groups], 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def straight(folder: str) -> StraightRuns:
    """With the runs of two ranks that several tests compare, in one process group."""
    runs = StraightRuns(folder)
    runs.of(2, [config(0), config(3, "bf16")])
    return runs


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_every_stage_trains_as_plain_torch(straight, world, stage):
    (run,) = straight.of(world, [config(stage)]).values()
    assert run.losses == pytest.approx(plain_losses(), rel=2e-6)


@pytest.mark.parametrize(
    ("world", "kind", "averaged"),
    [(1, config(1), False), (2, config(0), True), (2, config(3, "bf16"), True)],
)
def test_a_checkpoint_has_frozen_weights_to_the_last_bit(straight, folder, world, kind, averaged):
    straight.of(world, [kind])
    checkpoint = newest_checkpoint(locate(folder).child(f"{world}/{kind['name']}"))
    saved, first = checkpoint.weights(averaged=averaged), small_model().state_dict()
    assert saved.keys() == first.keys()
    same = {key for key in first if torch.equal(saved[key], first[key])}
    assert same >= {key for key in first if key.startswith(("embedding", "class_", "blocks.0."))}
    assert not any(key.startswith(("blocks.1.", "head", "positions")) for key in same)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("before", "after"), [((1, 1), (2, 3)), ((2, 3), (1, 0)), ((2, 1), (1, 3)), ((2, 2), (2, 1))]
)
def test_a_run_goes_on_under_another_stage_and_world(straight, folder, before, after):
    """From (world, stage) to the other."""
    # The first weights of the resumed run are others: those of the checkpoint have to come back.
    straight.of(before[0], [config(before[1])])
    changed = {**config(after[1]), "from": f"{before[0]}/fp32-{before[1]}"}
    (run,) = run_ranks(after[0], resumed_from_other_weights, [changed], folder)[0].values()
    expected = straight.of(2, [config(0)])["fp32-0"]
    assert run.losses == pytest.approx(expected.losses[2:], rel=2e-6)
    assert torch.allclose(run.averaged, expected.averaged, atol=1e-4)


def resumed_from_other_weights(rank: int, configs: list[Any], folder: str) -> dict[Any, Run]:
    import tests.training.engine_runs as runs

    plain = runs.small_model

    def other_model() -> torch.nn.Module:
        model = plain()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        return model

    runs.small_model = other_model
    return resumed(rank, configs, folder)


def tuning_recipe(optim: dict[str, Any], **model: Any) -> Any:
    return recipe_with(model=model or {"name": "ViT-Ti/16"}, optim={"steps": 3, **optim})


def test_the_plan_counts_what_is_trained_and_what_is_computed():
    fixed = ["embedding", "class_token", "positions", "blocks", "norm"]
    probe = tuning_recipe({"frozen": fixed})
    assert count_parameters(probe, 1000) == 193_000
    shape = state_shape(probe, 1000, 2)
    assert (shape.num_parameters, shape.num_frozen) == (193_000, 5_717_416 - 193_000)
    tokens, width, pixels = 197, 192, 196 * 3 * 16**2 * 192
    # Each product of the forward pass has two in the backward pass, but that of the pixels.
    forward = (step_macs(tuning_recipe({}), 1000) + pixels) // 3
    # Of a linear probe the backward pass is the head's own gradient.
    assert step_macs(probe, 1000) == forward + 192_000
    # Frozen to the middle: six blocks and the head have two products for each of the forward pass.
    half = step_macs(tuning_recipe({"frozen": [*fixed[:3], "blocks.0-5"]}), 1000)
    block = tokens * 12 * width**2 + 2 * tokens**2 * width
    last = tokens * 2 * width**2 + 10 * width**2 + 2 * tokens * width
    assert half == forward + 2 * (5 * block + last + 192_000)


@pytest.mark.parametrize(
    ("optim", "model", "message"),
    [
        ({"frozen": ["stem"]}, {}, r"optim\.frozen: 'stem' is not.*embedding, class_token, pos"),
        ({"frozen": ["blocks.9-12"]}, {}, r"'blocks.9-12' is not a part.*blocks\.0-11, norm, head"),
        ({"frozen": ["blocks.5-4"]}, {}, r"'blocks.5-4' is not a part"),
        ({"frozen": ["head.0-1"]}, {}, r"'head.0-1' is not a part"),
        ({"frozen": ["class_token"]}, {"name": "ViT-B/16", "pool": "gap"}, "is not a part"),
        ({"frozen": ["blocks"]}, {"name": "R50x1"}, r"root, units\.0-15, norm, head"),
        (
            {"frozen": ["embedding", "class_token", "positions", "blocks", "norm", "head"]},
            {},
            "nothing would be trained",
        ),
    ],
)
def test_wrong_parts_are_refused_before_anything_is_opened(optim, model, message):
    with pytest.raises(ValueError, match=message):
        check_model(tuning_recipe(optim, **model))


@pytest.mark.parametrize(
    ("kind", "init_from", "is_refused"),
    [
        ("finetune", "runs/a", True),
        ("sweep_trial", "runs/a", True),
        ("pretrain", None, True),
        ("pretrain", "runs/a", False),
    ],
)
def test_a_new_head_that_is_frozen_is_refused(kind, init_from, is_refused, monkeypatch):
    chosen = tuning_recipe({"frozen": ["norm", "head"]}).with_changes(init_from=init_from)
    with pytest.raises(ValueError, match="remove head") if is_refused else nullcontext():
        check_head_is_trained(chosen, kind)
    check_head_is_trained(chosen.with_changes(optim={"frozen": ("norm",)}), kind)
    # The objective has a head of its own, which is not a part of the model.
    check_head_is_trained(chosen.with_changes(train={"loss": "masked_patch"}), kind)
    if init_from is None:  # before anything starts
        monkeypatch.setattr(prepared_run, "resolve_run", lambda recipe: None)
        refused = prepared_run.prepared_training(chosen, kind)
        with pytest.raises(ValueError, match="remove head"), refused:
            pass
