"""Curves of metrics: exact recorded points, few enough to draw, however long the histories are.

Of a store in SQL only the points that are drawn are read, each by the index of run, key and step;
of an uneven history all its steps, too.
A server is asked for its own even sample, for which it reads every point of the histories. That one
is of records, and has some that were superseded where a run went back and recorded steps again: a
history whose sample shows that is read whole.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import sqlalchemy as sa
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vit_ray.mlflow_internals import (
    ALL_STEPS,
    METRICS,
    METRICS_COLUMNS,
    METRICS_INDEX,
    Record,
    engine_of,
    sample_of_server,
    sample_of_store,
)

Curve = list[tuple[float, float]]
"""Steps, ascending and each once, and finite values."""

RUNS_A_REQUEST: Final = 5
"""Whose curves one request asks for."""
ANSWER_S: Final = 60.0
"""Longest wait for them, longer than for others: a server reads every point to choose some."""
CONNECTIONS: Final = 4
_METRICS: Final = sa.table(METRICS, *map(sa.column, METRICS_COLUMNS))
_run, _key, _step, *_values = (_METRICS.c[name] for name in METRICS_COLUMNS)
_RECORD: Final = (_step, *_values)
_OF_RUN: Final = sa.and_(_run == sa.bindparam("run_id"), _key == sa.bindparam("key"))


class Histories:
    """Histories of the runs of one store, which are only read."""

    def __init__(self, client: MlflowClient, *, is_server: bool) -> None:
        self._client = client
        self._is_server = is_server
        self._has_bulk = is_server
        engine = None if is_server else engine_of(client)
        with _errors_of_mlflow():
            self._engine: sa.Engine | None = engine if engine and _is_indexed(engine) else None

    def curves(self, run_ids: Sequence[str], key: str, most: int) -> dict[str, Curve]:
        """Run id to its curve, of each run that has any: at most so many points, at least two.

        Of a longer history these are the first, the last, and others spread evenly between them.
        """
        found: dict[str, list[Record]] = {}
        for run_id, record in self._records(run_ids, key, most):
            found.setdefault(run_id, []).append(record)
        return {run_id: _curve(records) for run_id, records in found.items()}

    def _records(self, run_ids: Sequence[str], key: str, most: int) -> Iterator[tuple[str, Record]]:
        if self._engine is not None:
            with _errors_of_mlflow(), self._engine.connect() as connection:
                for run_id in run_ids:
                    for record in _sampled(connection, {"run_id": run_id, "key": key}, most):
                        yield run_id, record
        elif not self._is_server:
            sample = sample_of_store(self._client, run_ids, key, most)
            yield from self._without_superseded(sample, key, most)
        else:
            starts = range(0, len(run_ids), RUNS_A_REQUEST)
            parts = [run_ids[first : first + RUNS_A_REQUEST] for first in starts]
            with ThreadPoolExecutor(CONNECTIONS) as readers:
                for part in readers.map(lambda ids: self._of_server(ids, key, most), parts):
                    yield from part

    def _of_server(self, run_ids: Sequence[str], key: str, most: int) -> list[tuple[str, Record]]:
        if self._has_bulk:
            limit_s = max(ANSWER_S, float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", 0)))
            sample = sample_of_server(self._client, run_ids, key, most, limit_s)
            if sample is not None:
                return self._without_superseded(sample, key, most)
            self._has_bulk = False  # a proxy, or a managed server, without the pages' own calls
        return [(run_id, one) for run_id in run_ids for one in self._thinned(run_id, key, most)]

    def _without_superseded(
        self, sample: list[tuple[str, Record]], key: str, most: int
    ) -> list[tuple[str, Record]]:
        """The sample, of histories in which some step has an earlier time than one before it anew.

        Going back by less than the distance of two points of the sample does not show in it.
        """
        by_run: dict[str, list[Record]] = {}
        for run_id, record in sample:
            by_run.setdefault(run_id, []).append(record)
        return [
            (run_id, record)
            for run_id, records in by_run.items()
            for record in (
                self._thinned(run_id, key, most) if _goes_back(records, most) else records
            )
        ]

    def _thinned(self, run_id: str, key: str, most: int) -> list[Record]:
        """Of the whole history the latest record of each step, as far as they are drawn."""
        history = self._client.get_metric_history(run_id, key)
        latest = {m.step: (m.step, m.timestamp, m.value) for m in sorted(history, key=_order)}
        return _spread([*latest.values()], most)


@contextlib.contextmanager
def _errors_of_mlflow() -> Iterator[None]:
    """Inside this block an error of the database is one of MLflow, as in MLflow's own reading."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        raise MlflowException(str(error)) from error


def _order(metric: Metric) -> Record:
    return metric.step, metric.timestamp, metric.value


def _goes_back(sample: Sequence[Record], most: int) -> bool:
    """Whether some of a history is left out, and it has a step that was recorded before others."""
    times = [at for _, at, _ in sorted(sample)]
    return len(sample) >= most and times != sorted(times)


def _curve(records: Iterable[Record]) -> Curve:
    last = {step: value for step, _, value in sorted(records)}
    return [(float(s), float(v)) for s, v in last.items() if is_finite(v)]


def is_finite(value: float) -> bool:
    """Whether a recorded value is a number; a store in SQL keeps infinity as the greatest float."""
    return abs(value) < sys.float_info.max


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def _is_indexed(engine: sa.Engine) -> bool:
    """Whether the schema is of an MLflow that indexes the points of a run, as 3.17 does."""
    indices = sa.inspect(engine).get_indexes(METRICS)
    return any(
        tuple(index["column_names"][: len(METRICS_INDEX)]) == METRICS_INDEX for index in indices
    )


def _sampled(connection: sa.Connection, of: dict[str, str], most: int) -> list[Record]:
    """All of a short history; of a long one what stands at evenly spaced steps.

    Where these find too few, because it is uneven, at every so-manieth of its recorded steps.
    """
    beginning = _records(connection.execute(_BEGINNING.limit(most + 1), of))
    if len(beginning) <= most:
        return beginning
    first, last = beginning[0][0], connection.execute(_LAST, of).scalar_one()
    even = [first + (last - first) * i // (most - 1) for i in range(most)]
    records = _records_at(connection, of, even)
    if len({step for step, *_ in records}) >= min(most // 2, last - first + 1):
        return records
    recorded = [*dict.fromkeys(connection.execute(_STEPS, of).scalars())]
    return _records_at(connection, of, _spread(recorded, most))


def _records_at(connection: sa.Connection, of: dict[str, str], steps: list[int]) -> list[Record]:
    """Records of the first recorded step from each of these on."""
    each = {f"step_{i}": step for i, step in enumerate(dict.fromkeys(steps))}
    return _records(connection.execute(_first_from_each(len(each)), {**of, **each}))


def _records(rows: Iterable[Any]) -> list[Record]:
    return [(step, at, float("nan") if is_nan else value) for step, at, value, is_nan in rows]


_IN_ORDER: Final = (_OF_RUN, _step.between(*ALL_STEPS))
_BEGINNING: Final = sa.select(*_RECORD).where(*_IN_ORDER).order_by(_step)
_STEPS: Final = sa.select(_step).where(*_IN_ORDER).order_by(_step)
_LAST: Final = sa.select(sa.func.max(_step)).where(_OF_RUN)


@functools.cache
def _first_from_each(count: int) -> sa.CompoundSelect[Any]:
    """One statement of as many parts, each of which an index answers in every dialect."""
    return sa.union_all(*(_first_from(f"step_{i}") for i in range(count)))


def _first_from(name: str) -> sa.Select[Any]:
    wanted = sa.select(sa.func.min(_step)).where(_OF_RUN, _step >= sa.bindparam(name))
    step = wanted.correlate(None).scalar_subquery()
    # SQLite would look for `step = ` by the index of the primary key, and read every run's points.
    return sa.select(*_RECORD).where(_OF_RUN, _step.between(step, step))
