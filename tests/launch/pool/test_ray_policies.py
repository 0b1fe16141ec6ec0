"""Which failures end a run, how large an elastic group may be, and that it is saved before."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    _AutoscalingCoordinatorActor,
)
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.controller.state import (
    InitializingState,
    PreemptingState,
    ResizingState,
    RestartingState,
    RunningState,
    SchedulingState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.preemption import PreemptionInfo
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.scaling_policy import (
    autoscaling_coordinator_client as client,
)
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from tests.checkpoints.written import snapshot_of, write_snapshot
from tests.worker.fakes import FakeRun, make_job
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.checkpoints.checkpoint_format import DamagedCheckpointError
from vit_ray.launch.pool import failing_nodes, group_callbacks, ray_policies
from vit_ray.launch.pool.failing_nodes import FAILING_NODES, FailingNodes, LeaveOutNodes
from vit_ray.launch.pool.failure_causes import cause
from vit_ray.launch.pool.group_callbacks import (
    NotePlacement,
    SaveBeforeResize,
    newest_step,
    remove_groups,
)
from vit_ray.launch.pool.ray_policies import (
    KEEP_REQUEST_S,
    ConsecutiveFailurePolicy,
    DivisorScalingPolicy,
)
from vit_ray.outcomes import EventKind, Failure, WorkerPlace
from vit_ray.storage import locate
from vit_ray.worker.job import SmallerMicroBatchError, TrainJob


@pytest.mark.parametrize(
    ("nodes", "resources", "size"),
    [
        # 1, 2, 4 and 8 divide the batch
        ([{"CPU": 16.0}], {"CPU": 1.0}, 8),
        ([{"CPU": 8.0}], {"CPU": 1.0}, 4),  # eight would leave no CPU to read with
        ([{"CPU": 8.5}], {"CPU": 1.0}, 8),
        ([{"CPU": 4.0}, {"CPU": 1.0}], {"CPU": 1.0}, 4),
        ([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 1.0}, 1),
        ([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 0.5}, 2),
        ([{"CPU": 1.0}], {"CPU": 1.0}, 0),
        ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 32.0, "GPU": 3.0}], {"CPU": 1.0, "GPU": 1.0}, 4),
        ([{"CPU": 4.0, "GPU": 4.0}, {"CPU": 64.0}], {"CPU": 1.0, "GPU": 1.0}, 4),
        ([], {"CPU": 1.0}, 0),
    ],
)
def test_the_group_is_the_largest_that_divides_the_batch_and_leaves_a_cpu_to_read_with(
    nodes: list[dict[str, float]],
    resources: dict[str, float],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = {f"node-{index}": node for index, node in enumerate(nodes)}
    cpus = {name: node["CPU"] for name, node in alive.items()}
    monkeypatch.setattr(ray_policies, "cpus_by_node", lambda: cpus)
    scaling = ScalingConfig(
        num_workers=(1, 8), use_gpu="GPU" in resources, resources_per_worker=resources
    )
    policy = DivisorScalingPolicy(scaling, [1, 2, 4, 8], 0.5, lambda: None)
    lost = {"lost": {"CPU": 64.0, "GPU": 8.0}}  # Ray still holds it for the run
    assert policy._count_possible_workers(_held(alive, resources) | lost) == size


class Coordinator:
    """Ray's own, with nodes and a clock of the test's, called where an actor would be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.nodes = 0.0, ["a"]
        monkeypatch.setattr(ray, "get", lambda reference, **_: reference)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)  # it counts when it is told to
        self._counts = _AutoscalingCoordinatorActor(
            lambda: self.now_s, lambda *_, **__: None, self.alive
        )
        monkeypatch.setattr(ray, "nodes", self.alive)
        monkeypatch.setattr(client, "get_or_create_autoscaling_coordinator", lambda: self)
        monkeypatch.setattr(client.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(ray_policies, "WAIT_FOR_NODES_S", 0.0)
        # Both are set for the controller's process, which here is that of the tests.
        for name in ("AUTOSCALING_REQUESTS_EXPIRE_TIME_S", "AUTOSCALING_REQUESTS_INTERVAL_S"):
            monkeypatch.setattr(client, name, getattr(client, name))

    def alive(self) -> list[dict[str, Any]]:
        held = {"CPU": 1.0}
        return [{"NodeID": n, "Alive": True, "Resources": held} for n in self.nodes]

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self._counts, method))

    def start(self, run: str) -> DivisorScalingPolicy:
        """Policy of a run's controller, which has sent its first request."""
        scaling = ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 0.75})
        policy = DivisorScalingPolicy(scaling, [1, 2], 0.25, lambda: None)
        policy.GET_RESERVED_RESOURCES_INTERVAL_S = 0
        policy.after_controller_start(SimpleNamespace(run_id=run))
        return policy

    def size(self, policy: DivisorScalingPolicy, after_s: float = 0.0) -> int:
        """Of the group that the policy would start; 0: it waits."""
        self.now_s += after_s
        decision = policy.make_decision_for_non_running_worker_group()
        return decision.num_workers if isinstance(decision, ResizeDecision) else 0


def test_a_node_is_counted_as_soon_as_it_is_there_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch)
    policy = coordinator.start("run")
    assert coordinator.size(policy) == 1
    coordinator.nodes = ["a", "b"]
    assert coordinator.size(policy) == 2
    coordinator.nodes = ["b"]
    assert coordinator.size(policy) == 1


def test_a_driver_that_was_killed_keeps_its_places_for_seconds_and_one_that_lives_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = Coordinator(monkeypatch)
    killed = coordinator.start("killed")
    assert coordinator.size(killed) == 1
    again = coordinator.start("again")
    for _ in range(8):  # it lives
        assert coordinator.size(killed, after_s=KEEP_REQUEST_S / 4) == 1
        assert coordinator.size(again) == 0
    assert coordinator.size(again, after_s=KEEP_REQUEST_S - 1) == 0
    assert coordinator.size(again, after_s=2.0) == 1


def test_a_coordinator_that_does_not_answer_leaves_what_was_counted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = Coordinator(monkeypatch)
    policy = coordinator.start("run")

    def hangs(*_: Any) -> None:
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray_policies, "refresh_reserved_resources", hangs)
    assert coordinator.size(policy) == 1


def test_a_group_for_which_nobody_waits_any_more_stops_looking_for_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone() -> TrainJob | None:
        raise ray.exceptions.RayActorError

    policy = DivisorScalingPolicy(ScalingConfig(num_workers=(1, 2)), [1, 2], 0.5, gone)
    monkeypatch.setattr(
        ray_policies.ElasticScalingPolicy,
        "make_decision_for_non_running_worker_group",
        lambda self: NoopDecision(),
    )
    monkeypatch.setattr(ray_policies, "refresh_reserved_resources", lambda *_: None)
    with pytest.raises(ray.exceptions.RayActorError):
        policy.make_decision_for_non_running_worker_group()


def test_only_the_groups_of_one_pool_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {
        "": "PENDING",  # somebody's without a name
        "pool-a-0": "REMOVED",
        "pool-a-1": "PENDING",
        "pool-a-2": "CREATED",
        "pool-a-3": "PENDING",
        "pool-ab-0": "CREATED",
    }
    table = {str(i): {"name": n, "state": s} for i, (n, s) in enumerate(states.items())}
    removed: list[str] = []

    def found(name: str) -> str:
        if name == "pool-a-1":
            raise ValueError("it has ended by itself")
        return name

    monkeypatch.setattr(group_callbacks, "placement_group_table", lambda: table)
    monkeypatch.setattr(group_callbacks, "get_placement_group", found)
    monkeypatch.setattr(group_callbacks, "remove_placement_group", removed.append)
    remove_groups("pool-a")
    assert removed == ["pool-a-2", "pool-a-3"]


def test_a_group_has_its_place_while_it_runs_be_it_for_the_last_time() -> None:
    told: list[bool] = []
    note = SimpleNamespace(note_placement=SimpleNamespace(remote=told.append))
    callback = NotePlacement(note)
    decision = ResizeDecision(num_workers=2, resources_per_worker={})
    failure = failed(RuntimeError("lost"))
    leaving = PreemptionInfo(None, {})
    states = {
        SchedulingState(decision): False,
        RunningState(): True,
        PreemptingState(preemption_info=leaving, detected_at_s=0.0): True,
        ResizingState(decision): True,
        RestartingState(training_failed_error=failure): False,
    }
    for state in states:
        callback.after_controller_state_update(InitializingState(), state)
    assert told == list(states.values())


def _held(nodes: dict[str, dict[str, float]], worker: dict[str, float]) -> dict[str, Any]:
    """What Ray's coordinator sets aside on each node: for as many workers as fit, no more."""
    fitting = {
        name: min(node.get(key, 0.0) // n for key, n in worker.items())
        for name, node in nodes.items()
    }
    return {name: {k: n * count for k, n in worker.items()} for name, count in fitting.items()}


class Workers(FakeRun):
    """Record and control of a run, whose workers write a checkpoint when they are asked to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._step = locate(str(folder)), 0

    def request_save(self) -> None:
        self._step += 10
        where = Position(Progress(self._step), self._step, self._step, 1, {"w": [2]}, {}, "print")
        taken = snapshot_of(0, 1, {"weight|w|0": torch.ones(2)}, where)
        write_snapshot(taken, self._folder.child(folder_name(self._step)))


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return Workers(tmp_path)


def training(workers: Workers, folder: Path, max_failures: int = 5) -> Callable[[], TrainJob]:
    """What a pool's group is training."""
    job = make_job(folder, workers={"max_failures": max_failures})
    job = replace(job, record=workers, control=workers, run_folder=str(folder))
    return lambda: job


def test_a_running_group_is_saved_before_its_size_changes(workers: Any, tmp_path: Path) -> None:
    callback = SaveBeforeResize(training(workers, tmp_path))
    callback.after_controller_state_update(RunningState(), RunningState())
    assert newest_step(str(tmp_path)) == -1
    decision = ResizeDecision(num_workers=2, resources_per_worker={})
    callback.after_controller_state_update(RunningState(), ResizingState(decision))
    assert newest_step(str(tmp_path)) == 10


def failed(*errors: Exception) -> WorkerGroupError:
    return WorkerGroupError("workers failed", dict(enumerate(errors)))


def test_failures_end_a_run_only_where_no_checkpoint_lies_between_them(
    workers: Any, tmp_path: Path
) -> None:
    policy = ConsecutiveFailurePolicy(training(workers, tmp_path, max_failures=1))
    crash = failed(RuntimeError("Connection closed by peer"), RuntimeError("bad card"))
    assert policy.make_decision(crash) is FailureDecision.RETRY
    for _ in range(3):  # weeks, with checkpoints between
        workers.request_save()
        assert policy.make_decision(crash) is FailureDecision.RETRY
    too_large = failed(SmallerMicroBatchError("8 images"), RuntimeError("Connection reset"))
    assert policy.make_decision(too_large) is FailureDecision.RETRY
    assert policy.make_decision(crash) is FailureDecision.RAISE
    assert workers.failed.reason == (
        "worker 1: bad card; worker 0: Connection closed by peer "
        "(failure 2 without a new checkpoint between; workers.max_failures=1)"
    )
    assert len(workers.events) == 6


def told_training(
    monkeypatch: pytest.MonkeyPatch, folder: Path, max_failures: int
) -> tuple[Callable[[], TrainJob], list[str]]:
    """What a pool's group is training, and what its recorder, which is here, is told."""
    told: list[str] = []

    def note(*entry: Any) -> None:
        told.append(" ".join(str(part) for part in entry))

    run: Any = SimpleNamespace(event=note, fail=note, failure=lambda: None, places=dict)
    job = make_job(folder, workers={"max_failures": max_failures})
    job = replace(job, record=run, control=run)
    return lambda: job, told


def test_nodes_that_are_taken_back_and_workers_that_find_no_place_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    current_job, told = told_training(monkeypatch, tmp_path, max_failures=0)
    policy = ConsecutiveFailurePolicy(current_job)
    taken = ray.exceptions.RayActorError(preempted=True)
    timeout = ControllerError(WorkerGroupStartupTimeoutError(2))
    for error in (failed(taken), failed(WorkerHealthCheckFailedError("gone", taken)), timeout):
        for _ in range(30):
            assert policy.make_decision(error) is FailureDecision.RETRY
    # What waits for a place is told by its driver, once a minute.
    assert len(told) == 60
    assert policy.make_decision(failed(RuntimeError("bad card"))) is FailureDecision.RAISE


def test_a_crash_while_a_group_starts_is_tried_again_and_counted(
    workers: Any, tmp_path: Path
) -> None:
    for failure in (
        WorkerGroupStartupFailedError("a worker died"),
        ray.exceptions.RayActorError(),
        ray.exceptions.RayTaskError("init", "trace", RuntimeError("connection closed")),
    ):
        workers.fail(None)
        policy = ConsecutiveFailurePolicy(training(workers, tmp_path, max_failures=1))
        assert policy.make_decision(ControllerError(failure)) is FailureDecision.RETRY
        assert policy.make_decision(ControllerError(failure)) is FailureDecision.RAISE
    workers.fail(None)
    damaged = ControllerError(DamagedCheckpointError("every checkpoint is damaged"))
    policy = ConsecutiveFailurePolicy(training(workers, tmp_path, max_failures=-1))
    assert policy.make_decision(damaged) is FailureDecision.RAISE


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


def places(*nodes: str) -> dict[int, WorkerPlace]:
    """Of one worker on each node."""
    return {
        rank: WorkerPlace(f"10.0.0.{node}", node, f"GPU 3, pid 4{rank}, log /l/w.err", 57)
        for rank, node in enumerate(nodes)
    }


def test_an_error_names_the_worker_its_host_gpu_process_step_and_log(
    workers: Any, tmp_path: Path
) -> None:
    workers.at = places("1", "2")
    policy = ConsecutiveFailurePolicy(training(workers, tmp_path, max_failures=0))
    crash = failed(RuntimeError("Connection closed by peer"), RuntimeError("CUDA error: ECC"))
    assert policy.make_decision(crash) is FailureDecision.RAISE
    assert workers.failed.reason.startswith(
        "worker 1 on 10.0.0.2 (GPU 3, pid 41, log /l/w.err, step 57): CUDA error: ECC; worker 0 on "
    )


BAD_CARD, BY_PEER = RuntimeError("CUDA error: ECC"), RuntimeError("Connection reset by peer")
DIED = ray.exceptions.RayActorError(
    error_msg="Worker exits with a connection error code 2. End of file."
)
RAY_NODES = [
    {"NodeID": node, "Alive": node != "gone", "Resources": {"CPU": 4.0, "GPU": 2.0}}
    for node in ("1", "2", "gone")
]


@pytest.mark.parametrize(
    ("failures", "selector"),
    [
        # By node of the two workers: where each failure came from.
        ([(BY_PEER, BAD_CARD)] * 2, "!in(2)"),
        ([(BAD_CARD, BY_PEER)] * 2, "!in(1)"),
        ([(BY_PEER, DIED)] * 2, "!in(2)"),
        ([(BY_PEER, WorkerHealthCheckFailedError("A health check failed.", DIED))] * 2, "!in(2)"),
        ([(BY_PEER, BAD_CARD)], None),
        ([(BY_PEER, BAD_CARD), (BAD_CARD, BY_PEER), (BY_PEER, BAD_CARD)], None),  # in turn
        ([(BY_PEER, BY_PEER)] * 2, None),  # nobody knows whose fault it is
        ([(BAD_CARD, BAD_CARD)] * 2, None),
        ([(BY_PEER, SmallerMicroBatchError("8 images"))] * 2, None),
        ([(BY_PEER, RuntimeError(MEMORY))] * 2, None),
    ],
)
def test_a_node_on_which_a_group_fails_twice_in_a_row_is_left_out(
    failures: Any, selector: str | None, workers: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(FAILING_NODES, "_left", {})
    monkeypatch.setattr(FAILING_NODES, "_last", ("", 0.0))
    monkeypatch.setattr(ray, "nodes", lambda: RAY_NODES)
    workers.at = places("1", "2")
    job = training(workers, tmp_path, max_failures=-1)
    policy, callback = ConsecutiveFailurePolicy(job), LeaveOutNodes(job)
    for errors in failures:
        policy.make_decision(failed(*errors))
    scaling = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 2, "GPU": 1})
    for _ in range(2):
        chosen = callback.on_controller_start_worker_group(scaling_config=scaling, num_workers=2)
        assert chosen == (selector and {"ray.io/node-id": selector})
    texts = [text for kind, text, _ in workers.events if kind is EventKind.NODE_LEFT_OUT]
    assert len(texts) == (selector is not None)
    # Where no other nodes have room for it, a group with the bad one is better than none.
    assert callback.on_controller_start_worker_group(scaling_config=scaling, num_workers=3) is None


def test_failures_of_a_node_that_lie_far_apart_are_no_defect_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, now_s = FailingNodes(), [0.0]
    monkeypatch.setattr(failing_nodes.time, "monotonic", lambda: now_s[0])
    place = places("1")[0]
    for _ in range(3):
        nodes.note(place)
        now_s[0] += failing_nodes.IN_A_ROW_S + 1
    assert nodes.hosts == {}
    nodes.note(place)
    nodes.note(place)
    assert nodes.hosts == {"1": "10.0.0.1"}
    now_s[0] += failing_nodes.LEFT_OUT_S + 1
    assert nodes.hosts == {}  # it may have been repaired
    nodes.note(place)
    assert nodes.hosts == {"1": "10.0.0.1"}


def test_a_group_with_labels_counts_nodes_that_have_them_and_keeps_them_without_a_bad_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [
        {"NodeID": node, "Alive": True, "Resources": {"CPU": 4.0}, "Labels": {"pool": pool}}
        for node, pool in (("a", "train"), ("b", "train"), ("c", "read"))
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(FAILING_NODES, "_left", {})
    labels = {"pool": "train"}
    scaling = ScalingConfig(
        num_workers=(1, 8), resources_per_worker={"CPU": 1.0}, label_selector=labels
    )
    policy = DivisorScalingPolicy(scaling, [1, 2, 4, 8], 0.5, lambda: None)
    held = {node: {"CPU": 4.0} for node in "abc"}
    assert policy._count_possible_workers(held) == 8
    callback = LeaveOutNodes(lambda: None)
    FAILING_NODES._left["b"] = ("10.0.0.2", math.inf)
    assert policy._count_possible_workers(held) == 4
    chosen = callback.on_controller_start_worker_group(scaling_config=scaling, num_workers=4)
    assert chosen == {**labels, "ray.io/node-id": "!in(b)"}
    assert callback.on_controller_start_worker_group(scaling_config=scaling, num_workers=8) is None


def test_a_group_that_may_change_its_size_does_without_a_node_that_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FAILING_NODES, "_left", {"b": ("10.0.0.2", math.inf)})
    monkeypatch.setattr(ray_policies, "cpus_by_node", lambda: {"a": 4.0, "b": 4.0})
    scaling = ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 1.0})
    policy = DivisorScalingPolicy(scaling, [1, 2, 4, 8], 0.5, lambda: None)
    held = {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}}
    assert policy._count_possible_workers(held) == 2  # one of four CPUs is kept to read with
    FAILING_NODES._left.clear()
    assert policy._count_possible_workers(held) == 4


def test_a_host_without_memory_is_named_with_its_figures_and_what_to_do() -> None:
    killed = ray.exceptions.OutOfMemoryError(MEMORY)
    hidden = WorkerHealthCheckFailedError("A worker health check failed.", killed)
    text = cause(failed(RuntimeError("Connection reset by peer"), hidden))
    assert text.startswith(
        "worker 1: host 10.0.0.7 ran out of memory (60.80GB used / 64.00GB limit), so Ray ended"
    )
    assert "workers.cpus_per_worker" in text
    assert text.endswith("worker 0: Connection reset by peer")


def test_a_host_without_memory_ends_a_run_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    current_job, told = told_training(monkeypatch, tmp_path, max_failures=1)
    policy = ConsecutiveFailurePolicy(current_job)
    killed = ControllerError(ray.exceptions.OutOfMemoryError(MEMORY))
    assert policy.make_decision(killed) is FailureDecision.RETRY
    assert policy.make_decision(killed) is FailureDecision.RAISE
    assert "host 10.0.0.7 ran out of memory" in told[-1]


def test_a_pool_whose_server_was_ended_for_lack_of_memory_ends(tmp_path: Path) -> None:
    def gone() -> TrainJob | None:
        raise ray.exceptions.OutOfMemoryError(MEMORY)

    policy = ConsecutiveFailurePolicy(gone)
    assert policy.make_decision(failed(RuntimeError("x"))) is FailureDecision.RAISE


def test_what_a_worker_calls_unrecoverable_is_not_tried_again(workers: Any, tmp_path: Path) -> None:
    policy = ConsecutiveFailurePolicy(training(workers, tmp_path, max_failures=-1))
    crash = failed(RuntimeError("bad card"))
    assert policy.make_decision(crash) is FailureDecision.RETRY
    workers.fail(Failure("the data are bad"))
    assert policy.make_decision(crash) is FailureDecision.RAISE
