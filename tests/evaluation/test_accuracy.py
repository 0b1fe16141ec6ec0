"""Accuracy and counts of classes taken for others, against scikit-learn and hand-made cases."""

import csv
import io
from dataclasses import astuple

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, top_k_accuracy_score

from vit_ray.evaluation.accuracy import AccuracySums, Confusion

NUM_CLASSES = 12


def predictions(num_images=200, num_seen=NUM_CLASSES):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_images, NUM_CLASSES, generator=generator)
    labels = torch.randint(num_seen, (num_images,), generator=generator)
    return logits, labels, torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def test_single_labels_agree_with_scikit_learn_however_they_are_batched():
    logits, labels, losses = predictions()
    whole = AccuracySums.of_batch(logits, labels, losses)
    found = whole.means()
    assert found["top1"] == pytest.approx(accuracy_score(labels, logits.argmax(1)))
    expected = top_k_accuracy_score(labels, logits, k=5, labels=np.arange(NUM_CLASSES))
    assert found["top5"] == pytest.approx(expected)
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    parts = [slice(0, 7), slice(7, 130), slice(130, 200)]
    total = sum(
        (AccuracySums.of_batch(logits[p], labels[p], losses[p]) for p in parts), AccuracySums()
    )
    assert astuple(total) == pytest.approx(astuple(whole), rel=1e-12)
    with pytest.raises(ValueError, match="no evaluation image has a label"):
        AccuracySums().means()


def test_padding_of_weight_zero_counts_for_nothing_even_if_its_loss_is_nan():
    logits, labels, losses = predictions(8)
    padded = AccuracySums.of_batch(
        torch.cat([logits, torch.zeros(3, NUM_CLASSES)]),
        torch.cat([labels, torch.zeros(3, dtype=torch.int64)]),
        torch.cat([losses, torch.full((3,), float("nan"))]),
        torch.tensor([1.0] * 8 + [0.0] * 3),
    )
    assert padded == AccuracySums.of_batch(logits, labels, losses)


def test_any_of_several_labels_is_right_and_an_empty_set_is_skipped():
    logits = torch.tensor([[9.0, 1, 0], [9, 1, 0], [9, 1, 0], [9, 1, 0]], dtype=torch.bfloat16)
    labels = torch.tensor([[2, 0], [1, 2], [-1, -1], [0, -1]])
    sums = AccuracySums.of_batch(logits, labels, torch.tensor([1.0, 2.0, 100.0, 3.0]))
    assert sums == AccuracySums(top1=2.0, top5=3.0, loss=6.0, images=3.0)
    assert sums.means() == {"top1": 2 / 3, "top5": 1.0, "loss": 2.0}


def test_counts_are_those_of_scikit_learn_however_images_are_batched_and_shared():
    logits, labels, _ = predictions(num_seen=NUM_CLASSES - 1)
    expected = confusion_matrix(labels, logits.argmax(1), labels=range(NUM_CLASSES))
    ranks = [Confusion(), Confusion()]
    for first in range(0, 200, 16):
        part = slice(first, first + 16)
        weights = torch.ones(len(logits[part]))
        ranks[first // 16 % 2].add_batch(logits[part], labels[part, None], weights)
    ranks[0].merge(np.concatenate([rank.pairs() for rank in ranks]))
    found = np.zeros((NUM_CLASSES, NUM_CLASSES), np.int64)
    truth, predicted, counts = ranks[0].pairs().T
    found[truth, predicted] = counts
    assert np.array_equal(found, expected)
    accuracies = ranks[0].accuracies(NUM_CLASSES)
    assert accuracies[:-1] == pytest.approx((np.diag(expected) / expected.sum(axis=1))[:-1])
    assert np.isnan(accuracies[-1])


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
    confusion.add_batch(torch.eye(4)[predicted], torch.tensor(truth)[:, None], torch.ones(5))
    files = confusion.files(["ant", "a,bee", "cat", "dog"])
    pairs = list(csv.reader(io.StringIO(files["confusion.csv"].decode())))
    of_ants = [["ant", "ant", "1"], ["ant", "a,bee", "2"], ["ant", "cat", "1"]]
    assert pairs[1:] == [*of_ants, ["a,bee", "a,bee", "1"]]
    with pytest.raises(IndexError, match="out of"):
        confusion.files(["ant"])
