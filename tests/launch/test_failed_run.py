"""A training that fails has the compute that it took in its record."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vit_ray.config import load_recipe
from vit_ray.launch import run
from vit_ray.launch.preflight import PreparedRun
from vit_ray.launch.run import run_prepared
from vit_ray.launch.worker_group import RunFailedError


class Record:
    """A run's record, which its actor has written up to step 7."""

    def __init__(self) -> None:
        self.recorder = SimpleNamespace()
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, method: str, *values: Any) -> Any:
        self.asked.append((method, *values))
        return SimpleNamespace(step=7) if method == "status" else None


@pytest.mark.parametrize(("kind", "has_cost"), [("pretrain", True), ("evaluate", False)])
def test_a_training_that_fails_has_the_compute_of_its_steps(
    monkeypatch: pytest.MonkeyPatch, kind: Any, has_cost: bool
) -> None:
    record = Record()

    @contextmanager
    def open_record(*_: Any, **__: Any) -> Any:
        yield record

    def fail(*_: Any, **__: Any) -> None:
        raise RunFailedError("worker 1 died")

    for name, stand_in in {
        "connect": lambda recipe: None, "check_cluster": lambda *_: False,
        "open_record": open_record, "_job": lambda *_: None, "run_workers": fail,
        "shown_progress": lambda *_, **__: nullcontext(),
        "stopping_on_signals": lambda *_: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(run, name, stand_in)
    manifest = SimpleNamespace(num_classes=10)
    resolved: Any = SimpleNamespace(manifest=manifest, num_images=90, total_steps=20, streams={})
    with pytest.raises(RunFailedError, match="worker 1 died"):
        run_prepared(PreparedRun(load_recipe("digits"), kind, resolved))
    metrics = [values for method, *values in record.asked if method == "metrics"]
    assert [step for step, _ in metrics] == ([7] if has_cost else [])
    for _, cost in metrics:
        assert cost["study/images_seen"] == 7 * 128
        assert cost["study/exaflops"] > 0
