"""What jobs print at their end."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vit_ray.commands.tables.printed_tables import print_sweep
from vit_ray.experiments.search_space import RATE
from vit_ray.experiments.sweep import SweepResult
from vit_ray.experiments.training import Outcome
from vit_ray.outcomes import TrialState


def shown(accuracies: list[float], capsys: pytest.CaptureFixture[str]) -> str:
    rows = [
        Outcome(TrialState.FINISHED, top1=0.9, point={RATE: 0.01}),
        Outcome(TrialState.FAILED, error="a worker died", point={RATE: 0.1}),
    ]
    assert print_sweep(SweepResult(rows, {RATE: 0.01}, accuracies, "parent", "a link")) == 0
    return capsys.readouterr().out


def test_several_seeds_have_a_spread_and_one_has_none(capsys: Any) -> None:
    # The sample deviation of 0.96 and 0.98 is sqrt(2) / 100.
    assert "97.00% +- 1.41% (2 runs)" in shown([0.96, 0.98], capsys)
    single = shown([0.97], capsys)
    assert "97.00% (1 run" in single
    assert "+-" not in single
    assert re.search(r"0\.1 +.*failed: a worker died", single)
