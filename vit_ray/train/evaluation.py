"""Evaluation inside a run: all ranks work, each image counts once, every rank gets the figures.

Evaluation batches carry `weight`: 0 for the rows that pad the last batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vit_ray.config.training import EvalConfig, TrainConfig
from vit_ray.evaluate.accuracy import AccuracySums
from vit_ray.evaluate.few_shot import few_shot_accuracy
from vit_ray.train.collectives import all_rows, all_sum
from vit_ray.train.engine import DeepSpeedEngine
from vit_ray.train.loop import Batch
from vit_ray.train.objective import classification_loss, normalize


def measure_accuracy(
    engine: DeepSpeedEngine, batches: Iterable[Batch], train: TrainConfig
) -> dict[str, float]:
    """`top1`, `top5` and `loss` over all images of an evaluation stream."""
    sums = AccuracySums()
    for batch, _, logits in _predictions(engine, batches):
        labels = torch.from_numpy(batch["labels"]).to(logits.device).long()
        losses = classification_loss(logits, labels, _without_smoothing(train))
        weights = torch.from_numpy(batch["weight"]).to(logits.device)
        sums = sums + AccuracySums.of_batch(logits, labels, losses, weights)
    total = all_sum(sums.as_tensor().tolist(), engine.device)
    return AccuracySums.from_tensor(torch.tensor(total, dtype=torch.float64)).means()


def collect_features(
    engine: DeepSpeedEngine, batches: Iterable[Batch]
) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, D) float32 and first labels (N,) of every image, in one order on all ranks.

    They lie in host memory; a device holds no more of them than a batch, or a part in passing.
    """
    features, labels, samples = [], [], []
    for batch, head_inputs, _ in _predictions(engine, batches):
        real = batch["weight"] > 0
        features.append(head_inputs.cpu().numpy()[real])
        labels.append(batch["labels"][real, 0].astype(np.int64))
        samples.append(batch["sample"][real])
    order = np.argsort(all_rows(np.concatenate(samples), engine.device))
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    all_features, all_labels = (
        all_rows(np.concatenate(part), engine.device, places=places) for part in (features, labels)
    )
    return all_features, all_labels


def measure_few_shot(
    engine: DeepSpeedEngine,
    train_batches: Iterable[Batch],
    test_batches: Iterable[Batch],
    config: EvalConfig,
    num_classes: int,
) -> dict[str, float]:
    """`few_shot/N_shot_top1` for each number of shots; all ranks solve the same small system."""
    train_features, train_labels = collect_features(engine, train_batches)
    test_features, test_labels = collect_features(engine, test_batches)
    accuracies = few_shot_accuracy(
        train_features,
        train_labels,
        test_features,
        test_labels,
        num_classes=num_classes,
        shots=config.shots,
        seeds=config.few_shot_seeds,
    )
    return {f"few_shot/{n}_shot_top1": value for n, value in accuracies.items()}


def _predictions(
    engine: DeepSpeedEngine, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    for batch in batches:
        images = torch.from_numpy(np.ascontiguousarray(batch["image"])).to(engine.device)
        features, logits = engine.predict(normalize(images, engine.dtype))
        yield batch, features, logits


def _without_smoothing(train: TrainConfig) -> TrainConfig:
    loss = "softmax" if train.loss == "masked_patch" else train.loss
    return train.model_copy(update={"label_smoothing": 0.0, "loss": loss})
