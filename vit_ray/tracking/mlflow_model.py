"""Logs trained models with MLflow; runs as a separate process, since it imports pandas and SciPy.

Standard input is `[uri, records of models]` as JSON, the records as from `recorded_models`. The
last line of output lists, for each model that is not logged, the path of its log, and the reason.
"""

import json
import re
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Final

import mlflow
import numpy as np
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import ParamSchema, ParamSpec, Schema, TensorSpec

from vit_ray.tracking.metrics_log import Record
from vit_ray.tracking.mlflow_client import open_client
from vit_ray.tracking.mlflow_run import MAX_TAG_CHARS
from vit_ray.tracking.store_requests import limit_requests

# Tag by which a run's model at a step is found.
STEP_TAG: Final = "vit_ray.step"
# Characters that MLflow refuses in names of models; a trial's name has its learning rate.
_NOT_IN_NAMES: Final = re.compile(r"[/:.%\"']")
_CODE: Final = """import mlflow
from vit_ray.launch.logged_model import LoggedModel

mlflow.models.set_model(LoggedModel())
"""


def log_model(uri: str, record: Record) -> None:
    """Log a model of a run, and register it if its record says so; a repeated call does nothing.

    Raises:
        ValueError: MLflow has no such run.
    """
    run_id, step = record["run_id"], record["step"]
    if run_id is None:
        raise ValueError("MLflow does not have all of its run")
    client = open_client(uri)
    mlflow.set_tracking_uri(uri)
    experiment = client.get_run(run_id).info.experiment_id
    query = f"source_run_id = '{run_id}' AND tags.`{STEP_TAG}` = '{step}'"
    mlflow.set_experiment(experiment_id=experiment)
    model_id = None
    for logged in client.search_logged_models([experiment], query):
        if logged.status == "READY":
            model_id = logged.model_id
        else:  # its process ended before the files were stored
            client.delete_logged_model(logged.model_id)
    if model_id is None:
        model_id = _log_new_model(run_id, record)
    if name := record["register_as"]:
        query = f"name = '{name}' AND run_id = '{run_id}'"
        if not client.search_model_versions(query):
            mlflow.register_model(f"models:/{model_id}", name, await_registration_for=0)


def _log_new_model(run_id: str, record: Record) -> str:
    signature = ModelSignature(  # not of inputs: the model checks its many forms of images itself
        outputs=Schema(
            [TensorSpec(np.dtype("float32"), (-1, len(record["reference"]["classes"])))]
        ),
        params=ParamSchema([ParamSpec("output", "string", "logits")]),
    )
    # `Model.log` would also log the configuration as a parameter of the run, by which MLflow
    # compares runs.
    config = {"checkpoint": record["params"]["checkpoint"]}
    save = partial(mlflow.pyfunc.save_model, model_config=config)
    flavor = SimpleNamespace(save_model=save, __name__="mlflow.pyfunc")
    with TemporaryDirectory() as folder:
        files = {"README.md": record["card"], "reference.json": json.dumps(record["reference"])}
        for name, text in {**files, "model.py": _CODE}.items():
            Path(folder, name).write_text(text)
        info = Model.log(
            artifact_path=None,
            name=_NOT_IN_NAMES.sub("-", record["name"]),
            flavor=flavor,
            run_id=run_id,
            step=record["step"] + 1,  # has no metrics: MLflow logs those of this step again
            python_model=str(Path(folder, "model.py")),
            artifacts={name: str(Path(folder, name)) for name in files},
            pip_requirements=[f"mlflow=={version('mlflow')}", "vit-ray"],
            signature=signature,
            params=record["params"],
            tags={
                STEP_TAG: record["step"],
                "mlflow.note.content": record["card"][:MAX_TAG_CHARS],
            },
        )
    return str(info.model_id)


if __name__ == "__main__":
    limit_requests()
    store_uri, models = json.load(sys.stdin)
    problems = []
    for model in models:
        try:
            log_model(store_uri, model)
        except Exception as error:
            reason = str(error).partition("\n")[0] or repr(error)
            problems.append((model["log"], f"{model['name']}: {reason}"))
    print(json.dumps(problems))
