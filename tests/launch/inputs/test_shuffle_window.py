"""The order of a run's data is chosen once, and a run that goes on keeps its own; no Ray."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints.written import snapshot_of, write_snapshot
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.dataset import RowGroupColumns, ShardFile, write_manifest
from vit_ray.launch import prepared_run, resolved_run
from vit_ray.launch.prepared_run import prepared_training
from vit_ray.launch.resolved_run import ResolvedRun, resolve_run
from vit_ray.storage import locate

NUM_GROUPS = 100


def write_data_set(
    folder: Path, num_groups: int, *classes: str, group_bytes: int = 6_400_000
) -> str:
    """A manifest of row groups of 64 images, without shards."""
    columns = RowGroupColumns(
        np.zeros(num_groups), np.arange(num_groups), np.full(num_groups, 64),
        np.full(num_groups, group_bytes), {},
    )  # fmt: skip
    write_manifest(
        locate(str(folder)), columns,
        files=[ShardFile("part", num_groups * 64, num_groups * group_bytes, 0)],
        classes=list(classes or ("cat", "dog")), max_labels=1,
        origin={"groups": num_groups, "license": "CC0"},
    )  # fmt: skip
    return str(folder)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A run over 6,400 images of 100 kB, which are not there."""
    write_data_set(tmp_path / "data", NUM_GROUPS)
    return Recipe(
        name="run",
        output=str(tmp_path / "runs"),
        data={"train": str(tmp_path / "data")},
        train={"global_batch_size": 64, "micro_batch_size": 64},
        optim={"steps": 1000},
        model={"name": "ViT-Ti/16"},
    )


def save_checkpoint(recipe: Recipe, window: int = 0, fingerprint: str | None = None) -> None:
    """A checkpoint of a run that has read its data with a window."""
    tree = recipe.with_changes(data={"shuffle_window": window}).model_dump(mode="json")
    if fingerprint is None:
        fingerprint = open_dataset(str(recipe.data.train)).fingerprint
    batch = recipe.train.global_batch_size
    where = Position(Progress(10), 10, 10 * batch, batch, {"w": [2]}, tree, fingerprint)
    folder = locate(recipe.run_folder).child(folder_name(10))
    write_snapshot(snapshot_of(0, 1, {"weight|w|0": torch.ones(2)}, where), folder)


def prepared(recipe: Recipe) -> tuple[Recipe, ResolvedRun]:
    with prepared_training(recipe, "pretrain") as run:
        return run.recipe, run.resolved


def test_a_new_run_mixes_what_its_tasks_can_hold_and_records_it(recipe):
    found, resolved = prepared(recipe)
    assert found.data.shuffle_window == 1024
    spec = resolved.streams["train"]
    assert (spec.window.batch_size, spec.window.num_batches) == (64, 16)
    assert spec.manifest.whole is None


@pytest.mark.parametrize(
    ("memory_mib", "batch", "store_mib", "window"),
    [
        (64, 64, None, 256), (1, 64, None, 0), (512, 48, None, 1536),
        (256, 64, 24, 0), (256, 64, 64, 128),  # pixels of an image take 147 KiB
    ],
)  # fmt: skip
def test_the_window_follows_memory_batch_and_the_share_of_the_object_store(
    recipe, memory_mib, batch, store_mib, window, monkeypatch
):
    monkeypatch.setattr(resolved_run, "TASK_MEMORY_MIB", memory_mib)
    changed = recipe.with_changes(
        train={"global_batch_size": batch, "micro_batch_size": batch},
        data={"object_store_mib": store_mib},
    )
    resolved = resolve_run(changed)
    assert resolved.recipe.data.shuffle_window == window
    assert (resolved.streams["train"].window is None) == (window == 0)
    assert store_mib or resolved.streams["train"].task_rows == max(1024, window)


@pytest.mark.parametrize("window", [0, 512])
def test_a_run_goes_on_in_its_order_with_other_memory(recipe, window, monkeypatch):
    save_checkpoint(recipe, window)
    monkeypatch.setattr(resolved_run, "TASK_MEMORY_MIB", 1000)
    found, resolved = prepared(recipe)
    assert found.data.shuffle_window == window
    assert (resolved.streams["train"].window is None) == (window == 0)


def test_a_run_that_continues_is_checked_on_its_cluster_without_its_first_weights(
    recipe, monkeypatch
):
    """They are in its checkpoint, and the file need not be on the nodes any more."""
    monkeypatch.setattr(prepared_run, "check_weights", lambda _: None)
    checked: list[str | None] = []

    def check(new: Recipe) -> None:
        checked.append(new.init_from)

    longer = recipe.with_changes(init_from="/first.npz", optim={"steps": 20})
    with prepared_training(longer, "pretrain", check):
        assert checked == ["/first.npz"]
    save_checkpoint(longer, 1024)
    with prepared_training(longer, "pretrain", check) as run:
        assert checked == ["/first.npz", None]
        assert run.recipe.init_from == "/first.npz"


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (100, "no whole number of train.global_batch_size=64; the nearest is 128, and 0 is none"),
        (64 * 64, "about 397 MiB of each reading task, which holds 256; lower it to 2560"),
    ],
)
def test_a_window_that_cannot_be_is_refused(recipe, window, message):
    with pytest.raises(ValueError, match=message):
        resolve_run(recipe.with_changes(data={"shuffle_window": window}))
