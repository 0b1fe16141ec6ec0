"""The wait for a place, on a cluster and a clock of the test's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.worker.fakes import FakeRun, make_job
from vit_ray.launch import placement
from vit_ray.launch.failures import FailingNodes
from vit_ray.launch.placement import PlaceFinder
from vit_ray.outcomes import RunFailedError, RunStoppedError, WorkerPlace


class Cluster:
    """Nodes of some CPUs, of which others hold some; a look takes its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **cpus: float) -> None:
        self.cpus, self.held, self.now_s = dict(cpus), 0.0, 1e9
        self.asked: list[tuple[int, Any]] = []
        self.num_open = 0
        monkeypatch.setattr(placement, "placement_group", self._ask)
        monkeypatch.setattr(placement, "remove_placement_group", self._give_up)
        monkeypatch.setattr(placement, "live_nodes", self.nodes)
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": sum(self.cpus.values())})
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.0})

    def nodes(self, selector: Any = None) -> tuple[dict[str, Any], ...]:
        named = (selector or {}).get("ray.io/node-id", "")
        return tuple(
            {"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "Resources": {"CPU": cpus}}
            for name, cpus in self.cpus.items()
            if name not in named
        )

    def _ask(self, bundles: Any, strategy: str, *, bundle_label_selector: Any) -> Any:
        assert strategy == placement.STRATEGY
        self.num_open += 1
        self.asked.append((len(bundles), bundle_label_selector and bundle_label_selector[0]))
        need = sum(bundle["CPU"] for bundle in bundles)
        nodes = self.nodes(bundle_label_selector and bundle_label_selector[0])
        return Group(self, need, sum(node["Resources"]["CPU"] for node in nodes))

    def _give_up(self, group: Any) -> None:
        self.num_open -= 1


class Group:
    def __init__(self, cluster: Cluster, need: float, cpus: float) -> None:
        self._cluster, self._need, self._cpus = cluster, need, cpus

    def wait(self, timeout_s: float) -> bool:
        self._cluster.now_s += timeout_s
        return self._need <= self._cpus - self._cluster.held


def finder(
    cluster: Cluster, run: FakeRun, failing: FailingNodes | None = None, **workers: Any
) -> PlaceFinder:
    job = make_job(Path("/x"), workers=workers, data={"cpus_per_task": 0.5})
    job = replace(job, record=run)
    failing = failing or FailingNodes(None)
    return PlaceFinder(job, failing, use_gpu=False, clock=lambda: cluster.now_s)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch, a=4.0)


def test_what_is_missing_is_told_every_ten_seconds_until_the_limit_or_a_stop(cluster):
    run = FakeRun()
    run.stop = "Ctrl-C"
    with pytest.raises(RunStoppedError, match=r"^Ctrl-C$"):
        finder(cluster, run, num_workers=8).wait_for_place()
    assert (cluster.num_open, run.events) == (0, [])
    run.stop = None
    wants = finder(cluster, run, num_workers=8, place_timeout_minutes=1.0)
    with pytest.raises(RunFailedError, match=r"8 CPU \(the cluster has 4, .*minutes=1\)$"):
        wants.wait_for_place()
    assert [text.partition(":")[0] for _, text, _ in run.events] == [
        f"no workers for {seconds} s" for seconds in (10, 20, 30, 40, 50, 60)
    ]
    assert cluster.num_open == 0


def test_a_place_that_is_lost_again_and_again_is_not_asked_for_without_limit(cluster):
    run = FakeRun()
    wants = finder(cluster, run, num_workers=4, place_timeout_minutes=1.0)
    place = wants.wait_for_place()
    assert (place.waited_s, cluster.asked) == (placement.LOOK_S, [(4, None)])
    for _ in range(2):
        cluster.now_s += 20.0  # which Ray Train has waited
        place = wants.wait_for_place(place.since_s)
    cluster.now_s += 20.0
    with pytest.raises(RunFailedError, match=r"no workers for 6\d s: .* lost .*minutes=1\)$"):
        wants.wait_for_place(place.since_s)
    assert len(run.events) == 2


@pytest.mark.parametrize(("cpus", "held", "size"), [
    (9.0, 0.0, 8),
    (8.0, 0.0, 4),  # eight leave no CPU to read with
    (9.0, 2.0, 4),  # others hold the rest
    (1.5, 0.0, 1),
])  # fmt: skip
def test_an_elastic_group_has_the_largest_size_that_fits_and_leaves_a_cpu_for_reading(
    cpus, held, size, cluster
):
    cluster.cpus, cluster.held = {"a": cpus}, held
    run = FakeRun()
    place = finder(cluster, run, num_workers=[1, 8]).wait_for_place()
    assert (place.size, place.labels, cluster.num_open, run.events) == (size, {}, 0, [])


def test_a_node_that_fails_is_left_out_where_the_others_have_room(cluster):
    cluster.cpus = {"1": 4.0, "2": 4.0}
    failing, run = FailingNodes(None), FakeRun()
    for _ in range(2):
        failing.note(WorkerPlace("10.0.0.1", "1", "", 5))
    wants = finder(cluster, run, failing, num_workers=4, label_selector={"pool": "a"})
    for _ in range(2):
        place = wants.wait_for_place()
        assert place.labels == {"pool": "a", "ray.io/node-id": "!in(1)"}
    assert run.events == []
    # Where no other nodes have room for it, a group with the bad one is better than none.
    assert finder(cluster, run, failing, num_workers=8).wait_for_place().labels == {}
    cluster.held = 4.0  # nor where others keep what they have
    place = wants.wait_for_place()
    assert place.labels == {"pool": "a"}
    assert place.waited_s > 60
