"""What jobs print at their end."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import binomtest

from tests.recipes import recipe_with
from vit_ray.commands.printed_tables import (
    print_metrics,
    print_result,
    print_shares,
    print_sweep,
)
from vit_ray.commands.train import evaluate
from vit_ray.experiments.search_space import RATE
from vit_ray.experiments.sweep import SweepResult
from vit_ray.experiments.sweep_trials import Row
from vit_ray.experiments.trials import Outcome
from vit_ray.launch import run
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import TrialState


def shown(accuracies: list[float], capsys: pytest.CaptureFixture[str]) -> str:
    rows = [
        Row({RATE: 0.01}, Outcome(TrialState.FINISHED, top1=0.9)),
        Row({RATE: 0.1}, Outcome(TrialState.FAILED, error="a worker died")),
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


def test_the_accuracy_of_a_run_has_its_images_and_their_interval(capsys: Any) -> None:
    result = RunResult(
        None, "pets", 5, 5, {"eval/top1": 38 / 90, "train/loss": 1.0}, "", num_eval_images=90
    )
    print_result(result)
    low, high = binomtest(38, 90).proportion_ci(method="wilson")
    text = f"42.22% ({low:.1%} to {high:.1%} at 95 %, 90 images)"
    assert text in " ".join(capsys.readouterr().out.split())


def test_a_run_that_was_stopped_before_its_first_step_has_no_table(capsys: Any) -> None:
    assert print_result(RunResult(None, "pets", 0, 5, {}, "")) == 3
    assert capsys.readouterr().out.splitlines() == ["pets: step 0 of 5", "checkpoint: none"]


def test_an_evaluation_ends_with_the_link_to_its_tables_and_pictures(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = RunResult("of MLflow", "mine", 0, 0, {"eval/top1": 0.5}, "", hint="open PAGE")
    monkeypatch.setattr(run, "evaluated", lambda recipe: result)
    assert evaluate(recipe_with()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "MLflow page: open PAGE"
    monkeypatch.setattr(run, "evaluated", lambda recipe: replace(result, run_id=None))
    assert evaluate(recipe_with()) == 0
    assert "PAGE" not in capsys.readouterr().out


def test_an_evaluation_prints_shares_as_a_training_does(capsys: Any) -> None:
    print_metrics({"eval/top1": 0.9667, "eval/mean_class_top1": 0.5, "eval/loss": 0.25})
    shown = capsys.readouterr().out
    assert re.search(r"eval/top1 +\S+ +96\.67%", shown)
    assert re.search(r"eval/mean_class_top1 +\S+ +50\.00%", shown)
    assert re.search(r"eval/loss +\S+ +0\.2500", shown)


def test_an_accuracy_has_wilsons_interval_of_its_images(capsys: Any) -> None:
    print_shares("Top-1", {"ours": 0.8}, 10)
    low, high = binomtest(8, 10).proportion_ci(method="wilson")
    text = f"{low:.1%} to {high:.1%}"
    assert re.search(rf"ours +\S+ +80\.00% +\S+ +{re.escape(text)}", capsys.readouterr().out)
