"""Images per second from JPEG files to crops on the device, and by the ways there are beside it.

    python benchmarks/device_decode.py [FOLDER_OF_JPEGS] [--images 512] [--size 224] [--rounds 5]
        [--out FILE.md]

Rows: what a training worker does where `data.decode=device` (`vit_ray.worker.decode`), with
one CPU thread and with one for each core; its two parts, the decode of the regions and their
resize; nvImageCodec and torchvision decoding whole images and resizing none; and the crops as a
reading task makes them where `data.decode=host`, on one core. All in turn, round after round; a
pass is all images, and ends when the device has them. The ratio is the median over rounds of a
row's time over that of `data.decode=device` with all cores (above 1: that is faster). Without a
folder, pictures of 500 x 375 pixels are made, with grain, of some 100 kB each. On a GPU where there
is one, else by nvImageCodec's CPU backend. A row whose libraries are missing names what it lacks;
the resize needs torch alone.
"""

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import finish, header, in_turn, machine, reason

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CORES = len(os.sched_getaffinity(0))
HEIGHT, WIDTH, QUALITY, GRAIN = 375, 500, 90, 16
OURS = f"data.decode=device, {CORES} CPU threads"

Pass = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """What every row does once in a pass."""

    folder: Path | None
    count: int
    size: int

    @cached_property
    def files(self) -> list[bytes]:
        """Encoded images, those of a small folder several times."""
        if self.folder is None:
            return [picture(seed) for seed in range(self.count)]
        paths = sorted(p for p in self.folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
        if not paths:
            raise SystemExit(f"{self.folder} has no file whose name ends in .jpg or .jpeg")
        return [paths[i % len(paths)].read_bytes() for i in range(self.count)]

    @cached_property
    def augmentation(self) -> Any:
        """The crops of pre-training."""
        from vit_ray.data.images.crop_boxes import Augmentation

        return Augmentation("inception_crop", self.size)

    @cached_property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """The regions that a stream would draw."""
        from vit_ray.data.images.crop_boxes import draw_box
        from vit_ray.data.images.jpeg import size_of_jpeg

        sizes = [size_of_jpeg(file) or (HEIGHT, WIDTH) for file in self.files]
        draw = partial(draw_box, augmentation=self.augmentation)
        return [draw(size, rng_key=(0, 0, i)).bounds(size) for i, size in enumerate(sizes)]

    @cached_property
    def arrays(self) -> list[Any]:
        """The files as decoders take them."""
        import numpy as np

        return [np.frombuffer(file, np.uint8) for file in self.files]


def picture(seed: int) -> bytes:
    """A JPEG file of smooth colours under grain."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 12, 16, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(coarse, (HEIGHT, WIDTH), mode="bicubic")
    grain = torch.randn(1, 1, HEIGHT, WIDTH, generator=generator) * GRAIN
    pixels = (smooth + grain).clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0)
    sink = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(sink, "JPEG", quality=QUALITY)
    return sink.getvalue()


def whole_way(work: Work, threads: int) -> Pass:
    """Packed files to a batch of crops."""
    import numpy as np
    import pyarrow as pa

    from vit_ray.worker.decode.device_decode import DeviceDecoder

    def list_column(values: Any) -> Any:
        flat = np.asarray(values, np.int32)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])

    table = pa.table(
        {
            "encoded": pa.array(work.files, pa.binary()),
            "box": list_column(work.boxes),
            "is_flipped": np.arange(work.count) % 2 == 1,
            "where": pa.array(map(str, range(work.count))),
            "labels": list_column(np.zeros((work.count, 1))),
            "sample": np.arange(work.count),
        }
    )
    torch.set_num_threads(threads)  # as many as nvImageCodec takes
    decoder = DeviceDecoder(DEVICE, (work.size, work.size), work.count, refuse)

    def decode() -> object:
        torch.set_num_threads(threads)
        return decoder.decoded(table)

    return decode


def refuse(bad: dict[int, str]) -> None:
    raise ValueError(f"{len(bad)} images cannot be decoded")


def regions(work: Work) -> Pass:
    """The decode of it."""
    from vit_ray.worker.decode.device_decode import region_decoder

    decode = region_decoder(DEVICE)
    return lambda: decode(work.arrays, work.boxes)


def resizes(work: Work) -> Pass:
    """The resize of it, of regions that lie on the device: of sizes as of inception crops."""
    from vit_ray.worker.decode.batched_resize import resize_regions

    generator = torch.Generator().manual_seed(0)
    sides = torch.rand(work.count, 2, generator=generator) * 0.75 + 0.25
    shapes = (sides * torch.tensor([HEIGHT, WIDTH])).long().tolist()
    found = {i: torch.zeros(*s, 3, dtype=torch.uint8, device=DEVICE) for i, s in enumerate(shapes)}
    images = torch.zeros(work.count, work.size, work.size, 3, dtype=torch.uint8, device=DEVICE)
    return lambda: resize_regions(found, [False] * work.count, images)


def whole_images(work: Work) -> Pass:
    """nvImageCodec as its own example has it."""
    from nvidia import nvimgcodec

    if DEVICE.type == "cuda":
        decoder = nvimgcodec.Decoder(device_id=DEVICE.index)
    else:
        backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
        kind = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
        decoder = nvimgcodec.Decoder(device_id=kind, backends=backends)
    return lambda: decoder.decode(work.arrays)


def by_torchvision(work: Work) -> Pass:
    """nvJPEG under torchvision, or libjpeg-turbo where there is no GPU."""
    from torchvision.io import decode_jpeg

    files = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in work.files]
    if DEVICE.type == "cuda":
        return lambda: decode_jpeg(files, device=DEVICE)
    return lambda: [decode_jpeg(file) for file in files]


def on_host(work: Work) -> Pass:
    """What a reading task does."""
    import cv2

    from vit_ray.data.images.crops import training_crop

    cv2.setNumThreads(0)
    return lambda: [
        training_crop(file, work.augmentation, (0, 0, i)) for i, file in enumerate(work.files)
    ]


ROWS: dict[str, Callable[[Work], Pass]] = {
    OURS: partial(whole_way, threads=CORES),
    "data.decode=device, one CPU thread": partial(whole_way, threads=1),
    "of it: regions decoded": regions,
    "of it: regions resized": resizes,
    "nvImageCodec, whole images, none resized": whole_images,
    "torchvision, whole images, none resized": by_torchvision,
    "data.decode=host, one core": on_host,
}


def prepared(work: Work) -> tuple[dict[str, Pass], dict[str, str]]:
    """The rows that can run, warmed up, and why the others cannot."""
    passes, missing = {}, {}
    for name, prepare in ROWS.items():
        try:
            torch.set_num_threads(CORES)
            passes[name] = prepare(work)
            seconds(passes[name])
        except Exception as error:  # of other people's code, or its absence
            passes.pop(name, None)
            missing[name] = reason(error)
    return passes, missing


def seconds(work: Pass) -> float:
    """Of one pass, with the device's part of it."""
    torch.set_num_threads(CORES)
    start_s = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def measure(work: Work, rounds: int) -> Iterator[tuple[dict[str, list[float]], dict[str, str]]]:
    """Seconds of each row, and why others have none, after each round.

    Each round begins with another row.
    """
    passes, missing = prepared(work)
    found: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(rounds):
        for name in in_turn(list(passes), turn):
            if name in missing:
                continue
            try:
                found[name].append(seconds(passes[name]))
            except Exception as error:  # of other people's code
                missing[name] = reason(error)
        yield found, missing


def table(found: dict[str, list[float]], missing: dict[str, str], count: int) -> str:
    """Markdown."""
    lines = header("way | images/s | its time / ours | passes, fastest to slowest")
    for name in ROWS:
        if name in missing:
            lines.append(f"| {name} | not run: `{missing[name]}` | | |")
            continue
        times, ours = found[name], found.get(OURS, [])
        ratios = [a / b for a, b in zip(times, ours, strict=False)]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        spread = f"{min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms"
        lines.append(f"| {name} | {count / statistics.median(times):.0f} | {ratio} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--images", type=int, default=512, help="of a pass, which is one batch")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    rows = ""
    for measured in measure(Work(args.folder, args.images, args.size), args.rounds):
        rows = table(*measured, args.images)
        print(f"\n{rows}\n", flush=True)  # of one that is cut off, it is all
    finish(f"# device_decode: {machine()}, {device}\n\n{rows}", args.out)


if __name__ == "__main__":
    main()
