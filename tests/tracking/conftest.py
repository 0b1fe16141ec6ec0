"""Where a test's runs are recorded, and calls of an actor that is in this process."""

from pathlib import Path
from typing import Any

import pytest
import ray

from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking import recorder


@pytest.fixture
def config(tmp_path: Path) -> TrackingConfig:
    return TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="trials")


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "tracking" / "metrics.jsonl"


@pytest.fixture
def answers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of `Here` have been answered when they are made; others go to Ray."""
    wait_for = recorder._answer

    def answer(call: Any, limit_s: float) -> Any:
        return wait_for(call, limit_s) if isinstance(call, ray.ObjectRef) else call

    monkeypatch.setattr(recorder, "_answer", answer)
