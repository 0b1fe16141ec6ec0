"""Curves beside MLflow's own histories, from a SQL store and over HTTP."""

import itertools
import math
import sqlite3
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.server import app, handlers
from mlflow.tracking import MlflowClient
from sqlalchemy.dialects import mysql, postgresql

from tests.report.made_runs import served
from vit_ray.report.figures import histories
from vit_ray.report.figures.histories import Histories, _first_from_each

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


def test_an_error_of_the_database_is_one_of_mlflow(store, monkeypatch):
    client, run_ids = store
    read = Histories(client, is_server=False)

    def connect():
        raise sa.exc.OperationalError("SELECT", {}, Exception("database is locked"))

    monkeypatch.setattr(read, "_engine", SimpleNamespace(connect=connect))
    with pytest.raises(MlflowException, match="database is locked"):
        read.curves(list(run_ids.values()), "train/loss", MOST)


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


@pytest.fixture(params=["SQL", "SQL without the index", "server", "server without the call"])
def place(request, store, monkeypatch):
    """Histories that are read in one of the ways, the oracle, and run ids by kind."""
    client, run_ids = store
    if request.param == "SQL":
        yield Histories(client, is_server=False), client, run_ids
    elif request.param == "SQL without the index":
        monkeypatch.setattr(sa, "inspect", lambda _: _Bare())
        yield Histories(client, is_server=False), client, run_ids
    else:
        with_call = request.param == "server"
        monkeypatch.setattr(handlers, "_tracking_store", client._tracking_client.store)
        with served(app if with_call else _without_bulk) as address:
            yield Histories(MlflowClient(address), is_server=True), client, run_ids


class _Bare:
    def get_indexes(self, _):
        return [{"column_names": ["run_uuid"]}]


def _without_bulk(environ, start_response):
    if "ajax-api" in environ["PATH_INFO"]:
        start_response("404 Not Found", [("Content-Type", "text/html")])
        return [b"<h1>no such page</h1>"]
    return app(environ, start_response)


def recorded(oracle, run_id):
    """Pairs of step and finite value as MLflow tells them, in order of step and time."""
    history = oracle.get_metric_history(run_id, "train/loss")
    ordered = sorted(history, key=lambda m: (m.step, m.timestamp))
    return [(float(m.step), m.value) for m in ordered if abs(m.value) < 1e300]


def test_points_are_recorded_ones_with_the_first_and_the_last(place):
    read, oracle, run_ids = place
    found = read.curves([*run_ids.values()], "train/loss", MOST)
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
    assert read.curves([run_ids["long"]], "train/lr", MOST) == {run_ids["long"]: [(3.0, 0.5)]}
    assert read.curves([run_ids["long"]], "eval/loss", MOST) == {}


def test_a_run_that_is_gone_takes_no_other_with_it(place):
    read, _, run_ids = place
    both = [run_ids["short"], "f" * 32]  # in one request, where there are requests
    assert read.curves(both, "train/loss", MOST) == {
        both[0]: [(0.0, 3.0), (1.0, 2.0), (500.0, 1.0)]
    }


def test_of_a_step_that_was_trained_again_the_later_record_counts(place):
    read, oracle, run_ids = place
    found = read.curves([*run_ids.values()], "train/loss", MOST)
    for kind in ("rewound", "rewound twice", "short, recorded again", "backwards", "one step"):
        latest = dict(recorded(oracle, run_ids[kind]))
        assert all(latest[step] == value for step, value in found[run_ids[kind]]), kind
        # What MLflow shows beside the run.
        shown = oracle.get_run(run_ids[kind]).data.metrics["train/loss"]
        assert found[run_ids[kind]][-1][1] == shown


def test_what_was_recorded_again_looks_alike_from_a_database_and_from_a_server(place, store):
    """A short curve in each of its points; of a longer one the steps that are shown may differ."""
    read, client, run_ids = place
    there = read.curves([*run_ids.values()], "train/loss", MOST)
    here = Histories(client, is_server=False).curves([*run_ids.values()], "train/loss", MOST)
    assert there.keys() == here.keys()
    for kind, run_id in run_ids.items():
        if len(HISTORIES[kind]) <= MOST:
            assert there[run_id] == here[run_id], kind
        both = dict(there[run_id]).keys() & dict(here[run_id]).keys()
        assert len(both) >= min(2, len(here[run_id])), kind
        assert all(dict(there[run_id])[at] == dict(here[run_id])[at] for at in both), kind


def test_a_history_is_read_whole_only_where_nothing_less_shows_its_latest_records(
    place, monkeypatch, request
):
    read, _, run_ids = place
    whole = set()
    read_whole = Histories._whole

    def noted(self, run_id, *rest):
        whole.add(run_id)
        return read_whole(self, run_id, *rest)

    monkeypatch.setattr(Histories, "_whole", noted)
    read.curves([*run_ids.values()], "train/loss", MOST)
    went_back = {run_ids["rewound"], run_ids["rewound twice"]}
    way = request.node.callspec.params["place"]
    expected = {"SQL": set(), "server": went_back}
    assert whole == expected.get(way, {*run_ids.values()})


def test_points_stand_evenly(store):
    client, run_ids = store
    found = Histories(client, is_server=False).curves([run_ids["long"]], "train/loss", MOST)
    steps = [step for step, _ in found[run_ids["long"]]]
    gaps = [right - left for left, right in itertools.pairwise(steps)]
    assert max(gaps) - min(gaps) <= 10  # one record, which stand 10 steps apart


def test_every_read_of_a_sql_store_is_of_one_run_by_its_index(store):
    """Not by the primary key's, which begins with the key: the points of all runs."""
    client, run_ids = store
    engine = client._tracking_client.store.engine
    asked = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: asked.append(args[2:4]))
    Histories(client, is_server=False).curves([*run_ids.values()], "train/loss", MOST)
    asked = [(text, values) for text, values in asked if "FROM metrics" in text]
    assert len(asked) > len(run_ids)
    with sqlite3.connect(engine.url.database) as plain:
        for statement, values in asked:
            plan = [row[3] for row in plain.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
            reads = [line for line in plan if "metrics" in line]
            assert reads
            assert all("index_metrics_run_uuid_key_step (run_uuid=? AND key=?" in r for r in reads)


@pytest.mark.parametrize("dialect", [postgresql, mysql])
def test_the_statement_is_one_of_other_databases_too(dialect):
    text = str(_first_from_each(MOST).compile(dialect=dialect.dialect()))
    assert text.count("UNION ALL") == MOST - 1
    assert text.count("SELECT") == 3 * MOST  # a part has the step it wants twice


def test_a_server_may_take_longer_for_curves_than_for_other_answers(store, monkeypatch):
    client, run_ids = store

    def slow(environ, start_response):
        if "bulk-interval" in environ["PATH_INFO"]:
            time.sleep(1.5)
        return app(environ, start_response)

    monkeypatch.setattr(handlers, "_tracking_store", client._tracking_client.store)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with served(slow) as address:
        there = Histories(MlflowClient(address), is_server=True)
        found = there.curves([run_ids["long"]], "train/loss", MOST)
    assert len(found[run_ids["long"]]) == MOST


def test_a_server_without_the_call_is_asked_for_it_once(store, monkeypatch):
    client, run_ids = store
    asked = []

    def answer(*args, **_):
        asked.append(args)
        return SimpleNamespace(status_code=404)

    monkeypatch.setattr("mlflow.utils.rest_utils.http_request", answer)
    monkeypatch.setattr(histories, "CONNECTIONS", 1)
    store = client._tracking_client.store
    monkeypatch.setattr(store, "get_host_creds", lambda: None, raising=False)
    found = Histories(client, is_server=True).curves([*run_ids.values()], "train/loss", MOST)
    assert len(run_ids) > histories.RUNS_A_REQUEST
    assert len(asked) == 1
    assert len(found) == len(run_ids)
