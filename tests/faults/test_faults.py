"""What goes wrong in the middle of a run, and that the run ends as if it had not."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from ray.util.state import list_placement_groups

from tests.end_to_end.runs import (
    Driver,
    checkpoint_steps,
    curve,
    runs_of,
    same_weights,
    wait_until,
    weights_of,
    write_recipe,
)
from tests.faults.runs import (
    EVERY,
    STEPS,
    events_of,
    is_lost_until_noticed,
    kinds_of,
    long_recipe,
    seconds_of,
    start,
    worker_pids,
)
from tests.recipes import small_recipe
from vit_ray.checkpoints.checkpoint import folder_name
from vit_ray.config import Recipe
from vit_ray.config.keys import tags_of
from vit_ray.experiments.search_space import RATE, trial_recipe
from vit_ray.experiments.study_cells import study_cells
from vit_ray.launch.run import train
from vit_ray.outcomes import EventKind
from vit_ray.storage import locate
from vit_ray.tracking.tracker import replay


def points_are_counted_once(recipe: Recipe) -> bool:
    """One MLflow run whose loss curve has each logged step once at each attempt's own value."""
    (run,) = [r for r in runs_of(recipe) if r.info.run_name == recipe.name]
    steps = [step for step, _ in curve(recipe, run.info.run_id)]
    return len(steps) == len(set(steps)) and steps[-1] == STEPS


def test_a_killed_worker_loses_nothing(ray_cluster, digits, folder, undisturbed):
    recipe = long_recipe("worker-killed", digits, folder)
    driver = start(recipe, ray_cluster, folder)
    *_, killed = worker_pids(ray_cluster)
    killed_s = time.time()
    os.kill(killed, signal.SIGKILL)
    code, output = driver.wait()
    assert code == 0, output
    assert {EventKind.WORKER_FAILED, EventKind.RESUMED} <= set(kinds_of(recipe))
    assert is_lost_until_noticed(recipe, killed_s)
    assert "goodput " in output
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    assert points_are_counted_once(recipe)


@pytest.mark.parametrize("kind", ["TrainController", "StreamServer"])
def test_a_process_between_driver_and_workers_that_is_killed_is_replaced(
    kind, ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe(f"killed-{kind}", digits, folder)
    before = set(worker_pids(ray_cluster, kind))  # of runs that have just ended
    driver = start(recipe, ray_cluster, folder)
    (pid,) = set(worker_pids(ray_cluster, kind)) - before
    os.kill(pid, signal.SIGKILL)
    killed_s = time.time()
    wait_until(lambda: EventKind.RESUMED in kinds_of(recipe), driver)
    kept = [("state", "=", "CREATED")]  # Ray keeps the group of a controller that has died
    assert len(list_placement_groups(ray_cluster.dashboard, filters=kept)) == 1
    code, output = driver.wait()
    assert code == 0, output
    assert EventKind.WORKER_FAILED in kinds_of(recipe)
    assert is_lost_until_noticed(recipe, killed_s)
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    assert points_are_counted_once(recipe)


def test_a_killed_recorder_costs_nothing(ray_cluster, digits, folder, undisturbed):
    recipe = long_recipe("recorder-killed", digits, folder)
    before = set(worker_pids(ray_cluster, "RunRecords"))
    driver = start(recipe, ray_cluster, folder)
    (pid,) = set(worker_pids(ray_cluster, "RunRecords")) - before
    os.kill(pid, signal.SIGKILL)
    code, output = driver.wait()
    assert code == 0, output
    assert EventKind.WORKER_FAILED not in kinds_of(recipe)
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    assert points_are_counted_once(recipe)


def test_a_killed_driver_loses_nothing_when_the_job_is_started_again(
    ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe("driver-killed", digits, folder)
    driver = start(recipe, ray_cluster, folder)
    driver.process.kill()
    driver.wait()
    code, output = Driver(ray_cluster, "pretrain", str(write_recipe(recipe, folder))).wait()
    assert code == 0, output
    assert EventKind.RESUMED in kinds_of(recipe)
    assert seconds_of(recipe)["lost"] == 0  # what a driver that died had done is not known
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    assert points_are_counted_once(recipe)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_makes_a_checkpoint_and_ends_clean(ray_cluster, digits, folder, undisturbed, number):
    """As SIGTERM does; see test_stops.py."""
    recipe = long_recipe(f"stopped-by-{number.name}", digits, folder)
    driver = start(recipe, ray_cluster, folder)
    driver.process.send_signal(number)
    code, output = driver.wait()
    assert code == 3, output
    stopped_at = checkpoint_steps(recipe)[-1]
    assert (EventKind.STOPPED, stopped_at) in events_of(recipe)
    assert stopped_at < STEPS
    assert train(recipe).is_complete
    assert same_weights(weights_of(recipe), weights_of(undisturbed))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_of_a_sweep_reaches_its_trials_and_the_same_command_goes_on(
    ray_cluster, digits, folder, number
):
    pretrained = small_recipe("pretrained", digits, folder, optim={"steps": 8})
    train(pretrained)
    recipe = long_recipe(f"sweep-{number.name}", digits, folder).with_changes(
        init_from=pretrained.run_folder,
        workers={"num_workers": 1},
        sweep={"learning_rates": [0.001, 0.01], "dev_fraction": 0.1, "seeds": 1},
    )
    trials = [trial_recipe(recipe, {RATE: rate}) for rate in (0.001, 0.01)]
    arguments = str(write_recipe(recipe, folder))
    driver = Driver(ray_cluster, "sweep", arguments)
    wait_until(lambda: any(checkpoint_steps(trial) for trial in trials), driver)
    driver.process.send_signal(number)
    code, output = driver.wait()
    assert code == 3, output
    stopped_at = [checkpoint_steps(trial)[-1:] for trial in trials]
    assert all(steps < [STEPS] for steps in stopped_at)
    code, output = Driver(ray_cluster, "sweep", arguments).wait()
    assert code == 0, output
    ends = [tags_of(run.data.tags).get("vit_ray.events.resumed") for run in runs_of(recipe)]
    assert any(ends), stopped_at


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_of_a_study_reaches_its_cell_and_the_same_command_goes_on(
    ray_cluster, digits, folder, number
):
    recipe = long_recipe(f"study-{number.name}", digits, folder)
    shape = recipe.model.model_dump(mode="json")
    recipe = recipe.with_changes(
        workers={"num_workers": 1},
        study={
            "models": [{"label": "tiny", "model": shape}],
            "data_fractions": [0.25, 1.0],
            "epochs": [25],
            "max_concurrent": 1,
        },
    )
    first, second = (cell.recipe for cell in study_cells(recipe))
    arguments = str(write_recipe(recipe, folder))
    driver = Driver(ray_cluster, "scaling_study", arguments)
    wait_until(lambda: bool(checkpoint_steps(second)), driver)
    driver.process.send_signal(number)
    code, output = driver.wait()
    assert code == 3, output
    stopped_at = checkpoint_steps(second)[-1]
    before = weights_of(first)
    code, output = Driver(ray_cluster, "scaling_study", arguments).wait()
    assert code == 0, output
    assert checkpoint_steps(second)[-1] > stopped_at
    cells = {run.info.run_name: tags_of(run.data.tags) for run in runs_of(recipe)}
    assert cells[second.name]["vit_ray.events.resumed"] == "1"
    assert "vit_ray.events.resumed" not in cells[first.name]
    assert same_weights(weights_of(first), before)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe("damaged", digits, folder)
    train(recipe.with_changes(optim={"steps": 2 * EVERY}))
    newest = locate(recipe.output).child(recipe.name).child(folder_name(2 * EVERY))
    file = next(i for i in newest.list_files() if "00001-of-00002" in i.base_name)
    content = bytearray(Path(file.path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(file.path).write_bytes(content)
    result = train(recipe)
    assert result.is_complete
    assert (EventKind.RESUMED, EVERY) in events_of(recipe)
    assert same_weights(weights_of(recipe), weights_of(undisturbed))


def test_a_stopped_worker_is_taken_for_hung_and_all_restart(
    ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe("hung", digits, folder)
    recipe = recipe.with_changes(train={"step_timeout_s": 8.0})
    driver = start(recipe, ray_cluster, folder)
    frozen, *_ = worker_pids(ray_cluster)
    os.kill(frozen, signal.SIGSTOP)
    frozen_s = time.time()
    try:
        code, output = driver.wait(240)
    finally:
        _continue(frozen)
    assert code == 0, output
    assert kinds_of(recipe).count(EventKind.HUNG) == 1
    assert is_lost_until_noticed(recipe, frozen_s)
    assert same_weights(weights_of(recipe), weights_of(undisturbed))


def test_a_worker_that_dies_under_a_frozen_controller_is_missed_by_the_driver(
    ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe("frozen-controller", digits, folder)
    recipe = recipe.with_changes(train={"step_timeout_s": 8.0})
    path, kind = str(write_recipe(recipe, folder)), "TrainController"
    before = set(worker_pids(ray_cluster, kind))
    driver = Driver(ray_cluster, "tests.faults.quick_looks", path)
    wait_until(lambda: bool(checkpoint_steps(recipe)), driver)
    (frozen,) = set(worker_pids(ray_cluster, kind)) - before
    os.kill(frozen, signal.SIGSTOP)
    try:
        *_, killed = worker_pids(ray_cluster)
        os.kill(killed, signal.SIGKILL)
        code, output = driver.wait()
    finally:
        _continue(frozen)
    assert code == 0, output
    assert {EventKind.WORKER_FAILED, EventKind.RESUMED} <= set(kinds_of(recipe))
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    assert points_are_counted_once(recipe)


def test_a_stream_server_that_is_frozen_is_replaced_with_its_group(
    ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe("frozen-server", digits, folder)
    recipe = recipe.with_changes(train={"step_timeout_s": 8.0})
    before = set(worker_pids(ray_cluster, "StreamServer"))
    driver = start(recipe, ray_cluster, folder)
    (frozen,) = set(worker_pids(ray_cluster, "StreamServer")) - before
    os.kill(frozen, signal.SIGSTOP)
    try:
        code, output = driver.wait(240)
    finally:
        _continue(frozen)
    assert code == 0, output
    assert {EventKind.HUNG, EventKind.RESUMED} <= set(kinds_of(recipe))
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    assert points_are_counted_once(recipe)


def test_a_recorder_that_is_frozen_for_a_while_costs_nothing(
    ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe("frozen-recorder", digits, folder)
    before = set(worker_pids(ray_cluster, "RunRecords"))
    driver = start(recipe, ray_cluster, folder)
    (frozen,) = set(worker_pids(ray_cluster, "RunRecords")) - before
    os.kill(frozen, signal.SIGSTOP)
    try:
        wait_until(lambda: checkpoint_steps(recipe)[-1] == STEPS, driver)
    finally:
        _continue(frozen)
    code, output = driver.wait()
    assert code == 0, output
    assert EventKind.WORKER_FAILED not in kinds_of(recipe)
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    assert points_are_counted_once(recipe)


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the restart has ended it
        os.kill(pid, signal.SIGCONT)


def test_mlflow_away_for_good_costs_nothing_but_a_replay(ray_cluster, digits, folder):
    recipe = small_recipe("untracked", digits, folder)
    with socket.socket() as held:  # nobody will ever listen here
        held.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{held.getsockname()[1]}"
        result = train(recipe.with_changes(tracking={"uri": away}))
    assert result.is_complete
    assert result.run_id is None
    log_path = Path(recipe.output) / recipe.name / "metrics.jsonl"
    assert replay(log_path, recipe.tracking.uri).num_points > 0
    (run,) = [r for r in runs_of(recipe) if r.info.run_name == recipe.name]
    assert [step for step, _ in curve(recipe, run.info.run_id)] == [1, 4, 8, 12, 16, 20, 24]


def test_a_checkpoint_that_finds_no_room_is_told_and_the_next_one_counts(
    ray_cluster, digits, folder
):
    recipe = small_recipe("no-room", digits, folder)
    in_its_place = Path(recipe.output) / recipe.name / folder_name(8)
    in_its_place.parent.mkdir(parents=True)
    in_its_place.write_text("a file where the folder should be")
    result = train(recipe)
    assert result.is_complete
    assert EventKind.CHECKPOINT_FAILED in kinds_of(recipe)
    assert checkpoint_steps(recipe) == [16, 24]
