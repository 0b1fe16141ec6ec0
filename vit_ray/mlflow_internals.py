"""Every private name of MLflow that this project uses, in one file.

Each is here because no public name of MLflow 3.17 works instead; a test finds every one. MLflow is
imported by the functions, not with this file: `tracking/mlflow_api.py` imports it without what it
does not need.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

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
VIEW: Final = "vit_ray"
"""Key of the view that links open."""
VIEW_FIELDS: Final = (
    "compareRunCharts", "compareRunSections", "isAccordionReordered", "selectedColumns",
    "orderByKey", "orderByAsc",
)  # fmt: skip

INTERNALS: Final = (
    Internal(
        "mlflow.entities", "RunData",
        "`metrics` has the latest values without their steps and times.", "",
        {"to_proto": ("self",)},
    ),
)  # fmt: skip


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
