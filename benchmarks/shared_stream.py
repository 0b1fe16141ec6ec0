"""Decoding for 1, 2, 4 and 8 trials side by side, with one stream for all and with one for each.

    python benchmarks/shared_stream.py FOLDER_OF_JPEGS [--trials 1,2,4,8] [--rounds 3]

Sources are the folder's images, each cropped in its own way and scaled to a shorter side of 224
pixels. A trial is a process of one thread that takes its training stream as a worker does and takes
a step of SGD on every batch: a linear layer on patches of every fourth pixel, as wide as makes its
CPU time an image about half of the decode's. Servers, Ray Data and reading tasks are those of a
sweep. Decode CPU is that of the processes of reading tasks for each image that a trial has taken;
the rate counts the images of all trials. Ways alternate round by round; medians are given.
"""

import argparse
import io
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.result import finish, header, machine, measure_rounds

SIZE = 224
BATCH = 64
WARM_UP_S = 8.0
START_S = 60.0
"""Longest time until each trial has begun; Ray Data leaves some of many streams without a task."""
IMAGES = 6000


def write_images(source: Path, folder: Path) -> None:
    """Parts of the originals, the same ones at each call."""
    import numpy as np
    from PIL import Image

    files = sorted(source.rglob("*.JP*G")) or sorted(source.rglob("*.jp*g"))
    if not files:
        raise SystemExit(f"{source}: no JPEG files")
    for number in range(IMAGES):
        rng = np.random.default_rng(number)
        picture = Image.open(files[number % len(files)]).convert("RGB")
        width, height = (max(64, round(side * rng.uniform(0.7, 1.0))) for side in picture.size)
        left = int(rng.integers(picture.width - width + 1))
        top = int(rng.integers(picture.height - height + 1))
        scale = SIZE / min(width, height)
        part = picture.resize(
            (round(width * scale), round(height * scale)),
            Image.Resampling.BICUBIC,
            (left, top, left + width, top + height),
        )
        sink = io.BytesIO()
        part.save(sink, "JPEG", quality=int(rng.choice([85, 92])))
        file = folder / f"class_{number % 10}" / f"{number:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(sink.getvalue())


def spec_of(dataset: str) -> Any:
    from vit_ray.data import open_dataset
    from vit_ray.data.images.crop_boxes import Augmentation
    from vit_ray.data.order.shuffle import ShuffleWindow
    from vit_ray.data.stream.batches import StreamSpec

    window = ShuffleWindow(BATCH, 16)
    return StreamSpec(open_dataset(dataset), Augmentation(size=SIZE), window=window)


class Step:
    """A step of SGD on a batch, by one thread."""

    def __init__(self, width: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.embed = torch.nn.Conv2d(3, width, 8, 8)
        self.head = torch.nn.Linear(width, 10)
        parameters = [*self.embed.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def __call__(self, batch: dict[str, Any]) -> None:
        import torch

        pixels = batch["image"][:, ::4, ::4].copy()
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        logits = self.head(self.embed(images).flatten(2).mean(2))
        labels = torch.from_numpy(batch["labels"][:, 0].copy()).long()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def cost_ms(call: Any, times: int) -> float:
    """CPU milliseconds of this thread for each call."""
    call()
    began_s = time.thread_time()
    for _ in range(times):
        call()
    return 1000 * (time.thread_time() - began_s) / times


def costs(dataset: str) -> tuple[float, float, int]:
    """CPU ms an image of making a batch, of the step nearest to half of it, and its width."""
    import cv2

    from vit_ray.data.order.partition import Partition
    from vit_ray.data.order.samples import rows_per_group
    from vit_ray.data.stream.batches import BatchReader, StreamJob

    cv2.setNumThreads(0)
    spec = spec_of(dataset)
    counts = rows_per_group(spec.manifest, None)
    reader = BatchReader(StreamJob(spec, Partition(1, BATCH), 0, True, counts))
    batch, _ = reader.batch(0, 0, BATCH)
    decode_ms = cost_ms(lambda: reader.batch(0, 0, 8 * BATCH), 4) / (8 * BATCH)
    found = {}
    for width in (32, 64, 96, 128, 160, 192, 256):
        step = Step(width)
        found[width] = cost_ms(lambda step=step: step(batch), 10) / BATCH  # type: ignore[misc]
    width = min(found, key=lambda one: abs(found[one] - decode_ms / 2))
    return decode_ms, found[width], width


class Trial:
    """Trains in a thread, and says how many images it has had."""

    def __init__(self, server: Any, specs: list[Any], number: int, sharing: int, width: int):
        from vit_ray.data.stream.stream_server import RankStreams, Sharing

        self._taken = 0
        self._streams = RankStreams(
            server, specs[0], f"trial{number} 0", 0, 1,
            sharing=Sharing(f"trial{number}", sharing) if sharing else None,
        )  # fmt: skip
        self._step = Step(width)

    def train(self) -> None:
        for batch in self._streams.training_batches(BATCH, 0, 10**6 * BATCH):
            self._step(batch)
            self._taken += BATCH

    def taken(self) -> int:
        return self._taken


def readers_cpu_s(others: list[int]) -> dict[int, float]:
    """Of each worker process of this Ray but these."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::") and process.pid not in others:
                found[process.pid] = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return found


def measure(dataset: str, trials: int, is_shared: bool, width: int, seconds: float) -> Any:
    """Decode CPU ms an image and trial, images/s of all, MiB of the object store, of servers."""
    import ray

    from vit_ray.data.stream.stream_server import StreamServer

    os.environ |= {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=4 << 30,
    )
    try:
        remote = ray.remote(StreamServer).options(num_cpus=0, max_concurrency=2 * trials + 2)
        servers = [remote.remote(keeps_statistics=False) for _ in range(1 if is_shared else trials)]
        specs = ray.put({"train": spec_of(dataset)})
        actor = ray.remote(Trial).options(num_cpus=0, max_concurrency=2)
        sharing = trials if is_shared else 0
        each: list[Any] = [
            actor.remote(servers[number % len(servers)], [specs], number, sharing, width)
            for number in range(trials)
        ]
        for one in each:
            one.train.remote()
        actors = [*servers, *each]
        pids = ray.get([one.__ray_call__.remote(lambda _: os.getpid()) for one in actors])

        def num_begun() -> int:
            return sum(taken >= 4 * BATCH for taken in ray.get([e.taken.remote() for e in each]))

        def now() -> tuple[float, int, dict[int, float]]:
            taken = sum(ray.get([one.taken.remote() for one in each]))
            return time.perf_counter(), taken, readers_cpu_s(pids)

        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and num_begun() < trials:
            time.sleep(0.5)
        time.sleep(WARM_UP_S)
        (began_s, first, before), _ = now(), time.sleep(seconds)
        ended_s, last, after = now()
        used_s = sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items())
        free = ray.available_resources().get("object_store_memory", 0.0)
        held = ray.cluster_resources()["object_store_memory"] - free
        memory = sum(psutil.Process(pid).memory_info().rss for pid in pids[: len(servers)])
        return (
            1000 * used_s / (last - first), (last - first) / (ended_s - began_s),
            held / 2**20, memory / 2**20, trials - num_begun(),
        )  # fmt: skip
    finally:
        ray.shutdown()


def main() -> None:
    """Prepare the data, measure all ways in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prepared", type=Path, help="kept data; made where it is missing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        data = args.prepared or Path(made)
        if not (data / "set").exists():
            from benchmarks.data_stream import start_ray
            from vit_ray.config.command_sections import ConvertConfig
            from vit_ray.data.prepare.convert.conversion import convert

            write_images(args.folder, data / "images")
            start_ray()
            convert(ConvertConfig(source=f"{data}/images", destination=f"{data}/set", shard_mib=8))
            import ray

            ray.shutdown()
        dataset = str(data / "set")
        decode_ms, step_ms, width = costs(dataset)
        counts = [int(one) for one in args.trials.split(",")]
        ways = [(count, shared) for count in counts for shared in (False, True)]
        found = measure_rounds(
            ways, args.rounds, lambda way: measure(dataset, *way, width, args.seconds)
        )
    medians = {
        way: [statistics.median(column) for column in zip(*rows, strict=True)]
        for way, rows in found.items()
    }
    lines = [
        f"# shared_stream: {machine()}\n",
        f"One thread alone: decode {decode_ms:.3f} ms of CPU an image (d), step {step_ms:.3f} ms "
        f"(c, {step_ms / decode_ms:.2f} of it). Expected of n trials that share: "
        "(d + c) / (d/n + c).\n",
        *header(
            "trials | streams | decode CPU ms an image and trial | of one for each | images/s | "
            "of one for each | expected | object store MiB | servers MiB | trials without an image"
        ),
    ]
    for count, shared in ways:
        decode, rate, store, memory, idle = medians[count, shared]
        base_decode, base_rate, *_ = medians[count, False]
        expected = (decode_ms + step_ms) / (decode_ms / count + step_ms) if shared else 1.0
        lines.append(
            f"| {count} | {'one for all' if shared else 'one for each'} | {decode:.3f} | "
            f"{decode / base_decode:.2f} | {rate:,.0f} | {rate / base_rate:.2f} | "
            f"{expected:.2f} | {store:,.0f} | {memory:,.0f} | {idle:.0f} |"
        )
    finish("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
