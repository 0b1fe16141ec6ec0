"""What MLflow knows about earlier attempts: the run of a name.

While MLflow is away the answer is "nothing", with a warning, and commands fall back on their
checkpoints.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from vit_ray.config.recorded_recipe import PARENT_TAG, RUN_FOLDER
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking.mlflow_api import MlflowClient, Run
from vit_ray.tracking.mlflow_client import open_client, redact_uri, safe_uri

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


def newest_run(
    tracking: TrackingConfig,
    name: str,
    kind: str | None = None,
    parent_id: str | None = None,
    *,
    folder: str | None = None,
    noted_id: str | None = None,
) -> str | None:
    """Id of the newest run of this name and `vit_ray.kind`, if given, under a parent.

    Args:
        parent_id: the parent's run; None for a run without one.
        folder: of the command's runs, as in their tag `RUN_FOLDER`: only these are taken.
        noted_id: a run that is preferred to any other, if it exists.
    """

    def ask(client: MlflowClient) -> str | None:
        named = runs_of_name(client, tracking.experiment, name, kind)
        its = [run for run in named if run.data.tags.get(PARENT_TAG) == parent_id]
        if folder is not None:
            noted = [run for run in its if run.info.run_id == noted_id]
            here = [run for run in its if run.data.tags.get(RUN_FOLDER) == folder]
            its = noted or here
        return str(its[0].info.run_id) if its else None

    return _asked(tracking, ask, None)


def runs_of_name(
    client: MlflowClient,
    experiment: str,
    name: str,
    kind: str | None = None,
) -> list[Run]:
    """Runs of this name and `vit_ray.kind`, if given, with a parent or without; newest first.

    Raises:
        MlflowException: MLflow does not answer.
    """
    place = client.get_experiment_by_name(experiment)
    if place is None:
        return []
    wanted = f"attributes.run_name = '{name}'"
    if kind is not None:
        wanted += f" and tags.`vit_ray.kind` = '{kind}'"
    return list(
        client.search_runs([place.experiment_id], wanted, order_by=["attributes.start_time DESC"])
    )


def is_finished(tracking: TrackingConfig, run_id: str) -> bool:
    """Whether the run has finished successfully; False while MLflow is away."""
    return _asked(tracking, lambda client: client.get_run(run_id).info.status == "FINISHED", False)


def _asked(
    tracking: TrackingConfig, ask: Callable[[MlflowClient], Answer], nothing: Answer
) -> Answer:
    try:
        return ask(open_client(tracking.uri))
    except Exception as error:
        logger.warning(
            "MLflow at %s cannot be asked for earlier runs: %s",
            safe_uri(tracking.uri),
            redact_uri(str(error), tracking.uri).partition("\n")[0],
        )
        return nothing
