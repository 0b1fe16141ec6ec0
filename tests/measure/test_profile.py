"""The trace of chosen steps."""

import gc
import gzip
import json
import weakref

import pytest
import torch

from vit_ray.measure import meters
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


def test_just_the_chosen_steps_are_in_the_trace():
    kept = traced(6, (3, 4))
    assert list(kept) == ["trace-steps-3-4.json.gz"]
    assert widths(kept["trace-steps-3-4.json.gz"]) == [12, 13]


def test_a_run_that_ends_first_keeps_what_there_is():
    (trace,) = traced(4, (3, 9)).values()
    assert widths(trace) == [12, 13]


@pytest.mark.parametrize(("next_step", "expected"), [(4, [10]), (5, None)])
def test_a_run_that_resumes_inside_or_after_them_traces_the_rest(next_step, expected):
    kept = traced(3, (3, 4), next_step)
    assert [widths(trace) for trace in kept.values()] == ([expected] if expected else [])


def test_the_profiler_is_let_go_while_the_run_goes_on(monkeypatch):
    made = []

    class Profiler(torch.profiler.profile):
        def __init__(self, **options) -> None:
            super().__init__(**options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(meters, "profile", Profiler)
    batches = profiled(iter(range(4)), (1, 1), 1, lambda name, trace: None)
    next(batches)
    assert made[0]() is not None
    assert [next(batches), next(batches)] == [1, 2]
    gc.collect()
    assert made[0]() is None


def test_a_trace_that_cannot_be_kept_is_an_error():
    """Unlike one that cannot be written."""

    def keep(name: str, trace: bytes) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        list(profiled(iter(range(2)), (1, 1), 1, keep))
