"""Every private name of MLflow that this project uses, in one file.

Each is here because no public name of MLflow 3.17 works instead; a test finds every one. MLflow is
imported by the functions, not with this file: `tracking/mlflow_api.py` imports it without what it
does not need.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from vit_ray.internals import Internal

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

VERSION: Final = "3.17"
"""Version of MLflow for which all of this was read and tested."""

Record = tuple[int, int, float]
"""Step, milliseconds since the epoch and value. Of several for one step the greatest counts, like
the latest value in MLflow."""

METRICS: Final = "metrics"
"""Table of all points in an SQL store."""
METRICS_COLUMNS: Final = ("run_uuid", "key", "step", "timestamp", "value", "is_nan")
METRICS_INDEX: Final = ("run_uuid", "key", "step")
ALL_STEPS: Final = (-(2**62), 2**62)
"""Without bounds SQLite uses the index of the primary key, and reads the points of every run."""
BULK_HISTORY: Final = "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"
"""What MLflow's own pages request from a server."""
VIEW_TAG: Final = "mlflow.sharedViewState."
"""Tag of an experiment: what MLflow's page of it shows, under a key. The page of MLflow 3.17 reads
the fields that `view_state` writes; other versions ignore fields that they do not have."""
VIEW_PARAMETER: Final = "viewStateShareKey"
"""Parameter of the page's address: the key."""
VIEW: Final = "vit_ray"
"""Key of the view that links open."""
VIEW_FIELDS: Final = (
    "compareRunCharts", "compareRunSections", "isAccordionReordered", "selectedColumns",
    "orderByKey", "orderByAsc",
)  # fmt: skip
_NO_SUCH_CALL: Final = (404, 405, 501)

_SAMPLE: Final = "The client has no call for an even sample of many long histories."

INTERNALS: Final = (
    Internal(
        "mlflow.tracking", "MlflowClient", "The client has no public way to its store.", "",
        attributes=("_tracking_client",),
    ),
    Internal(
        "mlflow.tracking._tracking_service.client", "TrackingServiceClient",
        "The client has no public way to its store.", "", attributes=("store",),
    ),
    Internal(
        "mlflow.store.tracking.sqlalchemy_store", "SqlAlchemyStore", _SAMPLE, "#11182",
        attributes=("engine",),
    ),
    Internal(
        "mlflow.store.tracking.dbmodels.models", "SqlMetric",
        f"{_SAMPLE} Points are read by the index of run, key and step.", "#11182",
        attributes=METRICS_COLUMNS,
    ),
    Internal(
        "mlflow.store.tracking.rest_store", "RestStore", _SAMPLE, "#11182",
        attributes=("get_host_creds",),
    ),
    Internal(
        "mlflow.utils.rest_utils", "http_request", _SAMPLE, "#11182",
        source=("timeout", "host_creds"),
    ),
    Internal(
        "mlflow.utils.rest_utils", "verify_rest_response", _SAMPLE, "#11182",
        {"": ("response", "endpoint", "expected_status")},
    ),
    Internal(
        "mlflow.entities", "RunData",
        "`metrics` has the latest values without their steps and times.", "",
        {"to_proto": ("self",)},
    ),
    Internal(
        "mlflow.system_metrics.system_metrics_monitor", "SystemMetricsMonitor",
        "It ends at the first request that fails, and has no public way to notice that.", "",
        attributes=("_process",),
    ),
)  # fmt: skip


def engine_of(client: MlflowClient) -> Any:
    """SQLAlchemy's engine of a client with an SQL store; None for any other."""
    return getattr(client._tracking_client.store, "engine", None)


def sample_of_server(
    client: MlflowClient, run_ids: Sequence[str], key: str, most: int, timeout_s: float
) -> list[tuple[str, Record]] | None:
    """Even samples of histories, each with its run id; None if a server lacks the call."""
    rest: Any = importlib.import_module("mlflow.utils.rest_utils")
    store: Any = client._tracking_client.store
    start, end = ALL_STEPS
    asked = {"run_ids": run_ids, "metric_key": key, "max_results": most}
    reply = rest.http_request(
        store.get_host_creds(),
        BULK_HISTORY,
        "GET",
        timeout=timeout_s,
        params={**asked, "start_step": start, "end_step": end},
    )
    if reply.status_code in _NO_SUCH_CALL:
        return None
    held = rest.verify_rest_response(reply, BULK_HISTORY).json().get("metrics", [])
    return [  # a value of 0 may be left out
        (
            one["run_id"],
            (int(one.get("step", 0)), int(one.get("timestamp", 0)), float(one["value"])),
        )
        for one in held
    ]


def view_state(section: str, metrics: Sequence[str], columns: Sequence[str], order_by: str) -> str:
    """A view of an experiment, in the form of its tag.

    Runs are in one list, with child runs expanded; by default these are collapsed, and not drawn in
    charts.

    Args:
        section: title of the first charts.
        metrics: of these charts, in order; a bar if no step is above 0. Other metrics are below in
            their own sections.
        columns: of the list of runs: `metrics.`, `params.` or `attributes.` and a name.
        order_by: the column that sorts the list, the greatest first.
    """

    def quoted(column: str) -> str:
        kind, _, name = column.partition(".")
        return f"{kind}.`{name}`"

    place = {"metricSectionId": section, "isGenerated": True, "deleted": False}
    bar = {"type": "BAR", "runsCountToCompare": 10}  # the page makes a line of it where it can
    charts = [
        {**bar, **place, "uuid": key, "metricKey": key, "displayName": key} for key in metrics
    ]
    first = {"uuid": section, "name": section, "display": True, "isReordered": True}
    values = (charts, [first], True, [*map(quoted, columns)], quoted(order_by), False)
    return json.dumps(dict(zip(VIEW_FIELDS, values, strict=True)))


def runs_page(address: str, experiment: str, *, has_view: bool) -> str:
    """Link to the list of an experiment's runs.

    Without its last part MLflow opens pages about language models and traces.

    Args:
        address: of the server.
        experiment: its id.
        has_view: the experiment has the view `VIEW`.
    """
    link = f"{address}/#/experiments/{experiment}/runs?workflowType=machine_learning"
    return link + (f"&{VIEW_PARAMETER}={VIEW}&compareRunsMode=CHART" if has_view else "")


def latest_points(run: Run) -> Iterable[Metric]:
    """The latest point of each key, with key, value, timestamp and step."""
    return run.data.to_proto().metrics


def is_sampling(monitor: Any) -> bool:
    """Whether a started monitor of system metrics still takes samples."""
    return bool(monitor._process.is_alive())
