"""`vit-ray init IMAGES`: looks at images and writes a suitable recipe, with reasons as comments."""

import contextlib
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from huggingface_hub import HfApi, try_to_load_from_cache

from vit_ray.addresses import absolute_path, with_home
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.config.loading import completed, load_recipe, parse_yaml
from vit_ray.data.convert.checks import Estimate, estimate_conversion
from vit_ray.data.convert.files import SeveralSplitsError
from vit_ray.storage import absolute, locate

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
_FEW: Final = 100_000
"""Below so many images the way is fine-tuning."""
_WEIGHTS: Final = "hf://google/vit-base-patch16-224-in21k"
"""ViT-B/16 of ImageNet-21k."""
_HUB_S: Final = 3.0
"""How long the hub may take to connect, and to send each part of its answer."""
_FROM_SCRATCH: Final = (
    "from random weights expect little: on the 50,000 images of CIFAR-10 a small ViT reaches "
    "57.5 %, a ResNet 74.5 %"
)
"""benchmarks/results/study_cifar10_cpu_2026-11-25.md."""


@dataclass(frozen=True)
class _Look:
    """What a source holds for training and for testing, and the names of these splits, if any."""

    train: Estimate
    split: str | None = None
    test: Estimate | None = None
    test_split: str | None = None

    @property
    def held_out(self) -> float:
        """Share of the training images to test on: a tenth, at least one and at most 10,000."""
        count = self.train.num_images
        return 0.0 if self.test else round(min(max(0.1, 1 / count), 10_000 / count), 6)

    @property
    def num_trained(self) -> int:
        return self.train.num_images - round(self.train.num_images * self.held_out)

    @property
    def splits(self) -> str:
        """Images of each split as text."""
        if self.test:
            return f"{self.split} {self.train.counts}, {self.test_split} {self.test.counts}"
        count = self.train.num_images - self.num_trained
        return f"{self.train.counts}, {count:,} of them are held out for testing"


def recipe_for(images: str) -> Path:
    """The recipe for these images in the current folder; written if there is none."""
    file = Path(f"{_name_of(images)}.yaml")
    config = load_recipe(file).convert if file.exists() else None
    if config is None or absolute(config.source) != absolute(images):
        write_recipe(images, None)
    return file


def write_recipe(images: str, out: str | None, weights: str | None = None) -> None:
    """Look at the images, write the recipe, and print the next command.

    Args:
        images: as `convert.source`.
        out: file to write; None = named after the folder of the images.
        weights: of a ViT-B/16 to fine-tune; "none" = train from random weights; None = those of
            ImageNet-21k for a small set of large images, if the hub has them in reach.

    Raises:
        ValueError: the file is there already, or the source has no images in classes.
    """
    chosen = None if weights == "none" else weights
    name = f"{_name_of(images)}-tuned" if chosen else _name_of(images)
    file = Path(out or f"{name}.yaml")
    if file.exists():
        raise ValueError(
            f"{str(file)!r} exists already; run the commands that it lists, move it, or give "
            "`init` another file with --out"
        )
    if not file.parent.is_dir():
        raise ValueError(f"--out {file}: there is no folder {str(file.parent)!r}")
    if chosen and "://" not in chosen and not with_home(chosen).exists():
        raise ValueError(
            f"--weights {weights}: no such file; give one of a ViT-B/16, or {_WEIGHTS}"
        )
    look = _look_at(images)
    if weights is None and look.train.num_images < _FEW:
        chosen = _published() if look.train.shorter_side > 64 else None
        name = f"{name}-tuned" if chosen else name
        typed = f"vit-ray init {shlex.quote(images)} --out OTHER.yaml --weights"
        other = f"to fine-tune published weights: {typed} {_WEIGHTS}"
        if chosen:
            other = f"so the recipe fine-tunes {chosen} (not: {typed} none)"
        elif look.train.shorter_side > 64:
            other = f"the hub did not answer; {other}"
        print(f"fewer than {_FEW:,} images: {_FROM_SCRATCH}; {other}")
    text = _recipe_text(images, file, name, look, chosen)
    completed(parse_yaml(text, str(file)), (), str(file))
    with open(file, "x", encoding="utf-8") as target:
        target.write(text)
    print(f"{images}: {look.splits}")
    print(f"{file} is written; next: vit-ray convert {shlex.quote(str(file))}")


def _published() -> str | None:
    """The weights of ImageNet-21k, if they are in the hub's cache or the hub answers."""
    name = _WEIGHTS.removeprefix("hf://")
    if isinstance(try_to_load_from_cache(name, "model.safetensors"), str):
        return _WEIGHTS
    try:
        HfApi().model_info(name, timeout=_HUB_S)
    except Exception:  # of an HTTP library that changes with the hub's versions
        return None
    return _WEIGHTS


def first_look(name: str, epochs: float) -> list[str]:
    """Overrides for a training of a few of these epochs."""
    few = 5 if epochs > 10 else 1
    return [f"name={name}-first", f"optim.epochs={few}", "optim.warmup_steps=0"]


def _name_of(images: str) -> str:
    """A name for the run, from that of the folder of the images."""
    folder = locate(images).path.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder).lstrip("-._")
    return name.split(".")[0].rstrip("-") or "images"


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
    if not splits:
        return _Look(found)
    for test in ("validation", "test"):
        if test in splits:
            # A test split may have no labels, as ImageNet's on the hub.
            with contextlib.suppress(ValueError):
                counted = estimate_conversion(config.model_copy(update={"split": test}))
                return _Look(found, "train", counted, test)
    return _Look(found, "train")


def _destination(images: str, name: str) -> PurePosixPath:
    """A folder for the converted splits, outside of the source."""
    usual, source = PurePosixPath("data", name), locate(images)
    if not f"{locate(str(usual)).uri}/".startswith(f"{source.uri.rstrip('/')}/"):
        return usual
    return PurePosixPath(os.path.relpath(Path(source.path).with_name(f"{name}-converted")))


def _beside(file: Path, place: str) -> str:
    """A path of the current folder as a recipe in this file has it; addresses stay."""
    if "://" in place or with_home(place).is_absolute():
        return place
    return os.path.relpath(absolute_path(place), os.path.realpath(file.parent))


def _recipe_text(images: str, file: Path, name: str, look: _Look, weights: str | None) -> str:
    """The recipe: the commands to type, then the sections, some with a reason above."""
    folder = _destination(images, _name_of(images))
    train, test = str(folder / (look.split or "train")), str(folder / (look.test_split or ""))
    convert = {"source": _beside(file, images), "destination": _beside(file, train)}
    data: dict[str, Any] = {"train": _beside(file, train)}
    data |= {"eval": _beside(file, test)} if look.test else {"held_out_fraction": look.held_out}
    trained, reasons = _training(look, bool(weights))
    sections = {
        "name": name,
        "output": _beside(file, "runs"),
        **({"init_from": _beside(file, weights)} if weights else {}),
        "convert": {**convert, "split": look.split} if look.split else convert,
        "data": {**data, "augment": {"kind": "resize_crop"}} if weights else data,
        **trained,
        "tracking": {"experiment": name},
        "plan": {"num_images": look.train.num_images, "num_classes": look.train.num_classes},
    }
    recipe = shlex.quote(str(file))
    train_it = f"vit-ray {'finetune' if weights else 'pretrain'} {recipe}"
    place = f"convert.split={look.test_split} {shlex.quote(f'convert.destination={test}')}"
    lines = [
        f"# {images!r}: {look.splits}",
        "# Commands:",
        f"#   vit-ray convert {recipe}",
        *([f"#   vit-ray convert {recipe} {place}"] if look.test else []),
        f"#   {train_it} --dry-run   # steps, memory, time",
        f"#   {train_it} {' '.join(first_look(name, trained['optim']['epochs']))}   # a first look",
        f"#   {train_it}",
        f"#   vit-ray predict runs/{name} PICTURES",
    ]
    for section, value in sections.items():
        lines += [f"# {reasons[section]}"] if section in reasons else []
        lines.append(f"{section}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, ""])


def _training(look: _Look, is_tuned: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """The sections of a model and its training, and reasons by section.

    Args:
        is_tuned: from weights of a ViT-B/16.
    """
    trained, side = look.num_trained, look.train.shorter_side
    batch = 512 if is_tuned else 4096
    while batch > 1 and (trained < 250 * batch > 16 * 250 or trained < batch):
        batch //= 2
    as_imagenet = round(_IMAGES_SEEN / trained)
    epochs = 20 if is_tuned else min(_MOST_EPOCHS, max(_LEAST_EPOCHS, as_imagenet))
    steps = max(1, round(epochs * trained / batch))  # as optim.total_steps
    every = max(1, steps // 20)
    model, why = _model(side, look.train.num_images)
    optim = {"name": "adamw", "learning_rate": 0.001, "weight_decay": 0.1}
    reason = f"the images of 90 epochs of ImageNet-1k would be {as_imagenet:,}."
    if is_tuned:
        model, why = {"name": "ViT-B/16", "image_size": 224}, "That of the weights."
        optim = {"name": "sgd", "learning_rate": 0.003, "weight_decay": 0.0}
        reason = "on Oxford Pets the paper takes 70, with this optimizer."
    optim |= {"schedule": "cosine", "epochs": epochs, "warmup_steps": min(10_000, every)}
    precision = "fp32" if side <= 64 else "bf16"
    sections = {
        "model": model,
        "optim": optim,
        "train": {"global_batch_size": batch, "precision": precision},
        "evaluate": {"every_steps": every},
        "checkpoint": {"every_steps": min(1000, every)},
    }
    return sections, {
        "model": why,
        "optim": f"{epochs} epochs: {reason} Warm-up: 5 % of {steps:,} steps.",
        "train": f"{max(1, trained // batch):,} steps per epoch. bf16 is for GPUs.",
        "plan": "For --dry-run before the images are converted.",
    }


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
    _, name, parameters = next(one for one in _MODELS if count < one[0])
    why = f"Shorter sides are {side} pixels (median), {parameters} parameters."
    return {"name": name, "image_size": size}, why
