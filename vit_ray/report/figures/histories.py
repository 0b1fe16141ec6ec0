"""Curves of metrics: exact recorded points, few enough to draw, however long the histories are.

From an SQL store only the points that are drawn are read, each by the index of run, key and step;
for an uneven history also all of its steps. A server returns its own even sample, for which it
reads every point of the histories. That sample may hold superseded records if a run went back and
recorded steps again: a history whose sample shows this is read whole. So are all histories if there
is neither the index nor the call.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import sqlalchemy as sa
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
)

T = TypeVar("T")
Curve = list[tuple[float, float]]
"""Steps, ascending and each once, and finite values."""

RUNS_A_REQUEST: Final = 5
"""Histories that one request asks for."""
ANSWER_S: Final = 60.0
"""Longest wait for them, longer than for other requests: a server reads every point to sample
some."""
CONNECTIONS: Final = 4
_METRICS: Final = sa.table(METRICS, *map(sa.column, METRICS_COLUMNS))
_run, _key, _step, *_values = (_METRICS.c[name] for name in METRICS_COLUMNS)
_OF_RUN: Final = sa.and_(_run == sa.bindparam("run_id"), _key == sa.bindparam("key"))
_IN_ORDER: Final = (_OF_RUN, _step.between(*ALL_STEPS))
_BEGINNING: Final = sa.select(_step, *_values).where(*_IN_ORDER).order_by(_step)
_STEPS: Final = sa.select(_step).where(*_IN_ORDER).order_by(_step)
_LAST: Final = sa.select(sa.func.max(_step)).where(_OF_RUN)


class Histories:
    """Histories of the runs in one store, which is only read."""

    def __init__(self, client: MlflowClient, *, is_server: bool) -> None:
        self._client = client
        self._has_bulk = is_server
        engine = None if is_server else engine_of(client)
        with _errors_of_mlflow():  # MLflow has had the index since 3.17
            indices = sa.inspect(engine).get_indexes(METRICS) if engine else []
        heads = [tuple(one["column_names"][: len(METRICS_INDEX)]) for one in indices]
        self._engine: sa.Engine | None = engine if METRICS_INDEX in heads else None

    def curves(self, run_ids: Sequence[str], key: str, most: int) -> dict[str, Curve]:
        """Run id to its curve, for each run that has one: at most this many points, at least two.

        For a longer history these are the first, the last, and others spread evenly between them.
        """
        records: dict[str, list[Record]] = {}
        if self._engine is not None:
            with _errors_of_mlflow(), self._engine.connect() as connection:
                for run_id in run_ids:
                    records[run_id] = _sampled(connection, {"run_id": run_id, "key": key}, most)
        else:
            starts = range(0, len(run_ids), RUNS_A_REQUEST)
            parts = [run_ids[first : first + RUNS_A_REQUEST] for first in starts]
            with ThreadPoolExecutor(CONNECTIONS) as readers:
                for part in readers.map(lambda ids: self._fetched(ids, key, most), parts):
                    records |= part
        latest = {
            run_id: {step: value for step, _, value in sorted(held)}
            for run_id, held in records.items()
            if held
        }
        return {
            run_id: [(float(s), float(v)) for s, v in held.items() if is_finite(v)]
            for run_id, held in latest.items()
        }

    def _fetched(self, run_ids: Sequence[str], key: str, most: int) -> dict[str, list[Record]]:
        sample = None
        if self._has_bulk:
            limit_s = max(ANSWER_S, float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", 0)))
            sample = sample_of_server(self._client, run_ids, key, most, limit_s)
            # A proxy or a managed server may lack the call that MLflow's own pages make.
            self._has_bulk = sample is not None
        if sample is None:
            return {run_id: self._whole(run_id, key, most) for run_id in run_ids}
        records: dict[str, list[Record]] = {}
        for run_id, record in sample:
            records.setdefault(run_id, []).append(record)
        for run_id, held in records.items():
            # Going back by less than the distance of two sampled points does not show in the
            # sample.
            times = [at for _, at, _ in sorted(held)]
            if len(held) >= most and times != sorted(times):
                records[run_id] = self._whole(run_id, key, most)
        return records

    def _whole(self, run_id: str, key: str, most: int) -> list[Record]:
        """The latest record of each step in the whole history, thinned to what is drawn."""
        history = self._client.get_metric_history(run_id, key)
        ordered = sorted((one.step, one.timestamp, one.value) for one in history)
        return spread([*{record[0]: record for record in ordered}.values()], most)


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most this many of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


@contextlib.contextmanager
def _errors_of_mlflow() -> Iterator[None]:
    """Inside this block errors of the database become MLflow errors, as MLflow does."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        raise MlflowException(str(error)) from error


def is_finite(value: float) -> bool:
    """Whether a recorded value is a number; an SQL store keeps infinity as the largest float."""
    return abs(value) < sys.float_info.max


def _sampled(connection: sa.Connection, of: dict[str, str], most: int) -> list[Record]:
    """All records of a short history; for a long one those at evenly spaced steps.

    If these are too few, because the history is uneven: every n-th recorded step.
    """

    def read(statement: Any, values: dict[str, Any]) -> list[Record]:
        rows = connection.execute(statement, values)
        return [(step, at, float("nan") if is_nan else value) for step, at, value, is_nan in rows]

    def read_from(steps: Iterable[int]) -> list[Record]:
        each = {f"step_{i}": step for i, step in enumerate(dict.fromkeys(steps))}
        return read(_first_from_each(len(each)), {**of, **each})

    beginning = read(_BEGINNING.limit(most + 1), of)
    if len(beginning) <= most:
        return beginning
    first, last = beginning[0][0], connection.execute(_LAST, of).scalar_one()
    records = read_from(first + (last - first) * i // (most - 1) for i in range(most))
    if len({step for step, *_ in records}) >= min(most // 2, last - first + 1):
        return records
    recorded = [*dict.fromkeys(connection.execute(_STEPS, of).scalars())]
    return read_from(spread(recorded, most))


@functools.cache
def _first_from_each(count: int) -> sa.CompoundSelect[Any]:
    """Records of the first recorded step from each of `step_0`, `step_1`, ... on.

    One statement with this many parts; an index answers each in every dialect.
    """
    parts = []
    for i in range(count):
        wanted = sa.select(sa.func.min(_step)).where(_OF_RUN, _step >= sa.bindparam(f"step_{i}"))
        step = wanted.correlate(None).scalar_subquery()
        # For `step = ` SQLite would use the index of the primary key, and read every run's points.
        parts.append(sa.select(_step, *_values).where(_OF_RUN, _step.between(step, step)))
    return sa.union_all(*parts)
