"""Rays of their own, on this machine or on two hosts, and commands on them as processes."""

import contextlib
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.net.trees import HERE, ROOT

Environment = dict[str, str]
PORTS = (
    "port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port", "metrics-export-port",
)  # fmt: skip
ADDRESSES = ("198.18.9.1", "198.18.9.2")  # RFC 2544 keeps 198.18.0.0/15 for tests of networks


class Command:
    """`vit-ray WORDS` as a process of this tree."""

    def __init__(
        self, own: Environment, *words: str, prefix: tuple[str, ...] = (), cwd: Path = ROOT
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "vit_ray", *words],
            cwd=cwd, env=own, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(self, limit_s: float = 300) -> int:
        return self.process.wait(limit_s)

    def must_end(self, limit_s: float = 900) -> None:
        if code := self.wait(limit_s):
            self._log.seek(0)
            raise RuntimeError(f"{self.process.args}: exit code {code}\n{self._log.read()[-4000:]}")


def environment(**changes: str) -> Environment:
    """For commands: this tree, CPUs alone, one thread a process, a Ray with a token."""
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost"}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**HERE.environment(), **fixed, **token, **changes}


@contextlib.contextmanager
def ray_head(**changes: str) -> Iterator[Environment]:
    """The environment of commands on a Ray of 4 CPUs, which ends with the block.

    `changes`: of the head's environment, which its workers inherit.
    """
    own = environment(**changes)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    words = ["--head", "--num-cpus=4", *(f"--{name}={port}" for name, port in ports.items())]
    with _ray(own, *words) as process:
        for name in ("port", "dashboard-port"):
            wait_until(functools.partial(is_open, ports[name]), process)
        yield {**own, "RAY_ADDRESS": f"127.0.0.1:{ports['port']}"}


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Environment, tuple[str, ...]] | None]:
    """Namespaces of network and processes, with a cable between them; None without root.

    Yields:
        The environment of commands on the first of two hosts with Ray and 2 CPUs each, and the
        words before a command.
    """
    if os.geteuid() != 0:
        yield None
        return
    names = [f"vn{os.getpid()}{end}" for end in "ab"]
    own = environment(RAY_ADDRESS=f"{ADDRESSES[0]}:6379")
    with contextlib.ExitStack() as hosts:
        for name in names:
            _ip("netns", "add", name)
            hosts.callback(_ip, "netns", "delete", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth",
            "peer", "name", "eth0", "netns", names[1])  # fmt: skip
        for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            words = [f"--address={own['RAY_ADDRESS']}"] if number else ["--head", "--port=6379"]
            words += [f"--node-ip-address={address}", "--num-cpus=2"]
            inside = f"ip netns exec {name} unshare --pid --fork --kill-child --mount-proc".split()
            host = hosts.enter_context(_ray(own, *words, prefix=inside))
            wait_until(functools.partial(_has_nodes, number + 1, names[0], own), host)
        yield own, ("ip", "netns", "exec", names[0])


@contextlib.contextmanager
def _ray(
    own: Environment, *words: str, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A node, with all that a head keeps in a folder of its own: sockets need short names."""
    command = [*prefix, str(Path(sys.executable).with_name("ray")), "start", "--block", *words]
    command += ["--num-gpus=0", "--object-store-memory=600000000", "--disable-usage-stats"]
    with tempfile.TemporaryDirectory(prefix="vn", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command += [f"--temp-dir={folder}"] if "--head" in words else []
        with open(f"{folder}/log", "w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=own, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=4)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)


def _has_nodes(count: int, name: str, own: Environment) -> bool:
    """Whether so many live, as a process on the host sees it."""
    script = "import ray; ray.init(log_to_driver=False); print(len(ray.nodes()))"
    command = ["ip", "netns", "exec", name, sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=180)
    return done.stdout.strip() == str(count)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def free_ports(count: int) -> list[int]:
    """Different ports that were free just now: above those of Ray's workers (10002 to 19999), and
    below those that Linux hands to connections (32768 on).
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            probe, port = held.enter_context(socket.socket()), 20_000 + secrets.randbelow(12_000)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[Any], limit_s: float = 300
) -> None:
    """Poll until the condition holds; fails if the process ends first."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise TimeoutError(f"{process.args}: exit code {process.poll()}, in {limit_s} s")
        time.sleep(0.05)
