"""Where a test's runs are recorded, and calls of an actor that is in this process."""

from pathlib import Path
from typing import Any

import pytest

from tests.tracking.tracked import Answer
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
    get = recorder.ray.get

    def answered(call: Any, timeout: float | None = None) -> Any:
        if not isinstance(call, Answer):
            return get(call, timeout=timeout)
        if call.error is not None:
            raise call.error
        return call.found

    monkeypatch.setattr(recorder.ray, "get", answered)
