"""Evaluation inside a run: all ranks work, each image counts once, every rank gets the results.

Evaluation batches carry `weight`: 0 for the rows that pad the last batch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit_ray.config import Recipe
from vit_ray.config.training_sections import EvalConfig
from vit_ray.evaluation.accuracy import AccuracySums, Confusion, ExampleImages
from vit_ray.evaluation.few_shot import FewShot
from vit_ray.evaluation.ground_truth import Answers
from vit_ray.measure.memory import is_out_of_memory
from vit_ray.metric_names import (
    DEV_GROUP,
    EVAL_GROUP,
    few_shot_top1,
)
from vit_ray.outcomes import EventKind
from vit_ray.own_parts import own_part
from vit_ray.training.collectives import all_rows, all_sum, all_sum_array, read_by_first
from vit_ray.training.engine import DeepSpeedEngine, Predictor
from vit_ray.training.loop import Batch, EvaluationCutError, as_tensor
from vit_ray.training.objective import classification_loss, normalize, per_image
from vit_ray.worker.job import TrainJob, UnrecoverableError
from vit_ray.worker.prefetch import device_batches
from vit_ray.worker.run_link import RunLink, Watchdog

Predicts = DeepSpeedEngine | Predictor


class Evaluator:
    """Evaluates the engine on a run's own streams, as its recipe says; all ranks call it."""

    def __init__(
        self,
        job: TrainJob,
        engine: Predicts,
        open_batches: Callable[[str], Iterable[Batch]],
        link: RunLink,
        watchdog: Watchdog,
    ) -> None:
        """
        Args:
            open_batches: opens this rank's evaluation batches of a named stream.
        """
        self._job, self._engine, self._open_batches = job, engine, open_batches
        self._link, self._watchdog = link, watchdog
        self._pool_labels: NDArray[np.int32] | None = None
        self._files: dict[str, bytes] = {}

    def evaluate(
        self,
        step: int,
        is_stopping: Callable[[], bool] = lambda: False,
        is_save_wanted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Accuracy and few-shot accuracy, of the weights and of the averaged weights.

        Metrics that cannot be computed fail an evaluation's own run; in a training run they become
        an event, and there are no metrics.

        Args:
            is_stopping, is_save_wanted: called between two batches, on every rank.

        Raises:
            EvaluationCutError: one of them was true on some rank.
            UnrecoverableError: as above, or a batch does not fit into memory.
        """
        self._watchdog.expect_long_step()
        self._is_stopping, self._is_save_wanted = is_stopping, is_save_wanted
        try:
            metrics = self._measure("")
            if self._engine.average is not None and metrics:
                metrics |= self._measure_averaged()
        except ValueError as error:
            # All ranks have the same results and so the same error; training is not the cause.
            if self._job.kind == "evaluate":
                raise UnrecoverableError(str(error)) from None
            self._link.note(EventKind.EVALUATION_FAILED, str(error), step)
            metrics = {}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            size = self._job.recipe.evaluate.batch_size
            raise UnrecoverableError(
                f"evaluate.batch_size={size}: so many images do not fit into device memory; lower "
                "it",
                is_agreed=False,
            ) from error
        return metrics

    def _measure(self, prefix: str) -> dict[str, float]:
        recipe, engine = self._job.recipe, self._engine
        metrics: dict[str, float] = {}
        has_images = recipe.data.eval is not None or recipe.data.held_out_fraction > 0
        if has_images and recipe.train.loss != "masked_patch":  # which trains no head
            accuracy = self._measure_accuracy()
            metrics |= {f"{EVAL_GROUP}{prefix}{name}": value for name, value in accuracy.items()}
            if recipe.chooses_on_dev and self._job.kind == "train":
                on_dev = measure_accuracy(engine, self._watched("dev"), recipe)
                metrics |= {f"{DEV_GROUP}{prefix}{name}": v for name, v in on_dev.items()}
        if recipe.evaluate.few_shot_train is not None:
            train, test = self._watched("few_shot_train"), self._watched("few_shot_test")
            if self._pool_labels is None:  # read by rank 0 at the first evaluation
                read = self._job.few_shot_labels
                assert read is not None
                self._pool_labels = read_by_first(read, engine.device)
            config = recipe.evaluate
            few_shot = FewShot(
                self._pool_labels,
                self._job.few_shot_classes,
                shots=config.shots,
                seeds=config.few_shot_seeds,
            )
            found = measure_few_shot(engine, train, test, config, few_shot)
            metrics |= {k.replace("/", f"/{prefix}"): v for k, v in found.items()}
        return metrics

    def _measure_averaged(self) -> dict[str, float]:
        agreed: EvaluationCutError | ValueError
        assert not isinstance(self._engine, Predictor)
        with self._engine.averaged():
            try:
                metrics = self._measure("averaged_")
            except (EvaluationCutError, ValueError) as error:
                agreed = error  # all ranks have it, and training continues with the masters
            else:
                return metrics
        raise agreed

    def _measure_accuracy(self) -> dict[str, float]:
        """Also keeps images, and tables of which class was taken for which."""
        answers, recipe = self._job.answers, self._job.recipe
        gather = partial(all_rows, device=self._engine.device)
        confusion, batches = Confusion(), self._watched("eval")
        images = ExampleImages(is_sigmoid=recipe.train.loss == "sigmoid")
        accuracy = measure_accuracy(self._engine, batches, recipe, answers, confusion, images)
        classes = answers.classes if answers else self._job.classes
        # Those of averaged weights, which come second, replace those of the masters.
        self._files = {**confusion.files(classes), **images.files(classes, gather)}
        if answers is None:
            return accuracy
        if self._link.rank == 0:
            for name, content in self._files.items():
                self._link.keep_file(name, content, "evaluation")
        of_classes = confusion.accuracies(len(classes))
        return accuracy | {"mean_class_top1": float(np.nanmean(of_classes))}

    def show_files(self) -> None:
        """Keep images and tables of the last evaluation."""
        if self._link.rank == 0:
            self._link.show_files(self._files, "evaluation")

    def _watched(self, name: str) -> Iterator[Batch]:
        """Batches of a stream; on a GPU, images are copied while it computes."""
        batches, device = self._open_batches(name), self._engine.device
        if device.type == "cuda":  # everything but the images is used on the host
            batches = device_batches(batches, device, pinned=("image",))
        for batch in batches:
            self._watchdog.expect_long_step()
            stops, saves = all_sum([self._is_stopping(), self._is_save_wanted()], device)
            if stops or saves:
                raise EvaluationCutError(is_stopping=stops > 0)
            yield batch


def measure_accuracy(
    engine: Predicts,
    batches: Iterable[Batch],
    recipe: Recipe,
    answers: Answers | None = None,
    confusion: Confusion | None = None,
    images: ExampleImages | None = None,
) -> dict[str, float]:
    """`top1`, `top5`, `loss` and `evaluate.metrics` over all images of an evaluation stream.

    Args:
        answers: the ground truth; None for the labels of the stream.
        confusion: collects the counts over all ranks' images.
        images: collects candidates among this rank's images.
    """
    sums, train, keys = AccuracySums(), recipe.train, recipe.evaluate.metrics
    own = [own_part(key, "evaluate.metrics") for key in keys]
    own_sums = torch.zeros(len(own), dtype=torch.float64)
    loss = "softmax" if train.loss == "masked_patch" else train.loss
    unsmoothed = train.model_copy(update={"label_smoothing": 0.0, "loss": loss})
    for batch, _, logits in _predictions(engine, batches):
        truth = batch["labels"]
        if answers is not None:
            truth = answers.of_batch(truth, batch["sample"])
            if answers.competing is not None:
                logits = logits[:, torch.from_numpy(answers.competing).to(logits.device)]
        labels = torch.from_numpy(truth).to(logits.device).long()
        losses = classification_loss(logits, labels, unsmoothed)
        weights = torch.from_numpy(batch["weight"]).to(logits.device)
        sums = sums + AccuracySums.of_batch(logits, labels, losses, weights)
        counted = (weights > 0) & (labels >= 0).any(1)
        for i, (key, metric) in enumerate(zip(keys, own, strict=True)):
            values = per_image(metric(logits, labels), labels, f"evaluate.metrics: {key}")
            own_sums[i] += float((torch.where(counted, values.double(), 0.0) * weights).sum())
        if confusion is not None:
            confusion.add_batch(logits, labels, weights)
        if images is not None:
            pixels = as_tensor(batch["image"])
            images.add_batch(pixels, batch["sample"], logits, labels, losses, weights)
    if confusion is not None:
        confusion.merge(all_rows(confusion.pairs(), engine.device))
    summed = all_sum([*astuple(sums), *own_sums.tolist()], engine.device)
    all_images = AccuracySums(*summed[: -len(own)] if own else summed)
    means = [value / all_images.images for value in summed[len(astuple(sums)) :]]
    names = [key.rpartition(".")[2] for key in keys]
    return all_images.means() | dict(zip(names, means, strict=True))


def measure_few_shot(
    engine: Predicts,
    train_batches: Iterable[Batch],
    test_batches: Iterable[Batch],
    config: EvalConfig,
    few_shot: FewShot,
) -> dict[str, float]:
    """`few_shot/N_shot_top1` for each number of shots: the mean over the seeds.

    Ranks add up sums over the drawn examples; features are in memory for one batch at a time. If a
    drawn image cannot be decoded, its class has one example less.
    """
    for batch, features, _ in _predictions(engine, train_batches):
        real = batch["weight"] > 0
        few_shot.add_examples(features.cpu().numpy()[real], batch["sample"][real])
    for array in few_shot.sum_arrays():
        all_sum_array(array, engine.device)
    few_shot.solve()
    for batch, features, _ in _predictions(engine, test_batches):
        real = batch["weight"] > 0
        few_shot.add_tests(features.cpu().numpy()[real], batch["labels"][real, 0])
    counts = np.array(all_sum(few_shot.counts.tolist(), engine.device))
    found = few_shot.accuracies(counts)
    return {few_shot_top1(n): float(np.mean(found[n])) for n in config.shots}


def _predictions(
    engine: Predicts, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    for batch in batches:
        images = as_tensor(batch["image"]).to(engine.device)
        features, logits = engine.predict(normalize(images, engine.dtype))
        yield batch, features, logits
