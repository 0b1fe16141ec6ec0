"""An accuracy next to the paper's: which of its test sets a recipe measures, and the table.

A result has a label: `data` if test set, pre-training and model are the paper's, else `proxy`. The
paper's numbers are shown next to a proxy only if they are for its test set.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from vit_ray.addresses import redact
from vit_ray.config import Recipe
from vit_ray.config.command_sections import PaperConfig
from vit_ray.data import open_dataset
from vit_ray.metric_names import EVAL_TOP1
from vit_ray.paper import PRETRAINING, TEST_SETS, table_2, table_5

Rows = list[dict[str, float | str | None]]
"""Of a table, by column; accuracies in percent."""


def evaluation_table(recipe: Recipe, metrics: Mapping[str, float]) -> Rows | None:
    """The result of an evaluation and the paper's; None if it has no accuracy."""
    top1 = metrics.get(EVAL_TOP1)
    if top1 is None or recipe.data.eval is None:
        return None
    return training_table(recipe, [top1], recipe.benchmark.kind)


def training_table(recipe: Recipe, test_top1: Sequence[float], labels: str = "own_labels") -> Rows:
    """The test accuracy of one training or of several, and the paper's.

    Args:
        labels: `benchmark.kind` of what was measured.
    """
    assert recipe.data.eval is not None
    paper, test = recipe.paper, open_dataset(recipe.data.eval)
    # ImageNet and ImageNet ReaL have the same images; the labels decide which of the two it is.
    if is_imagenet := paper.task in ("imagenet", "imagenet_real"):
        by_labels = {"own_labels": "imagenet", "imagenet_real": "imagenet_real"}
        paper = paper.model_copy(update={"task": by_labels.get(labels)})
    if labels != "own_labels" and not is_imagenet:
        paper = paper.model_copy(update={"task": None})
    data = "/".join(PurePosixPath(redact(test.path)).parts[-2:])
    counts = test.num_images, test.num_classes
    return result_table(paper, recipe.model.name, data, counts, test_top1)


def result_table(
    paper: PaperConfig, model: str, data: str, counts: tuple[int, int], top1: Sequence[float]
) -> Rows:
    """Our row, and the paper's rows for the same test set and model, by pre-training.

    Args:
        data: name of the test set's folder.
        counts: its images and classes.
        top1: of each run, as a share.
        paper: the recipe's test set and pre-training; a test set of another size or with other
            classes is not the paper's.
    """
    wanted = TEST_SETS.get(paper.task or "")
    doubt = "" if wanted else "paper.task is not set"
    if wanted and counts != (wanted.num_images, wanted.num_classes):
        doubt = (
            f"{wanted.title} has {wanted.num_images} test images of {wanted.num_classes} classes, "
            f"not {counts[0]} of {counts[1]}"
        )
        wanted = None
    of_paper: Rows = []
    for pretraining in [paper.pretraining] if paper.pretraining else PRETRAINING:
        if wanted is not None and paper.task is not None:
            what = (wanted.title, PRETRAINING[pretraining], model)
            if (two := table_2(model, pretraining, paper.task)) is not None:
                of_paper.append(_row("paper, Table 2", *what, *two, "3", "paper", ""))
            if (five := table_5(model, pretraining, paper.task)) is not None:
                of_paper.append(_row("paper, Table 5", *what, five, None, "", "paper", ""))
    is_data = bool(of_paper) and paper.pretraining is not None
    if not doubt and not is_data:
        doubt = "paper.pretraining is not set" if of_paper else "the paper does not have this model"
    trained_on = PRETRAINING[paper.pretraining] if paper.pretraining else None
    deviation = statistics.stdev(top1) if len(top1) > 1 else None
    mine = _row(
        "ours", wanted.title if wanted else data, trained_on, model, statistics.fmean(top1),
        deviation, str(len(top1)), "data" if is_data else "proxy", doubt,
    )  # fmt: skip
    return [mine, *of_paper]


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
    """Of 0.29, not 28.999999999999996."""
    return None if share is None else float(f"{100 * share:.14g}")
