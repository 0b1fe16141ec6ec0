"""`vit-ray init IMAGES`: looks at images and writes a suitable recipe, with reasons as comments.

`vit-ray start IMAGES` then converts them and trains for a first look.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path, PurePosixPath
from typing import Any, Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.config.loading import completed, load_recipe, parse_yaml
from vit_ray.data.convert.estimate import Estimate, estimate_conversion
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
_Look = tuple[Estimate, str | None, str | None]
"""What a source holds, and the names of its training and test split, if it has several."""


def write_recipe(
    images: str, out: str | None, *, continues: bool = False
) -> tuple[Path, list[str]]:
    """Look at the images, write the recipe, and print the next command.

    Args:
        images: as `convert.source`.
        out: file to write; None = named after the folder of the images.
        continues: a file that is there stays if it is a recipe for these images.

    Returns:
        The file, and overrides for a training of a few epochs.

    Raises:
        ValueError: the file is there already, or the source has no images in classes.
    """
    place = locate(images)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.path.rstrip("/").rpartition("/")[2]).lstrip("-._")
    name = name.split(".")[0].rstrip("-") or "images"
    file = Path(out or f"{name}.yaml")
    is_there = file.exists()
    if is_there and not (continues and _converts(file, images)):
        raise ValueError(
            f"{str(file)!r} exists already; run the commands that it lists, move it, or give "
            "`init` another file with --out"
        )
    if not file.parent.is_dir():
        raise ValueError(f"--out {file}: there is no folder {str(file.parent)!r}")
    look = _look_at(images)
    found, *_ = look
    text, first = _recipe_text(images, file, name, _destination(place, name), look)
    if not is_there:
        completed(parse_yaml(text, str(file)), (), str(file))
        with open(file, "x", encoding="utf-8") as target:
            target.write(text)
    print(f"{images}: {found.counts}")
    if found.num_rejected:
        print(
            f"{found.num_rejected} of {found.num_sampled} sampled files are not images "
            f"({found.reason}); `convert` lists all of them"
        )
    done = "is there already" if is_there else "is written"
    print(f"{file} {done}; next: vit-ray convert {shlex.quote(str(file))}")
    return file, first


def _converts(file: Path, images: str) -> bool:
    """Whether the file is a recipe that converts these images."""
    config = load_recipe(file).convert
    return config is not None and config.source == images


def start_training(images: str) -> int:
    """Write the recipe, convert the images, and train for a few epochs.

    The same command again continues with what is finished.
    """
    from vit_ray.commands.convert import run_convert
    from vit_ray.commands.train import pretrain

    file, first = write_recipe(images, None, continues=True)
    recipe = load_recipe(file)
    run_convert(recipe)
    if test := recipe.data.eval:
        run_convert(
            recipe.with_changes(convert={"split": PurePosixPath(test).name, "destination": test})
        )
    return pretrain(load_recipe(file, first))


def _look_at(images: str) -> _Look:
    """Count and open some images.

    Raises:
        ValueError: there are no images with classes to train on.
    """
    config = ConvertConfig(source=images, destination="data")
    splits: tuple[str | None, ...] = ()
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
    test = next((one for one in ("validation", "test") if one in splits), None)
    return found, "train" if splits else None, test


def _destination(source: Location, name: str) -> PurePosixPath:
    """A folder for the converted splits, outside of the source."""
    usual = PurePosixPath("data", name)
    if f"{locate(str(usual)).uri}/".startswith(f"{source.uri.rstrip('/')}/"):
        converted = PurePosixPath(source.path).with_name(f"{name}-converted")
        return PurePosixPath(os.path.relpath(converted))
    return usual


def _recipe_text(
    images: str, file: Path, name: str, folder: PurePosixPath, look: _Look
) -> tuple[str, list[str]]:
    """The recipe, and overrides for a first look."""
    found, split, test = look
    count, side = found.num_images, found.shorter_side
    held_out = 0.0 if test else min(0.1, round(10_000 / count, 6))
    trained = count - round(count * held_out)
    batch = 4096
    while batch > 1 and (trained < 250 * batch > 16 * 250 or trained < batch):
        batch //= 2
    epochs = min(_MOST_EPOCHS, max(_LEAST_EPOCHS, round(_IMAGES_SEEN / trained)))
    steps = max(1, round(epochs * trained / batch))  # as optim.total_steps
    few = 10 if epochs > 10 else 1
    tenth = max(1, round(few * trained / batch) // 10)
    first = [
        f"name={name}-first", f"optim.epochs={few}", f"optim.warmup_steps={tenth}",
        f"evaluate.every_steps={tenth}", f"train.log_every_steps={tenth}",
    ]  # fmt: skip
    train, evaluated = str(folder / (split or "train")), str(folder / (test or ""))
    source: dict[str, Any] = {"source": images, "destination": train}
    source |= {"split": split} if split else {}
    data: dict[str, Any] = {"train": train}
    data |= {"eval": evaluated} if test else {"held_out_fraction": held_out}
    model, why = _model(side, count)
    command, recipe = "vit-ray {} " + shlex.quote(str(file)), {"name": name, "output": "runs"}
    commands = [command.format("convert")]
    if test:
        changed = shlex.quote(f"convert.destination={evaluated}")
        commands.append(f"{commands[0]} convert.split={test} {changed}")
    commands.append(f"{command.format('pretrain')} --dry-run   # steps, memory, time")
    commands.append(f"{command.format('pretrain')} {' '.join(first)}   # a first look")
    commands += [command.format("pretrain"), f"vit-ray predict runs/{name} PICTURES"]
    if side > 64 and count < 1_000_000:
        on = f"data.eval={evaluated}" if test else "data.eval=null data.held_out_fraction=0.1"
        commands.append("# below a million images, fine-tuning published weights is more accurate:")
        commands.append(
            f"vit-ray finetune finetune/pets name={name}-finetuned output=runs model.name=ViT-B/16 "
            f"init_from=hf://google/vit-base-patch16-224-in21k data.train={train} {on}"
        )
    optim = {
        "name": "adamw", "learning_rate": 0.001, "weight_decay": 0.1, "schedule": "cosine",
        "epochs": epochs, "warmup_steps": max(1, min(10_000, steps // 20)),
    }  # fmt: skip
    engine = {"global_batch_size": batch, "precision": "fp32" if side <= 64 else "bf16"}
    sections = recipe | {
        "convert": source, "model": model, "data": data, "optim": optim, "train": engine,
        "evaluate": {"every_steps": max(1, steps // 20)},
        "checkpoint": {"every_steps": max(1, min(1000, steps // 20))},
        "tracking": {"experiment": name},
    }  # fmt: skip
    reasons = {
        "model": why,
        "data": "" if test else f"No test split: {count - trained:,} images are held out.",
        "optim": f"{epochs} epochs ({_LEAST_EPOCHS} to {_MOST_EPOCHS}): the images of 90 epochs of "
        f"ImageNet-1k would be {round(_IMAGES_SEEN / trained):,}. Warm-up: 5 % of {steps:,} steps.",
        "train": f"{max(1, trained // batch):,} steps per epoch. bf16 is for GPUs.",
    }
    lines = [f"# {found.counts} in {images!r}", "# Commands:", *(f"#   {one}" for one in commands)]
    for key, value in sections.items():
        lines += [f"# {reasons[key]}"] if reasons.get(key) else []
        lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join([*lines, ""]), first


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
