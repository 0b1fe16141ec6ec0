"""Runs in MLflow as a test spells them out."""

from typing import Any

from mlflow.entities import Metric, Param


def store_run(
    client: Any, experiment: str, name: str, metrics: Any = None, params: Any = None,
    tags: Any = None, *, curve: Any = (), status: str | None = "FINISHED",
    start_ms: int | None = None, time_ms: int = 0,
) -> str:  # fmt: skip
    """Its id. Metrics are of step 100, `curve` has steps and losses; status None: it goes on."""
    known = {key: text for key, text in (tags or {}).items() if text is not None}
    run_id = str(client.create_run(experiment, start_ms, known, name).info.run_id)
    points = [Metric(key, value, time_ms, 100) for key, value in (metrics or {}).items()]
    points += [Metric("train/loss", loss, time_ms, step) for step, loss in curve]
    client.log_batch(run_id, points, [Param(k, str(v)) for k, v in (params or {}).items()])
    if status is not None:
        client.set_terminated(run_id, status)
    return run_id
