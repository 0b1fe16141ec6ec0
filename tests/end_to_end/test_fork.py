"""Forks that are trained: without a change, and with another batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import Digits
from tests.end_to_end.runs import same_weights, weights_of
from tests.recipes import STEPS, small_recipe
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.checkpoints.sample_digest import add_digests, samples_digest
from vit_ray.commands.cli import vit_ray
from vit_ray.config import load_recipe
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.launch.run import train
from vit_ray.storage import locate
from vit_ray.tracking.mlflow_client import open_client


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_fork_ends_with_its_parents_weights_and_reads_on_with_another_batch(
    digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    # With half the batch, from the same place in the data.
    words = [*words[:3], "name=halves", "train.global_batch_size=32", "optim.steps=18"]
    forked = CliRunner().invoke(vit_ray, words)
    assert forked.exit_code == 0, forked.output
    halves = load_recipe(Path("halves.yaml"))
    assert train(halves).steps == 18
    newest = newest_checkpoint(locate(halves.run_folder))
    assert newest is not None
    assert (newest.position.samples_seen, newest.position.applied_steps) == (18 * 32, 8 + 2)
    progress, batches = newest.position.progress, SeenBatches(resolve_run(halves))
    received = [samples_digest(step * 32, batches.planned(step)) for step in (16, 17)]
    assert int(progress.samples_digest, 16) == add_digests(*received)
