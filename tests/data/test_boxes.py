"""The place of a crop is part of a run's contract: recorded values, and no company changes it."""

import hashlib

import numpy as np
import pytest

from vit_ray.data.boxes import Augmentation, CropBox, draw_box, draw_boxes

NUMBERS = np.random.default_rng(5)
HEIGHTS, WIDTHS = NUMBERS.integers(1, 900, 3000), NUMBERS.integers(1, 900, 3000)
SAMPLES, EPOCHS = NUMBERS.integers(0, 1 << 40, 3000), NUMBERS.integers(0, 300, 3000)
SIZES = np.stack([HEIGHTS, WIDTHS], axis=1)
SEED = -7


def digest(boxes: list[CropBox]) -> str:
    rows = [(box.top, box.left, box.height, box.width, box.is_flipped) for box in boxes]
    return hashlib.sha256(np.array(rows, np.float64).tobytes()).hexdigest()[:16]


# Drawn one image after the other, in plain Python, with math.exp, math.sqrt and round.
RECORDED = [
    (Augmentation(), "97ce9ae7ffa107ff"),
    (Augmentation(min_area=0.9, max_area=1.0, flip=False), "34660f7964431130"),
    (Augmentation("resize_crop", size=(200, 220), resize=256), "5dcae76e224e84ed"),
    (Augmentation("center_crop"), "e6c76930bdcf785f"),
    (Augmentation("resize"), "3cfc636f46932848"),
]


@pytest.mark.parametrize(("augmentation", "recorded"), RECORDED)
def test_boxes_are_the_recorded_ones(augmentation, recorded):
    boxes = draw_boxes(SIZES, augmentation, SEED, EPOCHS, SAMPLES)
    assert digest(boxes) == recorded
    for i, box in enumerate(boxes[:50]):  # the same alone as in company
        size = (int(HEIGHTS[i]), int(WIDTHS[i]))
        assert draw_box(size, augmentation, (SEED, int(EPOCHS[i]), int(SAMPLES[i]))) == box
