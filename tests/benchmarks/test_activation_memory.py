"""Predicted against measured memory of a pass, with a device that is made up."""

import pytest
import torch

from benchmarks import activation_memory
from benchmarks.activation_memory import measured_gib, row

NAME = "ViT-Ti/16"
GIB = 2**30


@pytest.mark.slow
def test_what_lies_there_before_the_pass_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, and what libraries take for themselves at their first use."""
    calls: list[str] = []

    def note(name: str, value: int) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda: (calls.append(name), value)[1])

    note("memory_allocated", 1 * GIB)
    note("reset_peak_memory_stats", 0)
    note("max_memory_allocated", 3 * GIB)
    plain = activation_memory.pass_of

    def pass_of(name: str, batch: int) -> object:
        forward, weights = plain(name, batch)
        return lambda: (calls.append("pass"), forward())[1], weights

    monkeypatch.setattr(activation_memory, "pass_of", pass_of)
    monkeypatch.setattr(activation_memory, "DEVICE", torch.device("cpu"))
    assert measured_gib(NAME, 1) == 2.0
    assert calls == [
        "pass", "memory_allocated", "reset_peak_memory_stats", "pass", "max_memory_allocated",
    ]  # fmt: skip


def test_the_batch_is_halved_while_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def measured(name: str, batch: int) -> float:
        tried.append(batch)
        if batch > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 2.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(activation_memory, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(activation_memory, "measured_gib", measured)
    monkeypatch.setattr(activation_memory, "predicted_gib", lambda name, batch: batch / 4)
    assert row(NAME, 32) == f"| {NAME} | 8 | 2.000 | 2.000 | 1.000 (bar 0.9 to 1.1) |"
    assert tried == [32, 16, 8]
