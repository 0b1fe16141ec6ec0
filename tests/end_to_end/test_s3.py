"""Training from a bucket, with its checkpoints in a bucket, as submitted jobs."""

import json
import shutil

import pytest

from tests.data.s3_server import SECRET_KEY, s3_environment, serve_s3, timeout
from tests.end_to_end.runs import curve, runs_of, submit, write_recipe
from tests.recipes import small_recipe
from vit_ray.experiments.search_space import RATE


@pytest.mark.slow
def test_a_run_reads_from_s3_and_goes_on_from_its_checkpoints_there(
    ray_head, digits, working_dir, tmp_path
):
    buckets = tmp_path / "buckets"
    shutil.copytree(digits.train, buckets / "sets" / "train")
    (buckets / "runs").mkdir()
    first = small_recipe(
        "on-s3", digits, tmp_path, output="s3://runs/all",
        data={"train": "s3://sets/train", "eval": None},
        optim={"steps": 8, "schedule": "constant"}, checkpoint={"every_steps": 4, "keep_last": 2},
    )  # fmt: skip
    with serve_s3(buckets) as port:
        variables = {**s3_environment(port), **timeout(20.0), "HOME": str(tmp_path)}
        second = first.with_changes(optim={"steps": 12})
        for recipe in (first, second):
            job = ("python", "jobs/pretrain.py", str(write_recipe(recipe, tmp_path)))
            code, output = submit(ray_head, working_dir, *job, **variables)
            assert code == 0, output[-6000:]
    assert "resumed: from step 8" in output
    # By files: the server leaves the empty folders of deleted keys behind.
    shards = (buckets / "runs" / "all" / "on-s3").glob("step-*/*.safetensors")
    assert sorted({shard.parent.name for shard in shards}) == ["step-00000008", "step-00000012"]
    (run,) = runs_of(second)
    assert [step for step, _ in curve(second, run.info.run_id)] == [1, 4, 8, 9, 12]
    for path in [*tmp_path.glob("mlflow.db"), *(buckets / "runs").rglob("*.json")]:
        assert SECRET_KEY.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_sweep_keeps_its_runs_and_the_files_of_tune_on_s3(
    ray_head, digits, working_dir, tmp_path
):
    buckets = tmp_path / "buckets"
    shutil.copytree(digits.train, buckets / "sets" / "train")
    shutil.copytree(digits.test, buckets / "sets" / "test")
    (buckets / "runs").mkdir()
    recipe = small_recipe(
        "swept", digits, tmp_path, output="s3://runs/all",
        data={"train": "s3://sets/train", "eval": "s3://sets/test"}, optim={"steps": 4},
        workers={"num_workers": 1},
        sweep={"learning_rates": [0.01, 0.001], "dev_fraction": 0.1, "seeds": 1},
    )  # fmt: skip
    job = ("python", "jobs/sweep.py", str(write_recipe(recipe, tmp_path)))
    ends = []
    with serve_s3(buckets) as port:
        variables = {**s3_environment(port), **timeout(20.0), "HOME": str(tmp_path)}
        for _ in range(2):
            code, output = submit(ray_head, working_dir, *job, **variables)
            assert code == 0, output[-6000:]
            ends.append({run.info.run_name: run.info.end_time for run in runs_of(recipe)})
    names = {"swept", "swept-lr0.01", "swept-lr0.001"}
    assert names < ends[0].keys()
    del ends[0]["swept"], ends[1]["swept"]
    assert ends[0] == ends[1]  # nothing was trained again
    results = (buckets / "runs" / "all" / "tune" / "swept-trials").glob("*/result.json")
    found = {json.loads(file.read_text().splitlines()[-1])["config"][RATE] for file in results}
    assert found == {0.01, 0.001}
