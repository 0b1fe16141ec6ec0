"""What jobs print at their end."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scipy.stats import binomtest

from vit_ray.commands.printed_tables import print_shares, print_sweep
from vit_ray.experiments.search_space import RATE
from vit_ray.experiments.sweep import SweepResult
from vit_ray.experiments.training import Outcome
from vit_ray.outcomes import TrialState


def shown(accuracies: list[float], capsys: pytest.CaptureFixture[str]) -> str:
    rows = [
        Outcome(TrialState.FINISHED, top1=0.9, point={RATE: 0.01}),
        Outcome(TrialState.FAILED, error="a worker died", point={RATE: 0.1}),
    ]
    finals = [Outcome(TrialState.FINISHED, top1=top1) for top1 in accuracies]
    assert print_sweep(SweepResult(rows, {RATE: 0.01}, finals, "parent", "a link")) == 0
    return capsys.readouterr().out


def test_several_seeds_have_a_spread_and_one_has_none(capsys: Any) -> None:
    # The sample deviation of 0.96 and 0.98 is sqrt(2) / 100.
    assert "97.00% +- 1.41% (2 runs)" in shown([0.96, 0.98], capsys)
    single = shown([0.97], capsys)
    assert "97.00% (1 run" in single
    assert "+-" not in single
    assert re.search(r"0\.1 +.*failed: a worker died", single)


def test_an_accuracy_has_wilsons_interval_of_its_images(capsys: Any) -> None:
    print_shares("Top-1", {"ours": 0.8}, 10)
    low, high = binomtest(8, 10).proportion_ci(method="wilson")
    text = f"{low:.1%} to {high:.1%}"
    assert re.search(rf"ours +\S+ +80\.00% +\S+ +{re.escape(text)}", capsys.readouterr().out)
