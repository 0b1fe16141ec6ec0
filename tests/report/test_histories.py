"""Curves beside MLflow's own histories, from a SQL store and over HTTP."""

import itertools
import math

import pytest
from mlflow.entities import Metric
from mlflow.server import app, handlers
from mlflow.tracking import MlflowClient

from tests.report.made_runs import served
from vit_ray.report.figures.histories import curves

AT = 1_760_000_000_000
LONG = [(step, 2.0 / (1 + step) + step % 7) for step in range(0, 20_000, 10)]
HISTORIES = {
    "short": [(0, 3.0), (1, 2.0), (500, 1.0)],
    "long": LONG,
    # Of two records of a step the later one counts, as after a restart.
    "rewound": [*LONG[:1200], *((step, value + 100) for step, value in LONG[1000:])],
    # Went back twice, over the same steps, and ended before it was where it had been.
    "rewound twice": [
        *LONG[:1000],
        *((step, value + 100) for step, value in LONG[400:800]),
        *((step, value + 200) for step, value in LONG[500:700]),
    ],
    "short, recorded again": [(step, 10.0 * part + step) for part in range(3) for step in range(9)],
    "backwards": [(step, 10.0 * part + step) for part in range(3) for step in range(9)],
    "uneven": [*((step, step * 0.5) for step in range(1000)), (1_000_000, 7.0)],
    "one step": [(0, float(i)) for i in range(900)],
    "holes": [(step, (math.nan, math.inf, 1.0)[step % 3]) for step in range(30)],
    "below zero": [(step, float(step)) for step in range(-400, 400)],
}
MOST = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The client of a store, and run ids by the kind of their history."""
    folder = tmp_path_factory.mktemp("histories")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("histories", artifact_location=f"file://{folder}/a")
    run_ids = {}
    for kind, history in HISTORIES.items():
        run_ids[kind] = client.create_run(experiment, run_name=kind).info.run_id
        later = -1 if kind == "backwards" else 1  # there what is recorded last has happened first
        points = [
            Metric("train/loss", value, AT + later * i, step)
            for i, (step, value) in enumerate(history)
        ]
        for first in range(0, len(points), 1000):
            client.log_batch(run_ids[kind], points[first : first + 1000])
    client.log_metric(run_ids["long"], "train/lr", 0.5, step=3)
    return client, run_ids


@pytest.fixture(params=["SQL", "server"])
def place(request, store, monkeypatch):
    """A client that reads in one of the ways, and run ids by kind."""
    client, run_ids = store
    if request.param == "SQL":
        yield client, run_ids
    else:
        monkeypatch.setattr(handlers, "_tracking_store", client._tracking_client.store)
        with served(app) as address:
            yield MlflowClient(address), run_ids


def recorded(oracle, run_id):
    """Pairs of step and finite value as MLflow tells them, in order of step and time."""
    history = oracle.get_metric_history(run_id, "train/loss")
    ordered = sorted(history, key=lambda m: (m.step, m.timestamp))
    return [(float(m.step), m.value) for m in ordered if abs(m.value) < 1e300]


def test_points_are_recorded_ones_with_the_first_and_the_last(place):
    oracle, run_ids = place
    found = curves(oracle, [*run_ids.values()], "train/loss", MOST)
    assert found.keys() == {*run_ids.values()}
    for kind, run_id in run_ids.items():
        known = recorded(oracle, run_id)
        steps = [step for step, _ in found[run_id]]
        assert {*found[run_id]} <= {*known}, kind
        assert steps == sorted({*steps}), kind
        assert [steps[0], steps[-1]] == [known[0][0], known[-1][0]], kind
        assert len(steps) <= MOST
        if len(known) <= MOST:
            assert found[run_id] == [*dict(known).items()], kind
        elif kind != "one step":
            assert len(steps) >= MOST // 2, kind
    assert curves(oracle, [run_ids["long"]], "train/lr", MOST) == {run_ids["long"]: [(3.0, 0.5)]}
    assert curves(oracle, [run_ids["long"]], "eval/loss", MOST) == {}


def test_of_a_step_that_was_trained_again_the_later_record_counts(place):
    oracle, run_ids = place
    found = curves(oracle, [*run_ids.values()], "train/loss", MOST)
    for kind in ("rewound", "rewound twice", "short, recorded again", "backwards", "one step"):
        latest = dict(recorded(oracle, run_ids[kind]))
        assert all(latest[step] == value for step, value in found[run_ids[kind]]), kind
        # What MLflow shows beside the run.
        shown = oracle.get_run(run_ids[kind]).data.metrics["train/loss"]
        assert found[run_ids[kind]][-1][1] == shown


def test_points_stand_evenly(store):
    client, run_ids = store
    found = curves(client, [run_ids["long"]], "train/loss", MOST)
    steps = [step for step, _ in found[run_ids["long"]]]
    gaps = [right - left for left, right in itertools.pairwise(steps)]
    assert max(gaps) - min(gaps) <= 10  # one record, which stand 10 steps apart
