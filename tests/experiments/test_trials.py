"""Trials under Ray Tune: diverged, failed, killed, interrupted, and taken up by another driver.

Ray, Tune and the parent's record are real; a trial's training is a loop that writes its step to a
file and continues from it. Real trainings are stopped and killed in `tests/faults/`.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.tune.schedulers import ASHAScheduler

from tests.conftest import Digits, Head
from tests.recipes import small_recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.experiments import trials
from vit_ray.experiments.search_space import tune_space
from vit_ray.experiments.sweep import optuna_search
from vit_ray.experiments.trials import (
    STEP,
    OpenParent,
    Outcome,
    open_parent,
    run_trials,
)
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.launch.run import Following
from vit_ray.outcomes import RunStoppedError

RATES = [0.4, 0.1, 0.2]
STEPS = 8


def training(folder: Path, pause_s: float, config: dict[str, Any], following: Following) -> Any:
    """Its accuracy is its rate; evaluated after each step, and saved when it is stopped."""
    saved = folder / f"{config['rate']}"
    step = int(saved.read_text()) if saved.exists() else 0
    with open(folder / "starts", "a") as starts:
        starts.write(f"{config['rate']} {step}\n")
    while step < STEPS:
        if following.stop.is_set() or following.parent.record.stop_reason():
            saved.write_text(str(step))
            raise RunStoppedError("stopped")
        time.sleep(pause_s)
        step += 1
        if step < STEPS:
            following.on_evaluation(step, {"eval/top1": config["rate"]})
    saved.write_text(str(step))
    return asdict(Outcome(config["rate"], step))


def failing(folder: Path, config: dict[str, Any], following: Following) -> Any:
    """One diverges, the process of one dies once, and that of one each time."""
    if config["rate"] == 0.1:
        return asdict(Outcome(error="not finite"))
    if config["rate"] == 0.2 and (folder / "died").exists():
        logging.getLogger("vit_ray.test").warning("it is here again")
        return asdict(Outcome(0.2, STEPS))
    if config["rate"] == 0.2:
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    following.on_evaluation(1, {"eval/top1": 0.4})
    deadline_s = time.monotonic() + 120
    while not any('"rate": 0.4' in one.read_text() for one in folder.rglob("result.json")):
        assert time.monotonic() < deadline_s, "Tune has not got it"
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def parent(ray_cluster: Head, digits: Digits, tmp_path: Path) -> Iterator[OpenParent]:
    recipe = small_recipe("parent", digits, tmp_path)
    with open_parent(recipe, "sweep", resolve_run(recipe), 1, [recipe]) as opened:
        yield opened


def run(parent: OpenParent, work: Any, rates: list[float] = RATES, **how: Any) -> list[Any]:
    # Tune must take no text for a part of the space.
    configs = [{"rate": rate, "data.augment": '{"flip": [true]}'} for rate in rates]
    results = run_trials(work, parent, "trials", [], configs, **{"max_concurrent": 2, **how})
    assert "space" in how or [one["config"] for one in results] == configs
    return results


def starts(folder: Path) -> list[tuple[float, int]]:
    file = folder / "starts"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(float(rate), int(step)) for rate, step in map(str.split, lines)]


def test_a_diverged_and_a_killed_trial_end_no_other(parent, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trials, "MOST_RESTARTS", 1)
    lost, *results = run(parent, partial(failing, tmp_path))  # of 0.4, 0.1 and 0.2
    assert [one["error"] for one in results] == ["not finite", ""]
    assert [Outcome.of_result(one).is_measured for one in results] == [False, True]
    assert [one["warnings"] for one in results] == ["", "it is here again"]
    assert "died, or could not be started again (at most 1 restarts)" in lost["error"]
    assert lost["error"].partition(";")[0] in caplog.text


@contextmanager
def signalled(number: int, is_due: Callable[[], bool]) -> Iterator[None]:
    """The block is ended by a signal a second after it is due: the handlers are the driver's."""

    def interrupt() -> None:
        while not is_due():
            time.sleep(0.05)
        time.sleep(1.0)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(RunStoppedError):
        yield


def saved(folder: Path) -> dict[float, int]:
    """Steps by rate."""
    return {float(path.name): int(path.read_text()) for path in folder.glob("0.*")}


def slow_to_save(folder: Path, config: dict[str, Any], following: Following) -> Any:
    """Saves the number of starts 15 s after it is stopped."""
    with open(folder / "starts", "a") as file:
        file.write(f"{config['rate']} 0\n")
    while not (following.stop.is_set() or following.parent.record.stop_reason()):
        time.sleep(0.2)
    time.sleep(15.0)
    (folder / f"{config['rate']}").write_text(str(len(starts(folder))))
    raise RunStoppedError("stopped")


def test_a_stop_waits_for_a_checkpoint_that_takes_longer_than_tune_would(parent, tmp_path):
    with signalled(signal.SIGTERM, lambda: len(starts(tmp_path)) >= 2):
        run(parent, partial(slow_to_save, tmp_path), RATES[:2])
    assert saved(tmp_path) == dict.fromkeys(RATES[:2], 2)


def slow_to_end(folder: Path, config: dict[str, Any], following: Following) -> Any:
    """The first trial ends, the second is worse at its rung; as above, when that is stopped."""
    following.on_evaluation(1, {"eval/top1": config["rate"]})
    if config["rate"] == RATES[0]:
        return asdict(Outcome(config["rate"], STEPS))
    return slow_to_save(folder, config, following)


def test_a_trial_that_asha_stops_last_has_the_time_for_its_checkpoint(parent, tmp_path):
    asha = ASHAScheduler(STEP, max_t=STEPS, reduction_factor=4, stop_last_trials=False)
    work = partial(slow_to_end, tmp_path)
    _, stopped = run(parent, work, RATES[:2], max_concurrent=1, scheduler=asha)
    assert Outcome.of_result(stopped).is_stopped_early
    assert saved(tmp_path) == {RATES[1]: 1}


def test_a_search_of_optuna_continues_with_what_it_has_measured(ray_cluster, digits, tmp_path):
    recipe = small_recipe("parent", digits, tmp_path)
    config = SweepConfig(search="optuna", num_trials=6, space={"rate": {"uniform": [0.1, 0.4]}})
    how: dict[str, Any] = {"max_concurrent": 1, "rates": [0.1] * 6, "space": tune_space(config)}
    opened: Callable[[], Any] = partial(
        open_parent, recipe, "sweep", resolve_run(recipe), 1, [recipe]
    )
    # Two have ended.
    with signalled(signal.SIGTERM, lambda: len(saved(tmp_path)) >= 2), opened() as first:
        run(first, partial(training, tmp_path, 0.3), searcher=optuna_search(config), **how)
    before = starts(tmp_path)
    with opened() as second:
        work = partial(training, tmp_path, 0.0)
        results = run(second, work, searcher=optuna_search(config), **how)
    rates = [one["config"]["rate"] for one in results]
    assert len(set(rates)) == 6
    assert {rate for rate, _ in before} < set(rates)  # the search knows them
    again = [rate for rate, _ in starts(tmp_path)[len(before) :]]
    finished = [rate for rate, _ in before[:-1]]
    assert not set(again) & set(finished)
