"""What the speed of a model is held against."""

import pytest
import torch

from benchmarks import model_step
from benchmarks.model_step import OURS, Row, step_flops, table
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
    row = Row(NAME, "compiled", OURS, 1, torch.bfloat16, [1.0], [1.0], flops=paper // 2)
    assert "| 50.0% (bar 45%) | 100.0% |" in table([row])
