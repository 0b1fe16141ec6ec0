"""What jobs print at their end."""

import re

from scipy.stats import binomtest

from vit_ray.commands.experiments import print_sweep
from vit_ray.commands.train import print_metrics, print_result, print_table
from vit_ray.experiments.search_space import RATE
from vit_ray.experiments.sweep import Row, SweepResult
from vit_ray.experiments.trials import Outcome
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import TrialState


def test_several_seeds_have_a_spread_and_one_has_none(capsys):
    rows = [
        Row({RATE: 0.01}, Outcome(TrialState.FINISHED, top1=0.9)),
        Row({RATE: 0.1}, Outcome(TrialState.FAILED, error="a worker died")),
    ]

    def shown(*accuracies: float) -> str:
        finals = [Outcome(TrialState.FINISHED, top1=top1) for top1 in accuracies]
        assert print_sweep(SweepResult(rows, {RATE: 0.01}, finals, "parent", "a link")) == 0
        return capsys.readouterr().out

    # The sample deviation of 0.96 and 0.98 is sqrt(2) / 100.
    assert "97.00% +- 1.41% (2 runs)" in shown(0.96, 0.98)
    single = shown(0.97)
    assert "97.00% (1 run of sweep.seeds)" in single
    assert "+-" not in single
    assert re.search(r"learning_rate=0\.1 +.*failed: a worker died", single)


def test_an_accuracy_has_its_images_and_their_interval_whole_in_a_pipe(capsys):
    low, high = binomtest(38, 90).proportion_ci(method="wilson")
    expected = f"42.22% ({low:.1%} to {high:.1%} at 95 %, 90 images)"
    metrics = {"eval/top1": 38 / 90, "eval/loss": 1.5, "eval/" + "x" * 3000: 0.25}
    print_metrics(metrics, 90)
    text = capsys.readouterr().out
    assert [text.count(one) for one in (expected, "1.5000", "x" * 3000)] == [1, 1, 1]
    assert print_result(RunResult(None, "pets", 5, 5, metrics, "", num_eval_images=90)) == 0
    assert expected in " ".join(capsys.readouterr().out.split())
    # Of a run that was stopped before its first step.
    assert print_result(RunResult(None, "pets", 0, 5, {}, "")) == 3
    assert capsys.readouterr().out.splitlines() == ["pets: step 0 of 5", "checkpoint: none"]


def test_no_number_is_broken_where_a_terminal_is_narrower_than_a_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    row = {f"column {k}": f"{k}.1234567" for k in range(9)}
    print_table("Cells", [row, row])
    text = capsys.readouterr().out
    assert [text.count(cell) for cell in row.values()] == [2] * 9
