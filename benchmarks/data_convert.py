"""Conversion: images per second and peak memory, at two sizes of data, from files and tar shards.

    python benchmarks/data_convert.py FOLDER_OF_JPEGS [--images 4000 16000] [--out FILE.md]
    PYTHONPATH=PEERS python benchmarks/data_convert.py FOLDER_OF_JPEGS --peers FOLDER_OF_COPIES \
        --images 16000 [--out FILE.md]

The images are linked into class folders (or written into tar shards of 1,000) as often as it takes,
and converted on all cores by a Ray of the run's own, every one checked. Memory is what belongs to a
process alone (resident less shared), sampled ten times a second: of the driver, of the largest
task, and of all processes together, Ray's own included. Bounded memory shows in the last column.

With `--peers`: the same against writers of other libraries (`convert_peers.py`), from distinct
files that are made of the images once, in FOLDER_OF_COPIES, and read before. Each way runs in a
process for each core. CPU time is that of all processes, Ray's own included, while the files are
converted; what a way has not put on the disk is put there after its turn, and timed too.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import psutil

from benchmarks.convert_peers import WRITERS as PEERS
from benchmarks.result import finish, header, machine, measure_apart, measure_rounds

SHARD_MIB = 64
CLASSES = 10
MIB = 1 << 20

CONVERT = """
import json, sys, time
import ray
from benchmarks.convert_peers import tree_cpu_s
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.data.shard_writer import EncodedImage
from vit_ray.data.jpeg import size_of_jpeg
from vit_ray.data.convert import shards
from vit_ray.data.convert.conversion import convert
from vit_ray.launch.cluster.connection import connect

source, target, shard_mib, kind = sys.argv[1:]

def unchecked(image, key, labels, config, libjpeg):
    height, width = size_of_jpeg(image)
    return EncodedImage(image, labels, key, width, height)

if kind == "unchecked":
    shards.checked = unchecked
    ray.cloudpickle.register_pickle_by_value(shards)
keys = {"source": source, "destination": target, "shard_mib": int(shard_mib),
        "index_jpeg": kind not in ("none", "unchecked")}
recipe = recipe_from_dict({"name": "converted", "convert": keys}, "the benchmark")
connect(recipe)
begun, cpu_s = time.perf_counter(), tree_cpu_s()
report = convert(recipe.convert)
seconds, cpu_s = time.perf_counter() - begun, tree_cpu_s() - cpu_s
facts = {"images": report.num_images, "indexed": report.num_indexed, "bytes": report.bytes}
print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, **facts}))
"""
ROUNDS = 3
OURS = {
    "conversion": ("index", "all coefficients decoded, restart index"),
    "conversion, `index_jpeg=false`": ("none", "all coefficients decoded"),
    "conversion without its checks": ("unchecked", "header read; no setting of the product"),
}
"""Kind and what is done with each image, by the name of a way."""


def link_files(images: list[Path], count: int, folder: Path) -> None:
    for i in range(count):
        target = folder / f"class_{i % CLASSES}" / f"{i:07d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(images[i % len(images)], target)


def write_tars(images: list[Path], count: int, folder: Path) -> None:
    folder.mkdir(parents=True)
    for first in range(0, count, 1000):
        with tarfile.open(folder / f"{first // 1000:05d}.tar", "w") as tar:
            for i in range(first, min(first + 1000, count)):
                content = images[i % len(images)].read_bytes()
                add(tar, f"{i:07d}.jpg", content)
                add(tar, f"{i:07d}.cls", str(i % CLASSES).encode())


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


LAYOUTS = {"class folders": link_files, "WebDataset tar": write_tars}


def own_memory(root: psutil.Process) -> Iterator[tuple[bool, int]]:
    """(whether it is a task, bytes) of the driver and of every process below it."""
    for process in [root, *root.children(recursive=True)]:
        try:
            memory = process.memory_info()
            yield "ray::" in " ".join(process.cmdline()[:1]), memory.rss - memory.shared
        except psutil.Error:
            continue


def measure(source: Path, destination: Path) -> dict[str, Any]:
    """One conversion in a process tree of its own."""
    command = [sys.executable, "-c", CONVERT, str(source), str(destination), str(SHARD_MIB), ""]
    peaks = {"driver": 0, "task": 0, "all": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        root = psutil.Process(driver.pid)
        while driver.poll() is None:
            found = list(own_memory(root))
            if found:
                tasks = [size for is_task, size in found if is_task]
                peaks["driver"] = max(peaks["driver"], found[0][1])
                peaks["task"] = max(peaks["task"], *tasks, 0)
                peaks["all"] = max(peaks["all"], sum(size for _, size in found))
            time.sleep(0.1)
        assert driver.stdout is not None
        lines = driver.stdout.read().splitlines()
    return {**json.loads(lines[-1]), **{name: size / MIB for name, size in peaks.items()}}


def write_copies(images: list[Path], count: int, folder: Path) -> None:
    """Distinct files in class folders: each is a part of an image, encoded again."""
    for first, image in enumerate(images):
        numbers = range(first, count, len(images))
        names = [f"class_{i % CLASSES}/{i:07d}.jpg" for i in numbers]
        if all((folder / name).exists() for name in names):
            continue
        pixels = cv2.imread(str(image))
        for copy, name in enumerate(names):
            top, left = divmod(copy, 16)
            quality = [cv2.IMWRITE_JPEG_QUALITY, 95 + copy % 4]
            content = cv2.imencode(".jpg", pixels[top:, left:], quality)[1].tobytes()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def measure_way(way: str, source: Path, target: Path) -> dict[str, Any]:
    """One way in processes of its own, and the seconds after which all of it is on the disk."""
    script = str(Path(__file__).with_name("convert_peers.py"))
    places = [str(source), str(target)]
    found = measure_apart(
        [sys.executable, script, way, *places]
        if way in PEERS
        else [sys.executable, "-c", CONVERT, *places, str(SHARD_MIB), OURS[way][0]]
    )
    begin_s = time.perf_counter()
    os.sync()
    found["synced_s"] = found["seconds"] + time.perf_counter() - begin_s
    shutil.rmtree(target)
    return found


def peers_table(images: list[Path], count: int, folder: Path, rounds: int) -> list[str]:
    """Markdown: images/s, CPU time and bytes of conversions and of other writers."""
    write_copies(images, count, folder)
    files = sorted(folder.glob("*/*"))
    assert len(files) == count, f"{folder} has {len(files)} files; give another folder"
    num_bytes = sum(len(file.read_bytes()) for file in files)  # and so they are in memory
    os.sync()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        link_files(files[:20], 20, Path(scratch) / "few")
        few = measure_way(next(iter(OURS)), Path(scratch) / "few", Path(scratch) / "set")
        found = measure_rounds(
            [*OURS, *PEERS], rounds, lambda way: measure_way(way, folder, Path(scratch) / "set")
        )
    rates = {way: [count / row["seconds"] for row in rows] for way, rows in found.items()}
    start_s = few["seconds"]
    later = [count / (median(row["seconds"] for row in found[way]) - start_s) for way in OURS]
    lines = [
        f"{count:,} distinct files of {num_bytes / count / 1024:.0f} KiB on average, in memory; "
        f"{rounds} rounds in turn, medians. The start of a conversion (of 20 files) takes "
        f"{start_s:.1f} s; without it the rates of the first {len(later)} rows are "
        f"{', '.join(f'{rate:.0f}' for rate in later)} images/s. Other libraries are imported "
        "before.\n",
        *header(
            "way | each image | images/s | least to greatest | its / the conversion's | "
            "CPU ms an image | bytes / the files' | images/s, all on the disk"
        ),
    ]
    for way, rows in found.items():
        assert {row["images"] for row in rows} == {count}, way
        ratio = median(a / b for a, b in zip(rates[way], rates[next(iter(OURS))], strict=True))
        done = OURS[way][1] if way in OURS else "decoded" if "decoded" in way else "not looked at"
        lines.append(
            f"| {way} | {done} | {median(rates[way]):.0f} | {min(rates[way]):.0f} to "
            f"{max(rates[way]):.0f} | {ratio:.2f} | "
            f"{1000 * median(row['cpu_s'] for row in rows) / count:.2f} | "
            f"{rows[0]['bytes'] / num_bytes:.3f} | "
            f"{median(count / row['synced_s'] for row in rows):.0f} |"
        )
    return lines


def main() -> None:
    """Run every layout at every size, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[4000, 16000])
    parser.add_argument("--peers", type=Path, metavar="FOLDER_OF_COPIES")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="with --peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    images = sorted(p for p in args.folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    mean_kib = sum(p.stat().st_size for p in images) / len(images) / 1024
    option = "--peers FOLDER_OF_COPIES " * bool(args.peers)
    lines = [
        f"# data_convert: {machine()}\n",
        f"`python benchmarks/data_convert.py {args.folder.name} {option}--images "
        f"{' '.join(map(str, args.images))}`: {len(images)} JPEG files of {mean_kib:.0f} KiB on "
        f"average, used again and again; shards of {SHARD_MIB} MiB. The coefficients of every "
        "image are decoded, unless stated otherwise.\n",
    ]
    if args.peers:
        for count in args.images:
            lines += peers_table(images, count, args.peers, args.rounds)
    else:
        lines += layout_table(images, args.images, args.folder)
    finish("\n".join(lines), args.out)


def layout_table(images: list[Path], counts: list[int], folder: Path) -> list[str]:
    """Markdown: rate and memory of every layout at every size."""
    lines = header(
        "source | images | images/s | MiB/s | driver, MiB | largest task, MiB | all, MiB"
    )
    for layout, write in LAYOUTS.items():
        for count in counts:
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                write(images, count, Path(scratch) / "source")
                found = measure(Path(scratch) / "source", Path(scratch) / "set")
            rate, mib = count / found["seconds"], found["bytes"] / MIB / found["seconds"]
            lines.append(
                f"| {layout} | {count:,} | {rate:.0f} | {mib:.0f} | {found['driver']:.0f} | "
                f"{found['task']:.0f} | {found['all']:.0f} |"
            )
            print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
