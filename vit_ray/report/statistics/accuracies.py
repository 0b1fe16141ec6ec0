"""Which accuracies a report shows, their names, and the cost that they are plotted against."""

import statistics
from collections.abc import Sequence
from typing import Final

from vit_ray.metric_names import (
    EVAL_GROUP,
    EVAL_MEAN_AVERAGE_PRECISION,
    EVAL_TOP1,
    FEW_SHOT_GROUP,
    STUDY_EXAFLOPS,
    STUDY_IMAGES_SEEN,
    averaged_key,
    few_shot_top1,
)
from vit_ray.report.runs import IMAGES_KEY, MEAN_TRANSFER, TRAININGS, TRANSFER, RecordedRun
from vit_ray.report.statistics.groups import (
    FEW_SHOT_SETS,
    TEST_SET,
    TRAINING_SET,
    Group,
    differences,
)

_LAST: Final = {
    few_shot_top1(5): "5-shot linear accuracy",
    few_shot_top1(10): "10-shot linear accuracy",
    few_shot_top1(25): "25-shot linear accuracy",
    few_shot_top1(1): "1-shot linear accuracy",
    EVAL_MEAN_AVERAGE_PRECISION: "mean average precision",
    EVAL_TOP1: "top-1 accuracy",
}
ACCURACIES: Final = _LAST | {
    averaged_key(key): f"{name} of averaged weights" for key, name in _LAST.items()
}
"""Metric keys, and the name of each for readers."""
BASELINE: Final = "ViT"
"""The family that others are compared with, as in the paper."""


def trainings(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Without parents, benchmarks, evaluations and others that train nothing themselves."""
    return [run for run in runs if run.kind in TRAININGS]


def studied(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Runs that may share a figure: in a study, its cells.

    Their fine-tunings have other test sets, and their own compute.
    """
    return [run for run in runs if run.kind == "study_cell"] or list(runs)


def accuracies_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Keys to plot: the first few-shot accuracy that exists, those of evaluations, of transfers.

    With averaged weights first, if all measured runs have them.
    """
    held = {key for run in runs for key in run.metrics}
    few_shot = [key for key in _LAST if key in held and key.startswith(FEW_SHOT_GROUP)][:1]
    own = [*few_shot, *(key for key in _LAST if key in held and key.startswith(EVAL_GROUP))]
    mean = [MEAN_TRANSFER] if MEAN_TRANSFER in held else []
    return [decided_key(runs, key) for key in own] + mean + transfer_keys(runs)


def transfer_keys(runs: Sequence[RecordedRun]) -> list[str]:
    """Accuracies on single tasks after fine-tuning."""
    held = {key for run in runs for key in run.metrics}
    return sorted(key for key in held if TRANSFER.fullmatch(key) and key != MEAN_TRANSFER)


def decided_key(runs: Sequence[RecordedRun], key: str) -> str:
    """The accuracy that decides: with averaged weights if all runs with the key have that.

    And for the same images: a test set, or a dev split.
    """
    measured, other = [run for run in runs if key in run.metrics], averaged_key(key)
    has_all = measured and all(other in run.metrics for run in measured)
    is_alike = all(run.is_on_dev(key) == run.is_on_dev(other) for run in measured)
    return other if has_all and is_alike else key


def decided_top1(run: RecordedRun) -> float | None:
    """Accuracy with averaged weights if the run averaged any, else with the last weights."""
    return run.metrics.get(decided_key([run], EVAL_TOP1))


def accuracy_name(key: str) -> str:
    """Name of a metric for readers."""
    if key == MEAN_TRANSFER:
        return "mean top-1 over the tasks after fine-tuning"
    task = TRANSFER.fullmatch(key)
    return f"{task.group(1)} top-1 after fine-tuning" if task else ACCURACIES[key]


def title_of(key: str) -> str:
    """As `accuracy_name`, at the start of a caption."""
    name = accuracy_name(key)
    return name[0].upper() + name[1:]


def by_sets(runs: Sequence[RecordedRun], key: str) -> list[tuple[str, list[RecordedRun]]]:
    """Runs that have the accuracy, grouped by training and test set.

    Each with `, training set NAME, test set NAME`, as far as these differ among the runs. The test
    set of a transfer is that of its fine-tunings.
    """
    tests = FEW_SHOT_SETS if key.startswith(FEW_SHOT_GROUP) else (TEST_SET,)
    parts: dict[Group, list[RecordedRun]] = {}
    for run in runs:
        if key not in run.metrics:
            continue
        sets = run.group.only(lambda name: name in (TRAINING_SET, *tests))
        if task := TRANSFER.fullmatch(key):
            tuned = tunings_of(run, task.group(1))[:1]
            theirs = tuned[0].group.values.get(TEST_SET, "None") if tuned else "None"
            names = {**sets.names, **(tuned[0].group.names if tuned else {})}
            sets = Group.of({**sets.values, TEST_SET: theirs}, names)
        parts.setdefault(sets, []).append(run)
    names_of = differences([*parts])
    return [(f", {names_of[sets]}" if names_of[sets] else "", one) for sets, one in parts.items()]


def tunings_of(run: RecordedRun, task: str) -> list[RecordedRun]:
    """Trainings that gave a cell its accuracy on a task of its study."""
    return [
        one
        for one in run.tuned
        if one.tags.get("vit_ray.transfer_task") == task and not one.is_trial
    ]


def cost_of(run: RecordedRun, key: str, cost: str = STUDY_EXAFLOPS) -> float | None:
    """Cost that an accuracy is plotted against: pre-training and fine-tuning together.

    The accuracy on a task after fine-tuning, among a run's own metrics, has the mean cost of the
    fine-tunings of the task, and a mean over tasks the mean over these; if their cost is not
    recorded, that of the pre-training.
    """
    if (own := run.in_all(cost)) is None or not (task := TRANSFER.fullmatch(key)):
        return own
    keys = run.tasks if key == MEAN_TRANSFER else {task.group()}
    tasks = [found.group(1) for one in keys if (found := TRANSFER.fullmatch(one))]
    tuned = [one.recorded.get(cost) for name in tasks for one in tunings_of(run, name)]
    known = [one for one in tuned if one is not None]
    return own + (statistics.fmean(known) if known else 0.0)


def epochs_of(run: RecordedRun) -> float | None:
    """Length of a training; a length in steps or images also in epochs."""
    if (epochs := run.number("optim.epochs")) is not None:
        return epochs
    images, seen = run.metrics.get(IMAGES_KEY), run.metrics.get(STUDY_IMAGES_SEEN)
    return seen / images if seen and images else None
