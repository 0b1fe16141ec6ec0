"""Why a worker group has failed: the workers' own errors, and where those workers were."""

import re
from collections.abc import Mapping
from typing import Any, Final

from ray.exceptions import ActorDiedError, RayActorError

from vit_ray.outcomes import WorkerPlace
from vit_ray.ray_internals import memory_kill, without_retry_note

_MOST_CAUSES: Final = 3
_COLLATERAL: Final = re.compile(r"connection|peer|timed? ?out|nccl|gloo", re.IGNORECASE)


def cause(error: BaseException, places: Mapping[int, WorkerPlace] | None = None) -> str:
    """The workers' own errors, without Ray's frames; errors that are only consequences come last.

    A worker that dies breaks the connections of the others.

    Args:
        places: of the workers by rank, as far as known.
    """
    places = places or {}
    failures = getattr(error, "worker_failures", None)
    if not failures:
        if found := memory_kill(error):
            return (
                f"host {found[0]} ran out of memory ({found[1]}), so Ray ended the process; use "
                "nodes with more memory, or fewer workers per node (a larger "
                "workers.cpus_per_worker)"
            )
        lines = [line for line in without_retry_note(str(error)).splitlines() if line.strip()]
        return lines[-1].strip() if lines else repr(error)
    by_text: dict[str, tuple[bool, int]] = {}
    for rank, failure in sorted(failures.items()):
        text = cause(failure)
        by_text.setdefault(text, (_is_collateral(failure, text), rank))
    shown = []
    for text in sorted(by_text, key=by_text.__getitem__)[:_MOST_CAUSES]:
        rank = by_text[text][1]
        place = f" {places[rank]}" if rank in places else ""
        shown.append(f"worker {rank}{place}: {text}")
    return "; ".join(shown)


def _is_collateral(failure: BaseException, text: str) -> bool:
    """Whether a worker has only lost the others, by the messages of torch 2's NCCL and Gloo."""
    return not _is_ours(failure) and bool(_COLLATERAL.search(text))


def _is_ours(failure: BaseException) -> bool:
    return type(failure).__module__.startswith("vit_ray")


def failing_node(error: Any, places: Mapping[int, WorkerPlace]) -> WorkerPlace | None:
    """A place on the only node that may have caused a failure; None if there is no such node.

    Our own errors, and a lack of memory, would happen on any node.
    """
    blamed = {
        rank: failure
        for rank, failure in getattr(error, "worker_failures", {}).items()
        if not (_is_ours(failure) or memory_kill(failure))
        and (_has_died(failure) or not _is_collateral(failure, str(failure)))
    }
    found = [places[rank] for rank in sorted(blamed) if rank in places]
    is_one = len(found) == len(blamed) and len({place.node for place in found}) == 1
    return found[0] if is_one else None


def _has_died(failure: BaseException) -> bool:
    """Whether the worker's process has ended, or cannot be reached."""
    hidden = getattr(failure, "health_check_failure", failure)
    return isinstance(hidden, RayActorError)


def is_gone(failure: BaseException) -> bool:
    """Whether Ray knows that the worker's process has ended."""
    hidden = getattr(failure, "health_check_failure", failure)
    return isinstance(hidden, ActorDiedError)
