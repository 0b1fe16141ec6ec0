"""`vit-ray init IMAGES`: looks at images and writes a suitable recipe, with reasons as comments."""

import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.config.loading import load_recipe
from vit_ray.data.convert.estimate import Estimate, empty_text, estimate_conversion
from vit_ray.data.convert.files import SeveralSplitsError
from vit_ray.storage import Location, locate

_IMAGES_SEEN: Final = 90 * 1_281_167
"""90 epochs of ImageNet-1k, which train a ViT-S/16 to 76.5 % (Beyer et al., arXiv:2205.01580)."""
_MOST_EPOCHS, _LEAST_EPOCHS = 300, 7
_MODELS: Final = (
    (100_000, "ViT-Ti/16", "5.7 M"),
    (1_000_000, "ViT-S/16", "22 M"),
    (10_000_000, "ViT-B/16", "86 M"),
    (sys.maxsize, "ViT-L/16", "304 M"),
)
"""Up to this many images: the model, and its parameters."""


class _Look(NamedTuple):
    """What a source holds."""

    found: Estimate
    """For the training split."""
    split: str | None
    """Name of the training split, if the source has several."""
    test_split: str | None


def write_recipe(images: str, out: str | None) -> int:
    """Look at the images, write the recipe, and print the next command.

    Args:
        images: as `convert.source`.
        out: file to write; None = named after the folder of the images.

    Raises:
        ValueError: the file is there already, or the source has no images in classes.
    """
    place = locate(images)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.path.rstrip("/").rpartition("/")[2]).strip("-.")
    name = name.split(".")[0] or "images"
    file = Path(out or f"{name}.yaml")
    if file.exists():
        raise ValueError(f"{str(file)!r} exists already; give another file with --out, or move it")
    if not file.parent.is_dir():
        raise ValueError(f"--out {file}: there is no folder {str(file.parent)!r}")
    look = _look_at(images)
    text = _recipe_text(images, file, name, _destination(place, name), look)
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch, file.name)
        written.write_text(text, encoding="utf-8")
        load_recipe(written)
    with open(file, "x", encoding="utf-8") as target:
        target.write(text)
    print(f"{images}: {look.found.counts}")
    if look.found.empty_classes:
        print(empty_text(images, look.found.empty_classes))
    if look.found.num_rejected:
        print(
            f"{look.found.num_rejected} of {look.found.num_sampled} sampled files are not images ("
            f"{look.found.reason}); `convert` lists all of them"
        )
    print(f"wrote {file}; next: vit-ray pretrain {shlex.quote(str(file))} --dry-run")
    return 0


def _look_at(images: str) -> _Look:
    """Count and open some images.

    Raises:
        ValueError: there are no images with classes to train on.
    """
    config = ConvertConfig(source=images, destination="")
    splits: tuple[str | None, ...] = (None,)
    try:
        found = estimate_conversion(config)
    except SeveralSplitsError as error:
        splits = error.splits
        if "train" not in splits:
            raise
        found = estimate_conversion(config.model_copy(update={"split": "train"}))
    if found.num_classes < 2 and found.is_exact:
        raise ValueError(
            f"{images!r} has {found.num_classes} class; a classifier needs at least two, such as "
            "IMAGES/cat/1.jpg and IMAGES/dog/2.jpg"
        )
    # A test split may have no labels, as ImageNet's on the hub.
    test_split = next((one for one in ("validation", "test") if one in splits), None)
    return _Look(found, "train" if splits != (None,) else None, test_split)


def _destination(source: Location, name: str) -> PurePosixPath:
    """A folder for the converted splits, outside of the source."""
    usual = PurePosixPath("data", name)
    if f"{locate(str(usual)).uri}/".startswith(f"{source.uri.rstrip('/')}/"):
        converted = PurePosixPath(source.path).with_name(f"{name}-converted")
        return PurePosixPath(os.path.relpath(converted))
    return usual


def _recipe_text(images: str, file: Path, name: str, folder: PurePosixPath, look: _Look) -> str:
    count, side = look.found.num_images, look.found.shorter_side
    held_out = 0.0 if look.test_split else min(0.1, round(10_000 / count, 6))
    trained = count - round(count * held_out)
    batch = 4096
    while batch > 1 and (trained < 250 * batch > 16 * 250 or trained < batch):
        batch //= 2
    epochs = min(_MOST_EPOCHS, max(_LEAST_EPOCHS, round(_IMAGES_SEEN / trained)))
    steps = max(1, round(epochs * trained / batch))  # as optim.total_steps
    few = 10 if epochs > 10 else 1
    tenth = max(1, round(few * trained / batch) // 10)
    split, test = look.split, look.test_split
    destination, evaluated = str(folder / (split or "train")), str(folder / (test or ""))
    model, why = _model(side, count)
    source: dict[str, Any] = {"source": images, "destination": destination}
    source |= {"split": split} if split else {}
    data = [f"  train: {json.dumps(destination)}"]
    if test:
        data.append(f"  eval: {json.dumps(evaluated)}")
    else:
        data.append(
            f"  held_out_fraction: {held_out:g}  # no test split: accuracy is measured on "
            f"{count - trained:,} of the images"
        )
    command = f"vit-ray {{}} {shlex.quote(str(file))}"
    lines = [command.format("convert")]
    if test:
        changed = shlex.quote(f"convert.destination={evaluated}")
        lines.append(f"{lines[0]} convert.split={test} {changed}")
    lines.append(f"{command.format('pretrain')} --dry-run   # steps, memory, time; starts nothing")
    lines.append(command.format("pretrain"))
    lines.append(f"vit-ray predict runs/{name} PICTURES")
    if side > 64 and count < 1_000_000:
        on = f"data.eval={evaluated}" if test else "data.eval=null data.held_out_fraction=0.1"
        why += "\n# Below a million images, fine-tuning ImageNet-21k weights is more accurate:"
        why += f"\n#   vit-ray finetune finetune/pets name={name}-finetuned output=runs"
        why += " model.name=ViT-B/16 init_from=hf://google/vit-base-patch16-224-in21k"
        why += f" data.train={destination} {on}"
    is_small = side <= 64
    steps_per_epoch = max(1, trained // batch)
    return "\n".join(
        [
            f"# {look.found.counts} in {images!r}",
            "# Commands:",
            *(f"#   {line}" for line in lines),
            f"name: {json.dumps(name)}",
            "output: runs",
            f"convert: {json.dumps(source)}",
            f"# {why}",
            f"model: {json.dumps(model)}",
            "data:",
            *data,
            f"# {epochs} epochs, in a range of {_LEAST_EPOCHS} to {_MOST_EPOCHS}: the images of 90 "
            f"epochs of ImageNet-1k would be {round(_IMAGES_SEEN / trained):,} epochs here.",
            "# For a first look:",
            f"#   {command.format('pretrain')} name={name}-first optim.epochs={few} "
            f"optim.warmup_steps={tenth} evaluate.every_steps={tenth}",
            "optim:",
            "  name: adamw",
            "  learning_rate: 0.001  # the paper's for ImageNet-21k; tune it with `vit-ray sweep`",
            "  weight_decay: 0.1",
            "  schedule: cosine",
            f"  epochs: {epochs}",
            f"  warmup_steps: {max(1, min(10_000, steps // 20))}  # 5 % of {steps:,} steps",
            "train:",
            f"  global_batch_size: {batch}  # {steps_per_epoch:,} "
            f"step{'s' if steps_per_epoch > 1 else ''} per epoch; the paper's 4,096 is for a "
            "million images",
            f"  precision: {'fp32' if is_small else 'bf16'}  # "
            + ("also fast on CPUs at this size; bf16 for GPUs" if is_small else "for GPUs"),
            f"evaluate: {{every_steps: {max(1, steps // 20)}}}",
            f"checkpoint: {{every_steps: {max(1, min(1000, steps // 20))}}}",
            "workers: {num_workers: 1}  # one process each, on a GPU if there is one",
            f"tracking: {{experiment: {json.dumps(name)}}}",
            "",
        ]
    )


def _model(side: int, count: int) -> tuple[dict[str, Any], str]:
    """The section `model`, and the reason for it."""
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
            "tokens. The model is small because a large ViT overfits a set of this size."
        )
    size = 224 if side >= 224 else side // 16 * 16
    most, name, parameters = next(one for one in _MODELS if count < one[0])
    bound = f"; from {most:,} images on take a larger one" if most < sys.maxsize else ""
    return {"name": name, "image_size": size}, (
        f"Shorter sides are {side} pixels (median), {parameters} parameters{bound}."
    )
