"""What a run's record says of it: what trains as parameters, the rest as tags and inputs."""

import getpass
import json
import platform
import subprocess
import sys
from typing import Any

import pytest
from joblib import cpu_count

from tests.launch.resolved import resolved_run
from vit_ray.config import load_recipe
from vit_ray.config.keys import incompatible_changes, recorded_before, stored_tag
from vit_ray.experiments.search_space import RATE, final_recipe, trial_recipe
from vit_ray.launch import run_record
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run_record import (
    command_line,
    data_inputs,
    git_commit,
    group_of,
    machine_facts,
    run_facts,
    trained_params,
    training_cost,
)

CLUSTER = ClusterShape(1, 2, 0, 0.0)
TRIALS = ["init_from=x", "data.train=a/train", "data.eval=a/test"]


def test_trials_of_a_sweep_differ_in_the_learning_rate_alone():
    recipe = load_recipe("digits_sweep", TRIALS)
    trials = [trained_params(trial_recipe(recipe, {RATE: rate})) for rate in (0.1, 0.2)]
    assert {k for k in trials[0] if trials[0][k] != trials[1][k]} == {"optim.learning_rate"}
    assert trials[0].keys() == trials[1].keys()
    finals = [trained_params(final_recipe(recipe, {RATE: 0.1}, seed)) for seed in (0, 1)]
    assert {k for k in finals[0] if finals[0][k] != finals[1][k]} == {"seed"}
    assert finals[0] == trials[0]


def test_parameters_are_what_is_set_and_what_trains():
    params = trained_params(load_recipe("digits"))
    assert params["model.depth"] == "4"
    assert "None" not in params.values()
    assert not {"name", "output", "data.train", "data.eval", "data.cpus_per_task"} & set(params)
    others = ("tracking.", "plan.", "checkpoint.")
    # It decides which weights are the result.
    assert [key for key in params if key.startswith(others)] == ["checkpoint.keep_best"]
    assert len(params) < 55


@pytest.mark.parametrize("name", ["digits", "digits_sweep", "finetune/cifar10"])
def test_a_recorded_run_is_found_to_be_of_its_recipe_and_of_no_other(name):
    recipe = load_recipe(name)
    tags = run_facts(recipe, "study_cell", resolved_run(), CLUSTER, "typed")
    before = recorded_before(trained_params(recipe), tags)
    assert incompatible_changes(before, recipe.flat()) == []
    other = recipe.with_changes(data={"eval": "another"}, optim={"weight_decay": 0.77})
    changed = {change.key for change in incompatible_changes(before, other.flat())}
    assert changed == {"data.eval", "optim.weight_decay"}


def test_tags_say_data_stage_user_and_command(monkeypatch):
    words = ["/x/vit-ray", "sweep", "digits_sweep", "tracking.uri=http://u:hunter2@h"]
    monkeypatch.setattr(sys, "argv", words)
    recipe = load_recipe("digits_sweep", TRIALS)
    tags = run_facts(recipe, "sweep_trial", resolved_run(), CLUSTER, command_line())
    assert tags["vit_ray.kind"] == "sweep_trial"
    shown = {key for key in tags if not stored_tag(key).startswith("mlflow.")}  # what pages show
    assert shown == {
        "init_from", "vit_ray.kind", "vit_ray.cluster", "vit_ray.run_folder", "vit_ray.group",
    }  # fmt: skip
    assert tags["data.eval"] == "a/test"
    assert tags["vit_ray.run_folder"] == f"{recipe.output}/digits-sweep"
    assert tags["mlflow.user"] == getpass.getuser()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ana")  # who shares an account or a container
    again = run_facts(recipe, "sweep_trial", resolved_run(), CLUSTER, "typed")
    assert again["mlflow.user"] == "ana"
    assert tags["mlflow.source.name"] == "vit-ray sweep digits_sweep tracking.uri=http://h"
    assert "vit-ray sweep digits_sweep" in tags["mlflow.note.content"]
    assert "hunter2" not in str(tags)


def test_a_users_description_comes_first_and_his_tags_replace_none_of_ours():
    about = {"description": "Baseline of *May*", "tags": {"team": "vision", "data.eval": "x"}}
    recipe = load_recipe("digits_sweep", TRIALS).with_changes(tracking=about)
    tags = run_facts(recipe, "sweep_trial", resolved_run(), CLUSTER, "typed")
    assert tags["mlflow.note.content"].startswith("Baseline of *May*\n\nViT on ")
    assert tags["data.eval"] == "a/test"
    assert "team" not in tags  # it is sent apart: MLflow may refuse it
    with pytest.raises(ValueError, match=r"tracking\.tags: 'vit_ray\.kind' is reserved"):
        recipe.with_changes(tracking={"tags": {"vit_ray.kind": "mine"}})


def test_inputs_cost_and_machine_of_a_run():
    mine = ClusterShape(1, 4, 0, 0.0, is_private=True)
    assert str(mine) == f"1 node, {cpu_count()} cores, 0 GPUs"
    assert str(ClusterShape(2, 8, 1, 0.0)) == "2 nodes, 8 CPUs, 1 GPUs"
    facts = json.loads(machine_facts(mine))
    assert (facts["driver"], facts["ray_cpus"]) == (platform.node(), 4)
    plan = resolved_run()
    plan.manifest.num_classes = 10
    ten, twenty = (training_cost(plan, steps) for steps in (10, 20))
    assert (ten["study/steps"], ten["study/images_seen"]) == (10, 1280)
    assert twenty["study/exaflops"] == pytest.approx(2 * ten["study/exaflops"])
    train, test = data_inputs(plan)
    assert (train["name"], train["context"], test["context"]) == ("train", "training", "evaluation")
    assert train["profile"]["num_images"] == 90
    assert train["source"] == "/data/digits/train"
    assert len(train["digest"]) <= 36  # MLflow's limit


def test_a_group_is_of_runs_that_differ_by_the_seed_alone(monkeypatch):
    monkeypatch.setenv("VIT_RAY_GIT_COMMIT", "abc")

    def group(commit: str = "abc", fingerprint: str = "f", **changes: Any) -> str:
        monkeypatch.setenv("VIT_RAY_GIT_COMMIT", commit)
        resolved = resolved_run()
        resolved.streams["train"].manifest.fingerprint = fingerprint
        return group_of(load_recipe("digits", changes), resolved)

    one = group()
    assert group(seed=1, name="other", output="elsewhere", **{"data.train": "moved/train"}) == one
    assert group(**{"optim.learning_rate": 0.5}) != one
    assert group(fingerprint="e") != one
    assert group(commit="abd") != one


def test_the_commit_is_of_this_package_and_not_of_the_repository_around_it(tmp_path, monkeypatch):
    monkeypatch.delenv("VIT_RAY_GIT_COMMIT", raising=False)
    installed = tmp_path / "venv" / "run_metadata.py"
    installed.parent.mkdir()
    installed.write_text("")
    (tmp_path / "own.py").write_text("")
    for words in (
        ["init"], ["add", "own.py"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "own"],
    ):  # fmt: skip
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    monkeypatch.setattr(run_record, "__file__", str(installed))
    assert git_commit() == "unknown"
    subprocess.run(["git", "-C", str(tmp_path), "add", "venv"], check=True)
    assert git_commit().endswith("+")
