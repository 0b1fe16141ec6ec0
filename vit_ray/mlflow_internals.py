"""Every private name of MLflow that this project uses, in one file.

Each is here because no public name of MLflow 3.17 works instead; a test finds every one. MLflow is
imported by the functions, not with this file: `tracking/mlflow_client.py` imports it without what
it does not need.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from vit_ray.internals import Internal

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

VERSION: Final = "3.17"
"""Version of MLflow for which all of this was read and tested."""

VIEW_TAG: Final = "mlflow.sharedViewState."
"""Tag of an experiment: what MLflow's page of it shows, under a key. The page of MLflow 3.17 reads
the fields that `view_state` writes; other versions ignore fields that they do not have."""
VIEW_PARAMETER: Final = "viewStateShareKey"
"""Parameter of the page's address: the key."""
VIEW_FIELDS: Final = (
    "compareRunCharts", "compareRunSections", "isAccordionReordered", "selectedColumns",
    "orderByKey", "orderByAsc", "runsHiddenMode",
)  # fmt: skip

_SECTION: Final = "results"
"""Title of the first charts."""

INTERNALS: Final = (
    Internal(
        "mlflow.entities", "RunData",
        "`metrics` has the latest values without their steps and times.", "",
        {"to_proto": ("self",)},
    ),
)  # fmt: skip


def view_state(charts: Sequence[dict[str, Any]], columns: Sequence[str], order_by: str) -> str:
    """A view of an experiment, in the form of its tag.

    Runs are in one list, with child runs expanded, and all are drawn; by default child runs are
    collapsed, and charts have ten runs. Other metrics are below in sections of MLflow's own.

    Args:
        charts: as `scatter_chart` and `line_chart` make them, in order.
        columns: of the list of runs: `metrics.`, `params.` or `attributes.` and a name.
        order_by: the column that sorts the list, the greatest first.
    """

    def quoted(column: str) -> str:
        kind, _, name = column.partition(".")
        return f"{kind}.`{name}`"

    first = {"uuid": _SECTION, "name": _SECTION, "display": True, "isReordered": True}
    values = (charts, [first], True, [*map(quoted, columns)], quoted(order_by), False, "SHOWALL")
    return json.dumps(dict(zip(VIEW_FIELDS, values, strict=True)))


def scatter_chart(x: str, y: str) -> dict[str, Any]:
    """A point for each run; the axes are named as columns are."""

    def axis(column: str) -> dict[str, str]:
        kind, _, name = column.partition(".")
        return {"key": name, "type": "METRIC" if kind == "metrics" else "PARAM"}

    return {**_chart("SCATTER", f"{x} {y}"), "xaxis": axis(x), "yaxis": axis(y)}


def line_chart(metric: str) -> dict[str, Any]:
    """A line for each run, over its steps."""
    return {
        **_chart("LINE", metric), "metricKey": metric, "selectedMetricKeys": [metric],
        "xAxisKey": "step", "displayName": metric,
    }  # fmt: skip


def _chart(kind: str, uuid: str) -> dict[str, Any]:
    return {
        "type": kind, "uuid": uuid, "runsCountToCompare": 100, "metricSectionId": _SECTION,
        "isGenerated": False, "deleted": False,
    }  # fmt: skip


def runs_page(address: str, experiment: str, view: str = "") -> str:
    """Link to the list of an experiment's runs.

    Without its last part MLflow opens pages about language models and traces.

    Args:
        address: of the server.
        experiment: its id.
        view: key of a view of the experiment.
    """
    link = f"{address}/#/experiments/{experiment}/runs?workflowType=machine_learning"
    return link + (f"&{VIEW_PARAMETER}={view}&compareRunsMode=CHART" if view else "")


def latest_points(run: Run) -> Iterable[Metric]:
    """The latest point of each key, with key, value, timestamp and step."""
    return run.data.to_proto().metrics
