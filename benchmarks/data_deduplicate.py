"""Recall and precision of near-duplicate detection on transformed real images.

    python benchmarks/data_deduplicate.py FOLDER_OF_IMAGES [--limit 2000] [--known 1000]
        [--enlarge 1] [--against FOLDER] [--pairs FOLDER] [--out FILE.md]

Some of the images (half, if not said) play the evaluation set. Each is transformed in the ways that
duplicates differ and looked up; the others, which share no image with them, are looked up too and
must not be found, nor may flat pictures of other colours. Where a collection has copies within
itself, as CIFAR-10 has, what is found among the others must be looked at: --pairs keeps it. Hashes
propose and pixels confirm as in `deduplicate`, with its default threshold; how many hashes proposed
is told beside what was found. The cost is measured for flat pictures too, at two sizes of the
evaluation set. Precision and recall have their 95 % intervals (Wilson). With --against, all images
are looked up among those of that folder, and nothing else is done: --pairs keeps what is found, to
be judged by eye. Mirrored copies are always looked for.
"""

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from benchmarks.result import finish, header, machine
from vit_ray.data.images.crops import decode
from vit_ray.data.images.perceptual_hash import CROPS, perceptual_hash
from vit_ray.data.prepare.deduplicate import MAX_DISTANCE, _pictures, describe, find, known_from
from vit_ray.report.statistics.intervals import of_share


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


def with_text(pixels: Any) -> bytes:
    """White letters over the middle, as wide as the picture."""
    written = np.array(pixels)
    height, width = pixels.shape[:2]
    at, thickness = (round(0.05 * width), round(0.6 * height)), max(1, round(0.01 * width))
    font, white = cv2.FONT_HERSHEY_SIMPLEX, (255, 255, 255)
    cv2.putText(written, "SAMPLE 2026", at, font, width / 230, white, thickness, cv2.LINE_AA)
    return stored(written)


def with_bar(pixels: Any) -> bytes:
    """A black bar over the lowest 15 %."""
    barred = np.array(pixels)
    barred[round(0.85 * len(barred)) :] = 0
    return stored(barred)


def with_border(pixels: Any, width: int = 20) -> bytes:
    """A black border around the picture."""
    sides = [width] * 4
    return stored(cv2.copyMakeBorder(pixels, *sides, cv2.BORDER_CONSTANT))


def anywhere(pixels: Any, share: float) -> Any:
    """A crop at a random place, the same each time."""
    at = np.random.default_rng(pixels.size).random(2)
    return cropped(pixels, share, *at)


def turned(pixels: Any, degrees: float) -> Any:
    height, width = pixels.shape[:2]
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1.0)
    return cv2.warpAffine(pixels, turn, (width, height), borderMode=cv2.BORDER_REFLECT)


EDITS: dict[str, Callable[[Any], bytes]] = {
    "black border of 20 px": with_border,
    "black bar over the lowest 15 %": with_bar,
    "80 %, anywhere": lambda p: stored(anywhere(p, 0.8)),
    "brighter by 40 %": lambda p: stored(np.clip(p * 1.4, 0, 255).astype(np.uint8)),
    "mirrored": lambda p: stored(p[:, ::-1]),
    "turned by 3 degrees": lambda p: stored(turned(p, 3)),
}
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
    "off-centre 95 %": lambda p: stored(cropped(p, 0.95, 0.3, 0.8)),
    "darker by 30 %": lambda p: stored((p * 0.7).astype(np.uint8)),
    "text overlay": with_text,
    "brighter by 10 %": lambda p: stored(np.clip(p * 1.1, 0, 255).astype(np.uint8)),
    "grey": lambda p: stored(p.mean(axis=2).astype(np.uint8)),
    "half size, central 95 %, quality 50": lambda p: stored(cropped(scaled(p, 0.5), 0.95), 50),
}


def enlarged(image: bytes, factor: int) -> bytes:
    """The image with sides of `factor` times the length, as it came for 1."""
    if factor == 1:
        return image
    size = [side * factor for side in reversed(decode(image).shape[:2])]
    return stored(cv2.resize(decode(image), size, interpolation=cv2.INTER_CUBIC), 95)


def interval(hits: int, total: int) -> str:
    """A share with its 95 % interval."""
    found = of_share(hits / max(1, total), max(1, total))
    return f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def keep_pairs(folder: Path, pairs: list[tuple[bytes, bytes]]) -> None:
    """Each pair beside each other, as one picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(pairs):
        sides = [cv2.resize(decode(image), (160, 160)) for image in pair]
        (folder / f"{number:04d}.jpg").write_bytes(stored(np.hstack(sides)))


def known_of(images: list[bytes]) -> Any:
    return known_from([(("set", str(i)), describe(image)) for i, image in enumerate(images)])


def flat_pictures(count: int) -> list[bytes]:
    """Pictures of one colour each."""
    colours = np.random.default_rng(0).integers(0, 256, (count, 3), dtype=np.uint8)
    return [stored(np.full((32, 32, 3), colour, np.uint8), format="PNG") for colour in colours]


def microseconds(work: Callable[[], Any], count: int) -> tuple[Any, float]:
    begun = time.process_time()
    result = work()
    return result, (time.process_time() - begun) / count * 1e6


def cost_of_flat(count: int) -> str:
    """CPU time an image for as many flat pictures on both sides."""
    images = flat_pictures(2 * count)
    known = known_of(images[:count])
    (matches, _), taken = microseconds(lambda: find(known, images[count:], MAX_DISTANCE), count)
    equal = sum(match is not None for match in matches)
    return f"| {count} | {taken:.0f} | {equal} |"


def num_proposed(known: Any, images: list[bytes]) -> float:
    """Share of the images whose original is among those that the index proposes."""
    pictures = [(i, picture) for i, image in enumerate(images) for picture in _pictures(image)]
    pictures += [(i, np.ascontiguousarray(picture[:, ::-1])) for i, picture in pictures]
    hashes = np.stack([perceptual_hash(picture) for _, picture in pictures])
    near = known.index.near(hashes, MAX_DISTANCE)
    of_query = np.array([i for i, _ in pictures])[near.query]
    is_own = np.array(known.images)[near.found // len(CROPS)] == of_query
    return len(np.unique(of_query[is_own])) / len(images)


def images_in(folder: Path) -> list[bytes]:
    suffixes = (".jpg", ".jpeg", ".png")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in suffixes)
    return [path.read_bytes() for path in files]


def look_up_all(images: list[bytes], among: list[bytes], pairs: Path | None) -> str:
    """What is found of some images among others."""
    known, found = known_of(among), []
    for first in range(0, len(images), 512):
        some = images[first : first + 512]
        matches, _ = find(known, some, MAX_DISTANCE, flips=True)
        found += [(some[i], among[m.image]) for i, m in enumerate(matches) if m is not None]
    if pairs:
        keep_pairs(pairs, found)
    return f"{len(found)} of {len(images)} images are found among {len(among)} others."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--known", type=int, help="images of the evaluation set")
    parser.add_argument("--enlarge", type=int, default=1, help="factor of sides, done first")
    parser.add_argument("--against", type=Path, help="look all images up among these")
    parser.add_argument("--pairs", type=Path, help="where to keep what was found wrongly")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    files = images_in(args.folder)
    if args.against:
        print(look_up_all(files, images_in(args.against), args.pairs))
        return
    files = files[:: max(1, len(files) // args.limit)][: args.limit]
    images = [enlarged(content, args.enlarge) for content in files]
    order = np.random.default_rng(0).permutation(len(images))
    num_known = args.known or len(images) // 2
    known, others = ([images[i] for i in part] for part in np.split(order, [num_known]))
    known_index, indexing_us = microseconds(lambda: known_of(known), len(known))
    lines = [
        f"# data_deduplicate: {machine()}, one of them used\n",
        f"`python benchmarks/data_deduplicate.py {args.folder.name} --limit {args.limit} "
        f"--known {num_known} --enlarge {args.enlarge}`: {len(known)} evaluation images, "
        f"{len(others)} others, threshold {MAX_DISTANCE} of 128 bits. "
        "Mirrored copies are looked for.\n",
        *header("transform | proposed by hash | recall after pixels | found as another image"),
    ]
    wrong = hits = 0
    pairs: list[tuple[bytes, bytes]] = []
    for name, transform in (EDITS | TRANSFORMS).items():
        images = [transform(decode(image)) for image in known]
        proposed = num_proposed(known_index, images)
        matches, _ = find(known_index, images, MAX_DISTANCE, flips=True)
        right = sum(match is not None and match.image == i for i, match in enumerate(matches))
        found = [(i, match.image) for i, match in enumerate(matches) if match is not None]
        pairs += [(images[i], known[j]) for i, j in found if i != j]
        other = len(found) - right
        hits, wrong = hits + right, wrong + other
        lines.append(f"| {name} | {proposed:.4f} | {interval(right, len(known))} | {other} |")
        print(lines[-1], flush=True)
    (matches, _), lookup_us = microseconds(
        lambda: find(known_index, others, MAX_DISTANCE, flips=True), max(1, len(others))
    )
    pairs += [(others[i], known[m.image]) for i, m in enumerate(matches) if m is not None]
    false = sum(match is not None for match in matches)
    all_found, copies = hits + wrong + false, len(known) * len(EDITS | TRANSFORMS)
    differing = (len(known) - 1) * copies + len(known) * len(others)
    if args.pairs:
        keep_pairs(args.pairs, pairs)
    lines += [
        f"\nRecall {interval(hits, copies)} over all transforms; precision "
        f"{interval(hits, all_found)} of {all_found} that were found, counting {wrong} found as "
        f"another image and {false} of the {len(others)} others that were found at all: "
        f"{false + wrong} of {differing:,} pairs of different images.",
        f"\nIndexing takes {indexing_us:.0f} us an image, decoding, hashing, looking up and "
        f"comparing {lookup_us:.0f} us.",
        "\nFlat pictures of random colours against as many others:\n",
        *header("pictures | us an image | equal ones found"),
        *(cost_of_flat(count) for count in (1000, 4000)),
    ]
    finish("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
