"""What the speed of a model is held against."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import model_step
from benchmarks.model_step import OURS, Row, best_batch, measure, step_flops, table
from vit_ray.models.flops import forward_macs, training_macs

NAME = "ViT-B/16"


def test_the_floating_point_operations_of_our_step_are_those_of_mfu() -> None:
    count = training_macs(NAME, model_step.NUM_CLASSES, model_step.IMAGE_SIZE)
    assert step_flops(model_step.our_model, NAME) == 2 * count.model


def test_the_bar_stands_beside_the_share_of_what_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    paper = 6 * forward_macs(NAME, model_step.NUM_CLASSES, model_step.IMAGE_SIZE)
    monkeypatch.setattr(model_step, "peak_flops", lambda name, precision: paper)
    row = Row(NAME, "compiled", OURS, torch.bfloat16, 1, [1.0], [1.0], flops=paper // 2)
    assert "| 50.0% (bar 45%) | 100.0% |" in table([row])


class Steady:
    """Takes so many seconds a step by size of the batch; above the most there is no memory."""

    def __init__(self, most: int, seconds: dict[int, float]) -> None:
        self.most, self.seconds = most, seconds

    def try_batch(self, size: int) -> float | None:
        return self.seconds[size] if size <= self.most else None


RISING = {16: 1.0, 32: 1.2, 64: 2.0, 128: 3.0, 256: 5.0}


@pytest.mark.parametrize(
    ("most", "seconds", "found", "tried"),
    [
        (256, RISING, 256, [64, 128, 256]),
        (128, RISING, 128, [64, 128, 256]),
        (16, RISING, 16, [64, 32, 16]),
        (8, RISING, None, [64, 32, 16]),
        (256, {**RISING, 128: 4.1}, 64, [64, 128]),
    ],
)
def test_the_batch_grows_while_that_is_faster_and_shrinks_while_memory_runs_out(
    most: int, seconds: dict[int, float], found: int | None, tried: list[int]
) -> None:
    rates: dict[int, float | None] = {}
    trainee: Any = Steady(most, seconds)
    assert best_batch(trainee, sorted(seconds), rates) == found
    assert list(rates) == tried
    assert rates == {size: size / seconds[size] if size <= most else None for size in tried}


class Tiny(nn.Module):
    """Of which a batch above some size says that there is no memory, once it is compiled."""

    def __init__(self, most: int = 100, most_compiled: int = 100) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(3, model_step.NUM_CLASSES)
        self.most, self.most_compiled = most, most_compiled

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        is_compiled = getattr(self.blocks[0], "_compiled_call_impl", None) is not None
        if len(images) > (self.most_compiled if is_compiled else self.most):
            raise torch.OutOfMemoryError("CUDA out of memory")
        x = images.mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Without the compiler."""
        self._compiled_call_impl = self._call_impl


class Broken(Block):
    def compile(self, *args: Any, **kwargs: Any) -> None:
        def fails(*_: Any) -> None:
            raise RuntimeError("Failed to find C compiler")

        self._compiled_call_impl = fails


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncompilable(_: str) -> nn.Module:
        model = Tiny()
        model.blocks = nn.ModuleList([Broken() for _ in range(2)])
        return model

    def missing(_: str) -> nn.Module:
        raise ModuleNotFoundError("No module named 'timm'")

    peers = {
        OURS: lambda _: Tiny(most_compiled=2),
        "small": lambda _: Tiny(most=1),
        "none": lambda _: Tiny(most=0),
        "uncompilable": uncompilable,
        "missing": missing,
    }
    monkeypatch.setattr(model_step, "PEERS", peers)
    monkeypatch.setattr(model_step, "IMAGE_SIZE", 8)
    monkeypatch.setattr(model_step, "step_flops", lambda build, name: build(name) and 1)


@pytest.mark.usefixtures("peers")
def test_a_model_that_fails_leaves_the_others_their_rows() -> None:
    *_, rows = measure(NAME, "compiled", [1, 2, 4], torch.float32, rounds=2)
    by_peer = {row.peer: row for row in rows}
    assert by_peer[OURS].batch <= 2  # as compiled
    assert by_peer["small"].batch == 1
    assert by_peer["small"].tried == {2: None, 1: by_peer["small"].tried[1]}
    assert by_peer["none"].note == "out of memory at 1 images"
    assert by_peer["uncompilable"].note == "not compiled: RuntimeError: Failed to find C compiler"
    assert by_peer["missing"].note == "ModuleNotFoundError: No module named 'timm'"
    assert {row.peer: len(row.wall_s) for row in rows} == {
        OURS: 2, "small": 2, "none": 0, "uncompilable": 2, "missing": 0,
    }  # fmt: skip
    head, _, *lines = table(rows).splitlines()
    assert all(line.count("|") == head.count("|") for line in lines)


def test_ratios_are_of_the_time_for_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Row(NAME, "compiled", OURS, torch.bfloat16, 10, [1.0, 1.0], [2.0, 2.0])
    theirs = Row(NAME, "compiled", "timm", torch.bfloat16, 5, [1.0, 1.5], [1.0, 1.0])
    assert "| 2.500 | 1.000 |" in table([ours, theirs])
