"""Grids of images for people."""

import numpy as np

from vit_ray.evaluation.contact_sheet import sheet


def test_a_title_that_is_wider_than_its_images_is_whole() -> None:
    image = np.full((8, 8, 3), 128, np.uint8)
    title = "cifar10-vit-with-a-long-name, step 361: largest shares of the gradient"
    inked = [
        int((np.asarray(sheet([image] * count, [""] * count, title))[:28] < 128).sum())
        for count in (1, 8)
    ]
    assert inked[0] == inked[1] > 0
