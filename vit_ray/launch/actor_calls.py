"""Calls of the driver's own actors, with a time limit and an error that names the actor."""

from typing import Any, Final

import ray

ANSWER_LIMIT_S: Final = 300.0
"""Longer than the slowest call, to an MLflow server that is away, whose own limit is shorter."""


class ProcessDiedError(ray.exceptions.RayError, RuntimeError):
    """The process of one of the driver's actors has died; the text names the actor."""


_DIED: Final = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""The second is raised if Ray has ended the actor."""
PROCESS_DIED: Final = (*_DIED, ProcessDiedError)
"""What a call of an actor raises if its process has ended, with and without `answer`."""


def answer(
    reference: Any, whose: str, timeout_s: float = ANSWER_LIMIT_S, left_s: float | None = None
) -> Any:
    """What the call behind `reference` returns.

    Args:
        left_s: what earlier calls have left of `timeout_s`.

    Raises:
        RuntimeError: it has not answered in time.
        ProcessDiedError: its process has died.
        RayError: the call has failed.
    """
    try:
        return ray.get(reference, timeout=timeout_s if left_s is None else max(left_s, 0.0))
    except ray.exceptions.GetTimeoutError:
        raise RuntimeError(
            f"{whose} has not answered in {timeout_s:g} s: its process, on the driver's node, "
            "hangs or gets no CPU time; check that machine, then run the same command again"
        ) from None
    except _DIED as error:
        raise ProcessDiedError(f"the process of {whose} has died: {error}") from error
