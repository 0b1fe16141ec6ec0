"""The trace of chosen steps."""

import gzip
import json

import pytest
import torch

from vit_ray.measure.meters import profiled


def traced(num_batches: int, steps: tuple[int, int], next_step: int = 1) -> dict[str, bytes]:
    """Train on so many batches, each step a product of its own width."""
    kept: dict[str, bytes] = {}
    for batch in profiled(iter(range(num_batches)), steps, next_step, kept.__setitem__):
        torch.ones(1, 10 + batch) @ torch.ones(10 + batch, 1)
    return kept


def widths(trace: bytes) -> list[int]:
    """Inner sizes of the products in a trace, in the order of time."""
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    products = [e for e in events if e.get("name") == "aten::mm"]
    return [e["args"]["Input Dims"][0][1] for e in sorted(products, key=lambda e: e["ts"])]


@pytest.mark.parametrize(
    ("num_batches", "steps", "next_step", "expected"),
    [
        (6, (3, 4), 1, [12, 13]),
        (4, (3, 9), 1, [12, 13]),  # a run that ends first
        (3, (3, 4), 4, [10]),  # one that resumes inside of them
        (3, (3, 4), 5, None),
    ],
)
def test_just_the_chosen_steps_are_in_the_trace(num_batches, steps, next_step, expected):
    kept = traced(num_batches, steps, next_step)
    assert [widths(trace) for trace in kept.values()] == ([expected] if expected else [])
    name = f"trace-steps-{steps[0]}-{steps[1]}.json.gz"
    assert list(kept) == ([name] if expected else [])
