"""Which Ray a driver joins, or starts for itself alone."""

import importlib
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.utils import check_version_info

from tests.recipes import recipe_with
from vit_ray.launch import connection
from vit_ray.launch.connection import ClusterShape, check_address, connect

START = "from vit_ray.launch.connection import _start; _start(1)"


def test_an_address_at_which_no_ray_answers_is_an_error_that_names_it(monkeypatch):
    for address in ("foo", "ray://head:10001"):
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} is not an address"):
            check_address(address)
    monkeypatch.setattr(connection, "REACH_S", 1.0)
    with socket.socket() as held:  # bound: nothing will ever listen there
        held.bind(("127.0.0.1", 0))
        for listening in (False, True):  # to Ray's request nothing answers either way
            if listening:
                held.listen()
            address = f"127.0.0.1:{held.getsockname()[1]}"
            with pytest.raises(ValueError, match=f"RAY_ADDRESS={address}: no Ray answers there"):
                check_address(address)


def test_a_cluster_whose_services_are_down_is_reported_as_one_that_does_not_answer():
    grpc: Any = importlib.import_module("grpc")

    def refuse(_: bytes, context: Any) -> None:
        context.abort(grpc.StatusCode.UNAVAILABLE, "")

    answers = SimpleNamespace(service=lambda _: grpc.unary_unary_rpc_method_handler(refuse))
    server = grpc.server(ThreadPoolExecutor(1), handlers=(answers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ValueError, match=r"no Ray answers there .unavailable.; start the"):
            check_address(f"127.0.0.1:{port}")
    finally:
        server.stop(None)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vr", dir="/tmp") as folder:
        yield Path(folder)


def start(folder: Path, code: str = START, **environment: str) -> subprocess.CompletedProcess[str]:
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


def test_a_ray_for_one_command_leaves_no_files_and_no_processes(short_folder):
    looks = f"from {__name__} import running_in; print(running_in({str(short_folder)!r}))"
    done = start(short_folder, f"{START}; {looks}")
    assert "raylet" in done.stdout, done.stderr
    assert list(short_folder.iterdir()) == []
    deadline = time.monotonic() + 10.0
    while left := running_in(str(short_folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_rays_logs_are_kept_where_a_failure_names_them(short_folder):
    end = "raise RuntimeError('a worker failed; log /tmp/...')"
    run = f"import ray, sys; ray.init = lambda **_: 0\ndef run():\n    {START}\n    {end}\n"
    script = f"{run}from vit_ray.commands.cli import _ended\n"
    assert start(short_folder, f"{script}sys.exit(_ended(run))").returncode == 1
    assert list(short_folder.iterdir())


def test_a_start_of_ray_that_takes_too_long_ends_in_one_line(short_folder):
    """Also while it has Python's global lock, as where Ray waits for its worker processes."""
    hang = "import ctypes, ray; ray.init = lambda **_: ctypes.PyDLL(None).sleep(300)"
    done = start(short_folder, f"{hang}; {START}", RAY_worker_register_timeout_seconds="1")
    assert done.returncode == -signal.SIGKILL
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: waited 3 s for Ray's processes on this machine")
    assert "RAY_worker_register_timeout_seconds above 1" in line


def test_a_folder_whose_path_is_too_long_for_rays_sockets_is_told(tmp_path):
    """By Ray itself, before it starts anything."""
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    error = start(folder).stderr
    assert "ValueError: Ray could not be started in a folder in RAY_TMPDIR" in error
    assert "set RAY_TMPDIR to a folder of your own" in error
    assert list(folder.iterdir()) == []


def joining(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(connection, "check_address", lambda address: None)
    monkeypatch.setattr(connection, "shape", lambda at: ClusterShape(1, 9, 0, at, is_private=True))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)


def test_a_cluster_of_another_version_is_an_error_that_names_both(monkeypatch):
    theirs = {"ray_version": "2.59.1", "python_version": platform.python_version()}
    # Ray's own check, which `ray.init` makes with what the cluster says of itself.
    joining(monkeypatch, lambda **_: check_version_info(theirs, "10.0.0.2"))
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS=10\.0\.0\.1:6379: Version") as raised:
        connect(recipe_with())
    (line,) = str(raised.value).splitlines()
    assert "Ray: 2.59.1 Python: " in line
    assert f"Ray: {ray.__version__} Python: {platform.python_version()}; cluster and" in line


def test_sigterm_does_what_it_did_once_ray_is_joined(monkeypatch):
    """Ray's own handler prints a stack, and ends the process with exit code 15."""
    joining(monkeypatch, lambda **_: signal.signal(signal.SIGTERM, lambda *_: None))
    earlier = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        connect(recipe_with())
        with pytest.raises(SystemExit, match="143"):  # what is open is closed
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_a_ray_for_one_command_has_the_cores_that_it_may_use_or_as_many_cpus_as_it_needs(
    monkeypatch,
):
    """Of a host's 64 a container may use those of its affinity; the caller's warnings stay."""
    started: list[int] = []
    joining(monkeypatch, None)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setattr(connection, "_start", started.append)
    for name in ("mark_private", "_end_with_ray", "keep_no_dataset_statistics"):
        monkeypatch.setattr(connection, name, lambda *_: None)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        assert "7 cores" in str(connect(recipe_with()))
        assert not warnings.filters
    wide = recipe_with(workers={"num_workers": 64, "cpus_per_worker": 1.0})
    connect(recipe_with(), wide)
    assert started == [7, 64 + math.ceil(2 * wide.data.cpus_per_task)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "has_token", "message"), [
    ("disabled", True, "RAY_AUTH_MODE is disabled now"),
    ("token", False, "RAY_AUTH_MODE is token now"),
    ("token", True, "1 node, 4 CPUs, 0 GPUs"),
])  # fmt: skip
def test_a_cluster_that_refuses_the_token_is_told_at_once(
    mode, has_token, message, ray_head, short_folder
):
    """Ray itself tries for 20 s, and says that it failed to connect."""
    code = (
        "from tests.recipes import recipe_with; "
        "from vit_ray.launch.connection import connect; print(connect(recipe_with()))"
    )
    token = os.environ["RAY_AUTH_TOKEN"][:: 1 if has_token else -1]
    done = start(
        Path("/tmp"), code, RAY_ADDRESS=ray_head.address, HOME=str(short_folder),
        RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN=token,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert message in output
    assert "Failed to get cluster ID" not in output  # Ray's own attempts have not begun
    assert ("copy ~/.ray/auth_token of its head" in output) == (done.returncode != 0)
