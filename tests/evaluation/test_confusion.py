"""Counts of classes taken for others, against scikit-learn's confusion matrix."""

import csv
import io

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from vit_ray.evaluation.accuracy import CONFUSION_FILE, Confusion

NUM_CLASSES = 7


def random_predictions(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(images, NUM_CLASSES, generator=generator)
    labels = torch.randint(0, NUM_CLASSES - 1, (images, 1), generator=generator)  # none of class 6
    return logits, labels


def matrix(confusion: Confusion) -> np.ndarray:
    table = np.zeros((NUM_CLASSES, NUM_CLASSES), np.int64)
    truth, predicted, counts = confusion.pairs().T
    table[truth, predicted] = counts
    return table


def test_counts_are_those_of_scikit_learn_however_images_are_batched_and_shared():
    logits, labels = random_predictions(200)
    expected = confusion_matrix(labels[:, 0], logits.argmax(1), labels=range(NUM_CLASSES))
    ranks = [Confusion(), Confusion()]
    for first in range(0, 200, 16):
        part = slice(first, first + 16)
        weights = torch.ones(len(logits[part]))
        ranks[first // 16 % 2].add_batch(logits[part], labels[part], weights)
    ranks[0].merge(np.concatenate([rank.pairs() for rank in ranks]))
    assert np.array_equal(matrix(ranks[0]), expected)
    images = expected.sum(axis=1)
    accuracies = ranks[0].accuracies(NUM_CLASSES)
    assert accuracies[:6] == pytest.approx(np.diag(expected)[:6] / images[:6])
    assert np.isnan(accuracies[6])


def test_padding_and_images_without_an_answer_are_not_counted():
    confusion = Confusion()
    labels = torch.tensor([[0], [1], [-1]])
    confusion.add_batch(torch.eye(3), labels, torch.tensor([1.0, 0.0, 1.0]))
    assert confusion.pairs().tolist() == [[0, 0, 1]]
    confusion, logits = Confusion(), torch.eye(4)[[2, 3]]  # several count for the predicted one
    confusion.add_batch(logits, torch.tensor([[1, 2], [-1, 1]]), torch.ones(2))
    assert confusion.pairs().tolist() == [[1, 3, 1], [2, 2, 1]]


def test_the_table_names_classes_and_what_they_are_taken_for():
    confusion = Confusion()
    predicted, truth = [0, 1, 1, 2, 1], [0, 0, 0, 0, 1]
    weights = torch.ones(5)
    confusion.add_batch(torch.eye(4)[predicted], torch.tensor(truth)[:, None], weights)
    files = confusion.files(["ant", "=bee", "cat", "dog"])
    pairs = list(csv.reader(io.StringIO(files[CONFUSION_FILE].decode())))
    of_ants = [["ant", "ant", "1"], ["ant", "'=bee", "2"], ["ant", "cat", "1"]]
    assert pairs[1:] == [*of_ants, ["'=bee", "'=bee", "1"]]


def test_a_label_beyond_the_classes_is_an_error():
    confusion = Confusion()
    confusion.add_batch(torch.eye(3), torch.tensor([[0], [1], [5]]), torch.ones(3))
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        confusion.files(["ant", "bee", "cat"])
