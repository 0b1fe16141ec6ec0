"""Why a worker group has failed, where, and which nodes fail repeatedly."""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.train import PreemptionError

from vit_ray.outcomes import WorkerPlace
from vit_ray.ray_internals import memory_kill, without_retry_note
from vit_ray.storage import Location
from vit_ray.worker.job import SmallerMicroBatchError

IN_A_ROW_S: Final = 3600.0
"""Failures on a node that are further apart are not counted as a defect of it."""
LEFT_OUT_S: Final = 6 * 3600.0
"""After this time a node, perhaps repaired, is tried again; then a single failure is enough."""
NODES_FILE: Final = "failing_nodes.json"
"""In the run's folder, so that the next driver knows them."""

_MOST_CAUSES: Final = 3
_COLLATERAL: Final = re.compile(r"connection|peer|timed? ?out|nccl|gloo", re.IGNORECASE)


def cause(error: BaseException, places: Mapping[int, WorkerPlace] | None = None) -> str:
    """The workers' own errors, without Ray's frames; errors that are only consequences come last.

    A worker that dies breaks the connections of the others.

    Args:
        places: of the workers by rank, as far as known.
    """
    places = places or {}
    failures = _worker_failures(error)
    if not failures:
        return _text(getattr(error, "controller_failure", error))
    by_text: dict[str, tuple[bool, int]] = {}
    for rank, failure in sorted(failures.items()):
        text = _text(failure)
        by_text.setdefault(text, (_is_collateral(failure, text), rank))
    shown = []
    for text in sorted(by_text, key=by_text.__getitem__)[:_MOST_CAUSES]:
        rank = by_text[text][1]
        place = f" {places[rank]}" if rank in places else ""
        shown.append(f"worker {rank}{place}: {text}")
    return "; ".join(shown)


def _text(error: BaseException) -> str:
    if found := memory_kill(error):
        return (
            f"host {found[0]} ran out of memory ({found[1]}), so Ray ended the process; use "
            "nodes with more memory, or fewer workers per node (a larger "
            "workers.cpus_per_worker)"
        )
    lines = [line for line in without_retry_note(str(error)).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)


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
        for rank, failure in _worker_failures(error).items()
        if not (_is_ours(failure) or memory_kill(failure))
        and (_died_of(failure) is not None or not _is_collateral(failure, str(failure)))
    }
    found = [places[rank] for rank in sorted(blamed) if rank in places]
    is_one = len(found) == len(blamed) and len({place.node for place in found}) == 1
    return found[0] if is_one else None


def counts(error: Any) -> bool:
    """Whether a failure counts against `workers.max_failures`.

    A preempted node does not: it was taken away. Nor does a pass that did not fit into memory: a
    smaller micro-batch is the remedy, and there are only a few smaller sizes.
    """
    if isinstance(error, PreemptionError) or micro_batch_limit(error) is not None:
        return False
    failures = _worker_failures(error).values()
    deaths = [death for failure in failures if (death := _died_of(failure)) is not None]
    return not any(death.preempted for death in deaths)


def micro_batch_limit(error: Any) -> int | None:
    """Most images per pass in the next attempt, if this one ran out of memory; else None."""
    failures = _worker_failures(error).values()
    limits = [one.limit for one in failures if isinstance(one, SmallerMicroBatchError)]
    return min(limits, default=None)


def _worker_failures(error: Any) -> Mapping[int, Exception]:
    """By rank; of workers that died before they trained, too (`GroupBackend`)."""
    error = getattr(error, "controller_failure", error)
    return getattr(error, "worker_failures", None) or {}


def _died_of(failure: BaseException) -> RayActorError | None:
    """Why the worker's process has ended or cannot be reached, if that is the failure."""
    hidden = getattr(failure, "health_check_failure", failure)
    return hidden if isinstance(hidden, RayActorError) else None


class FailingNodes:
    """Nodes on which the group has failed twice in a row; recorded in the run's folder.

    A node is its id, which changes when its raylet restarts, and its address.
    """

    def __init__(self, folder: Location | None, clock: Callable[[], float] = time.time) -> None:
        """`folder`: None = nothing is recorded, as for an evaluation."""
        self._file = folder.child(NODES_FILE) if folder else None
        self._clock = clock
        self._left: dict[tuple[str, str], float] = {}
        """Unix time until which each is left out."""
        self._last, self._last_s = ("", ""), 0.0
        if self._file and self._file.exists():
            recorded = json.loads(self._file.read())
            self._left = {(node, host): until_s for node, host, until_s in recorded}

    def note(self, place: WorkerPlace | None) -> None:
        """Count a failure of the group: on a single node, or not (None)."""
        node = (place.node, place.host) if place else ("", "")
        now_s, before = self._clock(), self._last
        is_second = node == before and now_s - self._last_s < IN_A_ROW_S
        self._last, self._last_s = node, now_s
        if place and (is_second or node in self._left):
            self._left[node] = now_s + LEFT_OUT_S
            if self._file:
                rows = [[*one, until_s] for one, until_s in self._left.items()]
                self._file.write(json.dumps(rows).encode())

    def among(self, nodes: tuple[Mapping[str, Any], ...]) -> dict[str, str]:
        """Those of the nodes, as Ray lists them, that are left out now: id to host."""
        now_s = self._clock()
        left = [node for node, until_s in self._left.items() if now_s < until_s]
        left_ids = {node for node, _ in left}
        left_hosts = {host for _, host in left}
        hosts = [node["NodeManagerAddress"] for node in nodes]
        return {
            node["NodeID"]: host
            for node, host in zip(nodes, hosts, strict=True)
            if node["NodeID"] in left_ids or (host in left_hosts and hosts.count(host) == 1)
        }
