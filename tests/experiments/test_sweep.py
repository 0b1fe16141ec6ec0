"""What a sweep chooses and reports: the averaged weights' accuracy where weights are averaged."""

import pytest

from vit_ray.commands.tables import print_sweep
from vit_ray.config import Recipe
from vit_ray.config.schema import recipe_from_dict
from vit_ray.experiments.sweep import SweepResult, best_rate, sweep_metrics, sweep_row
from vit_ray.launch.run import RunResult
from vit_ray.launch.worker_group import RunFailedError


def recipe(averaging: float) -> Recipe:
    return recipe_from_dict({"name": "s", "train": {"averaging": averaging}}, "test")


def result(**metrics: float) -> RunResult:
    measured = {f"eval/{name}": value for name, value in metrics.items()}
    return RunResult("id", "name", 1, 1, measured, "folder")


# The last weights prefer the first rate, the averaged ones the second.
TRIALS = [
    (0.1, result(top1=0.8, averaged_top1=0.5), ""),
    (0.2, result(top1=0.6, averaged_top1=0.7), ""),
    (0.3, None, "not finite"),
]


@pytest.mark.parametrize(("averaging", "best"), [(0.0, 0.1), (0.9999, 0.2)])
def test_the_averaged_accuracy_decides_where_weights_are_averaged(
    averaging: float, best: float
) -> None:
    rows = [sweep_row(recipe(averaging), *trial) for trial in TRIALS]
    assert best_rate(rows) == best
    assert [row.dev_top1 for row in rows] == ([0.5, 0.7, None] if averaging else [0.8, 0.6, None])
    assert [row.last_dev_top1 for row in rows] == ([0.8, 0.6, None] if averaging else [None] * 3)


def test_both_accuracies_are_recorded_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [sweep_row(recipe(0.9999), *trial) for trial in TRIALS]
    outcome = SweepResult(rows, 0.2, [0.75, 0.77], "id", "hint", [0.65, 0.67])
    metrics = sweep_metrics(outcome)
    assert metrics["eval/averaged_top1"] == pytest.approx(0.76)
    assert metrics["eval/top1"] == pytest.approx(0.66)
    assert print_sweep(outcome) == 0
    text = capsys.readouterr().out
    for shown in ("70.00%", "60.00%", "76.00% +-", "last weights: 66.00%", "failed: not finite"):
        assert shown in text


def test_without_averaging_one_accuracy_is_recorded_and_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [sweep_row(recipe(0.0), *trial) for trial in TRIALS]
    outcome = SweepResult(rows, 0.1, [0.85], "id", "hint")
    assert sweep_metrics(outcome) == {
        "sweep/learning_rate": 0.1,
        "eval/top1": 0.85,
        "eval/top1_std": 0.0,
    }
    print_sweep(outcome)
    assert "averaged" not in capsys.readouterr().out


def test_a_sweep_of_failed_trials_says_why() -> None:
    with pytest.raises(RunFailedError, match="every trial failed; the first: not finite"):
        best_rate([sweep_row(recipe(0.0), *TRIALS[2])])
