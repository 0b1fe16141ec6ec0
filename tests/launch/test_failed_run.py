"""A training that fails has the compute that it took in its record."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vit_ray.config import load_recipe
from vit_ray.launch import run
from vit_ray.launch.prepared_run import PreparedRun
from vit_ray.launch.run import run_prepared
from vit_ray.launch.workers import RunFailedError


class OpenRun:
    """A run whose host has seen it up to step 7; it keeps the metrics that are recorded."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, dict[str, float]]] = []
        status = SimpleNamespace(step=7, metrics={"cost/core_days": 0.5})
        self.record = SimpleNamespace(
            metrics=lambda *call, again: self.recorded.append(call[:2]),
            status=lambda: status,
            request_stop=None,
        )


@pytest.mark.parametrize(("kind", "has_cost"), [("pretrain", True), ("evaluate", False)])
def test_a_training_that_fails_has_the_compute_of_its_steps(
    monkeypatch: pytest.MonkeyPatch, kind: Any, has_cost: bool
) -> None:
    opened = OpenRun()

    @contextmanager
    def open_record(*_: Any, **__: Any) -> Any:
        yield opened

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
    recipe = load_recipe("digits")
    resolved: Any = SimpleNamespace(
        recipe=recipe, manifest=manifest, num_images=90, total_steps=20, streams={}
    )
    with pytest.raises(RunFailedError, match="worker 1 died"):
        run_prepared(PreparedRun(kind, resolved))
    assert [step for step, _ in opened.recorded] == ([7] if has_cost else [])
    for _, cost in opened.recorded:
        assert cost["study/images_seen"] == 7 * 128
        assert cost["study/exaflops"] > 0
