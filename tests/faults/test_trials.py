"""Trials of a sweep share a process, though one is stopped or its process dies."""

import os
import signal
from pathlib import Path
from typing import Any

from ray import tune
from ray.util.state import list_actors

from tests.conftest import Head
from vit_ray.config.command_sections import SweepConfig
from vit_ray.experiments.asha import RememberedAsha, RungRecord
from vit_ray.experiments.trials import run_trials
from vit_ray.storage import locate


def trial_pids(head: Head) -> list[int]:
    filters = [("class_name", "=", "ImplicitFunc"), ("state", "=", "ALIVE")]
    return [one.pid for one in list_actors(head.dashboard, filters=filters, detail=True)]


def test_the_training_of_a_trial_whose_process_dies_goes_on_and_is_not_done_twice(
    ray_cluster: Head, tmp_path: Path
) -> None:
    trained, pids = [], []

    def train(index: int, rung: int) -> dict[str, Any]:
        (pid,) = trial_pids(ray_cluster)
        trained.append((index, rung))
        pids.append(pid)
        if (index, rung) == (1, 1):
            os.kill(pid, signal.SIGKILL)
        return {"result": index, "error": "", "is_over": rung == 1}

    points = {f"lr-{rate}": {"optim.learning_rate": rate} for rate in (0.1, 0.2, 0.3, 0.4)}
    outcomes = run_trials(points, train, max_concurrent=1, name="tune", storage_path=str(tmp_path))
    assert [outcome and outcome["result"] for outcome in outcomes] == [0, 1, 2, 3]
    assert trained == [(index, rung) for index in range(4) for rung in range(2)]
    assert len(set(pids)) == 2


def test_ray_tune_sees_what_varies_and_lists_are_no_dimensions(
    ray_cluster: Head, tmp_path: Path
) -> None:
    points: dict[str, dict[str, Any]] = {
        "a": {"optim.learning_rate": 0.1, "optim.frozen": ["head", "norm"], "optim.images": None},
        "b": {"optim.learning_rate": 0.1, "optim.frozen": [], "optim.images": 7},
    }

    def train(index: int, _: int) -> dict[str, Any]:
        return {"result": index, "error": "", "is_over": True}

    run_trials(points, train, max_concurrent=2, name="tune", storage_path=str(tmp_path))
    trials = tune.ExperimentAnalysis(str(tmp_path / "tune")).get_all_configs().values()
    assert sorted(trials, key=lambda config: config["trial"]) == [
        {"trial": "a", **points["a"], "optim.frozen": '["head", "norm"]'},
        {"trial": "b", **points["b"], "optim.frozen": "[]"},
    ]


def test_a_trial_that_asha_stops_asks_for_no_more_training(
    ray_cluster: Head, tmp_path: Path
) -> None:
    asked: list[tuple[int, int]] = []
    reached = [0.5, 0.9, 0.1, 0.6]

    def train(index: int, rung: int) -> dict[str, Any]:
        asked.append((index, rung))
        step = (4, 16)[rung]
        told = {"index": index, "step": step, "top1": reached[index]}
        return {**told, "error": "", "is_over": rung == 1}

    config = SweepConfig(scheduler="asha", grace_steps=4)
    record = RungRecord(locate(str(tmp_path)))
    outcomes = run_trials(
        {name: {} for name in "abcd"},
        train,
        max_concurrent=1,
        name="tune",
        storage_path=str(tmp_path),
        scheduler=RememberedAsha(config, record, list("abcd"), 16),
    )
    assert asked == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
    assert [outcome and outcome["is_over"] for outcome in outcomes] == [True, True, False, False]
