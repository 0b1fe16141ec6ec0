"""`vit-ray batch`: what it writes of a run and of a recipe, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from mlflow import MlflowClient
from PIL import Image

from tests.checkpoints.written import snapshot_of, write_snapshot
from tests.launch.inputs.test_seen_batch import recipe_on, sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.checkpoints.checkpoint import folder_name, read_checkpoint
from vit_ray.commands.cli import vit_ray
from vit_ray.commands.trained import batch
from vit_ray.config import Recipe
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.data import open_dataset
from vit_ray.data.images.crop_boxes import CropBox, draw_boxes
from vit_ray.launch.inputs import stream_cost as costs
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.inputs.stream_cost import STAGES, stream_cost
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.storage import locate
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening, metrics_log_path
from vit_ray.tracking.mlflow_client import open_client

__all__ = ["sets"]


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(vit_ray, ["batch", *words])
    return result.exit_code, result.output


@pytest.fixture
def recipe(sets: Path, tmp_path: Path) -> Recipe:
    return recipe_on(sets, output=str(tmp_path / "runs"), data={"shuffle_window": 32})


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> str:
    """The recipe of a run that has not begun."""
    path = tmp_path / "seen.yaml"
    path.write_text(yaml.safe_dump(recipe.recorded()))
    return str(path)


def begin(recipe: Recipe, run_id: str | None = None, **changes: Any) -> str:
    """A run of the recipe with a checkpoint of step 7, of two ranks; its folder."""
    facts = {
        "recipe": recipe.with_changes(**changes).recorded(),
        "data_fingerprint": open_dataset(str(recipe.data.train)).fingerprint,
        "global_batch_size": 16, "samples_seen": 7 * 16, "tracking_run_id": run_id,
    }  # fmt: skip
    return write_run(Path(recipe.run_folder), small_model("ViT"), facts=facts)


def test_table_picture_page_and_originals_of_a_recipe_before_its_run(
    file: str, recipe: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, text = said(file, "step=2:4", "--out", str(out), "--originals")
    assert code == 0, text
    assert re.search(r"reads \d+ row groups, 0\.\d MiB", text)
    table = pq.read_table(out / "batch.parquet").to_pylist()
    batches = SeenBatches(resolve_run(recipe))
    expected = [one for step in (2, 3) for one in batches.read(step)[1]]
    assert [(row["step"], row["place"], row["sample"], row["key"]) for row in table] == [
        (one.step, one.place, one.sample, one.key) for one in expected
    ]
    flat = pacsv.read_csv(out / "batch.csv").to_pylist()
    assert [row["key"] for row in flat] == [row["key"] for row in table]
    assert {row["classes"] for row in flat} == {"cat", "dog", "emu"}
    for one in expected:
        (original,) = (out / "originals").glob(f"{one.sample}-*.jpg")
        assert original.read_bytes() == one.content
    assert Image.open(out / "batch.png").width == 8 * 160
    page = (out / "batch.html").read_text()
    assert page.count('role="img"') == 2 * 2 * 16
    assert "MLflow shows the loss of this step at step 3" in page
    assert 'id="vega"' not in page
    code, text = said(file, "step=2", "--out", str(out))
    assert code == 2
    assert "exists already" in text


def test_the_operations_of_randaugment_are_in_the_tables_and_on_the_page(
    recipe: Recipe, tmp_path: Path
) -> None:
    file, out = tmp_path / "changed.yaml", tmp_path / "out"
    changed = recipe.with_changes(data={"augment": {"randaugment": "tensorflow"}})
    file.write_text(yaml.safe_dump(changed.recorded()))
    assert said(str(file), "step=1", "--out", str(out))[0] == 0
    expected = [list(one.operations) for one in SeenBatches(resolve_run(changed)).read(1)[1]]
    assert pq.read_table(out / "batch.parquet")["operations"].to_pylist() == expected
    flat = pacsv.read_csv(out / "batch.csv")["operations"].to_pylist()
    assert flat == [";".join(one) for one in expected]
    page = (out / "batch.html").read_text()
    assert all("; ".join(one) in page for one in expected)


def test_a_run_is_shown_as_it_was_trained_and_with_the_loss_of_the_step(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = begin(recipe)
    log = MetricsLog(metrics_log_path(folder))
    log.open(RunOpening(TrackingConfig(), recipe.name, log.path))
    log.metrics(5, {"train/loss": 1.2345})
    code, text = said(folder, "step=4", "rank=1/2")
    assert code == 0, text
    page = (tmp_path / "seen-step-4" / "batch.html").read_text()
    assert "Its loss was 1.2345" in page
    pixels, images = SeenBatches(resolve_run(recipe)).read(4, range(8, 16))
    rows = pq.read_table("seen-step-4/batch.parquet").to_pylist()
    assert [row["sample"] for row in rows] == [one.sample for one in images]
    assert len(pixels) == 8


def test_the_cost_of_each_stage_by_a_clock_that_ticks_when_it_is_read(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(ticks)))
    resolved = resolve_run(recipe_on(sets))
    groups, _ = SeenBatches(resolved).cost(3)
    samples = SeenBatches(resolved).planned(3)
    stored = sum(min(8, 70 - 8 * group) for group in {int(one) // 8 for one in samples})
    found = stream_cost(resolved, 3)
    # A row group takes a tick to read and one to check, which is taken off; an image one a stage.
    assert found == {
        "read": 0.0, "check": pytest.approx(groups / stored + 1), "draw": 2 / 16, "decode": 1.0,
        "crop": 1.0, "augment": 1.0, "copy": 1 / 16,
    }  # fmt: skip


def test_the_cost_is_measured_with_a_few_row_groups_in_memory_at_a_time(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, held = list[int](), list[int]()
    read = costs._read

    def noted(*drawn: Any) -> list[CropBox]:
        measured.extend(drawn[-1].tolist())
        return draw_boxes(*drawn)

    def counted(*asked: Any) -> Any:
        held.append(len(asked[1]))
        return read(*asked)

    monkeypatch.setattr(costs, "draw_boxes", noted)
    monkeypatch.setattr(costs, "_read", counted)
    monkeypatch.setattr(costs, "_GROUPS_HELD", 2)
    resolved = resolve_run(recipe_on(sets, data={"shuffle_window": 32}))
    stream_cost(resolved, 3)
    assert sorted(measured) == sorted(SeenBatches(resolved).planned(3).tolist())
    assert max(held) <= 2 < sum(held) == SeenBatches(resolved).cost(3)[0]


def test_the_cost_is_printed_and_nothing_written(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "stream_cost", lambda *_: dict.fromkeys(STAGES, 0.001))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, text = said(file, "step=0:2", "--time")
    assert code == 0, text
    assert "decode         1.000   14.3%" in text
    assert "all            7.000    100%  143 images/s of one core" in text
    assert sorted(tmp_path.iterdir()) == before


def worked(log: MetricsLog, attempt: str, begin_s: float, size: int, first: int, last: int) -> None:
    log.keep_work(
        attempt=attempt, begin_s=begin_s, until_s=begin_s + 1, seconds={}, world_size=size,
        first_step=first, last_step=last, num_steps=last - first,
    )  # fmt: skip


def test_a_rank_is_of_the_attempt_that_trained_the_step(recipe: Recipe, tmp_path: Path) -> None:
    folder, outs = begin(recipe), iter(range(9))

    def samples(*words: str) -> list[int]:
        out = tmp_path / f"out{next(outs)}"
        code, text = said(folder, *words, "--out", str(out))
        assert code == 0, text
        return pq.read_table(out / "batch.parquet")["sample"].to_pylist()  # type: ignore[no-any-return]

    # Two ranks wrote the checkpoint of step 7.
    assert samples("step=5", "rank=1") == samples("step=5", "rank=1/2")
    text = said(folder, "step=5", "rank=1", "--out", str(tmp_path / "told"))[1]
    assert "rank 1 of 2, by the checkpoint of step 7\n" in text
    log = MetricsLog(metrics_log_path(folder))
    log.open(RunOpening(TrackingConfig(), recipe.name, log.path))
    worked(log, "a", 1.0, 8, 0, 6)
    worked(log, "b", 5.0, 4, 4, 7)  # from step 4 on, once more
    assert samples("step=5", "rank=3") == samples("step=5", "rank=3/4")
    assert samples("step=3", "rank=7") == samples("step=3", "rank=7/8")
    code, text = said(folder, "step=3:5", "rank=1")
    assert (code, "trained by 4 and 8 workers; give fewer steps" in text) == (2, True), text
    code, text = said(folder, "step=5", "rank=4")
    assert (code, "rank=4, of 4: give the rank and" in text) == (2, True), text
    code, text = said(folder, "step=9", "rank=1")
    assert (
        code,
        "that trained this step is not known; ask for the whole batch, or rank=1/8" in text,
    ) == (2, True)


def test_a_rank_between_checkpoints_of_different_ranks_is_asked_for(recipe: Recipe) -> None:
    folder = begin(recipe)
    (step_7,) = Path(folder).glob("*7")
    earlier = step_7.with_name(folder_name(4))
    model, position = small_model("ViT"), read_checkpoint(locate(str(step_7))).position
    position = replace(position, progress=replace(position.progress, step=4))
    shards = {f"weight|{n}|0": p.detach().flatten() for n, p in model.named_parameters()}
    write_snapshot(snapshot_of(0, 1, shards, position), locate(str(earlier)))
    code, text = said(folder, "step=5", "rank=1")
    assert (code, "step 4 has 1, and that of step 7 has 2" in text) == (2, True), text
    assert "rank=1/8 for 8 workers" in text
    code, text = said(folder, "step=3", "rank=0", "--out", f"{folder}-3")
    assert (code, "rank 0 of 1, by the checkpoint of step 4\n" in text) == (0, True), text


def test_the_loss_of_a_run_that_another_machine_recorded_is_in_mlflow(
    recipe: Recipe, tmp_path: Path
) -> None:
    file = tmp_path / "mlflow.db"
    client = MlflowClient(f"sqlite:///{file}")
    run = client.create_run(client.create_experiment("e")).info.run_id
    client.log_metric(run, "train/loss", 1.2345, step=5)

    def shown(name: str, run_id: str, step: str = "step=4") -> str:
        folder = begin(
            recipe.with_changes(name=name, tracking={"uri": f"sqlite:///{file}"}), run_id
        )
        code, text = said(folder, step, "--out", str(tmp_path / f"out-{name}"))
        assert code == 0, text
        return text + (tmp_path / f"out-{name}" / "batch.html").read_text()

    assert "Its loss was 1.2345" in shown("recorded", run)
    partly = metrics_log_path(recipe.with_changes(name="partly").run_folder)
    log = MetricsLog(partly)
    log.open(RunOpening(TrackingConfig(), "partly", log.path))
    log.metrics(6, {"train/loss": 5.4321})
    found = shown("partly", run, "step=4:6")
    assert "Its loss was 1.2345" in found
    assert "Its loss was 5.4321" in found
    found = shown("unknown", "0" * 32)
    assert "without the loss of the step: MLflow at" in found
    assert "Its loss was" not in found
    Path(file).unlink()
    assert "no such file; give the MLflow database of the runs" in shown("away", run)
    assert not Path(file).exists()


def test_the_steps_of_a_sample_by_number_and_by_key(recipe: Recipe) -> None:
    folder = begin(recipe)
    steps = list(SeenBatches(resolve_run(recipe)).steps_of(33))
    by_number, by_key = said(folder, "sample=33"), said(folder, "key=large/33.jpg")
    assert by_number[0] == by_key[0] == 0
    lines = [line for line in by_number[1].splitlines() if line.startswith("step ")]
    assert lines == [line for line in by_key[1].splitlines() if line.startswith("step ")]
    assert lines == [
        f"step {step} (epoch {epoch}), place {place} of its batch: "
        f"{'seen' if step < 7 else 'to come'}"
        for step, epoch, place in steps
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["step=20"], "the run has 20 steps; give one from 0 to 19"),
        (["step=18:21"], "step=18:21: the run has 20 steps"),
        (["step=5:5"], "the run has 20 steps"),
        (["step=-1"], "give a number, or a range such as 100:110"),
        (["step=1", "rank=2/2"], "which must divide train.global_batch_size=16"),
        (["step=1", "rank=0/3"], "which must divide train.global_batch_size=16"),
        (["sample=70"], "the data set has samples 0 to 69"),
        (["sample=70.jpg"], "give a number, or the key as key=KEY"),
        (["key=70.jpg"], "has no image with this key"),
        (["seed=4"], "give step=K, step=K:N, sample=NUMBER or key=KEY"),
        (["step=1", "sample=1"], "give step=K, step=K:N, sample=NUMBER or key=KEY"),
        (["step=1", "sed=4"], "unknown key sed; did you mean seed?"),
    ],
)
def test_what_cannot_be_is_refused(file: str, words: list[str], told: str) -> None:
    code, text = said(file, *words)
    assert (code, told in text) == (2, True), text
    assert len(text.strip().splitlines()[-1]) < 500


def test_another_recipe_or_data_set_than_the_runs_is_refused(
    file: str, recipe: Recipe, sets: Path
) -> None:
    folder = begin(recipe, seed=5)
    code, text = said(file, "step=1")
    assert (code, "seed was 5 and is 0" in text) == (2, True), text
    code, text = said(folder, "step=1", "data.augment.flip=false")
    assert (code, "data.augment.flip was True and is False" in text) == (2, True), text
    assert f"give the run's folder, {folder}" in text
    code, text = said(folder, "step=1", f"data.train={sets / 'small'}")
    assert (code, "is not the data set of the run 'seen'" in text) == (2, True), text


def test_a_step_before_a_fork_is_its_parents(recipe: Recipe) -> None:
    folder = begin(recipe)
    (Path(folder) / "branched_from.txt").write_text("parent at step 5")
    code, text = said(folder, "step=4")
    assert (code, "branches off parent at step 5" in text) == (2, True), text
    assert said(folder, "step=5", "--out", f"{folder}-5")[0] == 0


def test_the_sets_of_evaluations_need_not_be_there(recipe: Recipe) -> None:
    folder = begin(recipe, data={"eval": "/no/such/set"})
    assert said(folder, "step=5", "--out", f"{folder}-5")[0] == 0


def test_a_folder_that_is_no_run_and_an_unknown_name_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty_store = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(f"sqlite:///{empty_store}")
    assert "has no checkpoint" in said(str(tmp_path), "step=1")[1]
    assert "to name a run by its folder, give" in said("nothing-of-this-name", "step=1")[1]
    for store, message in (
        (empty_store, "does not have the run"),
        (tmp_path / "none.db", "no such"),
    ):
        code, text = said("0" * 32, "step=1", f"tracking.uri=sqlite:///{store}")
        assert (code, message in text) == (2, True), text
    assert list(tmp_path.iterdir()) == []


def test_no_torch_no_ray_cluster_and_no_mlflow_for_plain_images(file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import json, sys; from click.testing import CliRunner; "
        "from vit_ray.commands.cli import vit_ray; "
        f"CliRunner().invoke(vit_ray, ['batch', {file!r}, 'step=0', '--out', {str(out)!r}]); "
        "import ray; names = ('torch', 'mlflow', 'deepspeed'); "
        "print(json.dumps([one in sys.modules for one in names] + [ray.is_initialized()]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [False] * 4
    assert np.asarray(Image.open(out / "batch.png")).any()
