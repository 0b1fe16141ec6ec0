"""`vit-ray batch RUN|RECIPE step=k`: the images of a step as the model sees them.

It reads only what the step reads: no Ray, no cluster, no weights.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from vit_ray.data.crops import UInt8Array, decode
from vit_ray.evaluation.image_grid import SIDE, sheet
from vit_ray.launch.inputs.seen_batch import SeenBatches, SeenImage
from vit_ray.launch.named_run import NamedRun, find_run

MOST_SHOWN: Final = 64
"""Images in the pictures; the table has all of them."""
_BOX_COLOR: Final = (255, 64, 64)
_SHOWN_PX: Final = 320


def show_batch(source: str, words: Sequence[str], out: str | None) -> int:
    """Write pictures and a table, and print their paths; or print the steps of a sample.

    Args:
        source: a run or recipe, as `find_run` takes it.
        words: `step=k`, `step=k:n`, `sample=NUMBER` or `key=KEY`; `rank=r/n`; and changes of the
            recipe.
        out: folder to write; None for one named after the run and the step.

    Raises:
        ValueError: an argument is wrong, the run has no such step, rank or sample, or as
            `find_run`.
    """
    asked = dict(word.partition("=")[::2] for word in words)
    names = ("step", "sample", "key", "rank")
    own: dict[str, str] = {key: asked[key] for key in names if key in asked}
    if len(own.keys() & {"step", "sample", "key"}) != 1:
        raise ValueError(
            "no step is given; give step=K, step=K:N, sample=NUMBER or key=KEY, such as step=0"
        )
    run = find_run(source, [word for word in words if word.partition("=")[0] not in own])
    batches = SeenBatches(run.resolved)
    if "step" not in own:
        for sample in _samples(run, batches, own):
            _print_steps(run, batches, sample)
        return 0
    steps = run.checked_steps(_steps(own["step"]))
    places = _places(own.get("rank"), run.recipe.train.global_batch_size)
    folder = _new_folder(out or f"{run.recipe.name}-step-{own['step'].replace(':', '-')}")
    _write(run, batches, steps, places, folder)
    return 0


def _new_folder(name: str) -> Path:
    """The folder, made now unless it is there and empty."""
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _steps(text: str) -> range:
    """The steps of `100` or `100:110`."""
    if not (found := re.fullmatch(r"(\d+)(?::(\d+))?", text)):
        raise ValueError(f"step={text}: give a number, or a range such as 100:110")
    first = int(found[1])
    return range(first, int(found[2]) if found[2] else first + 1)


def _places(rank: str | None, batch: int) -> range:
    """Positions in the global batch: all, or those of rank `r/n`."""
    if rank is None:
        return range(batch)
    found = re.fullmatch(r"(\d+)/([1-9]\d*)", rank)
    number, world = (int(found[1]), int(found[2])) if found else (0, 0)
    if not world or not number < world or batch % world:
        raise ValueError(
            f"rank={rank}: give the rank and the number of workers, such as rank=3/8, which must "
            f"divide train.global_batch_size={batch}"
        )
    share = batch // world
    return range(number * share, (number + 1) * share)


def _samples(run: NamedRun, batches: SeenBatches, own: Mapping[str, str]) -> list[int]:
    """The given number, or the numbers of the images with a key."""
    if "sample" in own:
        if not own["sample"].isdecimal():
            raise ValueError(f"sample={own['sample']}: give a number, or the key as key=KEY")
        return [int(own["sample"])]
    manifest = run.resolved.manifest
    print(f"reads the keys of {manifest.num_images:,} images", file=sys.stderr, flush=True)
    if not (samples := batches.samples_of_key(own["key"])):
        raise ValueError(f"key={own['key']}: {manifest.path} has no image with this key")
    return samples


def _print_steps(run: NamedRun, batches: SeenBatches, sample: int) -> None:
    done = run.newest.position.step if run.newest else 0
    steps = [one for one in batches.steps_of(sample) if one[0] < run.total_steps]
    print(f"sample {sample}; the newest checkpoint is of step {done}")
    for step, epoch, place in steps:
        when = "seen" if step < done else "to come"
        print(f"step {step:,} (epoch {epoch}), place {place} of its batch: {when}")
    if not steps:
        print("no step of this run has it")


def _write(run: NamedRun, batches: SeenBatches, steps: range, places: range, folder: Path) -> None:
    classes = run.resolved.manifest.classes
    rows, crops, shown = [], list[UInt8Array](), list[SeenImage]()
    for step in steps:
        pixels, images = batches.read(step, places)
        rows += [one.row_of_table(classes) for one in images]
        left = MOST_SHOWN - len(shown)
        crops += list(pixels[:left].copy())  # so that the batch can be freed
        shown += images[:left]
    pq.write_table(pa.Table.from_pylist(rows), folder / "batch.parquet")
    title = f"{run.recipe.name}, step {steps.start}"
    title += f" to {steps.stop - 1}" if len(steps) > 1 else ""
    title += f", the first {len(shown)} of {len(rows):,}" if len(shown) < len(rows) else ""
    names = [f"{one.sample} {_names(one, classes)}" for one in shown]
    sheet(crops, names, title).save(folder / "batch.png")
    boxed = [_boxed(one) for one in shown]
    sheet(boxed, [one.key for one in shown], f"{title}, as stored").save(folder / "stored.png")
    for name in ("batch.png", "stored.png", "batch.parquet"):
        print(f"wrote {folder / name}")


def _names(one: SeenImage, classes: list[str]) -> str:
    return ", ".join(classes[label] for label in one.labels) or "no label"


def _boxed(one: SeenImage) -> UInt8Array:
    """The stored image with the box that is cut out."""
    image, box = Image.fromarray(decode(one.content)), one.box
    corners = (box.left, box.top, box.left + box.width - 1, box.top + box.height - 1)
    width = max(1, round(max(image.size) / SIDE))
    ImageDraw.Draw(image).rectangle(corners, outline=_BOX_COLOR, width=width)
    image.thumbnail((_SHOWN_PX, _SHOWN_PX))  # the next one may have 50 million pixels, too
    return np.asarray(image)
