"""Why groups fail and on which nodes, by Ray's own errors: no Ray runs."""

from typing import Any

import pytest
import ray
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from vit_ray.launch.failures import (
    IN_A_ROW_S,
    LEFT_OUT_S,
    FailingNodes,
    cause,
    counts,
    failing_node,
)
from vit_ray.outcomes import WorkerPlace
from vit_ray.storage import locate
from vit_ray.worker.job import SmallerMicroBatchError

# As Ray 2.60's raylet writes it.
MEMORY = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.7, ID: 3f2a) was 60.80GB used / 64.00GB limit (0.950000)
Object store memory usage: [(- objects spillable: 0)]
Top 10 memory users:
PID\tMEM(GB)\tCOMMAND
71\t12.5\tray::RayTrainWorker
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io. \
Consider provisioning more memory on this node. To disable worker killing, set the environment \
variable `RAY_memory_monitor_refresh_ms` to zero."""
BAD_CARD, BY_PEER = RuntimeError("CUDA error: ECC"), RuntimeError("Connection reset by peer")
DIED = ray.exceptions.RayActorError(
    error_msg="Worker exits with a connection error code 2. End of file."
)
PLACES = {
    rank: WorkerPlace(f"10.0.0.{node}", node, f"GPU 3, pid 4{rank}, log /l/w.err", 57)
    for rank, node in enumerate("12")
}


def failed(*errors: Exception) -> WorkerGroupError:
    return WorkerGroupError("workers failed", dict(enumerate(errors)))


def hidden(error: Exception) -> Exception:
    return WorkerHealthCheckFailedError("A worker health check failed.", error)


@pytest.mark.parametrize(
    ("errors", "node"),
    [
        ((BY_PEER, BAD_CARD), "2"),
        ((BAD_CARD, BY_PEER), "1"),
        ((BY_PEER, DIED), "2"),
        ((BY_PEER, hidden(DIED)), "2"),
        ((BY_PEER, BY_PEER), None),  # nobody knows whose fault it is
        ((BAD_CARD, BAD_CARD), None),
        ((BY_PEER, SmallerMicroBatchError("8 images", 4)), None),
        ((BY_PEER, RuntimeError(MEMORY)), None),
    ],
)
def test_the_node_of_a_failure_is_that_of_the_only_worker_that_did_not_lose_another(errors, node):
    found = failing_node(failed(*errors), PLACES)
    assert (found.node if found else None) == node
    assert failing_node(ControllerError(RuntimeError("x")), PLACES) is None


def test_a_host_without_memory_is_named_with_its_figures():
    text = cause(failed(BY_PEER, hidden(ray.exceptions.OutOfMemoryError(MEMORY))))
    assert text.startswith("worker 1: host 10.0.0.7 ran out of memory (60.80GB used / 64.00GB")
    assert text.endswith("worker 0: Connection reset by peer")
    starting = ControllerError(ray.exceptions.OutOfMemoryError(MEMORY))
    assert "host 10.0.0.7 ran out of memory" in cause(starting)
    assert counts(starting)


def node(name: str, host: str) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": host}


NODES = (node("1", "10.0.0.1"), node("2", "10.0.0.2"))


def test_failures_that_lie_far_apart_or_on_nodes_in_turn_are_no_defect_of_a_node():
    now_s = [1e9]
    nodes = FailingNodes(None, lambda: now_s[0])
    for _ in range(3):
        nodes.note(PLACES[0])
        now_s[0] += IN_A_ROW_S + 1
    assert nodes.among(NODES) == {}
    nodes.note(PLACES[0])
    nodes.note(PLACES[0])
    assert nodes.among(NODES) == {"1": "10.0.0.1"}
    now_s[0] += LEFT_OUT_S + 1
    assert nodes.among(NODES) == {}  # it may have been repaired
    nodes.note(PLACES[0])
    assert nodes.among(NODES) == {"1": "10.0.0.1"}
    in_turn = FailingNodes(None)
    for place in (PLACES[0], PLACES[1], PLACES[0], None, PLACES[0]):
        in_turn.note(place)
    assert in_turn.among(NODES) == {}


def test_the_next_driver_knows_a_failing_node_also_by_its_host(tmp_path):
    """Ray's id of a node is another one after its raylet has started again."""
    folder = locate(str(tmp_path))
    first = FailingNodes(folder)
    first.note(PLACES[0])
    first.note(PLACES[0])
    second = FailingNodes(folder)
    assert second.among(NODES) == {"1": "10.0.0.1"}
    assert second.among((node("9", "10.0.0.1"), NODES[1])) == {"9": "10.0.0.1"}
    both = (node("8", "10.0.0.1"), node("9", "10.0.0.1"))
    assert second.among(both) == {}  # which of them is not known
