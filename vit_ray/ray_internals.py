"""Every private name of Ray that this project uses, in one file.

Each is here because no public name of Ray 2.60 works instead; a test finds every one with the
parameters that are used. Names are imported on first use, so that a task that reads data does not
import Ray Train.
"""

import importlib
import itertools
import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import ray

from vit_ray.internals import Internal

if TYPE_CHECKING:
    from ray.data._internal.execution.execution_callback import (
        ExecutionCallback as ExecutionCallback,
    )
    from ray.experimental.internal_kv import _internal_kv_list as _internal_kv_list
    from ray.experimental.internal_kv import _internal_kv_put as _internal_kv_put
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback as DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback as PlacementGroupCleanerCallback,
    )
    from ray.train.v2._internal.callbacks.preemption_callback import (
        PreemptionCallback as PreemptionCallback,
    )
    from ray.train.v2._internal.exceptions import (
        WorkerGroupStartupFailedError as WorkerGroupStartupFailedError,
    )
    from ray.train.v2._internal.exceptions import (
        WorkerGroupStartupTimeoutError as WorkerGroupStartupTimeoutError,
    )
    from ray.train.v2._internal.execution.callback import ControllerCallback as ControllerCallback
    from ray.train.v2._internal.execution.callback import (
        ReplicaGroupCallback as ReplicaGroupCallback,
    )
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback as WorkerGroupCallback
    from ray.train.v2._internal.execution.context import get_train_context as get_train_context
    from ray.train.v2._internal.execution.controller.state import (
        PreemptingState as PreemptingState,
    )
    from ray.train.v2._internal.execution.controller.state import ResizingState as ResizingState
    from ray.train.v2._internal.execution.controller.state import RunningState as RunningState
    from ray.train.v2._internal.execution.controller.state import (
        SchedulingState as SchedulingState,
    )
    from ray.train.v2._internal.execution.failure_handling import (
        DefaultFailurePolicy as DefaultFailurePolicy,
    )
    from ray.train.v2._internal.execution.failure_handling import FailureDecision as FailureDecision
    from ray.train.v2._internal.execution.failure_handling.default import (
        _is_preemption_failure as _is_preemption_failure,
    )
    from ray.train.v2._internal.execution.scaling_policy import (
        ElasticScalingPolicy as ElasticScalingPolicy,
    )
    from ray.train.v2._internal.execution.scaling_policy import NoopDecision as NoopDecision
    from ray.train.v2._internal.execution.scaling_policy import ScalingDecision as ScalingDecision

    node_labels_match_selector: Callable[[dict[str, str], dict[str, str]], bool]

VERSION: Final = "2.60"
"""Version of Ray for which all of this was read and tested."""
_COUNTED_FOR_S: Final = 10.0
"""How old a count of the cluster's resources may be; each asks the head."""
_TRAIN: Final = "ray.train.v2._internal"
_DATA: Final = "ray.data._internal.execution"


_POLICIES = "A run's own failure and scaling policies have no public place in Ray Train."
_DECISIONS = "What such a policy returns."

INTERNALS: Final = (
    Internal(
        f"{_TRAIN}.execution.failure_handling", "DefaultFailurePolicy", _POLICIES, "#51067",
        {
            "__init__": ("self", "failure_config"),
            "make_decision": ("self", "training_failed_error"),
        },
    ),
    Internal(
        f"{_TRAIN}.execution.failure_handling", "FailureDecision", _DECISIONS, "#54833",
        attributes=("RETRY", "RAISE"),
    ),
    Internal(
        f"{_TRAIN}.execution.failure_handling.default", "_is_preemption_failure",
        "Preempted nodes do not count as failures, as in Ray's own policy.", "#64360",
        {"": ("training_failed_error",)},
    ),
    Internal(
        f"{_TRAIN}.exceptions", "WorkerGroupStartupFailedError",
        "Workers that die while their group starts count as a failure of the run.", "#54833",
    ),
    Internal(
        f"{_TRAIN}.exceptions", "WorkerGroupStartupTimeoutError",
        "A group that is not placed yet has not failed.", "#54833",
    ),
    Internal(
        f"{_TRAIN}.execution.scaling_policy", "ElasticScalingPolicy", _POLICIES, "",
        {
            "__init__": ("self", "scaling_config"),
            "make_decision_for_non_running_worker_group": ("self",),
            "_count_possible_workers": ("self", "reserved_resources"),
            "after_controller_start": ("self", "train_run_context"),
        },
        ("_autoscaling_coordinator",),
    ),
    Internal(f"{_TRAIN}.execution.scaling_policy", "NoopDecision", _DECISIONS, ""),
    Internal(f"{_TRAIN}.execution.scaling_policy", "ScalingDecision", _DECISIONS, ""),
    Internal(
        "ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer",
        "The method that passes policies to the controller is overridden.", "#51067",
        {"_initialize_and_run_controller": ("self", "controller_init_kwargs")},
    ),
    Internal(
        "ray.train.v2.api.config", "ScalingConfig",
        "What a worker needs, with Ray's defaults filled in.", "",
        attributes=("_resources_per_worker_not_none",),
    ),
    Internal(
        f"{_TRAIN}.execution.callback", "ControllerCallback",
        "A checkpoint is requested before the group changes its size; `ray.train.UserCallback` is "
        "not called then.", "",
        {
            "after_controller_state_update": ("self", "previous_state", "current_state"),
            "on_controller_start_worker_group": ("self", "scaling_config", "num_workers"),
            "before_controller_execute_resize_decision": ("self", "resize_decision"),
        },
    ),
    Internal(
        f"{_TRAIN}.execution.callback", "WorkerGroupCallback",
        "Sees which workers have failed before they are replaced.", "",
        {
            "after_worker_group_start": ("self", "worker_group"),
            "after_worker_group_poll_status": ("self", "worker_group_status"),
        },
    ),
    Internal(
        f"{_TRAIN}.execution.callback", "ReplicaGroupCallback", "Sees that a worker was replaced.",
        "", {"after_replica_group_start": ("self", "replica_group")},
    ),
    Internal(
        f"{_TRAIN}.callbacks.preemption_callback", "PreemptionCallback",
        "Ray skips it when it replaces single workers, whose handles it would keep.", "",
        {"after_worker_group_start": ("self", "worker_group")},
    ),
    Internal(
        "ray.train.backend", "Backend", "Makes Ray Train replace single workers; not documented.",
        "", attributes=("has_replica_groups", "share_cuda_visible_devices"),
    ),
    Internal(
        f"{_TRAIN}.execution.controller.state", "ResizingState",
        "Distinguishes that change from others.", "",
    ),
    Internal(
        f"{_TRAIN}.execution.controller.state", "RunningState",
        "Shows whether a group is placed.", "",
    ),
    Internal(
        f"{_TRAIN}.execution.controller.state", "SchedulingState",
        "A group starts waiting for its place.", "",
    ),
    Internal(
        f"{_TRAIN}.execution.controller.state", "PreemptingState",
        "A group whose node is about to leave is still placed.", "",
    ),
    Internal(
        f"{_TRAIN}.execution.scaling_policy.autoscaling_coordinator_client",
        "AUTOSCALING_REQUESTS_EXPIRE_TIME_S",
        "The request of a killed driver's group blocks the next group for that long.", "",
    ),
    Internal(
        f"{_TRAIN}.execution.scaling_policy.autoscaling_coordinator_client",
        "AUTOSCALING_REQUESTS_INTERVAL_S",
        "A live group renews its request before that.", "",
    ),
    Internal(
        "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator",
        "_AutoscalingCoordinatorActor",
        "Counts nodes and requests every 20 s, or on request.", "",
        {"get_reserved_resources": ("self", "requester_id", "recompute")},
    ),
    Internal(
        "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator",
        "get_or_create_autoscaling_coordinator",
        "Ray Data starts it when it executes, and knows no CPUs before it answers; it can start at "
        "the same time as the process that executes.", "",
        {"": ()},
    ),
    Internal(
        "ray.data._internal.stats", "get_or_create_stats_actor",
        "Ray Data starts it where it first executes, and it stays there: a node with an actor is "
        "never idle.", "",
        {"": ()},
    ),
    Internal(
        "ray.data._internal.usage.actor", "get_or_create_usage_collection_actor", "As above.", "",
        {"": ()},
    ),
    Internal(
        "ray.data._internal.stats", "_StatsManager",
        "It keeps numbers for a dashboard in a separate process; a Ray without a dashboard does "
        "not show them.", "",
        {
            "register_dataset_to_stats_actor": (
                "dataset_tag", "operator_tags", "topology", "data_context",
            ),
            "update_execution_metrics": (
                "dataset_tag", "op_metrics", "operator_tags", "state",
            ),
            "update_iteration_metrics": ("stats", "dataset_tag", "split_index"),
        },
    ),
    Internal(
        "ray.data._internal.cluster_autoscaler.rate_based_cluster_autoscaler",
        "RateBasedClusterAutoscaler",
        "Data sets that execute at the same time get of each node its free CPUs divided by their "
        "number, rounded down: none, if there are more hosts than a host has CPUs.", "",
        {"get_total_resources": ("self",)},
    ),
    Internal(
        f"{_TRAIN}.execution.context", "get_train_context",
        "`ray.train.get_preemption_info` waits for all workers at each call; the loop agrees by "
        "itself.", "#65183",
        {"": ()},
    ),
    Internal(
        f"{_TRAIN}.callbacks.datasets", "DatasetsCallback",
        "Left out: our own process serves streams, and this would start another one.", "",
    ),
    Internal(
        f"{_TRAIN}.callbacks.placement_group_callback", "PlacementGroupCleanerCallback",
        "Left out: the cleaner is a process, which does not end without a dashboard.", "",
    ),
    Internal(
        f"{_TRAIN}.execution.worker_group.worker_group", "SynchronizationActor",
        "Its process imports Ray Train, for a barrier of functions that are not called, such as "
        "`ray.train.report`.",
        "", source=("SynchronizationActor.options(",),
    ),
    Internal(
        f"{_TRAIN}.execution.worker_group.worker_group", "placement_group",
        "A group that is given up while it waits for its place is found by a name; Ray Train gives "
        "it none, and receives no messages while it waits.", "",
        {
            "": (
                "bundles", "strategy", "name", "lifetime", "_soft_target_node_id",
                "bundle_label_selector", "topology_strategy",
            ),
        },
    ),
    Internal(
        f"{_DATA}.execution_callback", "ExecutionCallback",
        "The type of the context's `custom_execution_callback_classes`.", "",
        {"on_execution_step": ("self", "executor")},
    ),
    Internal(
        f"{_DATA}.streaming_executor", "StreamingExecutor",
        "Shows such a callback whether the loop has anything to wait for.", "",
        attributes=("_topology",),
    ),
    Internal(
        f"{_DATA}.interfaces.physical_operator", "PhysicalOperator", "As above.", "",
        {"num_active_tasks": ("self",), "has_completed": ("self",)},
    ),
    Internal(
        "ray.experimental.internal_kv", "_internal_kv_put",
        "Counts bad rows over all processes without an actor.", "",
        {"": ("key", "value", "overwrite", "namespace")},
    ),
    Internal(
        "ray.experimental.internal_kv", "_internal_kv_list", "As above.", "",
        {"": ("prefix", "namespace")},
    ),
    Internal(
        "ray._private.worker", "print_to_stdstream",
        "The scheduler's messages are printed whatever `log_to_driver` is.", "#63800",
        {"": ("data", "ignore_prefix")},
    ),
    Internal(
        "ray._raylet", "AuthenticationTokenLoader",
        "A client of an address does not use this machine's token.", "#64755",
        {"has_token": ("self", "ignore_auth_mode")},
    ),
    Internal(
        "ray._raylet", "node_labels_match_selector",
        "Whether any node could take a worker is checked before Ray waits for one.", "",
    ),
    Internal(
        "ray._private.state", "state",
        "Which nodes drain, and so take no new work, is in no public list.", "",
        attributes=("get_draining_nodes",),
    ),
    Internal("ray._raylet", "Config", "Reads the authentication mode again.", "#64755"),
    Internal(
        "ray._private.grpc_utils", "init_grpc_channel",
        "Ray tries for 20 s to join a cluster that refuses its token, without a message.", "",
        {"": ("address", "options", "asynchronous", "credentials")},
    ),
)  # fmt: skip
_A_QUESTION: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A request of clients that are about to join a cluster; its message is empty."""
_MODULES: Final = {internal.name: internal.module for internal in INTERNALS}


def __getattr__(name: str) -> Any:
    """A name of the table, imported on first use."""
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_MODULES[name]), name)


def preemption_notice() -> Any:
    """Ray Train's notice for this worker's group, without waiting for the other workers."""
    context = importlib.import_module(_MODULES["get_train_context"]).get_train_context()
    return context.preemption_context.preemption_info


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes of the connected cluster that take no new work and are about to leave."""
    state = importlib.import_module(_MODULES["state"]).state
    return frozenset(state.get_draining_nodes())


def hide_printed_messages(is_hidden: Callable[[str], bool]) -> None:
    """Keep lines of the cluster's messages off this process's terminal, permanently."""
    worker: Any = importlib.import_module(_MODULES["print_to_stdstream"])
    plain = worker.print_to_stdstream
    if getattr(plain, "hides_messages", False):
        return

    def print_the_others(data: dict[str, Any], ignore_prefix: bool) -> None:
        if not any(is_hidden(str(line)) for line in data["lines"]):
            plain(data, ignore_prefix)

    print_the_others.hides_messages = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_the_others


# Texts of Ray 2.60 for errors without a type.
STARTUP_TIMEOUT: Final = "The current node timed out during startup"
_VERSION_MISMATCH: Final = "Version mismatch: "
_MANY_ACTORS: Final = "worker processes have been started"
_RETRY_NOTE: Final = re.compile(
    r"\nFailed to [^\n]* attempts \(total backoff .*believe this to be transient\.", re.DOTALL
)
_MEMORY_KILL: Final = re.compile(r"Memory on the node \(IP: ([^,]+),.*?\) was (.+? limit)")
"""In a text of several lines; the last is about Ray's settings."""


def is_startup_timeout(error: Exception) -> bool:
    """Whether `ray.init` raised it because a node could not be started in time."""
    return STARTUP_TIMEOUT in str(error)


def version_mismatch(error: Exception) -> str | None:
    """What differs, if `ray.init` raised it for another Ray or Python; None for other errors."""
    text = " ".join(str(error).split())
    return text.removeprefix(_VERSION_MISMATCH) if text.startswith(_VERSION_MISMATCH) else None


def is_warning_of_many_actors(line: str) -> bool:
    """Whether a printed line is the warning about many small actors."""
    return _MANY_ACTORS in line


def memory_kill(error: BaseException) -> tuple[str, str] | None:
    """Host, and use of its memory, if Ray has ended a process for lack of it; else None."""
    found = _MEMORY_KILL.search(str(error))
    return (found[1], found[2]) if found else None


def without_retry_note(text: str) -> str:
    """An error's text without the lines on retries that Ray Data (2.60) writes below it."""
    return _RETRY_NOTE.sub("", text)


def has_auth_token() -> bool:
    """Whether this machine or environment has a token, in any authentication mode."""
    raylet = importlib.import_module("ray._raylet")
    return bool(raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def token_problem(address: str, timeout_s: float) -> str | None:
    """Why the cluster at `HOST:PORT` refuses this process's token; None if it does not.

    Raises:
        ConnectionError: what listens there is no Ray.
    """
    grpc = importlib.import_module("grpc")
    connect = importlib.import_module(_MODULES["init_grpc_channel"]).init_grpc_channel
    with connect(address, [("grpc.enable_http_proxy", 0)]) as channel:  # as Ray itself joins
        try:
            channel.unary_unary(_A_QUESTION)(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                raise ConnectionError(error.code().name.lower()) from None
            is_refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
            return str(error.details()) if is_refused else None
    return None


def reload_ray_config() -> None:
    """Apply `RAY_*` variables that were set after Ray was imported."""
    importlib.import_module("ray._raylet").Config.initialize("")


def expire_resource_requests_after(seconds: int, repeat_s: int) -> None:
    """For elastic groups whose controller runs in this process, which repeats the requests."""
    for name, value in (
        ("AUTOSCALING_REQUESTS_EXPIRE_TIME_S", seconds),
        ("AUTOSCALING_REQUESTS_INTERVAL_S", repeat_s),
    ):
        setattr(importlib.import_module(_MODULES[name]), name, value)


def keep_no_dataset_statistics() -> None:
    """For Ray Data sets that this process executes."""
    manager = importlib.import_module(_MODULES["_StatsManager"])._StatsManager
    methods = next(i for i in INTERNALS if i.name == "_StatsManager").parameters
    for name in methods:
        setattr(manager, name, staticmethod(lambda *_, **__: None))


def start_data_actors() -> None:
    """Start Ray Data's own actors on this process's node, for as long as the cluster lives.

    Ray never removes the node on which they are, and at its end waits for them without result: it
    should be that of the driver, which is the head by default.
    """
    for name in (
        "get_or_create_autoscaling_coordinator",
        "get_or_create_stats_actor",
        "get_or_create_usage_collection_actor",
    ):
        getattr(importlib.import_module(_MODULES[name]), name)()


def give_datasets(share: float, reserved_cpus: float) -> None:
    """Limit what Ray Data sets that this process executes may use, from now on.

    Args:
        share: of the cluster's object store and of its CPUs, CPU-only nodes included; 1 for Ray
            Data's own limits.
        reserved_cpus: of the cluster, which are not counted.
    """
    from ray.data import ExecutionResources

    module = importlib.import_module(_MODULES["RateBasedClusterAutoscaler"])
    autoscaler: Any = module.RateBasedClusterAutoscaler
    plain = autoscaler.__dict__.get("_plain_total", autoscaler.get_total_resources)
    autoscaler._plain_total = plain
    if share == 1:
        autoscaler.get_total_resources = plain
        return
    counted: list[tuple[float, Any]] = []

    def get_total_resources(_: Any) -> Any:
        now = time.monotonic()
        if not counted or now - counted[-1][0] > _COUNTED_FOR_S:
            total = ray.cluster_resources()  # type: ignore[no-untyped-call]
            # The object store of this process's node, on which most blocks are made.
            here = ray.get_runtime_context().get_node_id()
            own_store = next(
                (n["Resources"].get("object_store_memory", 0.0) for n in ray.nodes()  # type: ignore[no-untyped-call]
                 if n["NodeID"] == here), math.inf,
            )  # fmt: skip
            part = ExecutionResources(
                cpu=share * max(0.0, total.get("CPU", 0.0) - reserved_cpus),
                object_store_memory=min(share * total.get("object_store_memory", 0.0), own_store),
                memory=share * total.get("memory", 0.0),
            )
            counted[:] = [(now, part)]
        return counted[-1][1]

    autoscaler.get_total_resources = get_total_resources


def name_placement_groups(name: str) -> None:
    """For worker groups that this process, a controller, starts: `name`, and a number from 0."""
    module: Any = importlib.import_module(_MODULES["placement_group"])
    plain, numbers = module.placement_group, itertools.count()

    def place(**options: Any) -> Any:
        return plain(**options, name=f"{name}-{next(numbers)}")

    module.placement_group = place


def replace_barrier(barrier: type) -> None:
    """For worker groups that this process, a controller, starts.

    Args:
        barrier: class of the actor that takes the calls of Ray Train's.
    """
    module: Any = importlib.import_module(_MODULES["SynchronizationActor"])
    module.SynchronizationActor = ray.remote(num_cpus=0)(barrier)


def refresh_reserved_resources(policy: Any, timeout_s: float) -> None:
    """Count the nodes and requests now, for an elastic policy that requests its places."""
    counted = policy._autoscaling_coordinator.get_reserved_resources.remote(
        policy._requester_id, recompute=True
    )
    ray.get(counted, timeout=timeout_s)
