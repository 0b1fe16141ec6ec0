"""What jobs print at their end."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from scipy.stats import binomtest

from vit_ray.commands import train
from vit_ray.commands.experiments import print_sweep
from vit_ray.commands.train import print_metrics, print_result, print_table
from vit_ray.config import Recipe
from vit_ray.experiments.search_space import RATE
from vit_ray.experiments.sweep import Row, SweepResult
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


def test_several_seeds_have_a_spread_and_one_has_none(capsys):
    # The sample deviation of 0.96 and 0.98 is sqrt(2) / 100.
    assert "97.00% +- 1.41% (2 runs)" in shown([0.96, 0.98], capsys)
    single = shown([0.97], capsys)
    assert "97.00% (1 run of sweep.seeds)" in single
    assert "+-" not in single
    assert re.search(r"learning_rate=0\.1 +.*failed: a worker died", single)


def test_the_accuracy_of_a_run_has_its_images_and_their_interval(capsys):
    result = RunResult(
        None, "pets", 5, 5, {"eval/top1": 38 / 90, "train/loss": 1.0}, "", num_eval_images=90
    )
    print_result(result)
    low, high = binomtest(38, 90).proportion_ci(method="wilson")
    text = f"42.22% ({low:.1%} to {high:.1%} at 95 %, 90 images)"
    assert text in " ".join(capsys.readouterr().out.split())


def test_each_number_of_an_evaluation_is_shown_once_and_whole_in_a_pipe(capsys):
    print_metrics({"eval/top1": 38 / 90, "eval/loss": 1.5, "eval/" + "x" * 3000: 0.25}, 90)
    text = capsys.readouterr().out
    low, high = binomtest(38, 90).proportion_ci(method="wilson")
    assert text.count(f"42.22% ({low:.1%} to {high:.1%} at 95 %, 90 images)") == 1
    assert [text.count(one) for one in ("42.22%", "1.5000", "x" * 3000)] == [1, 1, 1]


@pytest.mark.parametrize("width", [80, 200])
def test_no_number_is_broken_where_a_terminal_is_narrower_than_a_table(width, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    row = {f"column {k}": f"{k}.1234567" for k in range(9)}
    print_table("Cells", [row, row])
    lines = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    counts = [sum(line.count(cell) for line in lines) for cell in row.values()]
    assert counts == [2] * 9
    assert any(all(cell in line for cell in row.values()) for line in lines) == (width == 200)


def test_only_a_table_with_a_row_of_the_paper_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(run, "evaluated", lambda recipe: RunResult(None, "a", 1, 1, {}, ""))
    rows = [{"row": "ours", "note": "proxy"}, {"row": "paper", "note": ""}]
    done = Outcome(TrialState.FINISHED, top1=0.9)
    sweep = SweepResult([Row({RATE: 0.1}, done)], {RATE: 0.1}, [done], "parent", "")
    for table, is_shown in ((None, False), (rows[:1], False), (rows, True)):
        monkeypatch.setattr(train, "evaluation_table", lambda *_, table=table: table)
        train.evaluate(Recipe(name="a"))
        assert ("the paper's" in capsys.readouterr().out) == is_shown
        print_sweep(replace(sweep, beside_paper=table))
        assert ("the paper's" in capsys.readouterr().out) == is_shown


def test_a_run_that_was_stopped_before_its_first_step_has_no_table(capsys):
    assert print_result(RunResult(None, "pets", 0, 5, {}, "")) == 3
    assert capsys.readouterr().out.splitlines() == ["pets: step 0 of 5", "checkpoint: none"]
