"""`vit-ray init IMAGES`: looks at images and writes a suitable recipe, with reasons as comments."""

import contextlib
import json
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, try_to_load_from_cache

from vit_ray.addresses import with_home
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.config.loading import completed, load_recipe, parse_yaml
from vit_ray.data.convert.checks import Estimate, estimate_conversion
from vit_ray.data.convert.files import SeveralSplitsError
from vit_ray.storage import absolute, locate

# 90 epochs of ImageNet-1k, which train a ViT-S/16 to 76.5 % (Beyer et al., arXiv:2205.01580).
_IMAGES_SEEN: Final = 90 * 1_281_167
_MAX_EPOCHS, _MIN_EPOCHS = 300, 7
# Models for fewer images than the number.
_MODELS: Final = (
    (100_000, "ViT-Ti/16"),
    (1_000_000, "ViT-S/16"),
    (10_000_000, "ViT-B/16"),
    (sys.maxsize, "ViT-L/16"),
)
# With fewer images, fine-tuning is advised.
_MIN_FROM_SCRATCH: Final = 100_000
# ViT-B/16 of ImageNet-21k.
_WEIGHTS: Final = "hf://google/vit-base-patch16-224-in21k"
# Seconds that the hub may take to connect, and to send each part of its answer.
_HUB_S: Final = 3.0
# benchmarks/results/study_cifar10_cpu_2026-11-25.md.
_FROM_SCRATCH: Final = (
    "from random weights expect little: on the 50,000 images of CIFAR-10 a small ViT reaches "
    "57.5 %, a ResNet 74.5 %"
)


@dataclass(frozen=True)
class _Source:
    """Estimates of a source's images for training and testing, and the names of these splits."""

    train: Estimate
    split: str | None = None
    test: Estimate | None = None
    test_split: str | None = None

    @property
    def held_out_fraction(self) -> float:
        """Share of the training images to test on: a tenth, at least one and at most 10,000."""
        count = self.train.num_images
        return 0.0 if self.test else round(min(max(0.1, 1 / count), 10_000 / count), 6)

    @property
    def num_held_out(self) -> int:
        return round(self.train.num_images * self.held_out_fraction)

    @property
    def counts(self) -> str:
        if self.test:
            return f"{self.split} {self.train.counts}, {self.test_split} {self.test.counts}"
        return f"{self.train.counts}, {self.num_held_out:,} of them are held out for testing"


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
    name = _name_of(images)
    file = Path(out or f"{name}{'-tuned' if weights not in (None, 'none') else ''}.yaml")
    if file.exists():
        raise ValueError(
            f"{str(file)!r} exists already; run the commands that it lists, move it, or give "
            "`init` another file with --out"
        )
    if not file.parent.is_dir():
        raise ValueError(f"--out {file}: there is no folder {str(file.parent)!r}")
    if weights not in (None, "none") and "://" not in weights and not with_home(weights).exists():
        raise ValueError(
            f"--weights {weights}: no such file; give one of a ViT-B/16, or {_WEIGHTS}"
        )
    source = _examine(images)
    chosen = _advised(images, source) if weights is None else weights
    text = _recipe_text(images, file, name, source, None if chosen == "none" else chosen)
    completed(parse_yaml(text, str(file)), (), str(file))
    with open(file, "x", encoding="utf-8") as target:
        target.write(text)
    print(f"{images}: {source.counts}")
    print(f"{file} is written; next: vit-ray convert {shlex.quote(str(file))}")


def _advised(images: str, source: _Source) -> str | None:
    """Weights to fine-tune, or None; for few images also prints what to expect, and the choice."""
    if source.train.num_images >= _MIN_FROM_SCRATCH:
        return None
    command = f"vit-ray init {shlex.quote(images)} --out OTHER.yaml --weights"
    weights, advice = None, f"to fine-tune published weights: {command} {_WEIGHTS}"
    if source.train.shorter_side > 64 and _has_published():
        weights, advice = _WEIGHTS, f"so the recipe fine-tunes {_WEIGHTS} (not: {command} none)"
    print(f"fewer than {_MIN_FROM_SCRATCH:,} images: {_FROM_SCRATCH}; {advice}")
    return weights


def _has_published() -> bool:
    # Whether the weights are in the hub's cache, or the hub answers.
    name = _WEIGHTS.removeprefix("hf://")
    if isinstance(try_to_load_from_cache(name, "model.safetensors"), str):
        return True
    with contextlib.suppress(Exception):  # of an HTTP library that changes with the hub's versions
        HfApi().model_info(name, timeout=_HUB_S)
        return True
    return False


def first_look(name: str, epochs: float) -> list[str]:
    """Overrides for a training of a few of these epochs."""
    return [f"name={name}-first", f"optim.epochs={5 if epochs > 10 else 1}", "optim.warmup_steps=0"]


def _name_of(images: str) -> str:
    folder = locate(images).path.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder).lstrip("-._")
    return name.split(".")[0].rstrip("-") or "images"


def _examine(images: str) -> _Source:
    """Count and open some images.

    Raises:
        ValueError: there are no images with classes to train on.
    """
    config = ConvertConfig(source=images, destination="data")
    try:
        source = _Source(estimate_conversion(config))
    except SeveralSplitsError as error:
        if "train" not in error.splits:
            raise
        source = _Source(estimate_conversion(config.model_copy(update={"split": "train"})), "train")
        for split in sorted({"test", "validation"}.intersection(error.splits)):
            # The second is preferred: a test split may have no labels, as ImageNet's on the hub.
            with contextlib.suppress(ValueError):
                test = estimate_conversion(config.model_copy(update={"split": split}))
                source = replace(source, test=test, test_split=split)
    if source.train.num_classes < 2 and source.train.num_counted == source.train.num_parts:
        raise ValueError(
            f"{images!r} has {source.train.num_classes} class; a classifier needs at least two, "
            "such as IMAGES/cat/1.jpg and IMAGES/dog/2.jpg"
        )
    return source


def _recipe_text(images: str, file: Path, name: str, source: _Source, weights: str | None) -> str:
    """The recipe: the commands to type, then the sections, some with a reason.

    Paths are absolute: the file may be in another folder.
    """
    location, folder = locate(images), Path.cwd() / "data" / name
    if location.is_local and folder.is_relative_to(location.path):  # outside of the source
        folder = Path(location.path).with_name(f"{name}-converted")
    test = str(folder / (source.test_split or ""))
    data: dict[str, Any] = {"train": str(folder / (source.split or "train"))}
    data |= {"eval": test} if source.test else {"held_out_fraction": source.held_out_fraction}
    convert = {"source": absolute(images), "destination": data["train"]}
    training = _training(source, bool(weights))
    sections: dict[str, Any] = {
        "name": f"{name}-tuned" if weights else name,
        "output": absolute("runs"),
        **({"init_from": absolute(weights)} if weights else {}),
        "convert": {**convert, "split": source.split} if source.split else convert,
        "data": {**data, "augment": {"kind": "resize_crop"}} if weights else data,
        **training,
        "tracking": {"experiment": name},
        "plan": {"num_images": source.train.num_images, "num_classes": source.train.num_classes},
    }
    trained = source.train.num_images - source.num_held_out
    epochs, batch = training["optim"]["epochs"], training["train"]["global_batch_size"]
    reasons = {
        "model": f"for sides of {source.train.shorter_side} pixels (median)",
        "optim": f"{epochs} epochs: {epochs * trained:,} images; ImageNet takes {_IMAGES_SEEN:,}",
        "train": f"{max(1, trained // batch):,} steps per epoch; bf16 is for GPUs",
        "plan": "for --dry-run before the images are converted",
    }
    recipe = shlex.quote(str(file))
    train_command = f"vit-ray {'finetune' if weights else 'pretrain'} {recipe}"
    test_keys = f"convert.split={source.test_split} {shlex.quote(f'convert.destination={test}')}"
    shorter = " ".join(first_look(sections["name"], epochs))
    lines = [
        f"# {images!r}: {source.counts}",
        "# Commands:",
        f"#   vit-ray convert {recipe}",
        *([f"#   vit-ray convert {recipe} {test_keys}"] if source.test else []),
        f"#   {train_command} --dry-run   # steps, memory, time",
        f"#   {train_command} {shorter}   # a first look",
        f"#   {train_command}",
        f"#   vit-ray predict runs/{sections['name']} PICTURES",
    ]
    for section, value in sections.items():
        lines += [f"# {reasons[section]}"] if section in reasons else []
        lines.append(f"{section}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, ""])


def _training(source: _Source, is_tuned: bool) -> dict[str, Any]:
    """The sections of a model and its training.

    Args:
        is_tuned: fine-tune weights of a ViT-B/16.
    """
    side, num_images = source.train.shorter_side, source.train.num_images - source.num_held_out
    batch = 512 if is_tuned else 4096
    while batch > 1 and (num_images < 250 * batch > 16 * 250 or num_images < batch):
        batch //= 2
    if is_tuned:
        epochs = 20  # on Oxford Pets the paper takes 70, with this optimizer
        model = {"name": "ViT-B/16", "image_size": 224}
        optim = {"name": "sgd", "learning_rate": 0.003, "weight_decay": 0.0}
    else:
        epochs = min(_MAX_EPOCHS, max(_MIN_EPOCHS, round(_IMAGES_SEEN / num_images)))
        model = _model(side, source.train.num_images)
        optim = {"name": "adamw", "learning_rate": 0.001, "weight_decay": 0.1}
    every = max(1, round(epochs * num_images / batch) // 20)
    return {
        "model": model,
        "optim": {
            **optim, "schedule": "cosine", "epochs": epochs, "warmup_steps": min(10_000, every),
        },
        "train": {"global_batch_size": batch, "precision": "fp32" if side <= 64 else "bf16"},
        "evaluate": {"every_steps": every},
        "checkpoint": {"every_steps": min(1000, every)},
    }  # fmt: skip


def _model(side: int, num_images: int) -> dict[str, Any]:
    """The section `model` for images of this shorter side in pixels."""
    if side > 64:
        name = next(name for limit, name in _MODELS if num_images < limit)
        return {"name": name, "image_size": min(224, side // 16 * 16)}
    patch = 4 if side <= 48 else 8
    depth, width = (6, 192) if num_images < 100_000 else (12, 384)  # a large ViT would overfit
    return {
        "name": "ViT", "image_size": max(patch, side // patch * patch), "depth": depth,
        "width": width, "mlp_dim": 4 * width, "num_heads": width // 64, "patch_size": patch,
    }  # fmt: skip
