"""The order of a study's work: the rule for the study itself and for its `--dry-run`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vit_ray.config.command_sections import StudyConfig
from vit_ray.experiments.runner import Flow, Room
from vit_ray.experiments.study_cells import Cell

C = TypeVar("C")
R = TypeVar("R")


def in_groups(study: StudyConfig, cells: list[Cell], steps: list[int]) -> list[list[int]]:
    """Indices of cells that are trained one after another, the longest of a branching row first.

    Args:
        steps: of each cell.
    """
    if not study.branch:
        return [[index] for index in range(len(cells))]
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, cell in enumerate(cells):
        groups[cell.label, cell.fraction, cell.recipe.seed].append(index)
    return [sorted(group, key=lambda one: -steps[one]) for group in groups.values()]


def in_order(
    groups: list[Sequence[C]],
    room: Room,
    need: Callable[[C], Room],
    exaflops: Callable[[C], float],
) -> list[Sequence[C]]:
    """Largest first if several run in parallel; otherwise in the recipe's order.

    Args:
        need, exaflops: of a cell.
    """
    needs = sorted((need(group[0]) for group in groups), key=lambda one: (one.gpus, one.cpus))
    if len(needs) < 2 or not room.holds(needs[0], [needs[1]]):
        return groups
    return sorted(groups, key=lambda group: exaflops(group[0]), reverse=True)


def group_flow(
    group: Sequence[C],
    train: Callable[[C, C | None], Flow[R]],
    transfer: Callable[[C, R], Flow[None]],
) -> Flow[None]:
    """A cell and its transfers; or the longest cell of a branching row, and then the others in
    parallel.

    Args:
        train: called with a cell, and with the longest if that is another one.
        transfer: called with a cell and the outcome of its training.
    """
    longest, *branches = group
    result = yield from train(longest, None)

    def branch(cell: C) -> Flow[None]:
        yield from transfer(cell, (yield from train(cell, longest)))

    yield [transfer(longest, result), *map(branch, branches)]
