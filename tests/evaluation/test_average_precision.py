"""Mean average precision of several ranks' batches, against scikit-learn on all images at once."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from vit_ray.evaluation import average_precision
from vit_ray.evaluation.average_precision import ClassScores

NUM_IMAGES, NUM_CLASSES, MOST_LABELS = 90, 7, 4


def made(num_steps):
    """Scores (of so many different values, 0: all different), labels and the last padding rows.

    Class 6 has no image, some images have no label, and some have one twice.
    """
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(NUM_IMAGES, NUM_CLASSES)).astype(np.float32)
    if num_steps:
        scores = np.round(scores * num_steps / 6).astype(np.float32)
    labels = rng.integers(-1, NUM_CLASSES - 1, (NUM_IMAGES, MOST_LABELS))
    labels[:8] = -1
    weights = np.ones(NUM_IMAGES)
    weights[-5:] = 0
    return scores, labels, weights


def expected(scores, labels, weights):
    real = weights > 0
    truth = np.zeros((NUM_IMAGES, NUM_CLASSES + 1), bool)
    truth[np.arange(NUM_IMAGES)[:, None], labels] = True
    truth = truth[real, :NUM_CLASSES]
    held = truth.any(axis=0)
    assert held.sum() == NUM_CLASSES - 1
    return average_precision_score(truth[:, held], scores[real][:, held], average="macro")


def ranks_of(scores, labels, weights, num_ranks, batch=10):
    ranks = [ClassScores() for _ in range(num_ranks)]
    for number, first in enumerate(range(0, NUM_IMAGES, batch)):
        part = slice(first, first + batch)
        ranks[number % num_ranks].add_batch(
            *(torch.from_numpy(one[part]) for one in (scores, labels, weights))
        )
    return ranks


def measured(scores, labels, weights, num_ranks):
    ranks = ranks_of(scores, labels, weights, num_ranks)
    scores = np.concatenate([rows for rank in ranks for rows in rank._scores])
    labels = np.concatenate([rows for rank in ranks for rows in rank._labels])
    whole = iter([scores, labels])
    return ranks[0].mean_average_precision(lambda _: next(whole))


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(1, 0), (2, 3), (9, 12)])
def test_it_is_scikit_learns_however_the_images_are_dealt(num_steps, num_ranks):
    """Few steps give many equal scores."""
    found = measured(*made(num_steps), num_ranks)
    assert found == pytest.approx(expected(*made(num_steps)), rel=1e-12)


def test_without_any_label_there_is_none():
    scores, labels, weights = made(0)
    assert measured(scores, np.full_like(labels, -1), weights, 2) is None
    assert measured(scores * np.nan, labels, weights, 1) is not None


def test_scores_beyond_the_limit_are_not_held(monkeypatch):
    monkeypatch.setattr(average_precision, "MAX_BYTES", 4 * 10 * NUM_CLASSES)
    (held,) = ranks_of(*made(0), 1)
    assert held.num_bytes > average_precision.MAX_BYTES
    assert not held._scores
