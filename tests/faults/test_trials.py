"""Trials of a sweep share a process; one whose process dies costs that trial, and no other."""

import os
import signal
from pathlib import Path
from typing import Any

from ray.util.state import list_actors

from tests.conftest import Head
from vit_ray.experiments.trials import run_trials


def test_a_trial_whose_process_dies_has_no_outcome_and_the_others_have_theirs(
    ray_cluster: Head, tmp_path: Path
) -> None:
    def trial_pids() -> list[int]:
        filters = [("class_name", "=", "ImplicitFunc"), ("state", "=", "ALIVE")]
        return [one.pid for one in list_actors(ray_cluster.dashboard, filters=filters, detail=True)]

    pids = []

    def train(index: int) -> dict[str, Any]:
        (pid,) = trial_pids()
        pids.append(pid)
        if index == 1:
            os.kill(pid, signal.SIGKILL)
        return {"result": index, "error": ""}

    outcomes = run_trials(4, train, max_concurrent=1, name="tune", storage_path=str(tmp_path))
    assert [outcome and outcome["result"] for outcome in outcomes] == [0, None, 2, 3]
    assert pids == [pids[0]] * 2 + [pids[2]] * 2
