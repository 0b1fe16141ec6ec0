"""scikit-learn's handwritten digits as a folder of class folders: real images without a download.

1,797 images of 8 x 8 pixels and 17 grey levels (UCI Optical Recognition of Handwritten Digits).
"""

from pathlib import Path

import cv2
import numpy as np
from sklearn.datasets import load_digits

TEST_EVERY = 6  # every 6th image is held out: 300 of 1,797
SIDE = 32  # stored larger than 8 x 8, so that crops have sub-pixel room


def write_digits(folder: Path) -> None:
    """Write `folder/train/CLASS/*.png` and `folder/test/CLASS/*.png`."""
    digits = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "test" if index % TEST_EVERY == 0 else "train"
        target = folder / split / str(label)
        target.mkdir(parents=True, exist_ok=True)
        grey = np.round(image * (255.0 / 16.0)).astype(np.uint8)
        large = cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(target / f"{index:04d}.png"), large)
