"""What of a recipe may change in the middle of a run: on checkpoints' positions, without a run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints.written import snapshot_of, write_snapshot
from tests.recipes import recipe_with
from vit_ray import storage
from vit_ray.checkpoints import checkpoint_format
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.checkpoints.checkpoint_format import COMMIT
from vit_ray.commands.job_list import COMMANDS
from vit_ray.config import Recipe, keys
from vit_ray.config.keys import all_keys, incompatible_changes, keys_below, on_resume
from vit_ray.config.schema import OnResume
from vit_ray.launch.named_run import accepted_changes, find_resume_point
from vit_ray.launch.run import _init_run
from vit_ray.storage import locate

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
        recipe=now,
        manifest=SimpleNamespace(fingerprint="print"),
        num_images=IMAGES,
        total_steps=now.optim.total_steps(IMAGES, BATCH),
    )
    return accepted_changes(resolved, at)


def test_a_resumed_run_keeps_the_run_whose_weights_it_began_with():
    began = replace(position(9), init_run_id="a" * 32)
    resumed: Any = SimpleNamespace(resume_from=SimpleNamespace(position=began))
    assert _init_run(resumed) == began.init_run_id


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_run_is_begun_again_on_purpose_only_where_no_checkpoint_can_be_used(is_whole, tmp_path):
    recipe = linear_recipe(output=str(tmp_path), resume="from_zero")
    folder = locate(recipe.run_folder).child(folder_name(140))
    at = replace(position(140), shapes={"w": [2]})
    write_snapshot(snapshot_of(0, 1, {"weight|w|0": torch.ones(2)}, at), folder)
    if is_whole:
        with pytest.raises(ValueError, match=r"can be used \(step 140\); set resume=auto"):
            find_resume_point(recipe)
        return
    for file in Path(folder.path).glob("*.safetensors"):
        file.write_bytes(b"")
    assert find_resume_point(recipe) is None


def test_a_driver_does_not_wait_for_a_marker_that_may_be_shown_late(tmp_path, monkeypatch):
    recipe = linear_recipe(output=str(tmp_path))
    for step in (1, 2):
        folder = locate(recipe.run_folder).child(folder_name(step))
        at = replace(position(step), shapes={"w": [2]})
        write_snapshot(snapshot_of(0, 1, {"weight|w|0": torch.ones(2)}, at), folder)
    folder.child(COMMIT).delete()
    monkeypatch.setattr(checkpoint_format, "READ_AGAIN_S", 10.0)
    pauses: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", pauses.append)
    found = find_resume_point(recipe)
    assert found is not None
    assert (found.position.step, sum(pauses)) == (1, 0)


def test_the_same_recipe_goes_on_without_a_word():
    assert accepted(linear_recipe(), position(20)) == []
    assert accepted(linear_recipe(), position(7)) == []


@pytest.mark.parametrize(
    ("changes", "key", "before", "now"),
    [
        ({"optim": {"learning_rate": 0.3}}, "optim.learning_rate", "0.1", "0.3"),
        ({"optim": {"weight_decay": 0.3}}, "optim.weight_decay", "0.0", "0.3"),
        ({"optim": {"schedule": "cosine"}}, "optim.schedule", "linear", "cosine"),
        ({"optim": {"warmup_steps": 3}}, "optim.warmup_steps", "0", "3"),
        ({"optim": {"epochs": 1.5}}, "optim.epochs", "2.0", "1.5"),
        ({"train": {"label_smoothing": 0.1}}, "train.label_smoothing", "0.0", "0.1"),
        ({"train": {"precision": "fp32"}}, "train.precision", "bf16", "fp32"),
        ({"data": {"augment": {"min_area": 0.5}}}, "data.augment.min_area", "0.05", "0.5"),
        ({"data": {"eval": "/data/other"}}, "data.eval", "/data/test", "/data/other"),
        ({"optim": {"betas": [0.9, 0.95]}}, "optim.betas", r"\[0.9, 0.999\]", r"\[0.9, 0.95\]"),
        ({"init_from": "/weights"}, "init_from", "None", "/weights"),
        ({"checkpoint": {"keep_best": True}}, "checkpoint.keep_best", "False", "True"),
    ],
)
def test_a_change_is_refused_by_name_with_both_values_or_accepted_on_purpose(
    changes, key, before, now
):
    told = f"{key} was {before} and is {now}"
    with pytest.raises(ValueError, match=f"{told}.*set resume=changed to continue it from step 7"):
        accepted(linear_recipe(**changes), position(7))
    (event,) = accepted(linear_recipe(**changes, resume="changed"), position(7))
    assert event.startswith("continues with another recipe: ")
    assert key in event


@pytest.mark.parametrize("step", [7, 20])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"model": {"name": "ViT-S/16"}}, "model.name was ViT-B/16 and is ViT-S/16"),
        ({"train": {"global_batch_size": 128}}, "train.global_batch_size was 64 and is 128"),
        ({"optim": {"name": "sgd"}}, "optim.name was adamw and is sgd"),
        ({"optim": {"frozen": ["norm"]}}, r'optim.frozen was \[\] and is \["norm"\]'),
        ({"train": {"loss": "sigmoid"}}, "train.loss was softmax and is sigmoid"),
        ({"data": {"fraction": 0.5}}, "data.fraction was 1.0 and is 0.5"),
        ({"data": {"held_out_fraction": 0.5}}, "data.held_out_fraction was 0.0 and is 0.5"),
        ({"data": {"shuffle_window": 128}}, "data.shuffle_window was 0 and is 128"),
    ],
)
def test_what_a_checkpoint_stands_for_cannot_change_at_all(changes, told, step):
    with pytest.raises(ValueError, match=f"cannot continue from step {step}: .*{told}"):
        accepted(linear_recipe(**changes, resume="changed"), position(step))


def test_other_data_cannot_be_gone_on_with():
    other = replace(position(7), data_fingerprint="other")
    with pytest.raises(ValueError, match="the data set's fingerprint was other and is print"):
        accepted(linear_recipe(resume="changed"), other)


def test_a_run_that_is_over_does_not_pass_for_one_of_another_recipe():
    changed = linear_recipe(optim={"learning_rate": 0.3}, resume="changed")
    told = r"has finished, and these keys have changed: optim.learning_rate was 0.1 and is 0.3; res"
    with pytest.raises(ValueError, match=told):
        accepted(changed, position(20))
    ended = replace(position(7), progress=Progress(step=7, ended="no better validation loss"))
    with pytest.raises(ValueError, match="has finished"):
        accepted(changed, ended)


@pytest.mark.parametrize("other", ["/data/other", None])
def test_a_run_that_is_over_is_not_given_out_as_measured_on_other_data(other):
    elsewhere = linear_recipe(data={"eval": other}, resume="changed")
    told = f"evaluated on other data: data.eval was /data/test and is {other}.*vit-ray evaluate"
    with pytest.raises(ValueError, match=told):
        accepted(elsewhere, position(20))
    assert accepted(elsewhere, position(7))
    few_shot = ("evaluate.few_shot_train", "evaluate.few_shot_test")
    assert {on_resume(key) for key in ("data.eval", *few_shot)} == {OnResume.EVALUATED}
    longer = elsewhere.with_changes(optim={"epochs": 4.0})
    assert f"data.eval was /data/test and is {other}" in accepted(longer, position(20))[0]


def test_a_run_that_ended_early_is_not_given_out_for_a_longer_one():
    begun = linear_recipe(train={"early_stopping": 2})
    ended = replace(position(7, begun), progress=Progress(step=7, ended="no better loss"))
    assert accepted(begun, ended) == []
    for resume in ("auto", "changed"):
        longer = begun.with_changes(optim={"epochs": 4.0}, resume=resume)
        told = r"ended after step 7 of 20 \(no better loss\).* 40 steps.*choose another name"
        with pytest.raises(ValueError, match=told):
            accepted(longer, ended)


@pytest.mark.parametrize("step", [7, 20])
def test_a_project_may_be_moved(step):
    places = {"data": {"eval": "/a/data/test"}, "output": "/a/runs", "init_from": "/a/runs/base"}
    begun = linear_recipe(**places)
    moved = linear_recipe(data={"eval": "/b/data/test"}, output="/b/runs", init_from="/b/runs/base")
    assert accepted(moved, position(step, begun)) == []
    weights = begun.with_changes(init_from="/elsewhere/base")
    (event,) = accepted(weights, position(step, begun))
    assert "init_from was /a/runs/base and is /elsewhere/base" in event
    for one, other in (("/a/runs/base", "/a/runs/other"), ("s3://b/base/", "s3://b/other/")):
        begun = linear_recipe(init_from=one)
        with pytest.raises(ValueError, match=f"init_from was {one} and is {other}"):
            accepted(begun.with_changes(init_from=other), position(step, begun))


def test_what_is_not_used_decides_nothing_until_it_is():
    few_shot = {"few_shot_train": "/data/train", "few_shot_test": "/data/test"}
    begun = linear_recipe(evaluate=few_shot)
    with pytest.raises(ValueError, match=r"evaluate.shots was .* and is \[1, 5\]"):
        accepted(begun.with_changes(evaluate={"shots": [1, 5]}), position(7, begun))
    with pytest.raises(ValueError, match=r"optim.decay_at was .* and is \[0.5\]"):
        accepted(linear_recipe(optim={"schedule": "steps", "decay_at": [0.5]}), position(7))
    for begun, changed in (
        (linear_recipe(optim={"name": "sgd"}), []),
        (linear_recipe(optim={"name": "parts.lion"}), ["optim.betas"]),
        (linear_recipe(train={"averaging": 0.9}), ["optim.betas", "train.averaging_warmup"]),
    ):
        now = begun.with_changes(optim={"betas": (0.9, 0.9)}, train={"averaging_warmup": False})
        found = [change.key for change in incompatible_changes(begun.flat(), now.flat())]
        assert found == changed


def test_a_longer_run_is_accepted_and_says_what_becomes_of_the_schedule():
    (event,) = accepted(linear_recipe(optim={"epochs": 4.0}), position(20))
    assert "optim.epochs was 2.0 and is 4.0, which makes 40 steps instead of 20" in event
    # Linear decay from 0.1 to 0: at its end after 20 of 20 steps, half way after 20 of 40.
    assert "the learning rate after step 20 is 0.05, and would have been 0" in event


def test_a_length_may_be_said_in_another_way():
    assert accepted(linear_recipe(optim={"epochs": None, "steps": 20}), position(7)) == []


def test_a_run_does_not_end_before_where_it_is():
    shorter = linear_recipe(optim={"epochs": 1.0}, resume="changed")
    with pytest.raises(ValueError, match="trained for 12 steps, and this recipe ends after 10"):
        accepted(shorter, position(12))
    assert "optim.epochs was 2.0 and is 1.0" in accepted(shorter, position(7))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"micro_batch_size": 8, "zero_stage": 3, "activation_checkpointing": 1}},
        {"train": {"offload": True, "step_timeout_s": 7.0, "profile_steps": [3, 4]}},
        {"train": {"nonfinite": "skip", "log_every_steps": 7, "callbacks": ["a.note"]}},
        {"data": {"train": "/moved", "cpus_per_task": 1.0, "max_bad_fraction": 0.5}},
        {"train": {"compile": False}, "tracking": {"experiment": "other"}},
        {"data": {"object_store_mib": 64, "label_selector": {"a": "b"}}},
        {"data": {"cache_dir": "/c", "cache_free_gib": 1.0}},
        {"evaluate": {"batch_size": 8, "metrics": ["a.top9"]}},
        {"workers": {"num_workers": [1, 8]}, "checkpoint": {"keep_last": 9}},
        {"data": {"shuffle_window": "auto"}},
        {"evaluate": {"every_steps": 5}},
        {"evaluate": {"shots": [1, 5], "few_shot_seeds": 9}},
        {"optim": {"decay_at": [0.5], "momentum": 0.5}},
        {"train": {"averaging_warmup": False}},  # nothing is averaged
        {"train": {"masked_target": "full_patch"}},
    ],
)
def test_speed_and_place_may_change(changes):
    assert accepted(linear_recipe(**changes), position(7)) == []


def test_a_run_of_a_recipe_with_other_keys_is_refused_with_who_reads_it():
    begun = position(7)
    begun.recipe["data"]["select_by"] = "row"
    told = r"another version of vit_ray; .*choose another name: unknown key data.select_by"
    with pytest.raises(ValueError, match=told):
        accepted(linear_recipe(), begun)


def test_when_evaluations_may_end_a_run_their_cadence_decides():
    begun = linear_recipe(train={"early_stopping": 2})
    with pytest.raises(ValueError, match=r"evaluate.every_steps was None and is 5"):
        accepted(begun.with_changes(evaluate={"every_steps": 5}), position(7, begun))


def test_every_key_that_a_training_reads_says_whether_it_may_change():
    keys = keys_below(*(key for key in COMMANDS["pretrain"].reads if key != "plan"))
    assert len(keys) > 90
    assert {key.name for key in keys if not key.on_resume} == {"name"}


def test_other_keys_of_the_training_than_these_need_the_flag():
    """Written out: with another one marked free, a run becomes another training in silence."""
    sections = ("data.", "optim.", "train.", "evaluate.")
    names = [key.name for key in all_keys()]
    mine = [key for key in names if key.startswith(sections) or "." not in key]
    free = (
        "output resume data.train data.max_bad_fraction data.cpus_per_task data.object_store_mib "
        "data.label_selector data.cache_dir data.cache_free_gib train.micro_batch_size "
        "train.zero_stage train.offload train.activation_checkpointing train.compile "
        "train.nonfinite train.log_every_steps train.profile_steps train.callbacks "
        "train.step_timeout_s evaluate.batch_size evaluate.metrics"
    )
    assert {key for key in mine if on_resume(key) is OnResume.FREE} == {*free.split()}
    assert on_resume("train.masked_target") is OnResume.FIXED  # where it is used


def test_what_switches_a_key_off_is_a_key_with_such_values():
    """A misspelt one would leave the key without effect on any comparison."""
    allowed = {key.name: key.allowed for key in all_keys()}
    switches = [used_if for _, used_if in keys._MARKS.values() if used_if]
    assert len(switches) > 10
    for used_if in switches:
        assert set(used_if.values) <= set(allowed[used_if.key].split(" | ")), used_if
        # Without values the switch is off where it is unset, or 0.
        can_be_off = allowed[used_if.key].endswith(" | null") or used_if.key == "train.averaging"
        assert used_if.values or can_be_off, used_if
