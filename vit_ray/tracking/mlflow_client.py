"""Opens MLflow's stores; finds and creates experiments, and gives links to them.

MLflow is imported without pandas and SciPy, as in mlflow-skinny: they take longer to import than
everything else.
"""

import logging
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote

from filelock import FileLock, Timeout

from vit_ray.addresses import absolute_uri, refuse_other_file, require_store, sqlite_file
from vit_ray.internals import hide_modules
from vit_ray.metric_names import (
    DEV_TOP1,
    EVAL_TOP1,
    RUN_GOODPUT,
    STUDY_EXAFLOPS,
    STUDY_STEPS,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    TRANSFER_MEAN_TOP1,
    few_shot_top1,
)
from vit_ray.mlflow_internals import VIEW_TAG, runs_page, view_state
from vit_ray.tracking.store_requests import limited_requests, safe_uri, unusable

with hide_modules("pandas", "scipy"):
    from mlflow.entities import (
        Dataset,
        DatasetInput,
        Experiment,
        InputTag,
        Metric,
        Param,
        Run,
        RunTag,
    )
    from mlflow.exceptions import MlflowException
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    from mlflow.tracking import MlflowClient

__all__ = [
    "Dataset", "DatasetInput", "InputTag", "Metric", "MlflowClient", "MlflowException", "Param",
    "Run", "RunTag", "SystemMetricsMonitor", "asking", "experiment_id", "found_runs", "open_client",
    "page_hint", "refuse_deleted", "share_view",
]  # fmt: skip

_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # opens with its runs
    "mlflow.note.content": (
        "Trainings of vit_ray. A sweep, study or VTAB is a run with its trainings below it; its "
        "artifacts hold `report.html`, and each run has `recipe.yaml`, which can be run unchanged. "
        "Metrics are `group/name_unit`: `dev/` is of images held out of the training set, `eval/` "
        "of the test set."
    ),
}
_COLUMNS: Final = (
    f"metrics.{EVAL_TOP1}", f"metrics.{few_shot_top1(5)}", f"metrics.{DEV_TOP1}",
    "params.model.name", "params.data.fraction", f"metrics.{STUDY_STEPS}", "params.seed",
    "params.optim.learning_rate", f"metrics.{STUDY_EXAFLOPS}", f"metrics.{TRANSFER_MEAN_TOP1}",
    f"metrics.{TRAIN_IMAGES_PER_S}", f"metrics.{RUN_GOODPUT}",
)  # fmt: skip
# The views of MLflow's page that links open, by kind of run.
_VIEWS: Final = {
    "sweep": view_state(
        _COLUMNS, f"metrics.{DEV_TOP1}", TRAIN_LOSS,
        ("params.optim.learning_rate", f"metrics.{DEV_TOP1}"),
    ),
    "study": view_state(
        _COLUMNS, f"metrics.{EVAL_TOP1}", TRAIN_LOSS,
        (f"metrics.{STUDY_EXAFLOPS}", f"metrics.{EVAL_TOP1}"),
    ),
    "runs": view_state(_COLUMNS, f"metrics.{EVAL_TOP1}", TRAIN_LOSS),
}  # fmt: skip
# Longest wait for other processes that open the same SQLite file; creating its schema takes 10 s.
LOCK_S = 60.0


def open_client(uri: str) -> MlflowClient:
    """A client that logs nothing; creates or upgrades a SQLite file.

    A SQLite file is opened under a lock: processes that create the schema of a database at the same
    time make each other fail. `store_requests` limits how long a request takes.

    Raises:
        TimeoutError: another process keeps the lock of the SQLite file for longer than `LOCK_S`.
        ValueError: as `refuse_other_file`.
        Exception: any error of MLflow's if the store cannot be used.
    """
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)  # its errors are also raised
    path = sqlite_file(uri)
    if path is None:
        return MlflowClient(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    try:
        with FileLock(lock, LOCK_S):
            refuse_other_file(uri)
            if not path.is_file():
                # The file is made in another folder, then moved: MLflow cannot open a file whose
                # process died between two of MLflow's migrations.
                folder = path.with_name(f"{path.name}.new")
                shutil.rmtree(folder, ignore_errors=True)  # of a process that died
                folder.mkdir()
                new = folder / path.name
                creator = MlflowClient(f"sqlite:///{quote(str(new.absolute()))}")
                creator.search_experiments(max_results=1)  # the first query creates the schema
                new.replace(path)
                folder.rmdir()
            client = MlflowClient(absolute_uri(uri))
            client.search_experiments(max_results=1)  # creates the schema in an empty file
    except Timeout:
        raise TimeoutError(
            f"another process has held {lock} for {LOCK_S:g} s; end the process that "
            f"`fuser {lock}` shows, or choose another tracking.uri"
        ) from None
    return client


@contextmanager
def asking(uri: str) -> Iterator[MlflowClient]:
    """A client of an existing store that answers; requests in this block have short limits.

    Raises:
        ValueError: as `require_store`.
        RuntimeError: the store does not answer at the start or later in the block, or there is no
            such kind of store; the message is one line without the address's secrets.
        TimeoutError: as `open_client`.
    """
    require_store(uri)
    with limited_requests():
        try:
            client = open_client(uri)
            client.search_experiments(max_results=1)
        except TimeoutError:  # its message says all that is needed
            raise
        except Exception as error:
            raise unusable(uri, error) from None
        try:
            yield client
        except MlflowException as error:
            raise unusable(uri, error) from None


def found_runs(client: MlflowClient, experiment: str, query: str) -> list[Run]:
    """Runs of an experiment, the newest first; none if there is no such experiment.

    Raises:
        MlflowException: MLflow does not answer.
    """
    entity = client.get_experiment_by_name(experiment)
    order = ["attributes.start_time DESC"]
    return list(client.search_runs([entity.experiment_id], query, order_by=order)) if entity else []


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """Id of the experiment; creates it if there is none.

    Artifacts of a SQLite file's runs are in `mlruns/` next to the file; a server decides itself.

    Raises:
        ValueError: the experiment has been deleted.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        path = sqlite_file(absolute_uri(uri))
        folder = None if path is None else (path.parent / "mlruns" / quote(name, safe="")).as_uri()
        try:
            client.create_experiment(name, artifact_location=folder, tags=_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was faster
                raise
        experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    refuse_deleted(experiment)
    return str(experiment.experiment_id)


def refuse_deleted(experiment: Experiment) -> None:
    """
    Raises:
        ValueError: the experiment has been deleted: MLflow does not allow its name again.
    """
    if experiment.lifecycle_stage != "active":
        raise ValueError(
            f"tracking.experiment={experiment.name!r} has been deleted in MLflow; restore it with "
            f"`mlflow experiments restore --experiment-id {experiment.experiment_id}` or choose "
            "another name"
        )


def share_view(client: MlflowClient, experiment: str, kind: str) -> str:
    """Store the view that links of a run of this kind open, as a tag of the experiment.

    Returns:
        The view's key; empty if MLflow refuses the tag.
    """
    name = next((name for name in _VIEWS if kind.startswith(name)), "runs")
    tag = f"{VIEW_TAG}{name}"
    try:
        if client.get_experiment(experiment).tags.get(tag) != _VIEWS[name]:
            client.set_experiment_tag(experiment, tag, _VIEWS[name])
    except MlflowException:  # this user may only write runs
        return ""
    return name


def page_hint(uri: str, experiment: str | None = None, view: str = "") -> str:
    """How to see the runs: a link, or for a SQLite file the command that serves it.

    Args:
        experiment: id of the experiment; MLflow's own start page shows traces, which we lack.
        view: as `share_view` returns it.
    """
    if sqlite_file(uri) is not None:
        return f"vit-ray ui {shlex.quote(absolute_uri(uri))}"
    link = safe_uri(uri).rstrip("/")
    return runs_page(link, experiment, view) if experiment else link
