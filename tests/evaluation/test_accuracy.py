"""Accuracy sums against scikit-learn's metrics and hand-made cases."""

from dataclasses import astuple

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, top_k_accuracy_score

from vit_ray.evaluation.accuracy import AccuracySums


def _batch(num_images=200, num_classes=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_images, num_classes, generator=generator)
    labels = torch.randint(num_classes, (num_images,), generator=generator)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return logits, labels, losses


def test_single_labels_agree_with_scikit_learn_however_they_are_batched():
    logits, labels, losses = _batch()
    whole = AccuracySums.of_batch(logits, labels, losses)
    found = whole.means()
    assert found["top1"] == pytest.approx(accuracy_score(labels, logits.argmax(1)))
    expected = top_k_accuracy_score(labels, logits, k=5, labels=np.arange(12))
    assert found["top5"] == pytest.approx(expected)
    expected_loss = float(torch.nn.functional.cross_entropy(logits, labels))
    assert found["loss"] == pytest.approx(expected_loss, rel=1e-6)
    parts = [slice(0, 7), slice(7, 130), slice(130, 200)]
    total = sum(
        (AccuracySums.of_batch(logits[p], labels[p], losses[p]) for p in parts), AccuracySums()
    )
    assert astuple(total) == pytest.approx(astuple(whole), rel=1e-12)
    with pytest.raises(ValueError, match="no evaluation image has a label"):
        AccuracySums().means()


def test_padding_of_weight_zero_counts_for_nothing_even_if_its_loss_is_nan():
    logits, labels, losses = _batch(8)
    padded = AccuracySums.of_batch(
        torch.cat([logits, torch.zeros(3, 12)]),
        torch.cat([labels, torch.zeros(3, dtype=torch.int64)]),
        torch.cat([losses, torch.full((3,), float("nan"))]),
        torch.tensor([1.0] * 8 + [0.0] * 3),
    )
    assert padded == AccuracySums.of_batch(logits, labels, losses)


def test_any_of_several_labels_is_right_and_an_empty_set_is_skipped():
    logits = torch.tensor([[9.0, 1, 0], [9, 1, 0], [9, 1, 0], [9, 1, 0]])
    labels = torch.tensor([[2, 0], [1, 2], [-1, -1], [0, -1]])
    sums = AccuracySums.of_batch(logits, labels, torch.tensor([1.0, 2.0, 100.0, 3.0]))
    assert sums == AccuracySums(top1=2.0, top5=3.0, loss=6.0, images=3.0)
    assert sums.means() == {"top1": 2 / 3, "top5": 1.0, "loss": 2.0}


def test_bf16_logits_and_fractional_weights():
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]], dtype=torch.bfloat16)
    sums = AccuracySums.of_batch(
        logits, torch.tensor([0, 1]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 1.5])
    )
    assert sums.means() == {"top1": 0.25, "top5": 1.0, "loss": 1.0}
