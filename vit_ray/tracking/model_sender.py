"""Logs a folder in MLflow's model format as a logged model of a run, each once."""

from __future__ import annotations

import re
from typing import Final

from vit_ray.tracking.metrics_log import Record
from vit_ray.tracking.mlflow_api import (
    LoggedModel,
    LoggedModelOutput,
    MlflowClient,
    MlflowException,
    Run,
)

STEP_TAG: Final = "vit_ray.step"
"""Tag that finds the model of a run's step again, which a cut-off attempt has begun to log."""
_FORBIDDEN: Final = re.compile(r"[/:.%\"']")
"""What names of logged models cannot hold."""


def send_model(client: MlflowClient, run: Run, record: Record) -> None:
    """Log the record's folder as a model of the run; what an earlier attempt did is not repeated.

    Raises:
        Exception: whatever MLflow raises.
    """
    model = _find(client, run, record) or _create(client, run, record)
    if model.status != "READY":
        client.log_model_artifacts(model.model_id, record["path"])
        model = client.finalize_logged_model(model.model_id, "READY")
    outputs = run.outputs.model_outputs if run.outputs else ()
    if model.model_id not in [output.model_id for output in outputs]:
        client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, record["step"])])
    if record["register_as"]:
        _register(client, run, model, record["register_as"])


def _find(client: MlflowClient, run: Run, record: Record) -> LoggedModel | None:
    found = client.search_logged_models(
        [run.info.experiment_id],
        f"source_run_id = '{run.info.run_id}' AND tags.`{STEP_TAG}` = '{record['step']}'",
        max_results=1,
    )
    return found[0] if found else None


def _create(client: MlflowClient, run: Run, record: Record) -> LoggedModel:
    return client.create_logged_model(
        run.info.experiment_id,
        name=_FORBIDDEN.sub("_", record["name"]),
        source_run_id=run.info.run_id,
        tags={STEP_TAG: str(record["step"])},
        params=record["params"],
    )


def _register(client: MlflowClient, run: Run, model: LoggedModel, name: str) -> None:
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # Not `models:/ID`, which a SQLite store looks up in MLflow's global store.
    source = model.artifact_location
    known = client.search_model_versions(f"name = '{name}' AND run_id = '{run.info.run_id}'")
    if source not in [version.source for version in known]:
        client.create_model_version(name, source, run.info.run_id, model_id=model.model_id)
