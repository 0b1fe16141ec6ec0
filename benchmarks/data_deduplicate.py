"""Recall and precision of near-duplicate detection on transformed real images.

    python benchmarks/data_deduplicate.py FOLDER_OF_IMAGES [--limit 2000] [--out FILE.md]

Half of the images play the evaluation set. Each is transformed in the ways that duplicates differ
and looked up; the other half, which shares no image with it, is looked up too and must not be
found. The threshold is the one that `deduplicate` uses by default.
"""

import argparse
import inspect
import io
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from vit_ray.data.images.crops import decode, training_crop
from vit_ray.data.images.perceptual_hash import HashIndex, hashes_under_crops, perceptual_hash
from vit_ray.data.prepare.deduplicate import _HASHED, deduplicate

THRESHOLD = inspect.signature(deduplicate).parameters["max_distance"].default


def stored(pixels: Any, quality: int = 90, format: str = "JPEG") -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(sink, format, quality=quality)
    return sink.getvalue()


def scaled(pixels: Any, factor: float) -> Any:
    height, width = pixels.shape[:2]
    size = (max(8, round(width * factor)), max(8, round(height * factor)))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)


def cropped(pixels: Any, share: float, top: float = 0.5, left: float = 0.5) -> Any:
    height, width = pixels.shape[:2]
    rows, columns = round(height * share), round(width * share)
    y, x = round((height - rows) * top), round((width - columns) * left)
    return pixels[y : y + rows, x : x + columns]


TRANSFORMS: dict[str, Callable[[Any], bytes]] = {
    "JPEG quality 30": lambda p: stored(p, 30),
    "WebP quality 60": lambda p: stored(p, 60, "WEBP"),
    "half size": lambda p: stored(scaled(p, 0.5)),
    "1.5 times the size": lambda p: stored(scaled(p, 1.5)),
    "resized to 256 x 256": lambda p: stored(cv2.resize(p, (256, 256))),
    "central 95 %": lambda p: stored(cropped(p, 0.95)),
    "central 90 %": lambda p: stored(cropped(p, 0.9)),
    "corner 90 %": lambda p: stored(cropped(p, 0.9, 0, 0)),
    "off-centre 92 %": lambda p: stored(cropped(p, 0.92, 0.2, 0.9)),
    "brighter by 10 %": lambda p: stored(np.clip(p * 1.1, 0, 255).astype(np.uint8)),
    "grey": lambda p: stored(p.mean(axis=2).astype(np.uint8)),
    "half size, central 95 %, quality 50": lambda p: stored(cropped(scaled(p, 0.5), 0.95), 50),
}


def hashed(images: list[bytes]) -> Any:
    return np.stack([perceptual_hash(training_crop(i, _HASHED, (0, 0, 0))) for i in images])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    suffixes = (".jpg", ".jpeg", ".png")
    files = sorted(p for p in args.folder.rglob("*") if p.suffix.lower() in suffixes)
    files = files[:: max(1, len(files) // args.limit)][: args.limit]
    images = [path.read_bytes() for path in files]
    known, others = images[::2], images[1::2]
    begun = time.process_time()
    crops = [hashes_under_crops(decode(image)) for image in known]
    indexing_us = (time.process_time() - begun) / len(known) * 1e6
    owners = np.repeat(np.arange(len(known)), [len(c) for c in crops])
    index = HashIndex(np.concatenate(crops))
    lines = [
        f"# data_deduplicate: {time.strftime('%Y-%m-%d')}, {platform.machine()}, one core\n",
        f"`python benchmarks/data_deduplicate.py {args.folder.name} --limit {args.limit}`: "
        f"{len(known)} evaluation images, {len(others)} others, threshold {THRESHOLD} of 256 "
        "bits.\n",
        "| transform | recall | found as another image |",
        "|---|---|---|",
    ]
    wrong = hits = 0
    for name, transform in TRANSFORMS.items():
        best, distances = index.nearest(hashed([transform(decode(image)) for image in known]))
        found = (best >= 0) & (distances <= THRESHOLD)
        right = found & (owners[best] == np.arange(len(known)))
        hits, wrong = hits + right.sum(), wrong + (found & ~right).sum()
        lines.append(f"| {name} | {right.mean():.4f} | {(found & ~right).sum()} |")
    begun = time.process_time()
    best, distances = index.nearest(hashed(others))
    lookup_us = (time.process_time() - begun) / len(others) * 1e6
    false = int(((best >= 0) & (distances <= THRESHOLD)).sum())
    total = len(known) * len(TRANSFORMS)
    lines += [
        f"\nRecall {hits / total:.4f} over all transforms; precision "
        f"{hits / max(1, hits + wrong + false):.4f}, counting {wrong} found as another image and "
        f"{false} of the {len(others)} others that were found at all.",
        f"\nIndexing takes {indexing_us:.0f} us an image, hashing and looking up "
        f"{lookup_us:.0f} us.",
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
