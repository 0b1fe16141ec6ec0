"""Every private name of Ray that this project uses, in one file.

Each is here because no public name of Ray 2.60 works instead; a test checks that each exists with
these parameters. Names are imported on first use, so that a task that reads data does not import
Ray Train.
"""

import functools
import importlib
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

    node_labels_match_selector: Callable[[dict[str, str], dict[str, str]], bool]

# Version of Ray for which all of this was read and tested.
VERSION: Final = "2.60"
# How long a count of the cluster's resources is used; each count is a request to the head.
_COUNT_AGE_S: Final = 10.0
_TRAIN: Final = "ray.train.v2._internal"
_DATA: Final = "ray.data._internal.execution"


INTERNALS: Final = (
    Internal(
        "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator",
        "get_or_create_autoscaling_coordinator",
        "Ray Data starts it when it executes, and knows no CPUs before it answers; here it starts "
        "in parallel with the process that executes.", "",
        {"": ()},
    ),
    Internal(
        "ray.data._internal.stats", "get_or_create_stats_actor",
        "Ray Data starts it on the node where it first executes: a node with an actor is never "
        "idle.", "",
        {"": ()},
    ),
    Internal(
        "ray.data._internal.stats", "_StatsManager",
        "It keeps numbers for the dashboard in a separate process; without a dashboard nothing "
        "shows them.", "",
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
        "Of several data sets that execute at the same time, each gets a node's free CPUs divided "
        "by their number, rounded down: none, if a node has fewer CPUs than there are sets.", "",
        {"get_total_resources": ("self",)},
    ),
    Internal(
        f"{_TRAIN}.execution.context", "get_train_context",
        "`ray.train.get_preemption_info` waits for all workers at each call; the training loop has "
        "its own agreement.", "#65183",
        {"": ()},
    ),
    Internal(
        f"{_DATA}.execution_callback", "ExecutionCallback",
        "The type of the context's `custom_execution_callback_classes`.", "",
        {"on_execution_step": ("self", "executor")},
    ),
    Internal(
        f"{_DATA}.streaming_executor", "StreamingExecutor",
        "Shows such a callback whether the executor has anything to wait for.", "",
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
        "ray.util.scheduling_strategies", "NodeAffinitySchedulingStrategy",
        "Without `_spill_on_unavailable` a task waits for its node while other nodes are free.", "",
        {"": ("node_id", "soft", "_spill_on_unavailable", "_fail_on_unavailable")},
    ),
    Internal(
        "ray._raylet", "AuthenticationTokenLoader",
        "A client of an address does not use this machine's token.", "#64755",
        {"has_token": ("self", "ignore_auth_mode")},
    ),
    Internal(
        "ray._raylet", "node_labels_match_selector",
        "Checks whether any node can run a worker, before Ray waits for one.", "",
    ),
    Internal("ray._raylet", "Config", "Reads the authentication mode again.", "#64755"),
    Internal(
        "ray._private.grpc_utils", "init_grpc_channel",
        "Ray tries for 20 s to join a cluster that refuses its token, without a message.", "",
        {"": ("address", "options", "asynchronous", "credentials")},
    ),
)  # fmt: skip
_MODULES: Final = {internal.name: internal.module for internal in INTERNALS}


def __getattr__(name: str) -> Any:
    """A name of the table, imported on first use."""
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_MODULES[name]), name)


def preemption_notice() -> Any:
    """Ray Train's notice for this worker's group, without waiting for the other workers."""
    return __getattr__("get_train_context")().preemption_context.preemption_info


def near_by() -> Any:
    """A strategy that runs tasks on this process's node first, and on others while it is full."""
    here = ray.get_runtime_context().get_node_id()
    strategy = __getattr__("NodeAffinitySchedulingStrategy")
    return strategy(here, soft=True, _spill_on_unavailable=True)


def operators_of(executor: Any) -> Any:
    """The operators of a Ray Data set that executes."""
    return executor._topology


# Texts of Ray 2.60 for errors without a type.
_RETRY_NOTE: Final = re.compile(
    r"\nFailed to [^\n]* attempts \(total backoff .*believe this to be transient\.", re.DOTALL
)
# Host, and the use of its memory.
_MEMORY_KILL: Final = re.compile(r"Memory on the node \(IP: ([^,]+),.*?\) was (.+? limit)")


def memory_kill(error: BaseException) -> tuple[str, str] | None:
    """Host and its memory use, if Ray ended a process because memory ran out; else None."""
    match = _MEMORY_KILL.search(str(error))
    return (match[1], match[2]) if match else None


def original_error(error: BaseException) -> BaseException:
    """An error without the wrappers of the Ray processes that it has come through."""
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return error


def without_retry_note(text: str) -> str:
    """An error's text without the lines on retries that Ray Data (2.60) writes below it."""
    return _RETRY_NOTE.sub("", text)


def has_auth_token() -> bool:
    """Whether this machine or environment has a token, in any authentication mode."""
    loader = __getattr__("AuthenticationTokenLoader").instance()
    return bool(loader.has_token(ignore_auth_mode=True))


def token_problem(address: str, timeout_s: float) -> str | None:
    """Why the cluster at `HOST:PORT` refuses this process's token; None if it does not.

    Raises:
        ConnectionError: no Ray cluster answers there.
    """
    grpc = importlib.import_module("grpc")
    connect = __getattr__("init_grpc_channel")
    with connect(address, [("grpc.enable_http_proxy", 0)]) as channel:  # Ray's own options
        # A request of clients before they join a cluster; its message is empty.
        request = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            request(b"", timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                raise ConnectionError(error.code().name.lower()) from None
            is_refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
            return str(error.details()) if is_refused else None
    return None


def reload_ray_config() -> None:
    """Apply `RAY_*` variables that were set after Ray was imported."""
    __getattr__("Config").initialize("")


def keep_no_dataset_statistics() -> None:
    """Turn off the dashboard's statistics of Ray Data sets that this process executes."""
    methods = next(i for i in INTERNALS if i.name == "_StatsManager").parameters
    for name in methods:
        setattr(__getattr__("_StatsManager"), name, staticmethod(lambda *_, **__: None))


def start_data_actors() -> None:
    """Start Ray Data's actors on this process's node, for the lifetime of the cluster.

    An autoscaler never removes the node on which they run, and such a node waits for them in vain
    when it ends. So it should be the driver's node, which is the head by default.
    """
    __getattr__("get_or_create_autoscaling_coordinator")()
    __getattr__("get_or_create_stats_actor")()


def give_datasets(share: float, reserved_cpus: float) -> None:
    """Limit the resources of Ray Data sets that this process executes from now on.

    Args:
        share: of the cluster's object store and of its CPUs, CPU-only nodes included; 1 for Ray
            Data's own limits.
        reserved_cpus: CPUs of the cluster that are not for data.
    """
    autoscaler: Any = __getattr__("RateBasedClusterAutoscaler")
    if not hasattr(autoscaler, "_plain_total"):
        autoscaler._plain_total = autoscaler.get_total_resources
    autoscaler.get_total_resources = autoscaler._plain_total
    if share < 1:
        autoscaler.get_total_resources = lambda _: _data_limits(
            share, reserved_cpus, time.monotonic() // _COUNT_AGE_S
        )


@functools.lru_cache(maxsize=1)
def _data_limits(share: float, reserved_cpus: float, _period: float) -> Any:
    from ray.data import ExecutionResources

    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    # The object store of this process's node, on which most blocks are made.
    here = ray.get_runtime_context().get_node_id()
    node_store = next(
        (n["Resources"].get("object_store_memory", 0.0) for n in ray.nodes()  # type: ignore[no-untyped-call]
         if n["NodeID"] == here), math.inf,
    )  # fmt: skip
    return ExecutionResources(
        cpu=share * max(0.0, total.get("CPU", 0.0) - reserved_cpus),
        object_store_memory=min(share * total.get("object_store_memory", 0.0), node_store),
        memory=share * total.get("memory", 0.0),
    )
