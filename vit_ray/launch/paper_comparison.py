"""The table of an accuracy and the paper's accuracies on the same test set.

A result has a label: `data` if test set, pre-training and model are the paper's, else `proxy`. The
paper's numbers are shown next to a proxy only if they are for the same test set.
"""

import statistics
from collections.abc import Sequence
from pathlib import PurePosixPath

from vit_ray.addresses import redact
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.paper import PRETRAINING, TEST_SETS, table_2, table_5

# Rows of a table by column; accuracies in percent.
Rows = list[dict[str, float | str | None]]


def training_table(recipe: Recipe, test_top1: Sequence[float], labels: str = "own_labels") -> Rows:
    """Our row, and the paper's rows for the same test set and model, by pre-training.

    The test set is not the paper's if its size or its number of classes differs.

    Args:
        test_top1: accuracy of each run, in [0, 1].
        labels: `benchmark.kind` of an evaluation.
    """
    assert recipe.data.eval is not None
    paper, model, test = recipe.paper, recipe.model.name, open_dataset(recipe.data.eval)
    task_of: dict[str, str | None] = {"own_labels": paper.task}
    if paper.task in ("imagenet", "imagenet_real"):  # the same images, with other labels
        task_of = {"own_labels": "imagenet", "imagenet_real": "imagenet_real"}
    task = task_of.get(labels)
    test_set = TEST_SETS.get(task or "")
    note = "" if test_set else "paper.task is not set"
    if test_set and (test.num_images, test.num_classes) != (
        test_set.num_images, test_set.num_classes,
    ):  # fmt: skip
        note = (
            f"{test_set.title} has {test_set.num_images} test images of {test_set.num_classes} "
            f"classes, not {test.num_images} of {test.num_classes}"
        )
        test_set = None
    of_paper: Rows = []
    for pretraining in [paper.pretraining] if paper.pretraining else PRETRAINING:
        if test_set is not None and task is not None:
            setting = (test_set.title, PRETRAINING[pretraining], model)
            if (entry := table_2(model, pretraining, task)) is not None:
                of_paper.append(_row("paper, Table 2", *setting, *entry, "3", "paper", ""))
            if (entry_5 := table_5(model, pretraining, task)) is not None:
                of_paper.append(_row("paper, Table 5", *setting, entry_5, None, "", "paper", ""))
    is_data = bool(of_paper) and paper.pretraining is not None
    if not note and not is_data:
        note = "paper.pretraining is not set" if of_paper else "the paper does not have this model"
    ours = _row(
        "ours",
        test_set.title if test_set else short_address(test.path),
        PRETRAINING[paper.pretraining] if paper.pretraining else None,
        model,
        statistics.fmean(test_top1),
        statistics.stdev(test_top1) if len(test_top1) > 1 else None,
        str(len(test_top1)),
        "data" if is_data else "proxy",
        note,
    )
    return [ours, *of_paper]


def short_address(address: str) -> str:
    """The last two parts of an address: the first parts may name private machines and buckets."""
    return "/".join(PurePosixPath(redact(address)).parts[-2:])


def _row(
    row: str,
    test_set: str,
    pretraining: str | None,
    model: str,
    top1: float,
    deviation: float | None,
    runs: str,
    label: str,
    note: str,
) -> dict[str, float | str | None]:
    return {
        "row": row, "test set": test_set, "pre-training": pretraining, "model": model,
        "top-1 %": in_percent(top1), "deviation %": in_percent(deviation), "runs": runs,
        "label": label, "note": note,
    }  # fmt: skip


def in_percent(share: float | None) -> float | None:
    """Percent of a share, rounded: 29 for 0.29, not 28.999999999999996."""
    return None if share is None else float(f"{100 * share:.14g}")
