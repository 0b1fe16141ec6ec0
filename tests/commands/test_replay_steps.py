"""Steps trained again from a checkpoint: against torch's own AdamW, and in two parts as in one."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests.checkpoints.written import snapshot_of, write_snapshot
from tests.launch.inputs.test_seen_batch import recipe_on, sets
from tests.recipes import recipe_with
from vit_ray.checkpoints.checkpoint import (
    Checkpoint,
    Position,
    Progress,
    folder_name,
    read_checkpoint,
)
from vit_ray.commands.trained.replay_steps import images_per_pass, replay_steps
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.launch.inputs.rank_batches import training_batches
from vit_ray.launch.named_run import find_run
from vit_ray.storage import locate
from vit_ray.train.objective import build_objective, make_loss
from vit_ray.train.optim.optimizers import build_optimizer
from vit_ray.train.optim.schedule import lr_at

__all__ = ["sets"]

STEPS = 5
BETAS = (0.8, 0.9)


def begin(recipe: Recipe) -> torch.nn.Module:
    """Writes a checkpoint of step 0, with Adam's moments; returns its model."""
    torch.manual_seed(0)
    model = build_objective(recipe, 3)
    torch.nn.init.normal_(model.head.weight, std=0.1)  # type: ignore[union-attr,arg-type]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    position = Position(
        Progress(), 0, 0, recipe.train.global_batch_size,
        {name: list(w.shape) for name, w in weights.items()}, recipe.recorded(),
        open_dataset(str(recipe.data.train)).fingerprint,
    )  # fmt: skip
    tensors = {f"weight|{name}|0": w.flatten().clone() for name, w in weights.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        tensors |= {f"{kind}|{name}|0": torch.zeros(w.numel()) for name, w in weights.items()}
    folder = locate(recipe.run_folder).child(folder_name(0))
    write_snapshot(snapshot_of(0, 1, tensors, position), folder)
    return model


def replayed(run_folder: str, first: str, steps: list[int], folder: str) -> str:
    """From one step to the next; the last checkpoint's folder. In a process of its own."""
    run, checkpoint = find_run(run_folder), read_checkpoint(locate(first))
    for step in steps:
        checkpoint = replay_steps(run, checkpoint, step, locate(folder))
    return checkpoint.folder.path


@pytest.mark.parametrize(
    ("micro", "batch", "images"),
    [(128, 128, 128), (96, 192, 96), ("auto", 128, 64), (256, 512, 64)],
)
def test_passes_are_the_runs_own_where_they_are_known_and_small(
    micro: int | str, batch: int, images: int
) -> None:
    train = {"micro_batch_size": micro, "global_batch_size": batch}
    assert images_per_pass(recipe_with(train=train)) == images


@pytest.mark.slow
def test_a_replay_is_the_training_by_torch_in_one_part_or_two(sets: Path, tmp_path: Path) -> None:
    recipe = recipe_on(
        sets,
        output=str(tmp_path / "runs"),
        optim={"learning_rate": 1e-2, "betas": BETAS, "weight_decay": 0.1, "clip_norm": 0.5},
        train={"mixup": 0.5, "averaging": 0.0},
        model={"dropout": 0.1},
    )
    model = begin(recipe)
    start = f"{recipe.run_folder}/{folder_name(0)}"
    found: list[Checkpoint] = []
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        for name, steps in (("one", [STEPS]), ("two", [2, STEPS])):
            place = str(tmp_path / name)
            path = process.submit(replayed, recipe.run_folder, start, steps, place).result()
            found.append(read_checkpoint(locate(path)))
    weights = [checkpoint.weights() for checkpoint in found]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [checkpoint.position.applied_steps for checkpoint in found] == [STEPS] * 2

    batches, loss_of = training_batches(recipe), make_loss(recipe)
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in build_optimizer(model, recipe.optim).param_groups
    ]
    adam = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8)
    for step in range(STEPS):
        for group in adam.param_groups:
            group["lr"] = lr_at(step, recipe.optim, len(batches))
        columns = [torch.from_numpy(batches[step][k]) for k in ("image", "labels", "sample")]
        loss_of(model, columns[0], columns[1].long(), columns[2], step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
    for name, wanted in model.named_parameters():
        found_now, wanted_now = weights[0][name], wanted.detach()
        if name.endswith("qkv.bias"):  # softmax undoes a key's bias: its gradient is rounding alone
            found_now, wanted_now = (
                torch.stack(w.chunk(3))[[0, 2]] for w in (found_now, wanted_now)
            )
        torch.testing.assert_close(found_now, wanted_now, rtol=1e-4, atol=1e-6)
