"""Which Ray a driver joins, or starts for itself alone."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from vit_ray.launch import connection
from vit_ray.launch.connection import check_address, check_reachable

START = "from vit_ray.launch.connection import _start; _start(1)"


def test_an_address_at_which_no_ray_answers_is_an_error_that_names_it(monkeypatch):
    for address in ("foo", "ray://head:10001"):
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address} is not an address"):
            check_reachable(address)
    with socket.socket() as held:  # nobody will ever listen here
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"RAY_ADDRESS={address}: no Ray answers there"):
            check_reachable(address, timeout_s=0.1)
    monkeypatch.setattr(connection, "REACH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match="something listens there, but no Ray answers"):
            check_address(address)


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
