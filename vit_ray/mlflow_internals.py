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
# Title of the first charts.
_SECTION: Final = "results"

INTERNALS: Final = (
    Internal(
        "mlflow.entities", "RunData",
        "`metrics` has the latest values without their steps and times.", "",
        {"to_proto": ("self",)},
    ),
)  # fmt: skip


def view_state(
    columns: Sequence[str], order_by: str, line: str, scatter: Sequence[str] = ()
) -> str:
    """A view of an experiment, in the form of its tag.

    Runs are in one list, with child runs expanded, and all are drawn; by default child runs are
    collapsed, and charts have ten runs. Other metrics are below in sections of MLflow's own.

    Args:
        columns: of the list of runs: `metrics.`, `params.` or `attributes.` and a name.
        order_by: the column that sorts the list, the greatest first.
        line: metric of a chart over steps, with a line for each run.
        scatter: columns of the axes of a chart before it, with a point for each run.
    """
    shared = {
        "runsCountToCompare": 100, "metricSectionId": _SECTION, "isGenerated": False,
        "deleted": False,
    }  # fmt: skip
    charts: list[dict[str, Any]] = []
    if scatter:
        x, y = (
            {"key": name, "type": "METRIC" if kind == "metrics" else "PARAM"}
            for kind, _, name in (column.partition(".") for column in scatter)
        )
        chart = {"type": "SCATTER", "uuid": " ".join(scatter), **shared}
        charts.append({**chart, "xaxis": x, "yaxis": y})
    chart = {"type": "LINE", "uuid": line, **shared, "metricKey": line}
    charts.append({
        **chart, "selectedMetricKeys": [line], "xAxisKey": "step", "displayName": line,
    })  # fmt: skip
    section = {"uuid": _SECTION, "name": _SECTION, "display": True, "isReordered": True}

    def quoted(column: str) -> str:  # as MLflow's page reads column names
        kind, _, name = column.partition(".")
        return f"{kind}.`{name}`"

    view = {
        "compareRunCharts": charts, "compareRunSections": [section], "isAccordionReordered": True,
        "selectedColumns": [*map(quoted, columns)], "orderByKey": quoted(order_by),
        "orderByAsc": False, "runsHiddenMode": "SHOWALL",
    }  # fmt: skip
    return json.dumps(view)


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
