"""Numbers and arrays of several ranks together, and their rows in one place."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.training.ranks import run_ranks
from vit_ray.training.collectives import all_max, all_rows, all_sum, all_sum_array, read_by_first

COUNTS = (5, 0, 11)
ALL = np.arange(3 * sum(COUNTS), dtype=np.float32).reshape(-1, 3)


def gathered(rank: int) -> list[Any]:
    first = sum(COUNTS[:rank])
    mine, device = ALL[first : first + COUNTS[rank]], torch.device("cpu")
    numbers = all_rows(mine[:, 0].astype(np.int64), device)
    return [all_rows(mine, device), numbers, all_rows(mine[:0], device)]


def test_all_ranks_get_all_rows_in_rank_order():
    for found, numbers, nothing in run_ranks(3, gathered):
        assert found.dtype == np.float32
        assert np.array_equal(found, ALL)
        assert numbers.tolist() == ALL[:, 0].tolist()
        assert nothing.shape == (0, 3)


# Sums that are exact in fp64, in any order, and in nothing less.
NUMBERS = [(2.0**53 - 8, 2.0**-10), (3.0, -(2.0**40)), (4.0, 0.25)]


def read_nothing() -> Any:
    raise OSError("the disk is away")


def reduced(rank: int) -> dict[str, Any]:
    device = torch.device("cpu")
    array = np.outer(NUMBERS[rank], np.arange(3.0))
    all_sum_array(array, device)
    first, second = NUMBERS[rank]
    with pytest.raises(ValueError, match="the disk is away"):  # on every rank
        read_by_first(read_nothing, device)
    return {
        "sum": all_sum([first, torch.tensor(second, dtype=torch.float64), rank == 1], device),
        "max": all_max([first, second], device),
        "array": array,
        "first": read_by_first(lambda: 7 + rank, device),
    }


def test_sums_and_maxima_are_those_of_all_ranks_to_the_last_bit():
    firsts, seconds = zip(*NUMBERS, strict=True)
    for found in run_ranks(3, reduced):
        assert found["sum"] == [sum(firsts), sum(seconds), 1.0]
        assert found["max"] == [max(firsts), max(seconds)]
        sums = np.array(found["sum"][:2])
        assert np.array_equal(found["array"], np.outer(sums, np.arange(3.0)))
        assert found["first"] == 7
