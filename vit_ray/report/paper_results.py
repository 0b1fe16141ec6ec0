"""Fine-tuning results of the paper's Tables 2 and 5, and the row of ours beside them.

A result of ours carries a label: `data` where test set, pre-training and model are the paper's, and
`proxy` for all others. Numbers of the paper stand beside a proxy only if they are of its test set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vit_ray.config.command_sections import PaperConfig
from vit_ray.report.paper import SOURCE
from vit_ray.report.tables import Column, Table, Value, percent

PRETRAINING: Final = {
    "imagenet": "ImageNet", "imagenet21k": "ImageNet-21k", "jft300m": "JFT-300M",
}  # fmt: skip
_TASKS: Final = ("cifar10", "cifar100", "imagenet", "imagenet_real", "flowers", "pets")
_MODELS: Final = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")


@dataclass(frozen=True)
class TestSet:
    """A column of the tables."""

    title: str
    num_classes: int
    num_images: int
    """As published: CIFAR's, Pets' and Flowers' test sets, ImageNet's validation set."""


TEST_SETS: Final = {
    "cifar10": TestSet("CIFAR-10", 10, 10_000),
    "cifar100": TestSet("CIFAR-100", 100, 10_000),
    "imagenet": TestSet("ImageNet", 1000, 50_000),
    "imagenet_real": TestSet("ImageNet ReaL", 1000, 50_000),
    "flowers": TestSet("Oxford Flowers-102", 102, 6_149),
    "pets": TestSet("Oxford-IIIT Pets", 37, 3_669),
}

# Mean and deviation of three runs in percent, in the order of the tasks.
TABLE_2: Final = {
    ("ViT-H/14", "jft300m"): (
        (99.50, 0.06), (94.55, 0.04), (88.55, 0.04), (90.72, 0.05), (99.68, 0.02), (97.56, 0.03),
    ),
    ("ViT-L/16", "jft300m"): (
        (99.42, 0.03), (93.90, 0.05), (87.76, 0.03), (90.54, 0.03), (99.74, 0.00), (97.32, 0.11),
    ),
    ("ViT-L/16", "imagenet21k"): (
        (99.15, 0.03), (93.25, 0.05), (85.30, 0.02), (88.62, 0.05), (99.61, 0.02), (94.67, 0.15),
    ),
}  # fmt: skip
# Percent, in the order of the tasks; for each of them in the order of the models.
TABLE_5: Final[dict[str, tuple[tuple[float | None, ...], ...]]] = {
    "imagenet": (
        (98.13, 97.77, 97.86, 97.94, None),
        (87.13, 86.31, 86.35, 87.07, None),
        (77.91, 73.38, 76.53, 71.16, None),
        (83.57, 79.56, 82.19, 77.83, None),
        (89.49, 85.43, 89.66, 86.36, None),
        (93.81, 92.04, 93.64, 91.35, None),
    ),
    "imagenet21k": (
        (98.95, 98.79, 99.16, 99.13, 99.27),
        (91.67, 91.97, 93.44, 93.04, 93.82),
        (83.97, 81.28, 85.15, 80.99, 85.13),
        (88.35, 86.63, 88.40, 85.65, 88.70),
        (99.38, 99.11, 99.61, 99.19, 99.51),
        (94.43, 93.02, 94.73, 93.09, 94.82),
    ),
    "jft300m": (
        (99.00, 98.61, 99.38, 99.19, 99.50),
        (91.87, 90.49, 94.04, 92.52, 94.55),
        (84.15, 80.73, 87.12, 84.37, 88.04),
        (88.85, 86.27, 89.99, 88.28, 90.33),
        (99.56, 99.27, 99.56, 99.45, 99.68),
        (95.80, 93.40, 97.11, 95.83, 97.56),
    ),
}


def table_2(model: str, pretraining: str, task: str) -> tuple[float, float] | None:
    """Mean and deviation as shares; None where the paper has none."""
    row = TABLE_2.get((model, pretraining))
    if row is None or task not in _TASKS:
        return None
    mean, deviation = row[_TASKS.index(task)]
    return mean / 100, deviation / 100


def table_5(model: str, pretraining: str, task: str) -> float | None:
    """Accuracy as a share; None where the paper has none."""
    if model not in _MODELS or task not in _TASKS:
        return None
    value = TABLE_5[pretraining][_TASKS.index(task)][_MODELS.index(model)]
    return None if value is None else value / 100


@dataclass(frozen=True)
class OurResult:
    """Accuracy of ours, a share, and what it is of."""

    model: str
    data: str
    """The test set as its folder is called."""
    num_images: int
    """Of the test set."""
    num_classes: int
    top1: float | None
    deviation: float | None = None
    """Over `runs`; None for a single one."""
    runs: int = 1


def result_table(ours: OurResult, paper: PaperConfig) -> Table:
    """Our row, and below it the paper's of the same test set and model, by pre-training.

    Args:
        paper: what the recipe says of test set and pre-training; a test set of another size or with
            other classes is not the paper's.
    """
    task, doubt = _task(ours, paper)
    of_paper = [
        row
        for pretraining in ([paper.pretraining] if paper.pretraining else list(PRETRAINING))
        for row in _rows_of_paper(ours.model, pretraining, task)
    ]
    is_data = bool(of_paper) and paper.pretraining is not None
    if not doubt and not is_data:
        doubt = "paper.pretraining is not set" if of_paper else "the paper has no such model"
    columns = [
        Column("row"), Column("test set"), Column("pre-training"), Column("model"),
        Column("top-1 %", percent), Column("deviation", percent), Column("runs"), Column("label"),
        Column("note"),
    ]  # fmt: skip
    mine: list[Value] = [
        "ours", TEST_SETS[task].title if task else ours.data,
        PRETRAINING[paper.pretraining] if paper.pretraining else None, ours.model, ours.top1,
        ours.deviation, str(ours.runs), "data" if is_data else "proxy", "" if is_data else doubt,
    ]  # fmt: skip
    return Table(f"Beside the paper's: {SOURCE}", columns, [mine, *of_paper])


def _task(ours: OurResult, paper: PaperConfig) -> tuple[str | None, str]:
    """The paper's test set, if ours is that; why it is none."""
    if paper.task is None:
        return None, "paper.task is not set"
    wanted = TEST_SETS[paper.task]
    if (ours.num_classes, ours.num_images) != (wanted.num_classes, wanted.num_images):
        return None, (
            f"{wanted.title} has {wanted.num_images} test images of {wanted.num_classes} classes, "
            f"not {ours.num_images} of {ours.num_classes}"
        )
    return paper.task, ""


def _rows_of_paper(model: str, pretraining: str, task: str | None) -> list[list[Value]]:
    if task is None:
        return []
    told = [TEST_SETS[task].title, PRETRAINING[pretraining], model]
    rows: list[list[Value]] = []
    if (two := table_2(model, pretraining, task)) is not None:
        rows.append(["paper, Table 2", *told, *two, "3", "paper", ""])
    if (five := table_5(model, pretraining, task)) is not None:
        rows.append(["paper, Table 5", *told, five, None, "", "paper", ""])
    return rows
