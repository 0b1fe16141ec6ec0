"""Which run a recipe goes on with, and what of it may change: on checkpoints, without a run."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints.written import snapshot_of, write_snapshots
from tests.commands.test_recorded_run import write_parent
from tests.launch.test_dataset import recipe_on, sets
from tests.recipes import recipe_with
from vit_ray import lock
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.commands.job_list import COMMANDS
from vit_ray.config import Recipe
from vit_ray.config.recipe import KEYS, keys_below, on_resume
from vit_ray.config.schema import OnResume
from vit_ray.launch.named_run import accepted_changes, find_resume_point, find_run, where_it_lies
from vit_ray.lock import hold_lock, this_process
from vit_ray.storage import locate

__all__ = ["sets"]

IMAGES, BATCH = 640, 64


def linear_recipe(**sections: Any) -> Recipe:
    return recipe_with(
        data={"train": "/data/train", "eval": "/data/test", "shuffle_window": 0},
        optim={"epochs": 2.0, "learning_rate": 0.1, "schedule": "linear"},
        train={"global_batch_size": BATCH},
    ).with_changes(**sections)


def position(step: int, begun: Recipe | None = None) -> Position:
    saved = (begun or linear_recipe()).model_dump(mode="json")
    return Position(Progress(step=step), step, step * BATCH, BATCH, {}, saved, "print")


def accepted(now: Recipe, at: Position) -> list[str]:
    resolved: Any = SimpleNamespace(
        recipe=now, manifest=SimpleNamespace(fingerprint="print"),
        num_images=IMAGES, total_steps=now.optim.total_steps(IMAGES, BATCH),
    )  # fmt: skip
    return accepted_changes(resolved, at)


def test_a_run_is_begun_again_on_purpose_only_where_no_checkpoint_can_be_used(tmp_path):
    recipe = linear_recipe(output=str(tmp_path), resume="from_zero")
    folder = locate(recipe.run_folder).child(folder_name(140))
    at = replace(position(140), shapes={"w": [2]})
    write_snapshots(folder, snapshot_of(0, 1, {"weight|w|0": torch.ones(2)}, at))
    with pytest.raises(ValueError, match=r"can be used \(step 140\); set resume=auto"):
        find_resume_point(recipe)
    for file in Path(folder.path).glob("*.safetensors"):
        file.write_bytes(b"")
    assert find_resume_point(recipe) is None


@pytest.mark.parametrize(("changes", "change"), [
    ({"optim": {"learning_rate": 0.3}}, "optim.learning_rate was 0.1 and is 0.3"),
    ({"optim": {"epochs": 1.5}}, "optim.epochs was 2.0 and is 1.5"),
    ({"data": {"augment": {"min_area": 0.5}}}, "data.augment.min_area was 0.05 and is 0.5"),
    ({"data": {"eval": "/data/other"}}, "data.eval was /data/test and is /data/other"),
    ({"optim": {"betas": [0.9, 0.95]}}, "optim.betas was [0.9, 0.999] and is [0.9, 0.95]"),
    ({"init_from": "/weights"}, "init_from was None and is /weights"),
    ({"checkpoint": {"keep_best": True}}, "checkpoint.keep_best was False and is True"),
])  # fmt: skip
def test_a_change_is_refused_by_name_with_both_values_or_accepted_on_purpose(changes, change):
    with pytest.raises(ValueError, match=re.escape(change)) as refused:
        accepted(linear_recipe(**changes), position(7))
    assert "set resume=changed to continue it from step 7" in str(refused.value)
    (event,) = accepted(linear_recipe(**changes, resume="changed"), position(7))
    assert event.startswith("continues with another recipe: ")
    assert change in event


@pytest.mark.parametrize("step", [7, 20])
@pytest.mark.parametrize(("changes", "message"), [
    ({"seed": 3}, "seed was 0 and is 3"),
    ({"model": {"name": "ViT-S/16"}}, "model.name was ViT-B/16 and is ViT-S/16"),
    ({"train": {"global_batch_size": 128}}, "train.global_batch_size was 64 and is 128"),
    ({"optim": {"name": "sgd"}}, "optim.name was adamw and is sgd"),
    ({"optim": {"frozen": ["norm"]}}, r'optim.frozen was \[\] and is \["norm"\]'),
    ({"train": {"loss": "sigmoid"}}, "train.loss was softmax and is sigmoid"),
    ({"data": {"fraction": 0.5}}, "data.fraction was 1.0 and is 0.5"),
    ({"data": {"held_out_fraction": 0.5}}, "data.held_out_fraction was 0.0 and is 0.5"),
    ({"data": {"shuffle_window": 128}}, "data.shuffle_window was 0 and is 128"),
])  # fmt: skip
def test_what_a_checkpoint_stands_for_cannot_change_at_all(changes, message, step):
    with pytest.raises(ValueError, match=f"cannot continue from step {step}: .*{message}"):
        accepted(linear_recipe(**changes, resume="changed"), position(step))


def test_a_run_that_is_over_does_not_pass_for_one_of_another_recipe():
    changed = linear_recipe(optim={"learning_rate": 0.3}, resume="changed")
    message = (
        r"has finished \(step 20\), and these keys have changed: optim.learning_rate was 0.1 and"
    )
    with pytest.raises(ValueError, match=message):
        accepted(changed, position(20))
    for other in ("/data/other", None):  # nor as measured on other data
        elsewhere = linear_recipe(data={"eval": other}, resume="changed")
        message = f"has finished.*data.eval was /data/test and is {other}.*vit-ray evaluate"
        with pytest.raises(ValueError, match=message):
            accepted(elsewhere, position(20))
        longer = elsewhere.with_changes(optim={"epochs": 4.0})
        assert f"data.eval was /data/test and is {other}" in accepted(longer, position(20))[0]


def test_a_run_that_ended_early_is_not_given_out_for_a_longer_one():
    begun = linear_recipe(train={"early_stopping": 2})
    ended = replace(position(7, begun), progress=Progress(step=7, ended="no better loss"))
    assert accepted(begun, ended) == []
    for resume in ("auto", "changed"):
        longer = begun.with_changes(optim={"epochs": 4.0}, resume=resume)
        message = r"has finished \(no better loss\).*optim.epochs was 2.0 and is 4.0.*another name"
        with pytest.raises(ValueError, match=message):
            accepted(longer, ended)


@pytest.mark.parametrize("step", [7, 20])
def test_a_project_may_be_moved(step, tmp_path):
    places = {"data": {"eval": "/a/data/test"}, "output": "/a/runs", "init_from": "/a/runs/base"}
    begun, b = linear_recipe(**places), str(tmp_path)
    for folder in ("data/test", "runs/base"):
        (tmp_path / folder).mkdir(parents=True)
    for eval_set in (f"{b}/data/test", "/a/data/test"):  # moved, too, or not
        moved = {"data": {"eval": eval_set}, "output": f"{b}/runs", "init_from": f"{b}/runs/base"}
        assert accepted(linear_recipe(**moved), position(step, begun)) == []
    with pytest.raises(ValueError, match="init_from was /a/runs/base and is /a/runs/other"):
        accepted(begun.with_changes(init_from="/a/runs/other"), position(step, begun))


def test_an_interval_of_evaluations_decides_a_run_with_early_stopping():
    recipe = linear_recipe(train={"early_stopping": 2})
    with pytest.raises(ValueError, match=r"evaluate.every_steps was .* and is 5"):
        accepted(recipe.with_changes(evaluate={"every_steps": 5}), position(7, recipe))


def test_another_length_is_told_with_what_becomes_of_the_schedule():
    (event,) = accepted(linear_recipe(optim={"epochs": 4.0}), position(20))
    assert "optim.epochs was 2.0 and is 4.0, which makes 40 steps instead of 20" in event
    # Linear decay from 0.1 to 0: at its end after 20 of 20 steps, half way after 20 of 40.
    assert "the learning rate after step 20 is 0.05, and would have been 0" in event
    shorter = linear_recipe(optim={"epochs": 1.0}, resume="changed")
    with pytest.raises(ValueError, match="trained for 12 steps, and this recipe ends after 10"):
        accepted(shorter, position(12))
    assert "optim.epochs was 2.0 and is 1.0" in accepted(shorter, position(7))[0]


@pytest.mark.parametrize("changes", [
    {
        "train": {"zero_stage": 3, "activation_checkpointing": 1, "callbacks": ["a.note"]},
        "data": {"train": "/moved", "max_bad_fraction": 0.5, "label_selector": {"a": "b"}},
        "evaluate": {"batch_size": 8, "metrics": ["a.top9"], "every_steps": 5},
        "workers": {"num_workers": [1, 8]}, "checkpoint": {"keep_last": 9},
        "tracking": {"experiment": "other"},
    },
    # The same order and length.
    {"data": {"shuffle_window": "auto"}, "optim": {"epochs": None, "steps": 20}},
])  # fmt: skip
def test_speed_and_place_may_change(changes):
    assert accepted(linear_recipe(**changes), position(7)) == []
    assert accepted(linear_recipe(), position(20)) == []


def test_a_run_on_other_data_or_of_other_keys_cannot_be_gone_on_with():
    other = replace(position(7), data_fingerprint="other")
    with pytest.raises(ValueError, match="the data set's fingerprint was other and is print"):
        accepted(linear_recipe(resume="changed"), other)
    begun = position(7)
    begun.recipe["data"]["select_by"] = "row"
    with pytest.raises(ValueError, match=r"another version of vit_ray; .*: unknown key data.sel"):
        accepted(linear_recipe(), begun)


def test_other_keys_of_the_training_than_these_need_the_flag():
    """Written out: with another one marked free, a run becomes another training in silence."""
    read = keys_below(*(key for key in COMMANDS["pretrain"].reads if key != "plan"))
    assert {key.name for key in read if not key.on_resume} == {"name"}
    sections = ("data.", "optim.", "train.", "evaluate.")
    names = [key.name for key in KEYS]
    mine = [key for key in names if key.startswith(sections) or "." not in key]
    free = (
        "output resume data.train data.max_bad_fraction data.cpus_per_task data.object_store_mib "
        "data.label_selector data.cache_dir data.cache_free_gib train.micro_batch_size "
        "train.zero_stage train.offload train.activation_checkpointing train.compile "
        "train.nonfinite train.log_every_steps train.profile_steps train.callbacks "
        "train.step_timeout_s evaluate.batch_size evaluate.metrics"
    )
    assert {key for key in mine if on_resume(key) is OnResume.FREE} == {*free.split()}


def test_a_copy_reads_what_was_copied_with_it_and_else_what_the_run_read(tmp_path):
    first, second, outside = tmp_path / "first", tmp_path / "a" / "second", tmp_path / "elsewhere"
    for folder in (first / "runs/digits", first / "runs/other", first / "data/train", outside):
        folder.mkdir(parents=True)
    recipe = {
        "name": "digits", "output": f"{first}/runs", "init_from": f"{first}/runs/other",
        "data": {"train": f"{first}/data/train", "eval": str(outside)},
        "evaluate": {"few_shot_train": "s3://bucket/set"},
    }  # fmt: skip

    def read_by(folder: Path) -> dict[str, Any]:
        return where_it_lies(recipe, locate(str(folder)))

    assert read_by(first / "runs" / "digits") == recipe
    shutil.copytree(first / "runs" / "digits", tmp_path / "alone")
    assert read_by(tmp_path / "alone") == recipe
    shutil.copytree(first, second)
    copied = json.loads(json.dumps(recipe).replace(str(first), str(second)))
    assert read_by(second / "runs" / "digits") == copied
    shutil.rmtree(second / "data")
    assert read_by(second / "runs" / "digits") == {**copied, "data": recipe["data"]}
    relative = {"name": "digits", "output": "runs", "data": {"train": "data"}}
    assert where_it_lies(relative, locate(str(first / "runs" / "digits"))) == relative


@pytest.mark.parametrize(("folder", "name"), [("renamed", "renamed"), ("digits (old)", None)])
def test_a_renamed_run_is_found_where_it_lies(folder, name, sets, tmp_path):
    recipe = recipe_on(sets, output=str(tmp_path / "runs"))
    moved = Path(write_parent(recipe)).rename(tmp_path / "runs" / folder)
    found = find_run(str(moved)).recipe
    # A folder whose name is no run's has the run's recorded name.
    assert (found.output, found.name) == (str(tmp_path / "runs"), name or recipe.name)


def test_a_copied_project_is_opened_on_its_own_data(sets, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(sets / "large", first / "data")
    recipe = recipe_on(sets, output=str(first / "runs"), data={"train": str(first / "data")})
    write_parent(recipe)
    first.rename(second)
    found = find_run(str(second / "runs" / recipe.name))
    assert found.manifest.path == str(second / "data")
    assert found.recipe.output == str(second / "runs")


def test_a_run_without_a_checkpoint_is_not_taken_for_a_recipe(tmp_path):
    with hold_lock(locate(str(tmp_path / "runs" / "a"))):
        pass
    with pytest.raises(ValueError, match=r"/runs/a has no complete checkpoint; give the run's re"):
        find_run(str(tmp_path / "runs" / "a"))


HOLD = """
import sys
from vit_ray import lock
from vit_ray.lock import hold_lock
from vit_ray.storage import locate
lock.HEARTBEAT_S = 0.05
with hold_lock(locate(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_driver_is_refused_and_one_whose_run_was_taken_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RELEASE_S", 0.1)
    run, pipe = locate(str(tmp_path / "runs" / "a")), subprocess.PIPE
    command = [sys.executable, "-c", HOLD, run.path]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as other:
        assert other.stdout.readline() == "held\n"
        refusal = pytest.raises(ValueError, match=r"/runs/a is in use by process \d+ of")
        with refusal, hold_lock(run):
            pass
        owner = {**this_process(run), "host": "node-7"}
        run.child("lock-00000002.json").write(json.dumps(owner).encode())
        assert other.wait(30) == 1
        assert "; this process no longer writes there; this driver ends" in other.stderr.read()
