"""What the functions of Ray's door do; `test_internals.py` finds the names."""

import importlib
import inspect
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray
import ray.train

from vit_ray import ray_internals
from vit_ray.launch.pool.failure_causes import cause
from vit_ray.launch.pool.no_barrier import NoBarrier


def test_each_name_is_given_by_the_door_and_no_other() -> None:
    assert ray_internals.FailureDecision.RAISE
    with pytest.raises(AttributeError):
        ray_internals.TrainController  # noqa: B018


def test_the_door_imports_ray_train_only_where_it_is_asked_for() -> None:
    code = (
        "import sys; from vit_ray.ray_internals import preemption_notice; "
        "sys.exit('ray.train' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_hidden_messages_are_not_printed_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[object] = []
    worker = importlib.import_module("ray._private.worker")
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, _: printed.append(data["lines"]))
    for _ in range(2):
        ray_internals.hide_printed_messages(lambda line: "have been started" in line)
    for line in ("8 workers have been started", "a worker died"):
        worker.print_to_stdstream({"lines": [line]}, False)
    assert printed == [["a worker died"]]


def test_requests_of_a_group_expire_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the group of a driver that was killed keeps its places from the next for 180 s."""
    client = importlib.import_module(
        "ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client"
    )
    monkeypatch.setattr(client, "AUTOSCALING_REQUESTS_EXPIRE_TIME_S", 180)
    monkeypatch.setattr(client, "AUTOSCALING_REQUESTS_INTERVAL_S", 20)
    ray_internals.expire_resource_requests_after(45, repeat_s=10)
    sent: list[int] = []

    class Coordinator:
        class request_resources:  # noqa: N801
            @staticmethod
            def remote(**request: object) -> None:
                sent.append(int(str(request["expire_after_s"])))

    requester = client.TrainAutoscalingCoordinatorClient("run")
    requester.__dict__["_autoscaling_coordinator"] = Coordinator
    monkeypatch.setattr(client.ray, "get", lambda *_, **__: None)
    workers = ray.train.ScalingConfig(num_workers=2)
    now_s = 100.0
    monkeypatch.setattr(client.time, "monotonic", lambda: now_s)
    requester.send_resource_request(workers, 2)
    now_s += 9.0
    requester.maybe_send_resource_request(workers, 2)
    assert sent == [45]
    now_s += 2.0
    requester.maybe_send_resource_request(workers, 2)
    assert sent == [45, 45]


def test_groups_of_workers_are_placed_under_a_name_and_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("ray.train.v2._internal.execution.worker_group.worker_group")
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(module, "placement_group", lambda **options: asked.append(options))
    ray_internals.name_placement_groups("pool-7")
    group = SimpleNamespace(
        resources_per_worker={"CPU": 2.0},
        num_workers=2,
        placement_strategy="PACK",
        label_selector=None,
    )
    scaling = ray.train.ScalingConfig(num_workers=2)
    for _ in range(2):
        module.WorkerGroup._create_placement_group(None, scaling, group)
    assert [one["name"] for one in asked] == ["pool-7-0", "pool-7-1"]
    assert asked[1]["bundles"] == [{"CPU": 2.0}] * 2


def test_the_process_in_place_of_ray_trains_barrier_takes_its_calls_and_is_light(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray calls it when it replaces a worker, and when a node is preempted."""
    module = importlib.import_module("ray.train.v2._internal.execution.worker_group.worker_group")
    monkeypatch.setattr(module, "SynchronizationActor", module.SynchronizationActor)
    theirs = module.SynchronizationActor.__ray_metadata__.modified_class
    ray_internals.replace_barrier(NoBarrier)
    ours = module.SynchronizationActor.__ray_metadata__.modified_class
    assert issubclass(ours, NoBarrier)
    called = set(re.findall(r"sync_actor\.(\w+)\.remote", inspect.getsource(module)))
    assert called == {"reset", "set_required_ranks"}
    for name in called:
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(getattr(NoBarrier, name)).parameters) == wanted
    assert module.SynchronizationActor._default_options["num_cpus"] == 0


def test_a_server_may_take_its_share_of_the_cluster_that_no_rank_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's own share of 64 servers on nodes of 16 CPUs would be none."""
    autoscaler = ray_internals.RateBasedClusterAutoscaler
    plain = autoscaler.get_total_resources
    cluster = {"CPU": 1024.0, "object_store_memory": 6400.0, "memory": 640.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
    nodes = [{"NodeID": "here", "Resources": {"object_store_memory": 300.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    try:
        ray_internals.give_datasets(1 / 64, 512)
        part = autoscaler.get_total_resources(None)
        assert (part.cpu, part.object_store_memory, part.memory) == (8, 100, 10)
        ray_internals.give_datasets(1 / 2, 512)
        half = autoscaler.get_total_resources(None)
        assert (half.cpu, half.object_store_memory) == (256, 300)  # of this node's own store
        ray_internals.give_datasets(1 / 2, 2000)
        assert autoscaler.get_total_resources(None).cpu == 0
    finally:
        ray_internals.give_datasets(1, 0)
    assert autoscaler.get_total_resources is plain


@pytest.mark.parametrize("denied", ["", "ACCESS_DENIED"])
def test_ray_datas_advice_on_retries_is_taken_off_an_error(denied: str) -> None:
    """As Ray itself writes it; the last line of an error is shown as its cause."""
    util = importlib.import_module("ray.data._internal.util")
    text = "shard 'a' is missing\nor has failed to load"
    error = util._annotate_exception_with_retry_context(
        ValueError(text), description="apply UDF transform", attempts=1, max_attempts=1,
        total_backoff_s=0.0, exception_str=denied,
    )  # fmt: skip
    assert "DataContext" in str(error)
    assert ray_internals.without_retry_note(str(error)) == text
    assert ray_internals.without_retry_note(text) == text
    assert cause(error) == "or has failed to load"
