"""What decoding only as finely as needed costs in quality, and saves in time.

    python benchmarks/data_decode.py FOLDER_OF_JPEGS [--out FILE.md]
    python benchmarks/data_decode.py FOLDER_OF_JPEGS --shrink-to 512 384 320 256 [--out FILE.md]

Training crops of every image against a reference: full decode by Pillow, the same crop, and
Pillow's antialiased bilinear resize. Peak signal-to-noise ratio in dB over crops, by how much the
crop shrinks; and microseconds of one core for each way to make the crop.

With `--shrink-to`: what `convert.shrink_to` gains in bytes and in time of one core, of images with
restart markers as a conversion writes them, and which share of crops is enlarged for it. Rounds
alternate between the sizes, so that ratios hold where other work shares the machine.
"""

import argparse
import io
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from benchmarks.result import finish, header, machine, measure_rounds
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.format.stored_image import StoredImage
from vit_ray.data.images.crop_boxes import Augmentation, CropBox, draw_box, draw_boxes
from vit_ray.data.images.crops import cut_crop, decode, training_crop
from vit_ray.data.jpeg_index.rewriting import restart_writer
from vit_ray.data.prepare.convert.shard_images import checked

SIZE = 224
SHRINKS = [(0.0, 1.0), (1.0, 1.25), (1.25, 1.6), (1.6, 2.0), (2.0, 4.0), (4.0, 99.0)]
DRAWS = 8
ROUNDS = 7
QUALITY = 95
"""That of `convert.shrink_quality` where nothing else is said."""


def psnr(a: Any, b: Any) -> float:
    error = np.mean((a.astype(float) - b.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def reference(pixels: Any, box: CropBox) -> Any:
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    crop = Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=edges)
    array = np.asarray(crop)
    return array[:, ::-1] if box.is_flipped else array


def box_of(image: bytes, augmentation: Augmentation, key: tuple[int, int, int]) -> CropBox:
    """The crop in full-size pixels: what the stream would cut for this key."""
    width, height = Image.open(io.BytesIO(image)).size
    return draw_box((height, width), augmentation, key)


def quality(
    images: list[bytes], augmentation: Augmentation
) -> dict[Any, list[tuple[float, float]]]:
    found = defaultdict(list)
    for i, image in enumerate(images):
        full = decode(image)
        for epoch in range(DRAWS):
            key = (0, epoch, i)
            box = box_of(image, augmentation, key)
            shrink = max(box.height, box.width) / SIZE
            bucket = next(b for b in SHRINKS if b[0] <= shrink < b[1])
            target = reference(full, box)
            ours = training_crop(image, augmentation, key)
            found[bucket].append((psnr(ours, target), psnr(plain(full, box), target)))
    return found


def plain(pixels: Any, box: CropBox) -> Any:
    """OpenCV's bilinear without antialiasing, as loaders built on OpenCV do it."""
    top, left = int(box.top), int(box.left)
    crop = pixels[top : top + round(box.height), left : left + round(box.width)]
    resized = cv2.resize(crop, (SIZE, SIZE))
    return resized[:, ::-1] if box.is_flipped else resized


def microseconds(make: Callable[[bytes, int], Any], images: list[bytes]) -> float:
    best = np.inf
    for _ in range(5):
        begun = time.process_time()
        for i, image in enumerate(images):
            make(image, i)
        best = min(best, time.process_time() - begun)
    return float(best / len(images) * 1e6)


def ways(augmentation: Augmentation) -> dict[str, Callable[[bytes, int], Any]]:
    out = np.empty((SIZE, SIZE, 3), np.uint8)

    def by_opencv(image: bytes, i: int) -> Any:
        pixels = cv2.cvtColor(cv2.imdecode(np.frombuffer(image, np.uint8), 1), cv2.COLOR_BGR2RGB)
        return plain(pixels, cached_box(image, i))

    def by_pillow(image: bytes, i: int) -> Any:
        return reference(np.asarray(Image.open(io.BytesIO(image)).convert("RGB")),
                         cached_box(image, i))  # fmt: skip

    boxes: dict[int, CropBox] = {}

    def cached_box(image: bytes, i: int) -> CropBox:
        if i not in boxes:
            boxes[i] = box_of(image, augmentation, (0, 0, i))
        return boxes[i]

    return {
        "vit_ray training_crop": lambda image, i: training_crop(
            image, augmentation, (0, 0, i), out
        ),
        "OpenCV full decode + bilinear": by_opencv,
        "Pillow full decode + antialiased bilinear": by_pillow,
        "OpenCV full decode alone": lambda image, i: decode(image),
    }


def shrunk(files: list[bytes], shrink_to: int | None) -> list[StoredImage]:
    """The images as a conversion stores them."""
    options = {"shrink_to": shrink_to, "shrink_quality": QUALITY}
    config = ConvertConfig(source="", destination="", **options)
    rows = [checked(file, "", (), config, restart_writer()) for file in files]
    return [StoredImage(row.image, (row.height, row.width), row.index) for row in rows]


def boxes_of(images: list[StoredImage], augmentation: Augmentation) -> list[CropBox]:
    sizes, places = np.array([image.size for image in images]), np.arange(len(images))
    return draw_boxes(sizes, augmentation, 0, places, places)


def crop_seconds(
    images: list[StoredImage], boxes: list[CropBox], augmentation: Augmentation
) -> float:
    """CPU seconds of a crop of every image."""
    out = np.empty(augmentation.shape, np.uint8)
    begun = time.process_time()
    for image, box in zip(images, boxes, strict=True):
        cut_crop(image, box, augmentation, out)
    return time.process_time() - begun


def shrinking_table(files: list[bytes], sizes: list[int]) -> list[str]:
    """Markdown: what each size gains over images as they came."""
    augmentation = Augmentation("inception_crop", SIZE)
    stored = {size: shrunk(files, size) for size in (None, *sizes)}
    boxes = {size: boxes_of(images, augmentation) for size, images in stored.items()}
    seconds = measure_rounds(
        stored, ROUNDS, lambda size: crop_seconds(stored[size], boxes[size], augmentation)
    )
    whole_bytes = sum(len(image.content) for image in stored[None])
    lines = header(
        "convert.shrink_to | bytes an image | of all | crop, us of a core | times as fast | "
        "crops enlarged"
    )
    for size, images in stored.items():
        num_bytes = sum(len(image.content) for image in images)
        ratio = np.median(np.divide(seconds[None], seconds[size]))
        enlarged = np.mean([max(box.height, box.width) < SIZE for box in boxes[size]])
        lines.append(
            f"| {size or 'unset'} | {num_bytes / len(images):,.0f} | {num_bytes / whole_bytes:.0%} "
            f"| {np.median(seconds[size]) / len(images) * 1e6:.0f} | {ratio:.2f} | {enlarged:.0%} |"
        )
    return lines


def shrinking_report(folder: Path, files: list[bytes], sizes: list[int]) -> str:
    return "\n".join(
        [
            f"# data_decode: convert.shrink_to, {machine()}\n",
            f"`python benchmarks/data_decode.py {folder.name} --shrink-to "
            f"{' '.join(map(str, sizes))}`: {len(files)} images, inception crops to {SIZE} px, "
            f"JPEG quality {QUALITY}; {ROUNDS} rounds in turn, medians, one core.\n",
            *shrinking_table(files, sizes),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shrink-to", type=int, nargs="+", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cv2.setNumThreads(0)
    files = [p for p in args.folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg")]
    images = [path.read_bytes() for path in sorted(files)]
    if args.shrink_to:
        report = shrinking_report(args.folder, images, args.shrink_to)
    else:
        report = quality_report(args.folder, images)
    finish(report, args.out)


def quality_report(folder: Path, images: list[bytes]) -> str:
    augmentation = Augmentation("inception_crop", SIZE)
    lines = [
        f"# data_decode: {machine()}, one of them used\n",
        f"`python benchmarks/data_decode.py {folder.name}`: {len(images)} images, "
        f"{DRAWS} crops each.",
        "\nPSNR in dB against Pillow's full decode and antialiased bilinear resize:\n",
        *header(
            "crop side / 224 | crops | vit_ray mean | vit_ray 5th percentile | plain OpenCV mean | "
            "plain OpenCV 5th percentile"
        ),
    ]
    for bucket, pairs in sorted(quality(images, augmentation).items()):
        ours, theirs = np.array(pairs).T
        lines.append(
            f"| {bucket[0]:g} to {bucket[1]:g} | {len(pairs)} | {ours.mean():.1f} | "
            f"{np.percentile(ours, 5):.1f} | {theirs.mean():.1f} | {np.percentile(theirs, 5):.1f} |"
        )
    lines += ["\nTime of one core:\n", *header("way | us an image | images/s")]
    for name, make in ways(augmentation).items():
        taken = microseconds(make, images)
        lines.append(f"| {name} | {taken:.0f} | {1e6 / taken:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
