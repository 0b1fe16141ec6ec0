"""What is wrong is said before anything starts."""

import re
from pathlib import Path

import pytest

from tests.conftest import Digits
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.launch import resolved_run
from vit_ray.launch.named_run import find_resume_point
from vit_ray.launch.prepared_run import prepared_training
from vit_ray.launch.resolved_run import resolve_run


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"train": "/no/such/set"}}, "no data set at '/no/such/set'"),
        ({"train": {"global_batch_size": 100}}, "the nearest valid train.global_batch_size is 96"),
        ({"train": {"global_batch_size": 2048}}, "more than the 1497 training images"),
        ({"optim": {"steps": None}}, "optim gives no length of the run"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(recipe, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_run(recipe.with_changes(**changes))


def few_shot(recipe: Recipe, digits: Digits, *shots: int) -> Recipe:
    sets = {"few_shot_train": digits.train, "few_shot_test": digits.test}
    return recipe.with_changes(evaluate={**sets, "shots": list(shots)})


def test_more_shots_than_a_class_has_images_are_refused(recipe, digits, monkeypatch, caplog):
    folders = [folder for folder in (digits.images / "train").iterdir() if folder.is_dir()]
    scarce = min(folders, key=lambda folder: (len(list(folder.iterdir())), folder.name))
    count = len(list(scarce.iterdir()))
    wanted = (
        rf"evaluate.shots=\[1, {count + 1}\]: class \d+ \('{scarce.name}'\) has {count} "
        rf"examples in evaluate.few_shot_train, {count + 1} are needed; use shots up to {count} or"
    )
    with pytest.raises(ValueError, match=wanted):
        resolve_run(few_shot(recipe, digits, 1, count + 1))
    resolve_run(few_shot(recipe, digits, 1, count))
    assert not caplog.text
    monkeypatch.setattr(resolved_run, "MOST_LABELS_READ", 100)  # of a huge pool no more are read
    resolve_run(few_shot(recipe, digits, 1000))
    assert "10 of 10 classes have fewer than 1000" in caplog.text
    caplog.clear()
    resolve_run(few_shot(recipe, digits, 2))
    assert not caplog.text


@pytest.mark.parametrize(
    ("averaging", "warms_up", "is_told"), [(0.9999, False, True), (0.9999, True, False)]
)
def test_averaged_weights_that_are_still_the_first_ones_are_told(
    recipe, caplog, averaging, warms_up, is_told
):
    recipe = recipe.with_changes(
        train={"averaging": averaging, "averaging_warmup": warms_up}, optim={"warmup_steps": 0}
    )
    with prepared_training(recipe, "pretrain"):
        assert ("averaged weights is still the initial weights" in caplog.text) is is_told
