"""Images kept of an evaluation: the same ones however they are dealt to ranks and batches."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import expit, softmax

from vit_ray.evaluation.accuracy import KINDS, ExampleImages
from vit_ray.evaluation.examples import SIDE, training_files

NUM_IMAGES, NUM_CLASSES = 60, 5
NAMES = ["a", 'b "quoted"', "<b>", "=1+1", "e"]


@pytest.fixture(scope="module")
def whole():
    """Images whose every pixel is four times their number; some are right, some have no label."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(NUM_IMAGES, NUM_CLASSES))
    labels = np.stack([rng.integers(0, NUM_CLASSES, NUM_IMAGES), np.full(NUM_IMAGES, -1)], axis=1)
    labels[::7] = -1
    labels[::5, 1] = 4
    shades = np.arange(NUM_IMAGES, dtype=np.uint8) * 4
    return {
        "images": np.broadcast_to(shades[:, None, None, None], (NUM_IMAGES, 4, 4, 3)).copy(),
        "samples": np.arange(NUM_IMAGES), "logits": logits, "labels": labels,
        "losses": rng.uniform(0, 9, NUM_IMAGES),
        "weights": (np.arange(NUM_IMAGES) < NUM_IMAGES - 4).astype(np.float32),
    }  # fmt: skip


def kept(whole, num_ranks, order, is_sigmoid=False):
    """The files of all ranks, each a thread, which get parts of the images in turn."""
    ranks = [ExampleImages(is_sigmoid=is_sigmoid) for _ in range(num_ranks)]
    for number, part in enumerate(np.array_split(order, 9)):
        columns = {
            key: value[part] if key == "samples" else torch.from_numpy(value[part])
            for key, value in whole.items()
        }
        ranks[number % num_ranks].add_batch(**columns)
    barrier, given = threading.Barrier(num_ranks), {}

    def files(rank):
        def gather(rows):
            given[rank] = rows
            barrier.wait(60)
            everyone = np.concatenate([given[other] for other in range(num_ranks)])
            barrier.wait(60)
            return everyone

        return ranks[rank].files(NAMES, gather)

    with ThreadPoolExecutor(num_ranks) as threads:
        found = list(threads.map(files, range(num_ranks)))
    assert all(one == found[0] for one in found)
    return found[0]


def shades(picture):
    """A quarter of the shade of each square of a row, which a JPEG keeps nearly."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)))
    assert pixels.shape[0] > SIDE  # the captions
    return [round(int(pixels[9, first + 9, 0]) / 4) for first in range(0, pixels.shape[1], SIDE)]


@pytest.mark.parametrize(("num_ranks", "is_sigmoid"), [(1, True), (3, False)])
def test_the_first_and_the_worst_of_all_ranks_are_kept(whole, num_ranks, is_sigmoid):
    order = np.random.default_rng(num_ranks).permutation(NUM_IMAGES)
    files = kept(whole, num_ranks, order, is_sigmoid)
    probabilities = (expit if is_sigmoid else partial(softmax, axis=1))(whole["logits"])
    real = [i for i in range(NUM_IMAGES - 4) if whole["labels"][i, 0] >= 0 or i % 5 == 0]
    predicted = whole["logits"].argmax(axis=1)
    wrong = [i for i in real if predicted[i] not in whole["labels"][i]]
    worst = sorted(wrong, key=lambda i: -whole["losses"][i])[: KINDS["errors"]]
    for kind, chosen in (("examples", real[: KINDS["examples"]]), ("errors", worst)):
        about = json.loads(files[f"{kind}.json"])
        assert [one["sample"] for one in about] == chosen
        assert shades(files[f"{kind}.jpg"]) == chosen
        for one, i in zip(about, chosen, strict=True):
            assert one["classes"] == [NAMES[k] for k in whole["labels"][i] if k >= 0]
            assert one["predicted"] == NAMES[predicted[i]]
            assert one["loss"] == pytest.approx(whole["losses"][i])
            assert one["probability"] == pytest.approx(probabilities[i].max(), rel=1e-6)


def test_losses_and_scores_that_are_no_numbers_do_no_harm(whole):
    bad = {**whole, "losses": np.full(NUM_IMAGES, np.nan), "logits": whole["logits"] * np.inf}
    files = kept(bad, 2, np.arange(NUM_IMAGES))
    assert len(json.loads(files["errors.json"])) == KINDS["errors"]
    right = {**whole, "labels": whole["logits"].argmax(axis=1)[:, None]}
    assert {*kept(right, 2, np.arange(NUM_IMAGES))} == {"examples.jpg", "examples.json"}


def test_training_crops_have_their_classes():
    images = 4 * np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
    labels = np.array([[0, 2], [1, -1], [-1, -1]], np.int32)
    files = training_files(images, [7, 8, 9], labels, NAMES)
    assert shades(files["training.jpg"]) == [0, 1, 2]
    assert json.loads(files["training.json"]) == [
        {"sample": sample, "classes": names, "predicted": None, "probability": None, "loss": None}
        for sample, names in ((7, ["a", "<b>"]), (8, ['b "quoted"']), (9, []))
    ]
