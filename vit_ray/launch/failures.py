"""Why a worker group has failed, where, and which nodes fail repeatedly."""

import json
import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.train import PreemptionError

from vit_ray.outcomes import WorkerPlace
from vit_ray.ray_internals import memory_kill, without_retry_note
from vit_ray.storage import Location
from vit_ray.worker.job import SmallerMicroBatchError

# In the run's folder, for the next driver.
_NODES_FILE: Final = "failing_nodes.json"
_MAX_CAUSES: Final = 3
_COLLATERAL: Final = re.compile(r"connection|peer|timed? ?out|nccl|gloo", re.IGNORECASE)


def cause(error: BaseException, worker_info: Mapping[int, WorkerPlace]) -> str:
    """The workers' errors, without Ray's frames; lost connections come last.

    A worker that dies breaks the connections of the other ranks.

    Args:
        worker_info: of the workers by rank, as far as known.
    """
    failures = _worker_failures(error)
    if not failures:
        return _text(getattr(error, "controller_failure", error))
    by_text: dict[str, tuple[bool, int]] = {}
    for rank, failure in sorted(failures.items()):
        text = _text(failure)
        by_text.setdefault(text, (_is_collateral(failure, text), rank))
    causes = []
    for text, (_, rank) in sorted(by_text.items(), key=itemgetter(1))[:_MAX_CAUSES]:
        where = f" {worker_info[rank]}" if rank in worker_info else ""
        causes.append(f"worker {rank}{where}: {text}")
    return "; ".join(causes)


def _text(error: BaseException) -> str:
    if kill := memory_kill(error):
        return (
            f"host {kill[0]} ran out of memory ({kill[1]}), so Ray ended the process; use "
            "nodes with more memory, or fewer workers per node (a larger "
            "workers.cpus_per_worker)"
        )
    lines = [line for line in without_retry_note(str(error)).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)


def _is_collateral(failure: BaseException, text: str) -> bool:
    """Whether a worker has only lost other ranks, by the messages of torch 2's NCCL and Gloo."""
    return not _is_ours(failure) and bool(_COLLATERAL.search(text))


def _is_ours(failure: BaseException) -> bool:
    return type(failure).__module__.startswith("vit_ray")


def failing_node(error: Any, worker_info: Mapping[int, WorkerPlace]) -> WorkerPlace | None:
    """A worker on the only node that may have caused a failure; None if there is no such node.

    Errors of this package, and a lack of memory, would happen on any node.
    """
    blamed = {
        rank: failure
        for rank, failure in _worker_failures(error).items()
        if not (_is_ours(failure) or memory_kill(failure))
        and (isinstance(failure, RayActorError) or not _is_collateral(failure, str(failure)))
    }
    workers = [worker_info[rank] for rank in sorted(blamed) if rank in worker_info]
    is_one_node = len(workers) == len(blamed) and len({worker.node for worker in workers}) == 1
    return workers[0] if is_one_node else None


def counts(error: Any) -> bool:
    """Whether a failure counts against `workers.max_failures`.

    Neither a preempted node counts, nor a pass that did not fit into memory: the next attempt has a
    smaller micro-batch, of which there are only a few sizes.
    """
    if isinstance(error, PreemptionError) or micro_batch_limit(error) is not None:
        return False
    failures = _worker_failures(error).values()
    return not any(isinstance(each, RayActorError) and each.preempted for each in failures)


def micro_batch_limit(error: Any) -> int | None:
    """Maximum images per pass in the next attempt, if this one ran out of memory; else None."""
    failures = _worker_failures(error).values()
    limits = [each.limit for each in failures if isinstance(each, SmallerMicroBatchError)]
    return min(limits, default=None)


def _worker_failures(error: Any) -> Mapping[int, Exception]:
    """Errors by rank, also of workers that died before they trained (`GroupBackend`).

    The error of a process that has ended or cannot be reached is a `RayActorError`.
    """
    error = getattr(error, "controller_failure", error)
    failures = getattr(error, "worker_failures", None) or {}
    return {rank: getattr(each, "health_check_failure", each) for rank, each in failures.items()}


class FailingNodes:
    """Nodes with two failures in a row, which later groups avoid; recorded in the run's folder.

    A node has an id, which changes when its raylet restarts, and an address.
    """

    def __init__(self, folder: Location | None) -> None:
        """`folder`: None = nothing is recorded, as for an evaluation."""
        self._file = folder.child(_NODES_FILE) if folder else None
        self._excluded: list[list[str]] = []  # id and address
        self._last: list[str] = []
        if self._file and self._file.exists():
            self._excluded = json.loads(self._file.read())

    def note(self, worker: WorkerPlace | None) -> str:
        """Count a failure of the group: on a single node, or elsewhere (None).

        Returns:
            The host that later groups avoid, if this was its second failure in a row; else empty.
        """
        node, before = [worker.node, worker.host] if worker else [], self._last
        self._last = node
        if not node or node != before or node in self._excluded:
            return ""
        self._excluded.append(node)
        if self._file:
            self._file.write(json.dumps(self._excluded).encode())
        return node[1]

    def among(self, nodes: tuple[Mapping[str, Any], ...]) -> dict[str, str]:
        """The excluded ones of these nodes of `ray.nodes()`: id to host."""
        ids, addresses = {node for node, _ in self._excluded}, {host for _, host in self._excluded}
        hosts = [node["NodeManagerAddress"] for node in nodes]
        return {
            node["NodeID"]: host
            for node, host in zip(nodes, hosts, strict=True)
            if node["NodeID"] in ids or (host in addresses and hosts.count(host) == 1)
        }
