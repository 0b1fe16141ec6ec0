"""Images per second from encoded JPEG to 224 px training crops: this stream, its peers, the limit.

    python benchmarks/data_stream.py FOLDER_OF_JPEGS [--rows 8000] [--seconds 20] [--out FILE.md]

All rows decode the same images with the same crop distribution, each in its own process tree on all
cores, from local files in the page cache; the rate is over the seconds after the warm-up, and the
time to the first batch is stated apart. Where other work shares the machine, the CPU time an image
is the fairer figure: all rows are bound by it. Peers that cannot be imported are listed as such.
"""

import argparse
import contextlib
import importlib.machinery
import io
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil

SIZE = 224
BATCH = 64
WARM_UP_S = 12.0
CORES = os.cpu_count() or 1


def pillow_crop(image: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode and crop as timm's default loader does: Pillow, bilinear, antialiased."""
    from PIL import Image

    picture = Image.open(io.BytesIO(image)).convert("RGB")
    top, left, height, width = inception_box(picture.height, picture.width, rng)
    box = (left, top, left + width, top + height)
    crop = picture.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    pixels = np.asarray(crop)
    return np.ascontiguousarray(pixels[:, ::-1]) if rng.random() < 0.5 else pixels


def opencv_crop(image: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode and crop as users of OpenCV do: full decode, bilinear."""
    pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    top, left, height, width = inception_box(*pixels.shape[:2], rng)
    crop = cv2.resize(pixels[top : top + height, left : left + width], (SIZE, SIZE))
    return np.ascontiguousarray(crop[:, ::-1]) if rng.random() < 0.5 else crop


def inception_box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height, width: area 5-100 %, aspect 3/4-4/3."""
    for _ in range(10):
        area = height * width * rng.uniform(0.05, 1.0)
        aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


CROPS = {"pillow": pillow_crop, "opencv": opencv_crop}


def image_files(data: Path) -> list[Path]:
    return sorted((data / "folder").glob("*/*"))


def torch_loader(data: Path, decoder: str) -> Iterator[Any]:
    """PyTorch's DataLoader over the image files, a worker per core."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset[Any]):
        def __init__(self) -> None:
            self.files = image_files(data)

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> Any:
            rng = np.random.default_rng()
            return torch.from_numpy(CROPS[decoder](self.files[index].read_bytes(), rng).copy())

    loader = DataLoader(
        Files(),
        BATCH,
        shuffle=True,
        num_workers=CORES,
        worker_init_fn=one_thread,
        prefetch_factor=4,
        persistent_workers=True,
    )
    while True:
        yield from loader


def one_thread(_: int) -> None:
    cv2.setNumThreads(0)


def webdataset_loader(data: Path, decoder: str) -> Iterator[Any]:
    """WebDataset over tar shards, a worker per core, decoding with OpenCV."""
    import webdataset

    shards = sorted(str(path) for path in (data / "tar").glob("*.tar"))

    def crop(sample: dict[str, Any]) -> tuple[np.ndarray]:
        return (CROPS[decoder](sample["jpg"], np.random.default_rng()),)

    stages = webdataset.WebDataset(shards, resampled=True, empty_check=False)
    dataset = stages.shuffle(500).map(crop).batched(BATCH)
    loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=CORES, worker_init_fn=one_thread, prefetch_factor=4
    )
    while True:
        yield from (images for (images,) in loader)


def import_streaming() -> Any:
    """MosaicML Streaming, with an empty stand-in for torchvision.

    It imports torchvision for its own vision data sets, which are not used here, and torchvision
    does not import beside a CPU build of torch.
    """

    class Anything(type(sys)):
        __path__: list[str] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("", ".transforms", ".transforms.functional", ".datasets", ".datasets.vision"):
        stand_in = Anything("torchvision" + name)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(stand_in.__name__, None)
        sys.modules[stand_in.__name__] = stand_in
    import streaming

    return streaming


def mosaic_loader(data: Path, decoder: str) -> Iterator[Any]:
    """MosaicML Streaming over MDS shards, a worker per core, decoding with OpenCV."""
    streaming = import_streaming()
    from torch.utils.data import DataLoader

    class Crops(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return CROPS[decoder](super().__getitem__(index)["image"], np.random.default_rng())

    dataset = Crops(local=str(data / "mds"), shuffle=True, batch_size=BATCH)
    loader = DataLoader(
        dataset,
        BATCH,
        num_workers=CORES,
        worker_init_fn=one_thread,
        prefetch_factor=4,
        persistent_workers=True,
    )
    while True:
        yield from loader


def plain_ray(data: Path, decoder: str) -> Iterator[Any]:
    """Ray Data as its guide shows it: read_parquet, map_batches, iter_batches."""
    import ray

    start_ray()

    def crops(batch: dict[str, Any]) -> dict[str, Any]:
        cv2.setNumThreads(0)
        rng = np.random.default_rng()
        return {"image": np.stack([CROPS[decoder](image, rng) for image in batch["image"]])}

    shards = sorted(str(path) for path in (data / "set").glob("part-*.parquet"))
    while True:
        dataset = ray.data.read_parquet(shards, columns=["image"]).map_batches(crops, batch_size=64)
        yield from (batch["image"] for batch in dataset.iter_batches(batch_size=BATCH))


def start_ray() -> None:
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=CORES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=2 << 30,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.get(ray.remote(lambda: 1).remote())
    print(json.dumps({"up": time.perf_counter()}), flush=True)


def vit_ray_stream(data: Path, folder: str) -> Iterator[Any]:
    """This project's training stream for one trainer; batches come from all shards at once."""
    import ray

    from vit_ray.data import open_dataset
    from vit_ray.data.images.crops import Augmentation
    from vit_ray.data.stream.batches import StreamSpec
    from vit_ray.data.stream.stream_server import RankStreams, StreamServer

    start_ray()
    spec = StreamSpec(open_dataset(str(data / folder)), Augmentation("inception_crop", SIZE))
    stop = spec.num_images * 50 // BATCH * BATCH
    specs = ray.put({"train": spec})
    server = ray.remote(StreamServer).options(num_cpus=0, max_concurrency=4).remote()
    streams = RankStreams(server, specs, "benchmark", 0, 1)
    yield from (batch["image"] for batch in streams.training_batches(BATCH, 0, stop))


def bare_loop(data: Path, decoder: str) -> Iterator[Any]:
    """The limit: a process per core crops images that lie in memory, and nothing else."""
    counts = multiprocessing.Array("q", CORES)
    files = [path.read_bytes() for path in image_files(data)[:2000]]
    workers = [
        multiprocessing.Process(target=crop_forever, args=(files, decoder, counts, i), daemon=True)
        for i in range(CORES)
    ]
    for worker in workers:
        worker.start()
    seen = 0
    while True:
        while sum(counts) - seen < BATCH:
            time.sleep(0.001)
        seen += BATCH
        yield np.empty((BATCH, SIZE, SIZE, 3), np.uint8)


def crop_forever(files: list[bytes], decoder: str, counts: Any, worker: int) -> None:
    from vit_ray.data.images.crops import Augmentation, training_crop

    cv2.setNumThreads(0)
    augmentation, out = Augmentation("inception_crop", SIZE), np.empty((SIZE, SIZE, 3), np.uint8)
    rng = np.random.default_rng(worker)
    parent = os.getppid()
    for turn in range(1 << 60):
        if os.getppid() != parent:
            return
        image = files[turn % len(files)]
        if decoder == "vit_ray":
            training_crop(image, augmentation, (worker, 0, turn), out)
        else:
            CROPS[decoder](image, rng)
        counts[worker] += 1


CONTENDERS: dict[str, tuple[Callable[[Path, str], Iterator[Any]], str]] = {
    "vit_ray stream": (vit_ray_stream, "set"),
    "vit_ray stream, 1 shard": (vit_ray_stream, "set_1"),
    "limit: bare loop, this decoder": (bare_loop, "vit_ray"),
    "bare loop, OpenCV": (bare_loop, "opencv"),
    "bare loop, Pillow": (bare_loop, "pillow"),
    "torch DataLoader + Pillow": (torch_loader, "pillow"),
    "torch DataLoader + OpenCV": (torch_loader, "opencv"),
    "WebDataset + OpenCV": (webdataset_loader, "opencv"),
    "MosaicML Streaming + OpenCV": (mosaic_loader, "opencv"),
    "plain Ray Data + OpenCV": (plain_ray, "opencv"),
}
"""`set` has 16 shards, all in flight at once."""


def measure(name: str, data: Path, seconds: float) -> None:
    """Run one contender in this process and print its figures as JSON."""
    make, argument = CONTENDERS[name]
    peak = {"store": 0}
    threading.Thread(target=watch_store, args=(peak,), daemon=True).start()
    started = time.perf_counter()
    batches: Iterable[Any] = iter(make(data, argument))
    next(iter(batches))
    first_s = time.perf_counter() - started
    while time.perf_counter() - started < first_s + WARM_UP_S:
        next(iter(batches))
    count, begin, cpu_s = 0, time.perf_counter(), tree_cpu_s()
    while time.perf_counter() - begin < seconds:
        batch = next(iter(batches))
        assert batch.shape[1:] == (SIZE, SIZE, 3), batch.shape
        count += len(batch)
    rate = count / (time.perf_counter() - begin)
    cpu_ms = (tree_cpu_s() - cpu_s) / count * 1000
    figures = {"rate": rate, "cpu_ms": cpu_ms, "first_s": first_s, "started": started, **peak}
    print(json.dumps(figures), flush=True)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def watch_store(peak: dict[str, int]) -> None:
    """Peak of the object store in bytes, by Ray's own count, in contenders that use Ray."""
    while True:
        time.sleep(0.5)
        if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
            continue
        from ray._private.internal_api import get_memory_info_reply, get_state_from_address

        address = sys.modules["ray"].get_runtime_context().gcs_address
        stats = get_memory_info_reply(get_state_from_address(address)).store_stats
        peak["store"] = max(peak["store"], stats.object_store_bytes_used)


def tree_cpu_s() -> float:
    """CPU seconds of this process and its descendants."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def run_apart(name: str, data: Path, seconds: float) -> dict[str, Any]:
    """One contender in a fresh process; its peak memory is that of the whole process tree."""
    command = [sys.executable, __file__, str(data), "--seconds", str(seconds), "--only", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks = {"rss": 0}
    watcher = threading.Thread(target=watch_memory, args=(process, peaks), daemon=True)
    watcher.start()
    out, err = process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if not lines or "rate" not in lines[-1]:
        return {"error": (err.strip().splitlines() or ["no output"])[-1][:160]}
    result = {key: value for line in lines for key, value in line.items()} | peaks
    if "up" in result:
        result["first_s"] -= result["up"] - result["started"]
    return result


def watch_memory(process: "subprocess.Popen[str]", peaks: dict[str, int]) -> None:
    """Peak memory that belongs to a process or its descendants alone, in bytes."""
    while process.poll() is None:
        try:
            root = psutil.Process(process.pid)
            infos = [p.memory_info() for p in [root, *root.children(recursive=True)]]
        except psutil.Error:
            continue
        peaks["rss"] = max(peaks["rss"], sum(info.rss - info.shared for info in infos))
        time.sleep(0.5)


def prepare(source: Path, data: Path, rows: int) -> None:
    """The images of a folder, repeated to `rows`, as files, tar shards, MDS and a data set."""
    files = sorted(p for p in source.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{source}: no JPEG files")
    for i in range(rows):
        folder = data / "folder" / f"class_{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[i % len(files)], folder / f"{i:06d}.jpg")
    write_tars(image_files(data), data / "tar")
    write_mds(image_files(data), data / "mds")
    subprocess.run([sys.executable, __file__, str(data), "--only", "convert"], check=True)


def write_tars(files: list[Path], folder: Path) -> None:
    folder.mkdir()
    for shard in range(16):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for file in files[shard::16]:
                tar.add(file, arcname=file.name)


def write_mds(files: list[Path], folder: Path) -> None:
    try:
        streaming = import_streaming()
    except ImportError:
        return
    with streaming.MDSWriter(out=str(folder), columns={"image": "bytes"}) as writer:
        for file in files:
            writer.write({"image": file.read_bytes()})


def convert_set(data: Path) -> None:
    from vit_ray.data.prepare.convert import convert

    start_ray()
    for name, shard_mib in (("set", 55), ("set_1", 100_000)):
        if not (data / name).exists():
            convert(str(data / "folder"), str(data / name), shard_mib=shard_mib)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown with the rate of each contender and our ratio to it."""
    ours, our_cpu_ms = (results["vit_ray stream"][name] for name in ("rate", "cpu_ms"))
    lines = [
        "| contender | images/s | ours / it | CPU ms an image | its / ours | first batch, s | "
        "private RSS, MiB | object store, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        if "error" in row:
            lines.append(f"| {name} | not run: `{row['error']}` | | | | | | |")
            continue
        lines.append(
            f"| {name} | {row['rate']:.0f} | {ours / row['rate']:.2f} | {row['cpu_ms']:.3f} | "
            f"{row['cpu_ms'] / our_cpu_ms:.2f} | {row['first_s']:.1f} | "
            f"{row['rss'] >> 20} | {row['store'] >> 20 or ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--prepared", type=Path, help="reuse this prepared folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.only == "convert":
        return convert_set(args.folder)
    if args.only:
        return measure(args.only, args.folder, args.seconds)
    data = args.prepared or Path(tempfile.mkdtemp(prefix="data_stream_"))
    if not (data / "set_1").exists():
        prepare(args.folder, data, args.rows)
    results: dict[str, dict[str, Any]] = {}
    for _ in range(args.rounds):
        for name in CONTENDERS:
            result = run_apart(name, data, args.seconds)
            print(name, result, flush=True)
            if name not in results or result.get("rate", 0) > results[name].get("rate", 0):
                results[name] = result
    command = f"--rows {args.rows} --seconds {args.seconds:g} --rounds {args.rounds}"
    report = (
        f"# data_stream: {time.strftime('%Y-%m-%d')}, {platform.machine()}, {CORES} cores\n\n"
        f"`python benchmarks/data_stream.py {args.folder.name} {command}`; best of the rounds.\n\n"
        f"{table(results)}\n"
    )
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
