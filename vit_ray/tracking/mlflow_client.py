"""MLflow's client: the schema created once, little logging; experiments and links to them."""

import logging
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from filelock import FileLock, Timeout

from vit_ray.addresses import (
    OtherFileError,
    absolute_uri,
    refuse_other_file,
    require_store,
    sqlite_file,
)
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
from vit_ray.mlflow_internals import (
    VIEW_TAG,
    line_chart,
    runs_page,
    scatter_chart,
    view_state,
)
from vit_ray.tracking.store_requests import limited_requests, safe_uri, unusable

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
_LOSS: Final = line_chart(TRAIN_LOSS)
_OVER_COMPUTE: Final = scatter_chart(f"metrics.{STUDY_EXAFLOPS}", f"metrics.{EVAL_TOP1}")
_OVER_RATES: Final = scatter_chart("params.optim.learning_rate", f"metrics.{DEV_TOP1}")
_VIEWS: Final = {
    "sweep": view_state((_OVER_RATES, _LOSS), _COLUMNS, f"metrics.{DEV_TOP1}"),
    "study": view_state((_OVER_COMPUTE, _LOSS), _COLUMNS, f"metrics.{EVAL_TOP1}"),
    "runs": view_state((_LOSS,), _COLUMNS, f"metrics.{EVAL_TOP1}"),
}
"""What links open, by what began the run; none has a chart with one dot a run and step."""
LOCK_S = 60.0
"""Longest wait for other processes that open the same SQLite file; creating its schema takes 10
s."""


def open_client(uri: str) -> MlflowClient:
    """A client that logs nothing; creates or upgrades a SQLite file.

    Under a lock: processes that create the schema of the same database at the same time make each
    other fail. How long a request takes is up to `request_limits`.

    Raises:
        TimeoutError: another process keeps the lock of the SQLite file for longer than `LOCK_S`.
        OtherFileError: as `refuse_other_file`.
        Exception: any error of MLflow's if the store cannot be used.
    """
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)  # it raises what it logs
    path = sqlite_file(uri)
    if path is None:
        return MlflowClient(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    try:
        with FileLock(lock, LOCK_S):
            refuse_other_file(uri)
            if not path.is_file():
                _make_store(path)
            client = MlflowClient(absolute_uri(uri))
            client.search_experiments(max_results=1)  # upgrades an empty file
    except Timeout:
        raise TimeoutError(
            f"another process has held {lock} for {LOCK_S:g} s; end the process that "
            f"`fuser {lock}` shows, or choose another tracking.uri"
        ) from None
    return client


def _make_store(path: Path) -> None:
    """Make the file beside, whole: nothing can open one whose process died between two of MLflow's
    migrations.
    """
    beside = path.with_name(f"{path.name}.new")
    shutil.rmtree(beside, ignore_errors=True)  # of a process that died
    beside.mkdir()
    made = f"sqlite:///{quote(str(beside.absolute() / path.name))}"
    MlflowClient(made).search_experiments(max_results=1)  # the first query creates the schema
    (beside / path.name).replace(path)
    beside.rmdir()


@contextmanager
def asking(uri: str) -> Iterator[MlflowClient]:
    """A client of a store with runs that answers, whose requests are limited inside this block.

    Raises:
        ValueError: as `require_store` and `refuse_other_file`.
        RuntimeError: it does not answer, or no longer in the block, or there is no such kind of
            store; says which in one line, without the address's secrets.
        TimeoutError: as `open_client`.
    """
    require_store(uri)
    with limited_requests():
        try:
            client = open_client(uri)
            client.search_experiments(max_results=1)
        except (TimeoutError, OtherFileError):  # one line: the first says who keeps the file locked
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
    place = client.get_experiment_by_name(experiment)
    order = ["attributes.start_time DESC"]
    return list(client.search_runs([place.experiment_id], query, order_by=order)) if place else []


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """Id of the experiment, which is created if there is none.

    Runs in a SQLite file keep their artifacts in `mlruns/` next to it; a server decides itself.

    Raises:
        ValueError: the experiment has been deleted.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        path = sqlite_file(absolute_uri(uri))
        place = None if path is None else (path.parent / "mlruns" / quote(name, safe="")).as_uri()
        try:
            client.create_experiment(name, artifact_location=place, tags=_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was faster
                raise
        found = client.get_experiment_by_name(name)
    assert found is not None
    refuse_deleted(found)
    return str(found.experiment_id)


def refuse_deleted(experiment: Experiment) -> None:
    """
    Raises:
        ValueError: the experiment has been deleted, so that its name cannot be used.
    """
    if experiment.lifecycle_stage != "active":
        raise ValueError(
            f"tracking.experiment={experiment.name!r} has been deleted in MLflow; restore it with "
            f"`mlflow experiments restore --experiment-id {experiment.experiment_id}` or choose "
            "another name"
        )


def share_view(client: MlflowClient, experiment: str, kind: str) -> str:
    """Keep the view that links of a run of this kind open with its experiment.

    Returns:
        Its key; empty if MLflow refuses it.
    """
    name = next((name for name in _VIEWS if kind.startswith(name)), "runs")
    tag = f"{VIEW_TAG}{name}"
    try:
        if client.get_experiment(experiment).tags.get(tag) != _VIEWS[name]:
            client.set_experiment_tag(experiment, tag, _VIEWS[name])
    except MlflowException:  # of a user who may only write runs
        return ""
    return name


def page_hint(uri: str, experiment: str | None = None, view: str = "") -> str:
    """How to see the runs: a link, or for a SQLite file the command that serves it.

    Args:
        experiment: its id. MLflow's own start page is about traces, which are not used here.
        view: as `share_view` returns it.
    """
    if sqlite_file(uri) is not None:
        return f"vit-ray ui {shlex.quote(absolute_uri(uri))}"
    link = safe_uri(uri).rstrip("/")
    return runs_page(link, experiment, view) if experiment else link
