"""Images per second from encoded JPEG to 224 px training crops: this stream, its peers, the limit.

    python benchmarks/data_stream.py FOLDER_OF_JPEGS [--rounds 3] [--seconds 15] [--out FILE.md]
    python benchmarks/data_stream.py FOLDER_OF_JPEGS --prepared FOLDER --prepare-only
    python benchmarks/data_stream.py [FOLDER_OF_JPEGS] --contenders "vit_ray stream" --cores 2 4 8

The images of the folder, or else pictures of noise, are cropped, scaled by 0.5 to 2 and encoded
again with several qualities and subsamplings, the same ones each time, until they are four times as
large as the last-level cache, or have `--mib`. All rows decode these images with the same crop
distribution, each in its own process tree on all cores, from local files in the page cache, and in
turn, round after round; medians and the least and greatest round are given. The rate is over the
seconds after the warm-up, and the time to the first batch is stated apart. The stream holds a few
thousand images ready, which come in bursts, as several reading tasks fill its order at once: over 4
seconds one and the same stream read 1,424 to 2,739 images/s, over 20 it read 2,297 and 2,346. Where
other work shares the machine, the CPU time an image is the fairer figure. Peers that cannot be
imported are listed as such; `requirements-peers.txt` has them. With `--cores` each contender runs
on so many cores, one after the other, and the rates of a core are compared with that of the fewest.
FFCV is not among the peers: `pip install` fails, as it has no wheels and its source needs C++
headers.
"""

import argparse
import contextlib
import importlib.machinery
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil

from benchmarks.result import finish, header, machine

SIZE = 224
BATCH = 64
WARM_UP_S = 5.0
CORES = len(os.sched_getaffinity(0))
CORE_BAR = 0.85  # images/s of a core, by those of a core where there are fewest
MIB = 1 << 20


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
    # Not by a runtime_env, for which each worker would be started by way of one process more.
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(
        num_cpus=CORES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=2 << 30,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.get(ray.remote(lambda: 1).remote())
    print(json.dumps({"up": time.perf_counter()}), flush=True)


def vit_ray_stream(data: Path, folder: str) -> Iterator[Any]:
    """This project's training stream for one trainer; batches come from all shards at once."""
    import ray

    from vit_ray.data import open_dataset
    from vit_ray.data.boxes import Augmentation
    from vit_ray.data.stream.batches import StreamSpec
    from vit_ray.data.stream.stream_server import RankStreams, StreamServer

    start_ray()
    augmentation = Augmentation("inception_crop", SIZE)
    spec = StreamSpec(open_dataset(str(data / folder)), augmentation)
    stop = spec.num_images * 1000 // BATCH * BATCH  # more than are read
    server = ray.remote(StreamServer).options(num_cpus=0, max_concurrency=4)
    server = server.remote(
        "benchmark", {"train": spec}, range(1), 1, keeps_statistics=False, warms_up=True
    )
    batches = RankStreams(server, 0).training_batches(BATCH, 0, stop)
    yield from (batch["image"] for batch in batches)


def spdl_loader(data: Path, decoder: str) -> Iterator[Any]:
    """SPDL: threads of one process, a pipeline of stages."""
    from spdl.pipeline import PipelineBuilder

    files = image_files(data)
    rng = np.random.default_rng()

    def endless() -> Iterator[Path]:
        while True:
            yield from (files[i] for i in rng.permutation(len(files)))

    def crop(file: Path) -> np.ndarray:
        return CROPS[decoder](file.read_bytes(), np.random.default_rng())

    cv2.setNumThreads(0)
    builder = PipelineBuilder().add_source(endless()).pipe(crop, concurrency=CORES)
    pipeline = builder.aggregate(BATCH).pipe(np.stack).add_sink(4).build(num_threads=CORES + 1)
    with pipeline.auto_stop():
        yield from pipeline


def bare_loop(data: Path, folder: str) -> Iterator[Any]:
    """The limit: a process per core crops images that lie in memory, and nothing else."""
    counts = multiprocessing.Array("q", CORES)
    workers = [
        multiprocessing.Process(target=crop_forever, args=(data / folder, counts, i), daemon=True)
        for i in range(CORES)
    ]
    for worker in workers:
        worker.start()
    seen = 0
    while True:
        while sum(counts) - seen < BATCH:
            assert all(worker.is_alive() for worker in workers), "a worker has ended"
            time.sleep(0.001)
        seen += BATCH
        yield np.empty((BATCH, SIZE, SIZE, 3), np.uint8)


def crop_forever(folder: Path, counts: Any, worker: int) -> None:
    """Rows of a data set with restart indices, whose crops are drawn a batch at a time."""
    from vit_ray.data import open_dataset
    from vit_ray.data.boxes import Augmentation, draw_boxes
    from vit_ray.data.crops import crop
    from vit_ray.data.shards import RowGroupReader

    cv2.setNumThreads(0)
    manifest = open_dataset(str(folder))
    reader = RowGroupReader(manifest)
    groups = [reader.read(group) for group in range(manifest.num_row_groups)]
    images = [group.stored(row) for group in groups for row in range(len(group.keys))]
    augmentation = Augmentation("inception_crop", SIZE)
    out = np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
    rng, parent = np.random.default_rng(worker), os.getppid()
    for turn in range(1 << 60):
        if os.getppid() != parent:
            return
        chosen = [images[i] for i in rng.integers(len(images), size=BATCH)]
        sizes, places = np.array([image.size for image in chosen]), np.arange(BATCH)
        boxes = draw_boxes(sizes, augmentation, worker, places, places + turn * BATCH)
        for i, (image, box) in enumerate(zip(chosen, boxes, strict=True)):
            crop(image, box, augmentation, out[i])
        counts[worker] += BATCH


CONTENDERS: dict[str, tuple[Callable[[Path, str], Iterator[Any]], str]] = {
    "vit_ray stream": (vit_ray_stream, "set"),
    "limit: bare loop, this decoder": (bare_loop, "set"),
    "torch DataLoader + Pillow": (torch_loader, "pillow"),
    "torch DataLoader + OpenCV": (torch_loader, "opencv"),
    "WebDataset + OpenCV": (webdataset_loader, "opencv"),
    "MosaicML Streaming + OpenCV": (mosaic_loader, "opencv"),
    "plain Ray Data + OpenCV": (plain_ray, "opencv"),
    "SPDL + OpenCV": (spdl_loader, "opencv"),
}
"""Data sets have 16 shards, all in flight at once."""
OURS = "vit_ray stream"


def measure(name: str, data: Path, seconds: float) -> None:
    """Run one contender in this process and print its figures as JSON."""
    make, argument = CONTENDERS[name]
    started = time.perf_counter()
    batches: Iterator[Any] = iter(make(data, argument))
    next(batches)
    first_s = time.perf_counter() - started
    while time.perf_counter() - started < first_s + WARM_UP_S:
        next(batches)
    count, begin, before = 0, time.perf_counter(), cpu_s()
    while time.perf_counter() - begin < seconds:
        batch = next(batches)
        assert batch.shape[1:] == (SIZE, SIZE, 3), batch.shape
        count += len(batch)
    rate = count / (time.perf_counter() - begin)
    figures = {"rate": rate, "cpu_ms": 1000 * (cpu_s() - before) / count}
    print(json.dumps({**figures, "first_s": first_s, "started": started}), flush=True)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def cpu_s() -> float:
    """CPU seconds of this process and its descendants so far."""
    spent, main = 0.0, psutil.Process()
    for process in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            spent += sum(process.cpu_times()[:2])
    return spent


def run_apart(name: str, data: Path, seconds: float, cores: int = CORES) -> dict[str, Any]:
    """One contender in a fresh process."""
    command = [sys.executable, __file__, str(data), "--seconds", str(seconds), "--only", name]
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])  # the process inherits it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, allowed)
    out, err = process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines or "rate" not in lines[-1]:
        last = (err.strip().splitlines() or ["no message"])[-1]
        return {"error": f"{process.returncode}: {last[:160]}"}
    result = {key: value for line in lines for key, value in line.items()}
    if "up" in result:
        result["first_s"] -= result["up"] - result["started"]
    return result


def prepare(source: Path, data: Path, num_bytes: int) -> None:
    """Distinct images as files, tar shards, MDS and a data set."""
    files = sorted(p for p in source.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{source}: no JPEG files")
    total, number = 0, 0
    with multiprocessing.Pool(CORES) as pool:
        while total < num_bytes:
            numbers = range(number, number + BATCH)
            for image in pool.map(partial(distinct_image, files), numbers, chunksize=1):
                file = data / "folder" / f"class_{number % 10}" / f"{number:06d}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                total += file.write_bytes(image)
                number += 1
    write_tars(image_files(data), data / "tar")
    write_mds(image_files(data), data / "mds")
    subprocess.run([sys.executable, __file__, str(data), "--only", "convert"], check=True)


def write_photographs(folder: Path, count: int) -> None:
    """JPEG files of 500 x 375 pixels and 120 KiB, noise of all scales: 16 pictures, repeated."""
    rng, pictures = np.random.default_rng(0), []
    for _ in range(16):
        pixels = np.full((375, 500, 3), 128, np.float32)
        for halvings in range(6):
            small = rng.normal(0, 7, (375 >> halvings, 500 >> halvings, 3)).astype(np.float32)
            pixels += cv2.resize(small, (500, 375), interpolation=cv2.INTER_CUBIC) * 1.4**halvings
        pictures.append(cv2.imencode(".jpg", pixels.clip(0, 255).astype(np.uint8))[1].tobytes())
    for i in range(count):
        path = folder / f"class_{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures[i % len(pictures)])


def distinct_image(files: list[Path], number: int) -> bytes:
    """Part of an original, scaled and encoded as its number says: the same at each call."""
    from PIL import Image

    rng = np.random.default_rng(number)
    picture = Image.open(files[number % len(files)]).convert("RGB")
    width, height = (max(64, round(side * rng.uniform(0.7, 1.0))) for side in picture.size)
    left, top = rng.integers(picture.width - width + 1), rng.integers(picture.height - height + 1)
    scale = 2.0 ** rng.uniform(-1, 1)
    size = (round(width * scale), round(height * scale))
    part = picture.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
    sink = io.BytesIO()
    quality, subsampling = int(rng.choice([75, 85, 92, 96])), int(rng.choice([0, 1, 2, 2]))
    part.save(sink, "JPEG", quality=quality, subsampling=subsampling)
    return sink.getvalue()


def last_level_cache_bytes() -> int:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    kib = [int(file.read_text().strip().rstrip("K")) for file in sizes]
    return max(kib, default=32 * 1024) * 1024


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
    from vit_ray.config.command_sections import ConvertConfig
    from vit_ray.data.convert.conversion import convert

    start_ray()
    shard_mib = sum(file.stat().st_size for file in image_files(data)) / MIB / 16
    places = {"source": f"{data}/folder", "destination": f"{data}/set"}
    convert(ConvertConfig(**places, shard_mib=shard_mib))


def median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown with medians and spread of each contender, and our ratio to it."""
    ours = median(results[OURS], "rate")
    our_cpu_ms = median(results[OURS], "cpu_ms")
    lines = header(
        "contender | images/s | least to greatest | ours / it | CPU ms an image | its / ours | "
        "first batch, s"
    )
    for name, rows in results.items():
        done = [row for row in rows if "error" not in row]
        if not done:
            lines.append(f"| {name} | not run: `{rows[0]['error']}` | | | | | |")
            continue
        rates, cpu_ms = [row["rate"] for row in done], median(done, "cpu_ms")
        lines.append(
            f"| {name} | {median(done, 'rate'):.0f} | {min(rates):.0f} to {max(rates):.0f} | "
            f"{ours / median(done, 'rate'):.2f} | {cpu_ms:.3f} | {cpu_ms / our_cpu_ms:.2f} | "
            f"{median(done, 'first_s'):.1f} |"
        )
    return "\n".join(lines)


def cores_table(results: dict[tuple[str, int], list[dict[str, Any]]]) -> str:
    """Markdown with the median rate of a core, and its share of that of the fewest cores."""
    lines = header("contender | cores | images/s | of a core | of that of the fewest cores")
    first: dict[str, float] = {}
    for (name, cores), rows in results.items():
        done = [row for row in rows if "error" not in row]
        if not done:
            lines.append(f"| {name} | {cores} | not run: `{rows[0]['error']}` | | |")
            continue
        rate = median(done, "rate")
        share = rate / cores / first.setdefault(name, rate / cores)
        lines.append(
            f"| {name} | {cores} | {rate:.0f} | {rate / cores:.0f} | {share:.3f} (bar {CORE_BAR}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--cores", type=int, nargs="+", default=[], help="ascending")
    parser.add_argument("--mib", type=float, help="of images; unset: four last-level caches")
    parser.add_argument("--prepared", type=Path, help="keep what is prepared in this folder")
    parser.add_argument("--prepare-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.only == "convert":
        return convert_set(args.folder)
    if args.only:
        return measure(args.only, args.folder, args.seconds)
    data = args.prepared or Path(tempfile.mkdtemp(prefix="data_stream_"))
    if not args.folder:
        args.folder = data / "noise"
        write_photographs(args.folder, 16)
    if not (data / "set" / "manifest.parquet").exists():
        whole = 4 * last_level_cache_bytes()
        prepare(args.folder, data, int(args.mib * MIB) if args.mib else whole)
    if args.prepare_only:
        return None
    if args.cores:
        return measure_cores(args, data)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contenders}
    for _ in range(args.rounds):
        for name in args.contenders:
            results[name].append(run_apart(name, data, args.seconds))
            print(name, results[name][-1], flush=True)
    finish(report_of(args, data, results), args.out)
    return None


def measure_cores(args: argparse.Namespace, data: Path) -> None:
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for name in args.contenders:
            for cores in args.cores:
                found = run_apart(name, data, args.seconds, cores)
                results.setdefault((name, cores), []).append(found)
                print(f"{found}\n\n{cores_table(results)}\n", flush=True)
    images = sum(file.stat().st_size for file in image_files(data)) >> 20
    chosen = f"{images} MiB of images, {args.rounds} rounds of {args.seconds:g} s"
    finish(f"# data_stream: {machine()}; {chosen}\n\n{cores_table(results)}", args.out)


def report_of(args: argparse.Namespace, data: Path, results: dict[str, Any]) -> str:
    images = [file.stat().st_size for file in image_files(data)]
    return (
        f"# Encoded JPEG to 224 px training crops: the stream, its peers, the limit\n\n"
        f"{machine()}, last-level cache "
        f"{last_level_cache_bytes() >> 20} MiB.\n\n"
        f"    python benchmarks/data_stream.py {args.folder.name} "
        f"--rounds {args.rounds} --seconds {args.seconds:g}\n\n"
        f"{len(images):,} distinct images, {sum(images) >> 20} MiB; {args.rounds} rounds in turn, "
        f"medians; `ours / it` above 1: ours is faster.\n\n{table(results)}\n"
    )


if __name__ == "__main__":
    main()
