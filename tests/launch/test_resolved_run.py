"""What a recipe comes to on its data before anything starts: streams, order, right answers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints.written import snapshot_of, write_snapshots
from tests.conftest import Digits
from tests.data.small_sets import write_set
from tests.models.small import TINY_VIT, small_model
from tests.recipes import recipe_with, small_recipe
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest, ShardFile, write_manifest
from vit_ray.evaluation.ground_truth import Answers
from vit_ray.launch import resolved_run
from vit_ray.launch.named_run import find_resume_point
from vit_ray.launch.resolved_run import answers_of, resolve_evaluation, resolve_run
from vit_ray.launch.run import PreparedRun, prepared_training
from vit_ray.models.weights import save_weights
from vit_ray.storage import locate

NUM_GROUPS, GROUP_BYTES = 100, 6_400_000
INIT_RUN = "a" * 32
CLASSES = [f"n{number:08d}" for number in range(6)]
KEYS = [f"ILSVRC2012_val_{number:08d}" for number in (6, 1, 5, 2, 4, 3)]


@pytest.fixture
def recipe(digits: Digits, tmp_path: Path) -> Recipe:
    return small_recipe("checked", digits, tmp_path)


def test_a_plan_counts_images_and_steps_and_resume_true_needs_a_run(recipe):
    with pytest.raises(ValueError, match="resume=true, but"):
        find_resume_point(recipe.with_changes(resume=True))
    assert find_resume_point(recipe) is None
    resolved = resolve_run(recipe.with_changes(optim={"steps": None, "epochs": 2.0}))
    assert resolved.num_images == 1497
    assert resolved.total_steps == round(1497 * 2 / 64)
    assert resolved.streams["eval"].num_images == 300


def test_a_held_out_part_beside_a_test_set_is_where_the_best_evaluation_is_chosen(recipe):
    held_out = recipe.with_changes(data={"held_out_fraction": 0.1})
    assert "dev" not in resolve_run(held_out).streams
    for keeps in ({"checkpoint": {"keep_best": True}}, {"train": {"early_stopping": 2}}):
        streams = resolve_run(held_out.with_changes(**keeps)).streams
        counts = {name: streams[name].num_images for name in ("train", "eval", "dev")}
        assert counts == {"train": 1347, "eval": 300, "dev": 150}
        assert "dev" not in resolve_run(recipe.with_changes(**keeps)).streams
        alone = resolve_run(held_out.with_changes(**keeps), needs_train=False)
        assert "dev" not in alone.streams


@pytest.mark.parametrize(("changes", "message"), [
    ({"train": {"global_batch_size": 100}}, "the nearest valid train.global_batch_size is 96"),
    ({"train": {"global_batch_size": 2048}}, "more than the 1497 training images"),
    ({"data": {"shuffle_window": 100}}, "train.global_batch_size=64; the nearest is 128"),
])  # fmt: skip
def test_a_recipe_that_cannot_work_is_refused(recipe, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_run(recipe.with_changes(**changes))


@pytest.fixture
def large(tmp_path: Path) -> Recipe:
    """A run over 6,400 images of 100 kB in row groups of 64, which are not there."""
    manifest = Manifest(
        np.zeros(NUM_GROUPS), np.arange(NUM_GROUPS), np.full(NUM_GROUPS, 64),
        np.full(NUM_GROUPS, GROUP_BYTES),
        files=[ShardFile("part", NUM_GROUPS * 64, NUM_GROUPS * GROUP_BYTES, 0)],
        classes=["cat", "dog"], origin={"license": "CC0"},
    )  # fmt: skip
    write_manifest(locate(str(tmp_path / "data")), manifest)
    return recipe_with(
        output=str(tmp_path / "runs"), data={"train": str(tmp_path / "data")},
        train={"global_batch_size": 64, "micro_batch_size": 64},
        optim={"steps": 1000}, model={"name": "ViT-Ti/16"},
    )  # fmt: skip


def save_checkpoint(recipe: Recipe, window: int) -> None:
    """A checkpoint of a run that has read its data with a window."""
    tree = recipe.with_changes(data={"shuffle_window": window}).model_dump(mode="json")
    fingerprint = open_dataset(str(recipe.data.train)).fingerprint
    where = Position(Progress(10), 10, 640, 64, {"w": [2]}, tree, fingerprint, init_run_id=INIT_RUN)
    folder = locate(recipe.run_folder).child(folder_name(10))
    write_snapshots(folder, snapshot_of(0, 1, {"weight|w|0": torch.ones(2)}, where))


def prepared(recipe: Recipe) -> PreparedRun:
    with prepared_training(recipe, "pretrain") as run:
        return run


def test_a_new_run_mixes_what_its_tasks_can_hold_and_records_it(large):
    resolved = prepared(large).resolved
    assert resolved.recipe.data.shuffle_window == 1024
    spec = resolved.streams["train"]
    assert (spec.window.batch_size, spec.window.num_batches) == (64, 16)
    with pytest.raises(ValueError, match="which holds 256; lower it to 2560"):
        resolve_run(large.with_changes(data={"shuffle_window": 64 * 64}))


@pytest.mark.parametrize(("memory_mib", "batch", "store_mib", "window"), [
    (64, 64, None, 256), (1, 64, None, 0), (512, 48, None, 1536),
    (256, 64, 24, 0), (256, 64, 64, 128),  # pixels of an image take 147 KiB
])  # fmt: skip
def test_the_window_follows_memory_batch_and_the_share_of_the_object_store(
    large, memory_mib, batch, store_mib, window, monkeypatch
):
    monkeypatch.setattr(resolved_run, "TASK_MEMORY_MIB", memory_mib)
    batches = {"global_batch_size": batch, "micro_batch_size": batch}
    resolved = resolve_run(large.with_changes(train=batches, data={"object_store_mib": store_mib}))
    assert resolved.recipe.data.shuffle_window == window
    assert (resolved.streams["train"].window is None) == (window == 0)
    assert store_mib or resolved.streams["train"].task_rows == max(1024, window)


@pytest.mark.parametrize("window", [0, 512])
def test_a_run_goes_on_in_its_order_with_other_memory_and_keeps_its_origin(
    large, window, monkeypatch
):
    save_checkpoint(large, window)
    monkeypatch.setattr(resolved_run, "TASK_MEMORY_MIB", 1000)
    run = prepared(large)
    resolved = run.resolved
    assert (resolved.recipe.data.shuffle_window, run.init_run) == (window, INIT_RUN)
    assert (resolved.streams["train"].window is None) == (window == 0)


@pytest.fixture
def validation(tmp_path: Path) -> Manifest:
    """Six images, image i of class i - 1, in an order of its own and in two row groups."""
    rows = [(key, [int(key[-1]) - 1]) for key in KEYS]
    return write_set(tmp_path / "validation", rows, CLASSES)


def right(answers: Answers, labels: list[int]) -> list[list[int]]:
    batch = np.array(labels, np.int32)[:, None]
    return answers.of_batch(batch, np.arange(len(labels))).tolist()


def test_images_without_a_right_answer_are_not_counted(validation, tmp_path):
    file = tmp_path / "real.json"
    file.write_text(json.dumps([[0], [1, 5], [2], [], [4], [5]]))
    benchmark = {"kind": "imagenet_real", "label_file": str(file)}
    recipe = recipe_with("evaluated", benchmark=benchmark, data={"eval": validation.path})
    answers = answers_of(recipe, validation, validation)
    found = replace(resolve_run(recipe, needs_train=False), answers=answers)
    assert found.num_eval_images == 5
    assert replace(found, answers=None).num_eval_images == 6
    some = Answers(tuple(CLASSES), 6, by_class=np.array([[0], [-1], [2], [-1], [-1], [5]]))
    assert replace(found, answers=some).num_eval_images == 3  # as ObjectNet's


def test_a_set_of_some_of_the_models_classes_is_evaluated_among_these(validation, tmp_path):
    part = write_set(tmp_path / "part", [("a", [0]), ("b", [1])], [CLASSES[1], CLASSES[4]])
    with pytest.raises(ValueError, match=r"has 2 classes and the model has 6.*kind=class_names"):
        answers_of(recipe_with(), part, validation)
    weights = tmp_path / "weights.npz"
    save_weights(small_model("ViT", num_classes=6), weights)
    recipe = recipe_with(
        data={"eval": part.path}, init_from=str(weights), output=str(tmp_path / "runs"),
        benchmark={"kind": "class_names", "model_classes": validation.path},
        model={"name": "ViT", "image_size": 32, **TINY_VIT},
    )  # fmt: skip
    resolved = resolve_evaluation(recipe)
    assert (resolved.num_classes, resolved.answers.num_outputs) == (6, 6)
    assert resolved.answers.classes == (CLASSES[1], CLASSES[4])


@pytest.mark.parametrize("key", ["id2label", "label_names"])
def test_the_models_class_order_is_known_from_the_folder_of_its_weights(
    validation, tmp_path, key, caplog
):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"")
    config = tmp_path / "hub" / "config.json"
    recipe = recipe_with(init_from=str(tmp_path / "hub"))

    def found(names: list[str]) -> list[list[int]]:
        told = {str(index): names[index] for index in (3, 0, 5, 1, 4, 2)}  # by number, in any order
        config.write_text(json.dumps({key: told if key == "id2label" else names}))
        return right(answers_of(recipe, validation, validation), [0, 5, 2])

    assert found(CLASSES[::-1]) == [[5], [0], [3]]
    # Other names for the classes leave the order of the data set.
    assert found([f"LABEL_{index}" for index in range(6)]) == [[0], [5], [2]]
    assert not caplog.text
    assert found(["tench", "goldfish", "shark", "ray", "cock", "hen"]) == [[0], [5], [2]]
    assert "names its 6 classes otherwise than the data set" in caplog.text
