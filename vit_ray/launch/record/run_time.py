"""A run's time by class, from the marks in its log."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

from vit_ray.measure.goodput import (
    DriverBegan,
    DriverEnded,
    Failed,
    Mark,
    WaitedForPlace,
    Work,
)
from vit_ray.tracking.metrics_log import Record

_OF_WORK: Final = tuple(field.name for field in dataclasses.fields(Work))


def marks_of(records: Iterable[Record]) -> Iterator[Mark]:
    """The marks that `MetricsLog.timeline` holds."""
    for record in records:
        match record["kind"]:
            case "start":
                yield DriverBegan(record.get("began_s") or record["time_ms"] / 1000)
            case "place wait":
                yield WaitedForPlace(record["begin_s"], record["end_s"])
            case "work":
                yield Work(**{key: record[key] for key in _OF_WORK if key in record})
            case "event":
                yield Failed(record["time_ms"] / 1000)
            case "finish":
                yield DriverEnded(record["time_ms"] / 1000)
