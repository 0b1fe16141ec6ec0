"""Evaluation in a run: all ranks work, each image counts once, and every rank gets the results.

Evaluation batches have a column `weight`: 0 for the rows that pad the last batch.
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
from vit_ray.measure.meters import is_out_of_memory
from vit_ray.metric_names import DEV_GROUP, EVAL_GROUP, few_shot_top1
from vit_ray.outcomes import EventKind, RunFailedError
from vit_ray.own_parts import own_part
from vit_ray.training.collectives import all_rows, all_sum, all_sum_array, read_by_first
from vit_ray.training.engine import DeepSpeedEngine, Predictor
from vit_ray.training.loop import Batch, EvaluationCutError, as_tensor
from vit_ray.training.objective import classification_loss, normalize, per_image
from vit_ray.worker.job import Streams, TrainJob, with_stream_errors
from vit_ray.worker.prefetch import device_batches
from vit_ray.worker.run_link import RunLink

Predicts = DeepSpeedEngine | Predictor


class Evaluator:
    """Evaluates the engine on a run's streams, as the recipe says; all ranks call it."""

    def __init__(self, job: TrainJob, engine: Predicts, streams: Streams, link: RunLink) -> None:
        self._job, self._engine, self._streams, self._link = job, engine, streams, link
        self._pool_labels: NDArray[np.int32] | None = None
        self._files: dict[str, bytes] = {}

    def evaluate(
        self, step: int, is_save_wanted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Accuracy and few-shot accuracy, of the weights and of the averaged weights.

        In a training run, metrics that cannot be computed become an event, and the result is empty.

        Args:
            is_save_wanted: called between two batches, on every rank.

        Raises:
            EvaluationCutError: some rank was asked to stop, or wants a checkpoint at once.
            RunFailedError: a batch does not fit into memory.
            ValueError: in a run that only evaluates, metrics cannot be computed.
        """
        self._link.watchdog.expect_long_step()
        self._is_save_wanted = is_save_wanted
        try:
            metrics = self._measure("")
            if self._engine.average is not None and metrics:
                metrics |= self._measure_averaged()
            return metrics
        except ValueError as error:
            # All ranks have the same results, so the same error; the training can continue.
            if self._job.kind == "evaluate":
                raise
            self._link.note(EventKind.EVALUATION_FAILED, str(error), step)
            return {}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            size = self._job.recipe.evaluate.batch_size
            raise RunFailedError(
                f"evaluate.batch_size={size}: a batch does not fit into device memory; lower it"
            ) from error

    def _measure(self, prefix: str) -> dict[str, float]:
        recipe, engine = self._job.recipe, self._engine
        metrics: dict[str, float] = {}
        has_images = recipe.data.eval is not None or recipe.data.held_out_fraction > 0
        if has_images and recipe.train.loss != "masked_patch":  # it trains no head
            accuracy = self._measure_accuracy()
            metrics |= {f"{EVAL_GROUP}{prefix}{name}": v for name, v in accuracy.items()}
            if recipe.chooses_on_dev and self._job.kind == "train":
                accuracy = measure_accuracy(engine, self._watched("dev"), recipe)
                metrics |= {f"{DEV_GROUP}{prefix}{name}": v for name, v in accuracy.items()}
        if recipe.evaluate.few_shot_train is not None:
            train, test = self._watched("few_shot_train"), self._watched("few_shot_test")
            if self._pool_labels is None:  # rank 0 reads them at the first evaluation
                read_labels = self._job.few_shot_labels
                assert read_labels is not None
                self._pool_labels = read_by_first(read_labels, engine.device)
            config = recipe.evaluate
            few_shot = FewShot(
                self._pool_labels,
                self._job.few_shot_classes,
                shots=config.shots,
                seeds=config.few_shot_seeds,
            )
            accuracies = measure_few_shot(engine, train, test, config, few_shot)
            metrics |= {k.replace("/", f"/{prefix}"): v for k, v in accuracies.items()}
        return metrics

    def _measure_averaged(self) -> dict[str, float]:
        assert not isinstance(self._engine, Predictor)
        with self._engine.averaged():
            try:
                return self._measure("averaged_")
            except (EvaluationCutError, ValueError) as raised:
                error = raised  # on all ranks: first take the master weights back
        raise error

    def _measure_accuracy(self) -> dict[str, float]:
        """Accuracy of the evaluation set; also prepares files: example images and confusions."""
        answers, recipe = self._job.answers, self._job.recipe
        gather = partial(all_rows, device=self._engine.device)
        confusion, batches = Confusion(), self._watched("eval")
        images = ExampleImages(is_sigmoid=recipe.train.loss == "sigmoid")
        accuracy = measure_accuracy(self._engine, batches, recipe, answers, confusion, images)
        classes = answers.classes if answers else self._job.classes
        # The averaged weights are measured second: their files replace those of the master weights.
        self._files = {**confusion.files(classes), **images.files(classes, gather)}
        if answers is None:
            return accuracy
        if self._link.rank == 0:
            for name, content in self._files.items():
                self._link.keep_file(name, content, "evaluation")
        class_accuracies = confusion.accuracies(len(classes))
        return accuracy | {"mean_class_top1": float(np.nanmean(class_accuracies))}

    def show_files(self) -> None:
        """Store the images and tables of the last evaluation with the run."""
        if self._link.rank == 0:
            self._link.show_files(self._files, "evaluation")

    def _watched(self, name: str) -> Iterator[Batch]:
        """Batches of a stream, watched by the watchdog, until some rank wants to stop or save."""
        job, device = self._job, self._engine.device
        # At most the images of one rank: more rows would be padding.
        num_images = -(-job.num_evaluated[name] // self._link.world_size)
        size = min(job.recipe.evaluate.batch_size, num_images)
        batches = with_stream_errors(self._streams.evaluation_batches(name, size))
        # The host uses everything but the images.
        for batch in device_batches(batches, device, pinned=("image",)):
            self._link.watchdog.expect_long_step()
            num_stopping, num_saving = all_sum(
                [self._link.is_ending(), self._is_save_wanted()], device
            )
            if num_stopping or num_saving:
                raise EvaluationCutError(is_stopping=num_stopping > 0)
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
        answers: the ground truth; None = the labels of the stream.
        confusion: collects counts over the images of all ranks.
        images: collects example images of this rank.
    """
    sums, train, keys = AccuracySums(), recipe.train, recipe.evaluate.metrics
    custom = [own_part(key, "evaluate.metrics") for key in keys]
    custom_sums = torch.zeros(len(custom), dtype=torch.float64)
    unsmoothed = train.model_copy(update={"label_smoothing": 0.0})
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
        for i, (key, metric) in enumerate(zip(keys, custom, strict=True)):
            values = per_image(metric(logits, labels), labels, f"evaluate.metrics: {key}")
            custom_sums[i] += float((torch.where(counted, values.double(), 0.0) * weights).sum())
        if confusion is not None:
            confusion.add_batch(logits, labels, weights)
        if images is not None:
            pixels = as_tensor(batch["image"])
            images.add_batch(pixels, batch["sample"], logits, labels, losses, weights)
    if confusion is not None:
        confusion.merge(all_rows(confusion.pairs(), engine.device))
    rank_sums = astuple(sums)
    totals = all_sum([*rank_sums, *custom_sums.tolist()], engine.device)
    all_images = AccuracySums(*totals[: len(rank_sums)])
    means = [total / all_images.images for total in totals[len(rank_sums) :]]
    names = [key.rpartition(".")[2] for key in keys]
    return all_images.means() | dict(zip(names, means, strict=True))


def measure_few_shot(
    engine: Predicts,
    train_batches: Iterable[Batch],
    test_batches: Iterable[Batch],
    config: EvalConfig,
    few_shot: FewShot,
) -> dict[str, float]:
    """`few_shot/N_shot_top1` for each number of shots N: the mean over the seeds.

    Features are in memory for one batch at a time: ranks add up sums over the drawn examples. A
    class has one example less for each drawn image that cannot be decoded.
    """
    for batch, features, _ in _predictions(engine, train_batches):
        real = batch["weight"] > 0
        few_shot.add_examples(features.cpu().numpy()[real], batch["sample"][real])
    for array in few_shot.sums:
        all_sum_array(array, engine.device)
    few_shot.solve()
    for batch, features, _ in _predictions(engine, test_batches):
        real = batch["weight"] > 0
        few_shot.add_tests(features.cpu().numpy()[real], batch["labels"][real, 0])
    counts = np.array(all_sum(few_shot.counts.tolist(), engine.device))
    accuracies = few_shot.accuracies(counts)
    return {few_shot_top1(n): float(np.mean(accuracies[n])) for n in config.shots}


def _predictions(
    engine: Predicts, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    for batch in batches:
        images = as_tensor(batch["image"]).to(engine.device)
        features, logits = engine.predict(normalize(images, engine.dtype))
        yield batch, features, logits
