"""A secret is planted wherever a run takes a text, and every byte that it leaves is searched."""

import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tracking.tracked import recorded_here
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config import load_recipe
from vit_ray.config.loading import write_yaml
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run_record import command_line, data_inputs, run_facts, trained_params
from vit_ray.report.page import write_report
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.worker.saving import make_position

SECRET = "hunter2"
ADDRESS = f"postgresql://user:{SECRET}@db/mlflow?password={SECRET}"


def _recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose recipe, command, data, events, tags and texts all name the address."""
    monkeypatch.setattr(sys, "argv", ["vit-ray", "pretrain", f"tracking.uri={ADDRESS}"])
    recipe = load_recipe("digits", [f"tracking.uri={ADDRESS}", f"init_from=http://{SECRET}@h/x"])
    manifest = SimpleNamespace(
        path=f"http://u:{SECRET}@h/data",
        fingerprint="f" * 64,
        num_images=9,
        num_classes=2,
        about={"source_url": f"http://u:{SECRET}@h/data"},
    )
    streams = {"train": SimpleNamespace(manifest=manifest, num_images=9)}
    plan: Any = SimpleNamespace(manifest=manifest, num_images=9, total_steps=1, streams=streams)
    tags = run_facts(recipe, "pretrain", plan, ClusterShape(1, 2, 0, 0.0), command_line())
    config = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", system_metrics=False)
    log_path = folder / "run" / "metrics.jsonl"
    params = trained_params(recipe) | recipe.flat()
    opening = RunOpening(
        config, "run", log_path, None, params, tags, None, datasets=data_inputs(plan)
    )
    record = recorded_here(opening)
    record.text("recipe.yaml", write_yaml(recipe.written()))
    record.tag("note", f"it is at {ADDRESS}")
    record.event("restart", f"cannot reach {ADDRESS}", 1)
    record.request_stop(f"cannot reach {ADDRESS}")
    record.metrics(1, {"train/loss": 1.0})
    assert record.finish("FINISHED") == ""
    return recipe


@pytest.mark.usefixtures("answers_here")
def test_nothing_that_a_run_writes_holds_a_secret(tmp_path, monkeypatch, capfd, caplog):
    recipe = _recorded(tmp_path, monkeypatch)
    write_report(f"sqlite:///{tmp_path}/mlflow.db", "vit_ray", tmp_path / "report.html")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"mlflow.db", "metrics.jsonl", "recipe.yaml", "report.html"} <= {p.name for p in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert any(b"postgresql://db/mlflow" in path.read_bytes() for path in files)
    job: Any = SimpleNamespace(recipe=recipe, data_fingerprint="f", data_terms={}, init_run_id=None)
    engine: Any = SimpleNamespace(applied_steps=0, shapes={})
    assert SECRET not in str(asdict(make_position(job, engine, Progress())))
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err + caplog.text
