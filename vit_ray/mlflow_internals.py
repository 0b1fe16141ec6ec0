"""Every private name of MLflow that this project uses, in one file.

Each is here because no public name of MLflow 3.17 works instead; a test checks that each exists.
This module does not import MLflow: `tracking/mlflow_client.py` does so without the packages that
are not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from vit_ray.internals import Internal

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

# Version of MLflow for which all of this was read and tested.
VERSION: Final = "3.17"

# Tag of an experiment, followed by the key of a view: what MLflow's page of the experiment shows.
# The page of MLflow 3.17 reads the fields that `view_state` writes; other versions ignore fields
# that they do not have.
VIEW_TAG: Final = "mlflow.sharedViewState."
# Parameter of the page's address: the key of a view.
VIEW_PARAMETER: Final = "viewStateShareKey"
# Title of the charts' first section.
_SECTION: Final = "results"

INTERNALS: Final = (
    Internal(
        "mlflow.entities", "RunData",
        "The public `metrics` are the latest values without their steps and times.", "",
        {"to_proto": ("self",)},
    ),
)  # fmt: skip


def view_state(
    columns: Sequence[str], order_by: str, line: str, scatter: Sequence[str] = ()
) -> str:
    """A view of an experiment, as text for its tag.

    The list has all runs, with child runs expanded, and charts draw all of them; by default child
    runs are collapsed, and charts have ten runs. MLflow adds its own sections with other metrics.

    Args:
        columns: of the list of runs: `metrics.`, `params.` or `attributes.` and a name.
        order_by: column by which the list is sorted, in descending order.
        line: metric of a line chart over steps, with a line for each run.
        scatter: columns for the two axes of a first chart, with a point for each run.
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
