"""The actor through which a run tells of itself."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import ray
from mlflow import MlflowClient

from vit_ray.config import TrackingConfig
from vit_ray.launch import recorder as recorder_module
from vit_ray.launch.recorder import start_recorder


def started(folder: Path) -> Any:
    config = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", system_metrics=False)
    spool = folder / "run" / "metrics.jsonl"
    return start_recorder(config, "run", spool, run_id=None, params={}, tags={}, resume_step=None)


def test_a_second_driver_of_a_run_is_refused_until_the_first_has_ended(
    ray_cluster: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "RELEASE_S", 1.0)
    first = started(tmp_path)
    with pytest.raises(ValueError, match=r"run 'run' in .* is being worked on by another driver"):
        started(tmp_path)
    ray.get(first.finish.remote("FINISHED"))
    ray.kill(first)
    monkeypatch.undo()
    second = started(tmp_path)
    assert ray.get(second.standing.remote()).step == 0
    ray.kill(second)


def test_a_file_from_a_worker_is_kept_with_the_run(ray_cluster: object, tmp_path: Path) -> None:
    recorder = started(tmp_path)
    content = gzip.compress(b"a trace")
    ray.get(recorder.content.remote("trace.json.gz", content))
    run_id = ray.get(recorder.run_id.remote())
    assert ray.get(recorder.finish.remote("FINISHED"))
    ray.kill(recorder)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    path = client.download_artifacts(run_id, "profile/trace.json.gz", str(tmp_path))
    assert Path(path).read_bytes() == content
