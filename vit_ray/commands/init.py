"""`vit-ray init IMAGES`: looks at images and writes a recipe that fits them, with its reasons."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import yaml

from vit_ray.config.recipe import recipe_from_dict
from vit_ray.data.images.crops import BadImageError, decode
from vit_ray.data.prepare.sources.formats import index_unit, list_units
from vit_ray.data.prepare.sources.hub import rows_of
from vit_ray.data.prepare.sources.source_count import SourceCount, count_source
from vit_ray.storage import locate

_SAMPLED_UNITS: Final = 16
_SAMPLED_PER_UNIT: Final = 4
_IMAGES_SEEN: Final = 90 * 1_281_167
"""90 epochs of ImageNet-1k, which train a ViT-S/16 to 76.5 % (Beyer et al., arXiv:2205.01580)."""
_MOST_EPOCHS, _LEAST_EPOCHS = 300, 7
_MODELS: Final = (
    (100_000, "ViT-Ti/16", "5.7 M"),
    (1_000_000, "ViT-S/16", "22 M"),
    (10_000_000, "ViT-B/16", "86 M"),
    (sys.maxsize, "ViT-L/16", "304 M"),
)
"""Most images, and the model for them with its parameters."""


class _Look(NamedTuple):
    """What is seen of a source."""

    counted: SourceCount
    """Of the split to train on."""
    split: str | None
    """Its name, where the source has several."""
    test_split: str | None
    side: int
    """Median of the shorter sides of some images, in pixels."""
    num_opened: int
    bad: list[str]
    """Why those that were opened cannot be decoded."""


def write_recipe(images: str, out: str | None) -> int:
    """Look at the images, write the recipe, and print what comes next.

    Args:
        images: as `convert.source`.
        out: file to write; None = named as the folder of the images.

    Raises:
        ValueError: the file is there already, or the source has no images in classes.
    """
    place = locate(images)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.path.rstrip("/").rpartition("/")[2]).strip("-.")
    name = name.split(".")[0] or "images"
    file = Path(out or f"{name}.yaml")
    if file.exists():
        raise ValueError(f"{str(file)!r} is there already; give another file by --out, or move it")
    if not file.parent.is_dir():
        raise ValueError(f"--out {file}: there is no folder {str(file.parent)!r}")
    look = _look_at(images)
    text = _recipe_text(images, file, name, look)
    recipe_from_dict(yaml.safe_load(text), where=str(file))
    with open(file, "x", encoding="utf-8") as target:
        target.write(text)
    print(f"{images}: {look.counted.num_images:,} images of {look.counted.num_classes:,} classes")
    if look.bad:
        print(
            f"{len(look.bad)} of {look.num_opened} files that were opened are no images ("
            f"{look.bad[0]}); the conversion will list all of them"
        )
    print(f"wrote {file}; next: vit-ray pretrain {shlex.quote(str(file))} --dry-run")
    return 0


def _look_at(images: str) -> _Look:
    """Count and open some images.

    Raises:
        ValueError: there is nothing to train on.
    """
    try:
        counts: dict[str | None, SourceCount] = {None: count_source(images)}
    except ValueError:
        counts = {}
        for part in ("train", "validation", "test"):
            with contextlib.suppress(ValueError):
                counts[part] = count_source(images, "auto", part)
        if "train" not in counts:
            raise
    split = next(iter(counts))
    count = counts[split]
    sides, bad = [], []
    for content in _sample(images, split):
        try:
            sides.append(min(decode(content).shape[:2]))
        except BadImageError as error:
            bad.append(str(error))
    if not sides:
        reason = f"; the first of {len(bad)} that were opened: {bad[0]}" if bad else ""
        raise ValueError(f"{images!r} holds no image that can be decoded{reason}")
    if count.num_classes < 2:
        raise ValueError(
            f"{images!r} has {count.num_classes} class; a classifier needs two or more, such as "
            "IMAGES/cat/1.jpg and IMAGES/dog/2.jpg"
        )
    test_split = next((one for one in ("test", "validation") if one in counts), None)
    side = round(statistics.median(sides))
    return _Look(count, split, test_split, side, len(sides) + len(bad), bad)


def _sample(images: str, split: str | None) -> Iterator[bytes]:
    """The first images of units all over the source."""
    units = list_units(images, "auto", split)
    for unit in units[:: -(-len(units) // _SAMPLED_UNITS)]:
        if unit.format == "huggingface":
            yield from (image for _, _, image in islice(rows_of(unit), _SAMPLED_PER_UNIT))
            continue
        for entry in islice(index_unit(unit, locate(unit.path)), _SAMPLED_PER_UNIT):
            if entry.problem is None:
                with contextlib.suppress(ValueError):  # the file cannot be read
                    yield entry.read()


def _recipe_text(images: str, file: Path, name: str, look: _Look) -> str:
    count, side = look.counted.num_images, look.side
    held_out = 0.0 if look.test_split else min(0.1, round(10_000 / count, 6))
    trained = count - round(count * held_out)
    batch = 4096
    while batch > 1 and (trained < 250 * batch > 16 * 250 or trained < batch):
        batch //= 2
    epochs = min(_MOST_EPOCHS, max(_LEAST_EPOCHS, round(_IMAGES_SEEN / trained)))
    steps = epochs * trained // batch
    model, why = _model(side, count)
    split, test = look.split, look.test_split
    destination = str(PurePosixPath("data", name, split or "train"))
    source: dict[str, Any] = {"source": images, "destination": destination}
    source |= {"split": split} if split else {}
    data = [f"  train: {json.dumps(destination)}"]
    if test:
        evaluated = str(PurePosixPath("data", name, test))
        data.append(f"  eval: {json.dumps(evaluated)}")
    else:
        data.append(
            f"  held_out_fraction: {held_out:g}  # there is no test split: accuracy is of "
            f"{count - trained:,} images"
        )
    command = f"vit-ray {{}} {shlex.quote(str(file))}"
    lines = [command.format("convert")]
    if test:
        lines.append(f"{lines[0]} convert.split={test} convert.destination={evaluated}")
    lines.append(f"{command.format('pretrain')} --dry-run   # steps, memory, time; starts nothing")
    lines.append(command.format("pretrain"))
    lines.append(f"vit-ray predict runs/{name} PICTURES")
    is_small = side <= 64
    return "\n".join(
        [
            f"# {count:,} images of {look.counted.num_classes:,} classes in {images}",
            "# Commands:",
            *(f"#   {line}" for line in lines),
            f"name: {name}",
            "output: runs",
            f"convert: {json.dumps(source)}",
            f"# {why}",
            f"model: {json.dumps(model)}",
            "data:",
            *data,
            f"# {epochs} epochs: {round(_IMAGES_SEEN / trained):,} would show as many images as 90 "
            f"of ImageNet-1k; usual are {_LEAST_EPOCHS} to {_MOST_EPOCHS}.",
            "# For a first look take 10: `optim.epochs=10 optim.warmup_steps=100`.",
            "optim:",
            "  name: adamw",
            "  learning_rate: 0.001  # the paper's for ImageNet-21k; `vit-ray sweep` finds yours",
            "  weight_decay: 0.1",
            "  schedule: cosine",
            f"  epochs: {epochs}",
            f"  warmup_steps: {max(1, min(10_000, steps // 20))}  # a twentieth of {steps:,} steps",
            "train:",
            f"  global_batch_size: {batch}  # {max(1, trained // batch):,} steps an epoch; the "
            "paper's 4,096 needs a million images",
            f"  precision: {'fp32' if is_small else 'bf16'}  # "
            + ("also fast on CPUs at this size; bf16 for GPUs" if is_small else "for GPUs"),
            f"evaluate: {{every_steps: {max(1, steps // 20)}}}",
            f"checkpoint: {{every_steps: {max(1, min(1000, steps // 20))}}}",
            "workers: {num_workers: 1}  # one process each, on a GPU where there is one",
            f"tracking: {{experiment: {json.dumps(name)}}}",
            "",
        ]
    )


def _model(side: int, count: int) -> tuple[dict[str, Any], str]:
    """The section `model`, and why."""
    if side <= 64:
        patch = 4 if side <= 48 else 8
        size = max(patch, side // patch * patch)
        depth, width = (6, 192) if count < 100_000 else (12, 384)
        model = {
            "name": "ViT", "image_size": size, "depth": depth, "width": width,
            "mlp_dim": 4 * width, "num_heads": width // 64, "patch_size": patch,
        }  # fmt: skip
        return model, (
            f"Sides are {side} pixels (median): patches of {patch} make {(size // patch) ** 2} "
            "tokens. Small, since a large ViT learns such a set by heart."
        )
    size = 224 if side >= 224 else side // 16 * 16
    most, name, parameters = next(one for one in _MODELS if count < one[0])
    bound = f"; for {most:,} images and more take a larger one" if most < sys.maxsize else ""
    return {"name": name, "image_size": size}, (
        f"Shorter sides are {side} pixels (median), {parameters} parameters{bound}. Weights that "
        "know ImageNet-21k are better below\n# a million images: `vit-ray finetune` with "
        "init_from=hf://google/vit-base-patch16-224-in21k model.name=ViT-B/16."
    )
