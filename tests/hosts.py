"""Hosts with addresses, processes and memory of their own on one machine, which can be cut off.

A host is a network, pid, mount, UTS and IPC namespace. Its one interface is a veth into a bridge
that lies in a namespace of its own, so nothing leaves the machine. All hosts share the machine's
disk, CPUs, memory figure and clock: what a host must have alone is mounted (`private`), and
memory and object store are given to Ray by flags.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SUBNET = "198.18.7"  # of 198.18.0.0/15, which RFC 2544 keeps for tests of networks
SHARED_MEMORY_MIB = 1500
_NUMBERS = itertools.count()
_NAMESPACES = ("--net", "--pid", "--uts", "--ipc", "--mount")
# The first process of a host reaps what others leave, and ends with the host alone.
_FIRST = "while :; do sleep 3600 & wait $!; done"


@functools.cache
def missing() -> str | None:
    """Why this machine cannot have hosts, or None."""
    try:
        with network() as net:
            net.join("probe").processes()
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        return f"hosts are refused: {getattr(error, 'stderr', None) or error}"
    return None


def require() -> None:
    """Skip the test where this machine cannot have hosts; fail where it was said to have them."""
    if reason := missing():
        if os.environ.get("VIT_RAY_HAS_HOSTS"):
            pytest.fail(f"no hosts, though VIT_RAY_HAS_HOSTS is set: {reason}")
        pytest.skip(reason)


@dataclass
class Host:
    name: str
    address: str
    folder: Path
    """Its own; holds its `/tmp/ray` and what is mounted privately."""
    _switch: str
    _port: str
    _first: subprocess.Popen[bytes]
    _pid: int

    def start(
        self, *command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a process on the host; its output is a pipe, standard error included."""
        return self._spawn(command, environment, cwd=cwd, stdout=subprocess.PIPE, text=True)

    def serve(
        self, log: str, *command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to the file `log` in the host's folder."""
        with open(self.folder / log, "ab") as output:
            return self._spawn(command, environment, stdout=output)

    def run(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 300,
    ) -> tuple[int, str]:
        """Exit code and output of a command on the host."""
        process = self.start(*command, environment=environment, cwd=cwd)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output

    def cut(self) -> None:
        _run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        _run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def lose(self) -> None:
        """End all its processes at once, as a power failure does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._first.wait(timeout=30)

    def processes(self) -> list[str]:
        """Command lines of what runs on it, without its first process; [] where it is lost."""
        output = self.run("ps", "-eo", "pid=,args=")[1]
        found = re.findall(r"^ *(\d+) (.+)$", output, re.MULTILINE)
        idle = ("sleep 3600", "ps -eo")
        return [args for pid, args in found if pid != "1" and not args.startswith(idle)]

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str] | None, **options: Any
    ) -> subprocess.Popen[Any]:
        enter = ["nsenter", "--target", str(self._pid), *_NAMESPACES, "--"]
        own = {**os.environ, **(environment or {})}
        return subprocess.Popen([*enter, *command], env=own, stderr=subprocess.STDOUT, **options)


class Network:
    def __init__(self, folder: Path) -> None:
        self._folder, self._token = folder, f"vr{os.getpid()}n{next(_NUMBERS)}"
        self._switch = f"{self._token}sw"
        self._namespaces: list[str] = []
        self._hosts: dict[str, Host] = {}
        self._hosts_file = folder / "hosts"
        self._hosts_file.write_text("127.0.0.1 localhost\n")

    def __enter__(self) -> Network:
        self._add(self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            host.lose()
        for namespace in self._namespaces:
            _run("ip", "netns", "delete", namespace)

    def _add(self, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)

    def join(self, name: str, private: Sequence[str] = ()) -> Host:
        """A host that is new, or one that was lost and starts again under its name and address.

        Args:
            name: its host name.
            private: folders that it has alone, empty at first; others share the machine's.
        """
        number = [*self._hosts, name].index(name) + 1
        namespace, port = f"{self._token}h{number}", f"p{number}"
        address, folder = f"{SUBNET}.{number}", self._folder / name
        if name not in self._hosts:
            self._add(namespace)
            _run("ip", "-n", self._switch, "link", "add", port, "type", "veth",
                 "peer", "name", "eth0", "netns", namespace)  # fmt: skip
            _run("ip", "-n", self._switch, "link", "set", port, "master", "br0")
            _run("ip", "-n", self._switch, "link", "set", port, "up")
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", namespace, "link", "set", "eth0", "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            with open(self._hosts_file, "a") as hosts:
                hosts.write(f"{address} {name}\n")
            folder.mkdir()
        first = self._boot(name, namespace, folder, private)
        host = Host(name, address, folder, self._switch, port, first, _child_of(first))
        self._hosts[name] = host
        return host

    def _boot(
        self, name: str, namespace: str, folder: Path, private: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        mounts = [f"mount -t tmpfs -o size={SHARED_MEMORY_MIB}m tmpfs /dev/shm",
                  f"mount --bind {self._hosts_file} /etc/hosts", "mkdir -p /tmp/ray"]  # fmt: skip
        for place in ("/tmp/ray", *private):
            own = folder / place.strip("/").replace("/", "-")
            own.mkdir(exist_ok=True)
            mounts.append(f"mount --bind {own} {place}")
        ready = folder / "ready"
        ready.unlink(missing_ok=True)
        script = " && ".join([f"hostname {name}", *mounts, f"touch {ready}"]) + f" && {_FIRST}"
        first = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "--pid", "--fork",
             "--kill-child", "--mount-proc", "--uts", "--ipc", "--mount", "bash", "-c", script],
            stderr=subprocess.PIPE,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not ready.exists():
            if first.poll() is not None or time.monotonic() > deadline:
                first.kill()
                _, message = first.communicate()
                raise AssertionError(f"host {name} did not start: {message.decode()}")
            time.sleep(0.05)
        return first


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network without hosts, whose namespaces and files go at the end."""
    folder = Path(tempfile.mkdtemp(prefix="vrh", dir="/tmp"))
    try:
        with Network(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


RAY = str(Path(sys.executable).parent / "ray")
PORT = 6379


def start_head(host: Host, options: Sequence[str] = (), **environment: str) -> None:
    """A Ray head on the host, with the job server and without CPUs."""
    role = ["--head", f"--port={PORT}", "--dashboard-host=0.0.0.0", *options]
    _start_ray(host, role, 0, environment)


def start_raylet(
    host: Host, head: Host, num_cpus: int = 2, options: Sequence[str] = (), **environment: str
) -> None:
    """A worker node on the host, which starts again when its raylet ends, as a pod does."""
    role = [f"--address={head.address}:{PORT}", *options]
    _start_ray(host, role, num_cpus, environment, again=True)


def _start_ray(
    host: Host,
    role: list[str],
    num_cpus: int,
    environment: Mapping[str, str],
    *,
    again: bool = False,
) -> None:
    command = [
        RAY, "start", "--block", *role, f"--node-ip-address={host.address}",
        f"--num-cpus={num_cpus}", "--num-gpus=0", "--memory=2000000000",
        "--object-store-memory=300000000", "--disable-usage-stats",
    ]  # fmt: skip
    if again:
        words = " ".join(command)
        command = ["bash", "-c", f"while :; do {words}; sleep 1; done"]
    host.serve("ray.log", *command, environment=environment)


def wait_for_nodes(head: Host, count: int, timeout_s: float = 120) -> None:
    """Until that many nodes are alive, as the head sees them, with its own."""
    script = (
        "import ray; ray.init(address='auto', logging_level='ERROR', log_to_driver=False);"
        "print('alive', sum(node['Alive'] for node in ray.nodes()))"
    )
    deadline = time.monotonic() + timeout_s
    while True:
        _, output = head.run(sys.executable, "-c", script, timeout_s=90)
        if f"alive {count}\n" in output:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(p.read_text()[-1500:] for p in head.folder.parent.glob("*/ray.log"))
            raise AssertionError(f"{count} nodes were not alive in {timeout_s} s: {output}\n{logs}")
        time.sleep(0.5)


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """The host's first process, as this machine numbers it."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
