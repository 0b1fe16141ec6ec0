"""A fork that is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.end_to_end.runs import same_weights, weights_of
from tests.recipes import STEPS, small_recipe
from vit_ray.commands.cli import vit_ray
from vit_ray.config import load_recipe
from vit_ray.launch.run import train
from vit_ray.tracking.mlflow_client import open_client


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_fork_ends_with_its_parents_weights(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = small_recipe("parent", digits, tmp_path)
    train(recipe)
    words = ["fork", recipe.run_folder, "step=8", "name=fork"]
    forked = CliRunner().invoke(vit_ray, words)
    assert forked.exit_code == 0, forked.output
    fork = load_recipe(Path("fork.yaml"))
    result = train(fork)
    assert result.steps == STEPS
    assert same_weights(weights_of(fork), weights_of(recipe))
    run = open_client(recipe.tracking.uri).get_run(result.run_id)
    assert run.data.tags["vit_ray.branched_from"] == "parent at step 8"
    assert run.info.run_name == "fork"
