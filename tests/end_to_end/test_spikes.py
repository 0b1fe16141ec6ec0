"""A spike that is planted in a run: noted when it happens, and explained by what was recorded."""

from __future__ import annotations

import csv
import itertools
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import Digits
from tests.data.pictures import jpeg
from tests.data.small_sets import write_encoded
from tests.recipes import small_recipe
from vit_ray.commands.cli import vit_ray
from vit_ray.data.format.shard_writer import EncodedImage
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.launch.run import train
from vit_ray.train.spikes import LEAST_STEPS

LABELLED, STEPS, BATCH = 5, 40, 16


@pytest.mark.slow
@pytest.mark.usefixtures("worker_pool")
def test_a_planted_spike_is_noted_and_explained_by_the_command_that_the_history_gives(
    digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias of -10 all images but the one with a label have next to no loss."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    images = [
        EncodedImage(jpeg(i, 20, 24), (1,) if i == LABELLED else (), f"{i}.jpg", 24, 20)
        for i in range(STEPS * BATCH)
    ]
    write_encoded(tmp_path / "set", "part-0.parquet", images, ["cat", "dog", "emu"], 32)
    plain = small_recipe(
        "spiked", digits, tmp_path,
        model={"head_bias": -10.0, "dropout": 0.0},
        data={"train": str(tmp_path / "set"), "eval": None},
        optim={"steps": STEPS, "learning_rate": 1e-5, "warmup_steps": 0},
        train={"global_batch_size": BATCH, "micro_batch_size": 8, "loss": "sigmoid"},
    )  # fmt: skip
    recipe, step = next(
        (recipe, step)
        for seed in itertools.count()
        for recipe in [plain.with_changes(seed=seed)]
        for step, *_ in SeenBatches(resolve_run(recipe)).steps_of(LABELLED)
        if LEAST_STEPS < step < STEPS - 1
    )
    result = train(recipe)
    (told,) = [event for event in result.events if event.startswith("spike")]
    command = re.search(r"`vit-ray (.+)`", told)
    assert command is not None, told
    assert f"step={step}" in command[1]
    explained = CliRunner().invoke(vit_ray, shlex.split(command[1]))
    assert explained.exit_code == 0, explained.output
    assert f"verdict: 1 of {BATCH} images make the gradient" in explained.output
    assert f"sample {LABELLED} ({LABELLED}.jpg, dog)" in explained.output
    with open(f"spiked-explain-{step}/images.csv", newline="") as file:
        rows = {int(row["sample"]): row for row in csv.DictReader(file)}
    then = {sample: float(row["loss_when_it_happened"]) for sample, row in rows.items()}
    # As recorded in training and as computed again from the checkpoint.
    assert then[LABELLED] == pytest.approx(float(rows[LABELLED]["loss"]), rel=0.01)
    assert max(loss for sample, loss in then.items() if sample != LABELLED) < 0.01
    assert then[LABELLED] > 9
