"""Which Ray a driver joins."""

import inspect
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import node
from ray._private.utils import check_version_info

from tests.ports import free_ports
from vit_ray.config import load_recipe
from vit_ray.launch.cluster import connection
from vit_ray.launch.cluster.connection import (
    ClusterShape,
    check_address,
    check_reachable,
    connect,
)
from vit_ray.ray_internals import STARTUP_TIMEOUT

TOKEN = "0123456789abcdef" * 2


@pytest.mark.parametrize("has_dashboard", [True, False])
def test_numbers_for_a_dashboard_are_kept_where_a_ray_for_one_command_has_one(
    monkeypatch: pytest.MonkeyPatch, has_dashboard: bool
) -> None:
    left_out: list[None] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(connection.DASHBOARD, str(int(has_dashboard)))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection, "_start", lambda num_cpus: None)
    monkeypatch.setattr(connection, "mark_private", lambda: None)
    monkeypatch.setattr(connection, "_end_with_ray", lambda folder: None)
    monkeypatch.setattr(connection, "shape", lambda ready_s: ClusterShape(1, 4, 0, ready_s))
    monkeypatch.setattr(connection, "keep_no_dataset_statistics", lambda: left_out.append(None))
    with warnings.catch_warnings():
        warnings.resetwarnings()
        connect(load_recipe("digits"))
        assert not warnings.filters  # those of the caller of `train`
    assert bool(left_out) != has_dashboard


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "localhost:{}"])
def test_an_address_at_which_nobody_listens_is_an_error_that_names_it(form: str) -> None:
    with socket.socket() as held:  # nobody will ever listen here
        held.bind(("127.0.0.1", 0))
        address = form.format(held.getsockname()[1])
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address}: no Ray answers there"):
            check_reachable(address, timeout_s=0.1)


def test_a_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no Ray answers there"):
        check_reachable("no-such-host.invalid:6379", timeout_s=0.1)


def test_an_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0.1)


@pytest.mark.parametrize("address", ["auto", "local"])
def test_other_forms_are_left_to_ray(address: str) -> None:
    check_reachable(address, timeout_s=0.1)


def test_a_ray_for_one_command_keeps_the_processes_of_its_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: dict[str, Any] = {}

    def init(**options: Any) -> None:
        chosen.update(options, kept=int(os.environ[connection.KEPT_PROCESSES]))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(connection.KEPT_PROCESSES, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(connection, "_STARTED", [])
    monkeypatch.setattr(connection, "_address", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(connection, "shape", lambda ready_s: ClusterShape(1, 4, 0, ready_s))
    monkeypatch.setattr(connection, "keep_no_dataset_statistics", lambda: None)
    recipe = load_recipe("digits", ["data.cpus_per_task=0.5"])
    wide = recipe.with_changes(workers={"num_workers": 90, "cpus_per_worker": 1.0})
    connect(recipe, wide)
    assert chosen["num_cpus"] == 91  # of a sweep's or study's widest training
    # Ray counts actors, of which there are about ten, as well.
    assert chosen["kept"] - 10 >= chosen["num_cpus"]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vr", dir="/tmp") as folder:
        yield Path(folder)


START = "from vit_ray.launch.cluster.connection import _start; _start(1)"


def start(folder: Path, code: str = START, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Ray is started in the folder by a process that ends."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_TMPDIR": str(folder), **environment},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def running_in(folder: str) -> list[str]:
    """Command lines of this machine's processes that name the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found.append((process / "cmdline").read_text())
    return [line for line in found if folder in line]


def test_a_ray_for_one_command_leaves_no_files_and_no_processes(short_folder: Path) -> None:
    looks = f"from {__name__} import running_in; print(running_in({str(short_folder)!r}))"
    done = start(short_folder, f"{START}; {looks}")
    assert "raylet" in done.stdout, done.stderr
    assert list(short_folder.iterdir()) == []
    deadline = time.monotonic() + 10.0
    while left := running_in(str(short_folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(("end", "code", "is_kept"), [
    ("return 0", 0, False),
    ("return 3", 3, False),  # stopped, with a checkpoint
    ("raise ValueError('a wrong key')", 2, False),
    ("raise RuntimeError('a worker failed; log /tmp/...')", 1, True),
])  # fmt: skip
def test_rays_logs_are_kept_where_a_failure_names_them(
    end: str, code: int, is_kept: bool, short_folder: Path
) -> None:
    run = f"import ray, sys; ray.init = lambda **_: 0\ndef run():\n    {START}\n    {end}\n"
    script = f"{run}from vit_ray.commands.cli import _ended\n"
    assert start(short_folder, f"{script}sys.exit(_ended(run))").returncode == code
    assert bool(list(short_folder.iterdir())) == is_kept


def test_a_start_of_ray_that_takes_too_long_ends_in_one_line(short_folder: Path) -> None:
    """Also while it has Python's global lock, as where Ray waits for its worker processes."""
    hang = "import ctypes, ray; ray.init = lambda **_: ctypes.PyDLL(None).sleep(300)"
    done = start(short_folder, f"{hang}; {START}", RAY_worker_register_timeout_seconds="1")
    assert done.returncode == -signal.SIGKILL
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: waited 3 s for Ray's processes on this machine")
    assert "RAY_worker_register_timeout_seconds above 1" in line


def test_a_machine_that_is_too_busy_to_start_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STARTUP_TIMEOUT in inspect.getsource(node)

    def init(**_: Any) -> None:
        raise Exception(f"{STARTUP_TIMEOUT}. This could happen because the GCS is overloaded.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RuntimeError, match=r"too busy.* again") as raised:
        connect(load_recipe("digits"))
    assert "\n" not in str(raised.value)


def joining(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    """A driver with an address at which somebody listens."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv(connection.AUTH_MODE, "disabled")
    monkeypatch.setattr(connection, "check_reachable", lambda address: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)


@pytest.mark.parametrize(
    ("ray_version", "python_version"),
    [("2.59.1", platform.python_version()), (ray.__version__, "3.9.1")],
)
def test_a_cluster_of_another_version_is_an_error_that_names_both(
    monkeypatch: pytest.MonkeyPatch, ray_version: str, python_version: str
) -> None:
    theirs = {"ray_version": ray_version, "python_version": python_version}
    # Ray's own check, which `ray.init` makes with what the cluster says of itself.
    joining(monkeypatch, lambda **_: check_version_info(theirs, "10.0.0.2"))
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS=10\.0\.0\.1:6379: The cluster") as raised:
        connect(load_recipe("digits"))
    (line,) = str(raised.value).splitlines()
    assert f"started with: Ray: {ray_version} Python: {python_version} This process" in line
    assert (
        f"started with: Ray: {ray.__version__} Python: {platform.python_version()}; both need"
        in line
    )
    assert "ray job submit" in line


def test_other_errors_of_joining_are_rays_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise RuntimeError("the cluster is full")

    joining(monkeypatch, fails)
    with pytest.raises(RuntimeError, match=r"^the cluster is full$"):
        connect(load_recipe("digits"))


@pytest.mark.parametrize("address", ["foo", "8265", "localhost", "ray://head:10001"])
def test_an_address_of_another_form_is_refused_by_the_name_of_its_variable(address: str) -> None:
    with pytest.raises(
        ValueError, match=f"RAY_ADDRESS={address} is not an address; give HOST:PORT"
    ):
        check_reachable(address)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head that takes only those that have its token; its address."""
    folder = tempfile.mkdtemp(prefix="vr", dir="/tmp")
    port, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block",
        f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}", "--num-cpus=1", f"--temp-dir={folder}",
        "--include-dashboard=false", "--disable-usage-stats",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL,
                            start_new_session=True)  # fmt: skip
    try:
        check_reachable(f"127.0.0.1:{port}", 60)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE is disabled now"),
        ({"RAY_AUTH_MODE": "token"}, "Authentication token is missing or incorrect"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN[::-1]}, "RAY_AUTH_MODE is token now"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}, "1 node, 1 CPUs, 0 GPUs"),
    ],
)
def test_a_cluster_that_refuses_the_token_is_told_at_once(
    environment: dict[str, str], message: str, guarded: str, tmp_path: Path
) -> None:
    """Ray itself tries for 20 s, and says that it failed to connect."""
    code = (
        "from tests.recipes import recipe_with; "
        "from vit_ray.launch.cluster.connection import connect; print(connect(recipe_with()))"
    )
    whole = {**os.environ, "RAY_ADDRESS": guarded, "HOME": str(tmp_path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=whole, capture_output=True, text=True, timeout=120
    )
    output = done.stdout + done.stderr
    assert message in output
    assert "Failed to get cluster ID" not in output  # Ray's own attempts have not begun
    assert ("copy ~/.ray/auth_token of its head" in output) == (done.returncode != 0)


@pytest.mark.parametrize("is_own", [True, False])
def test_sigterm_does_what_it_did_once_ray_is_joined(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own handler prints a stack, and ends the process with exit code 15."""
    earlier = signal.getsignal(signal.SIGTERM)
    before: Any = (lambda *_: None) if is_own else signal.SIG_DFL

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)

    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(connection, "token_problem", lambda *_: None)
        monkeypatch.setattr(connection, "shape", lambda _: "shape")
        signal.signal(signal.SIGTERM, before)
        try:
            assert connect(load_recipe("digits")) == "shape"
            if is_own:
                assert signal.getsignal(signal.SIGTERM) is before
            else:
                with pytest.raises(SystemExit, match="143"):  # what is open is closed
                    signal.raise_signal(signal.SIGTERM)
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        finally:
            signal.signal(signal.SIGTERM, earlier)


def test_a_ray_for_one_command_has_the_cores_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a host's 64 a container may use those of its affinity."""
    started: list[int] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **how: started.append(how["num_cpus"]))
    monkeypatch.setattr(connection, "mark_private", lambda: None)
    monkeypatch.setattr(connection, "_end_with_ray", lambda folder: None)
    monkeypatch.setattr(connection, "keep_no_dataset_statistics", lambda: None)
    monkeypatch.setattr(connection, "shape", lambda at: ClusterShape(1, 9, 0, at, is_private=True))
    assert "7 cores" in str(connect(load_recipe("digits")))
    assert started == [7]


def test_what_takes_connections_and_is_no_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REACH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match="something listens there, but no Ray answers"):
            check_address(address)


def test_a_folder_whose_path_is_too_long_for_rays_sockets_is_told(tmp_path: Path) -> None:
    """By Ray itself, before it starts anything."""
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    error = start(folder).stderr
    assert "ValueError: Ray could not be started in a folder in RAY_TMPDIR" in error
    assert "set RAY_TMPDIR to a folder of your own" in error
    assert list(folder.iterdir()) == []


class FakeProcess:
    def __init__(self, words: list[str], state: str) -> None:
        self.info = {"name": "raylet", "ppid": os.getpid(), "cmdline": words}
        self.state = state

    def status(self) -> str:
        return self.state


def test_a_process_ends_with_its_ray_and_not_with_the_one_that_it_had_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    before = FakeProcess([], psutil.STATUS_ZOMBIE)
    own = FakeProcess(["raylet", "--session_dir=/tmp/ray-b/session"], psutil.STATUS_RUNNING)
    monkeypatch.setattr(psutil, "process_iter", lambda _: [before, own])
    monkeypatch.setattr(connection, "LOOK_S", 0.01)
    monkeypatch.setattr(connection, "_address", lambda: "127.0.0.1:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", ended.append)
    others = set(threading.enumerate())
    connection._end_with_ray("/tmp/ray-b")
    (watch,) = set(threading.enumerate()) - others
    time.sleep(0.2)
    assert watch.is_alive()
    own.state = psutil.STATUS_ZOMBIE
    watch.join(30)
    assert ended == [1]
    assert "error: Ray on this machine has ended" in capsys.readouterr().err
