"""Conversion: images per second and CPU time, beside writers of other libraries.

    PYTHONPATH=PEERS python benchmarks/data_convert.py FOLDER_OF_JPEGS --peers FOLDER_OF_COPIES \
        [--images 4000 16000] [--rounds 3] [--out FILE.md]

Distinct files are made of the images once, in FOLDER_OF_COPIES, and read before. The writers are
those of `convert_peers.py`. Each way runs in a process for each core. CPU time is that of all
processes, Ray's own included, while the files are converted; what a way has not put on the disk is
put there after its turn, and timed too.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import cv2

from benchmarks.convert_peers import WRITERS as PEERS
from benchmarks.result import finish, header, machine, measure_apart, measure_rounds

SHARD_MIB = 64
CLASSES = 10

CONVERT = """
import json, sys, time
import ray
from benchmarks.convert_peers import tree_cpu_s
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.data.shard_writer import EncodedImage
from vit_ray.data.jpeg import size_of_jpeg
from vit_ray.data.convert import checks, shards
from vit_ray.data.convert.conversion import convert
from vit_ray.launch.connection import connect

source, target, shard_mib, kind = sys.argv[1:]

def unchecked(image, key, labels, config, libjpeg):
    height, width = size_of_jpeg(image)
    return EncodedImage(image, labels, key, width, height)

if kind == "unchecked":
    checks.checked = unchecked
    for module in (checks, shards):
        ray.cloudpickle.register_pickle_by_value(module)
keys = {"source": source, "destination": target, "shard_mib": int(shard_mib),
        "index_jpeg": kind not in ("none", "unchecked")}
recipe = recipe_from_dict({"name": "converted", "convert": keys}, "the benchmark")
connect(recipe)
begun, cpu_s = time.perf_counter(), tree_cpu_s()
report = convert(recipe.convert)
seconds, cpu_s = time.perf_counter() - begun, tree_cpu_s() - cpu_s
facts = {"images": report.num_images, "bytes": report.bytes}
print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, **facts}))
"""
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
    """Run every way at every size, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[4000, 16000])
    parser.add_argument("--peers", type=Path, metavar="FOLDER_OF_COPIES", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    images = sorted(p for p in args.folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    mean_kib = sum(p.stat().st_size for p in images) / len(images) / 1024
    lines = [
        f"# data_convert: {machine()}\n",
        f"`python benchmarks/data_convert.py {args.folder.name} --peers FOLDER_OF_COPIES --images "
        f"{' '.join(map(str, args.images))}`: {len(images)} JPEG files of {mean_kib:.0f} KiB on "
        f"average, used again and again; shards of {SHARD_MIB} MiB. The coefficients of every "
        "image are decoded, unless stated otherwise.\n",
    ]
    for count in args.images:
        lines += peers_table(images, count, args.peers, args.rounds)
    finish("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
