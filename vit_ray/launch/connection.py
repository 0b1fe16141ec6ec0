"""Finding or starting a Ray cluster, and reading its resources.

The same command runs on this machine, against `RAY_ADDRESS`, and inside `ray job submit`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import psutil
import ray
from joblib import cpu_count

from vit_ray.addresses import host_and_port
from vit_ray.config import Recipe
from vit_ray.ray_internals import (
    has_auth_token,
    keep_no_dataset_statistics,
    node_labels_match_selector,
    reload_ray_config,
    token_problem,
)

AUTH_MODE = "RAY_AUTH_MODE"
TMPDIR: Final = "RAY_TMPDIR"
# If set to 1, a Ray that is started for one command has its dashboard, which takes ten processes
DASHBOARD = "VIT_RAY_DASHBOARD"

# Ray ends idle worker processes above this number (by default its CPUs) after a second; the next
# training's tasks would have to start theirs again.
_IDLE_PROCESSES: Final = "RAY_num_workers_soft_limit"
# Ray's own processes and ours, in addition to those of tasks.
_NUM_ACTORS: Final = 12

# How long Ray waits for each of its new processes, 60 s by default; then it starts another one,
# again and again on a busy machine. This process waits three times as long for all of them.
_REGISTER_TIMEOUT_S: Final = "RAY_worker_register_timeout_seconds"
# A process, since `ray.init` holds Python's global lock while it waits for its processes.
_GUARD: Final = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    print(sys.argv[3], file=sys.stderr)
    os.kill(os.getppid(), signal.SIGKILL)
"""

# How long an address is tried, since a cluster takes time to start
REACH_S: Final = 10.0

_POLL_S: Final = 0.5
# Ray does not work without these processes.
_NEEDED: Final = ("raylet", "gcs_server")

# Addresses of the clusters that this process has started.
_STARTED: Final[set[str]] = set()


@dataclass(frozen=True)
class ClusterShape:
    """The resources of the whole cluster, and when it was up.

    Attributes:
        ready_s: unix time at which Ray was up.
        is_private: this driver has started the Ray, and ends it.
        nodes: the nodes that are up, as Ray lists them.
    """

    num_nodes: int
    num_cpus: float
    num_gpus: float
    ready_s: float
    is_private: bool = False
    nodes: tuple[Mapping[str, Any], ...] = ()

    def matching(self, selector: Mapping[str, str]) -> ClusterShape:
        if not selector:
            return self
        labels = dict(selector)
        nodes = tuple(n for n in self.nodes if node_labels_match_selector(n["Labels"], labels))
        return replace(
            self,
            num_nodes=len(nodes),
            num_cpus=sum(node["Resources"].get("CPU", 0.0) for node in nodes),
            num_gpus=sum(node["Resources"].get("GPU", 0.0) for node in nodes),
            nodes=nodes,
        )

    def __str__(self) -> str:
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        # Ray's count of this machine may be larger than its cores.
        cpus = f"{cpu_count()} cores" if self.is_private else f"{self.num_cpus:g} CPUs"
        return f"{nodes}, {cpus}, {self.num_gpus:g} GPUs"


def connect(recipe: Recipe, *other_recipes: Recipe) -> ClusterShape:
    """Join the cluster that `RAY_ADDRESS` names, or start one on this machine.

    A local cluster gets as many logical CPUs as the workers and two data tasks of each of the
    recipes need, even if there are fewer cores. It keeps Ray's token authentication, since its
    ports are open to the network.

    Raises:
        ValueError: no Ray answers at the address, or its Ray or Python has another version.
        RuntimeError: the machine is too busy to start a Ray.
    """
    if not _shows_logs():
        for name in ("ray.train", "ray.data", "ray.tune"):
            logging.getLogger(name).setLevel(logging.ERROR)
        os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Ray Tune's tables; `progress` shows it
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    recipe.storage.use()
    if ray.is_initialized():
        return shape(time.time())
    if address := os.environ.get("RAY_ADDRESS"):
        check_address(address)
        # SIGTERM would interrupt the registration at Ray, which then ends the process with code 1
        # and no message (Ray 2.60). Not where processes are started, which inherit this.
        with _own_signals(delivered_later={signal.SIGTERM}):
            _join(address, recipe.storage.variables())
    else:
        with _own_signals():
            _start_for(recipe, *other_recipes)
    return shape(time.time())


def _join(address: str, environment: Mapping[str, str]) -> None:
    """Join the cluster at `RAY_ADDRESS`; the run's processes get the environment's variables.

    Raises:
        ValueError: its Ray or Python has another version.
    """
    try:
        # no limit: Ray's own two minutes; `check_address` has tried before
        ray.init(
            log_to_driver=_shows_logs(),
            logging_level=logging.WARNING,
            runtime_env={"env_vars": environment} if environment else None,
        )
    except RuntimeError as error:  # of another version
        raise ValueError(
            f"RAY_ADDRESS={address}: {' '.join(str(error).split())}; cluster and driver "
            "need the same Python and Ray: start the driver on the cluster, for example "
            "with `ray job submit`, or update one of them"
        ) from error


def _start_for(*recipes: Recipe) -> None:
    """Start a Ray on this machine that has CPUs enough for each of the recipes."""
    needed = (
        each.workers.sizes[-1] * each.workers.cpus_per_worker + 2 * each.data.cpus_per_task
        for each in recipes
    )
    num_cpus = max(cpu_count(), math.ceil(max(needed)))
    os.environ.setdefault(_IDLE_PROCESSES, str(num_cpus + _NUM_ACTORS))
    folder = _start(num_cpus)
    mark_private()
    _end_with_ray(folder)
    if not has_dashboard():  # only the dashboard shows them; they take a process
        keep_no_dataset_statistics()


@contextlib.contextmanager
def _own_signals(delivered_later: Collection[signal.Signals] = ()) -> Iterator[None]:
    """Restore the handler of SIGTERM after the block; without one, SIGTERM raises SystemExit.

    The handler that `ray.init` installs prints a stack trace and exits with code 15.

    Args:
        delivered_later: signals that are delivered only after the block.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, delivered_later)
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            had_handler = callable(before) or before is signal.SIG_IGN
            signal.signal(signal.SIGTERM, before if had_handler else _exit_by_signal)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # so that Ray is shut down
                signal.signal(signal.SIGHUP, _exit_by_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _exit_by_signal(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second SIGTERM ends it at once
    sys.exit(128 + number)


def mark_private() -> None:
    """Mark the connected cluster as private to this driver, also in the processes of its trials."""
    _STARTED.add(_address())


def has_dashboard() -> bool:
    """Whether a Ray that is started for one command has a dashboard."""
    return os.environ.get(DASHBOARD) == "1"


def _start(num_cpus: int) -> str:
    """Start a Ray on this machine; returns its folder, which stays if the command fails.

    Otherwise the folder is removed at exit. A start that takes too long ends this process.

    Raises:
        ValueError: the folder cannot be written, or its path is too long for a socket.
        RuntimeError: the machine is too busy for it.
    """
    try:
        # Ray adds `/ray`, and a socket's path is short.
        folder = tempfile.mkdtemp(prefix="", dir=os.environ.get(TMPDIR))
        if not _shows_logs():
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            atexit.register(ray.shutdown)  # Ray's own at exit first waits 0.5 s for messages
        with variables({TMPDIR: folder}), _new_process_group(folder):
            # no limit: the group's first process ends this one
            ray.init(
                address="local",  # not another Ray that happens to run here
                num_cpus=num_cpus,
                include_dashboard=has_dashboard(),
                log_to_driver=_shows_logs(),
                logging_level=logging.ERROR,
            )
        return folder
    except OSError as error:
        raise ValueError(
            f"Ray could not be started in a folder in RAY_TMPDIR, TMPDIR or /tmp ({error}); set "
            "RAY_TMPDIR to a folder of your own with a short path"
        ) from error
    except Exception as error:  # has no type of its own after a timeout
        raise RuntimeError(
            f"Ray could not be started on this machine ({' '.join(str(error).split())}); run the "
            "same command again when less is running"
        ) from error


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, this process's environment has these values."""
    before = {key: os.environ[key] for key in values if key in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for key in values.keys() - before.keys():
            os.environ.pop(key, None)
        os.environ.update(before)


def _end_with_ray(folder: str) -> None:
    """End this process, with advice, when a process that Ray needs has ended.

    Ray would end it after 15 to 60 s, without advice.
    """
    address = _address()
    # An earlier Ray of this process may be ending: its processes name another folder.
    needed = [
        process
        for process in psutil.process_iter(["name", "ppid", "cmdline"])
        if process.info["ppid"] == os.getpid() and process.info["name"] in _NEEDED
        if folder in " ".join(process.info["cmdline"] or ())
    ]

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while all(process.status() != psutil.STATUS_ZOMBIE for process in needed):
                time.sleep(_POLL_S)
        if ray.is_initialized() and _address() == address:  # Ray was not shut down on purpose
            print(
                "error: Ray on this machine has ended: it was killed, or memory ran out; run the "
                f"same command again, which continues; Ray's logs are in {folder}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ray").start()


@contextlib.contextmanager
def _new_process_group(folder: str) -> Iterator[None]:
    """Processes started in the block get a process group of their own.

    Service managers, containers and some terminals send SIGTERM to the driver's whole group: the
    driver then writes a checkpoint, for which it needs its Ray. Inside the block, a terminal's
    Ctrl-C does not reach this process. The group's first process ends this one if the block takes
    too long.
    """
    group, timeout_s = os.getpgrp(), float(os.environ.get(_REGISTER_TIMEOUT_S, "60"))
    message = (
        f"error: waited {3 * timeout_s:g} s for Ray's processes on this machine: it is too busy, "
        "or has too little memory; run the same command again when less is running, or with "
        f"{_REGISTER_TIMEOUT_S} above {timeout_s:g}; Ray's logs are in {folder}"
    )
    guard = [sys.executable, "-S", "-c", _GUARD, str(os.getpid()), str(3 * timeout_s), message]
    with subprocess.Popen(guard, process_group=0) as first:
        try:
            os.setpgid(0, first.pid)  # children inherit it
        except PermissionError:  # a session's leader cannot change its group
            group = 0
        try:
            yield
        finally:
            first.kill()
            if group:
                try:
                    os.setpgid(0, group)
                except PermissionError:  # the group is empty, as after `nohup ... &` over ssh
                    os.setpgid(0, 0)


def check_address(address: str) -> None:
    """Check that a cluster answers at `HOST:PORT` and accepts the token of this machine.

    Ray would try for two minutes without a message; it checks other forms of address itself.

    Raises:
        ValueError: no Ray answers there in time, or the cluster requires a token.
    """
    # Ray 2.60 turns on token authentication for local clusters, but not for an address. A cluster
    # that was started on a machine with a token requires it; a cluster without authentication
    # ignores it.
    if AUTH_MODE not in os.environ and has_auth_token():
        os.environ[AUTH_MODE] = "token"
        reload_ray_config()
    if host_and_port(address) is None:
        return
    try:
        problem = token_problem(address, REACH_S)
    except ConnectionError as error:
        raise ValueError(
            f"RAY_ADDRESS={address}: no Ray answers there ({error}); start the cluster, give the "
            "address that `ray start --head` printed (not that of its dashboard), or unset "
            "RAY_ADDRESS to use this machine alone"
        ) from None
    if problem:
        raise ValueError(
            f"RAY_ADDRESS={address}: the cluster requires its token ({problem}); copy "
            "~/.ray/auth_token of its head to this machine, or set RAY_AUTH_TOKEN, and set "
            f"{AUTH_MODE}=token ({AUTH_MODE} is {os.environ.get(AUTH_MODE, 'not set')} now)"
        )


def _address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def shape(ready_s: float) -> ClusterShape:
    """The connected cluster in its present state."""
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    nodes = live_nodes()
    return ClusterShape(
        len(nodes),
        total.get("CPU", 0),
        total.get("GPU", 0),
        ready_s,
        is_private=_address() in _STARTED,
        nodes=nodes,
    )


def live_nodes(selector: Mapping[str, str] | None = None) -> tuple[Mapping[str, Any], ...]:
    """The nodes that are up and have the labels, as Ray lists them."""
    labels = dict(selector or {})
    return tuple(
        node
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node_labels_match_selector(node["Labels"], labels)
    )


def _shows_logs() -> bool:
    # The output of workers is only for debugging.
    return os.environ.get("VIT_RAY_LOGS") == "1"
