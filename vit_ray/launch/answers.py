"""Answers of the driver's own actors: waited for with a limit, and named when they do not come."""

from __future__ import annotations

from typing import Any, Final

import ray

ANSWER_LIMIT_S: Final = 300.0
"""The slowest, an MLflow server that is away, is given up after less."""
PROCESS_DIED: Final = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""What a call of an actor raises whose process has ended; the second where Ray has ended it."""


def answer(reference: Any, whose: str, timeout_s: float = ANSWER_LIMIT_S) -> Any:
    """What the call behind `reference` returns.

    Raises:
        RuntimeError: it has not answered in time.
        RayError: its process has died.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise RuntimeError(
            f"{whose} has not answered in {timeout_s:g} s: its process, on the driver's node, "
            "hangs or has no CPU time; look at that machine, then give the same command again"
        ) from None
