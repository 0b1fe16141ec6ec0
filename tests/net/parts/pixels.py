"""Crops of photographs and odd images, with and without an index of restart markers."""

from pathlib import Path
from typing import Any

import numpy as np

import vit_ray
from tests.net.sets import NUM_PHOTOS, converted, digest

SIDE, BATCH, EPOCHS = 96, 8, 2
TWO = {"randaugment": "tensorflow", "randaugment_layers": 2, "randaugment_magnitude": 10.0}
FOUR = {**TWO, "randaugment_layers": 4, "randaugment_magnitude": 15.0}
TRAINING: dict[str, dict[str, Any]] = {
    "inception": {},
    "inception, a third, bicubic": {"min_area": 0.33, "max_area": 0.9, "interpolation": "bicubic"},
    "inception, no flip": {"flip": False},
    "resize and crop": {"kind": "resize_crop", "resize": 120},
    "resize": {"kind": "resize", "interpolation": "bicubic"},
    "centre": {"kind": "center_crop"},
    "RandAugment 2, 10": TWO,
    "RandAugment 4, 15": {**FOUR, "kind": "resize"},
}
EVALUATION: dict[str, dict[str, Any]] = {
    "centre": {},
    "centre of 140, bicubic": {"resize": 140, "interpolation": "bicubic"},
    "resize": {"kind": "resize"},
    "resize, bicubic": {"kind": "resize", "interpolation": "bicubic"},
    "without a border": {"border": 2},
}


def record(folder: Path) -> dict[str, Any]:
    """By set and crop: one digest of all photographs, one of each odd image."""
    sets = {name: vit_ray.open_dataset(str(converted() / name)) for name in ("photos", "plain")}
    return {name: _crops(data) for name, data in sets.items()}


def _crops(data: Any) -> dict[str, Any]:
    keys = [sample.key for sample in data]
    found = {
        "training, inception of 224": _digests(keys, data, 224),
        "training, 64 high, 96 wide": _digests(keys, data, (64, 96)),
    }
    for name, crop in TRAINING.items():
        found[f"training, {name}"] = _digests(keys, data, SIDE, augment=crop)
    for name, crop in EVALUATION.items():
        # One image is nothing but its border.
        options = {"training": False, "eval_augment": crop, "max_bad_fraction": 0.1}
        found[f"evaluation, {name}"] = _digests(keys, data, SIDE, **options)
    return found


def _digests(keys: list[str], data: Any, side: Any, **options: Any) -> dict[str, str]:
    """In training, of each image's crops in two epochs."""
    images: dict[str, list[bytes]] = {key: [] for key in sorted(keys)}
    order = {"epochs": EPOCHS, "seed": 13, "shuffle_window": 0}
    for batch in data.iter_batches(BATCH, side, **order, **options):
        weights = batch.get("weight", np.ones(BATCH))
        for number, pixels, weight in zip(batch["sample"], batch["image"], weights, strict=True):
            if weight:
                images[keys[number]].append(pixels.tobytes())
    photos = [b"".join(each) for key, each in images.items() if Path(key).stem.isdigit()]
    assert len(photos) == NUM_PHOTOS
    odd = {key: digest(*each) for key, each in images.items() if not Path(key).stem.isdigit()}
    return {"photographs": digest(*photos), **odd}
