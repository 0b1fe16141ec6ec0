"""What goes wrong in the middle of a run, and that the run ends as if it had not."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.checkpoints.written import snapshot_of
from tests.conftest import Head
from tests.data.s3_server import FaultProxy, serve_s3, this_process_uses
from tests.end_to_end.runs import (
    checkpoint_steps,
    curve,
    runs_of,
    wait_until,
)
from tests.faults import runs
from tests.recipes import small_recipe
from tests.worker.fakes import FakeEngine, Worker, make_job
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name, open_checkpoint
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter, Snapshot, take_snapshot
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume, list_checkpoints
from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.launch.run import train
from vit_ray.outcomes import EventKind
from vit_ray.storage import locate
from vit_ray.tracking.tracker import replay

FAILED, HUNG, RESUMED = EventKind.WORKER_FAILED, EventKind.HUNG, EventKind.RESUMED
SHORT = {"step_timeout_s": 8.0}
NO_RAY = Head("", "")  # the command starts one for itself
GCS_ADDRESS = re.compile(r"--gcs-address=(\S+)")
PLACES = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
groups = ray.util.placement_group_table().values()
print(*(group["placement_group_id"] for group in groups if group["state"] != "REMOVED"))
"""


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the restart has ended it
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("process", "number", "kind"),
    [
        ("RayTrainWorker", signal.SIGKILL, FAILED),
        ("TrainController", signal.SIGKILL, FAILED),
        ("StreamServer", signal.SIGKILL, FAILED),
        ("RayTrainWorker", signal.SIGSTOP, HUNG),
        ("StreamServer", signal.SIGSTOP, HUNG),
    ],
)
def test_a_process_of_a_run_that_is_killed_or_frozen_is_replaced_and_loses_nothing(
    process, number, kind, ray_cluster, digits, folder, undisturbed
):
    sections = {"train": SHORT} if kind == HUNG else {}
    recipe = runs.long_recipe(f"{process}-{number.name}", digits, folder, **sections)
    before = set(runs.worker_pids(ray_cluster, process))  # of runs that have just ended
    driver = runs.start(recipe, ray_cluster, folder)
    *_, struck = set(runs.worker_pids(ray_cluster, process)) - before
    struck_s = time.time()
    os.kill(struck, number)
    try:
        wait_until(lambda: RESUMED in runs.kinds_of(recipe), driver)
        if kind == FAILED:  # Ray keeps the group of a controller that has died
            assert len(runs.groups(ray_cluster, "=", "CREATED")) == 1
        runs.end(driver)
    finally:
        _continue(struck)
    assert kind in runs.kinds_of(recipe)
    if (process, kind) != ("StreamServer", HUNG):
        assert runs.is_lost_until_noticed(recipe, struck_s)
    runs.ends_as(recipe, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_recorder_that_is_killed_or_frozen_for_a_while_costs_nothing(
    number, ray_cluster, digits, folder, undisturbed
):
    recipe = runs.long_recipe(f"recorder-{number.name}", digits, folder)
    before = set(runs.worker_pids(ray_cluster, "RunRecords"))
    driver = runs.start(recipe, ray_cluster, folder)
    (struck,) = set(runs.worker_pids(ray_cluster, "RunRecords")) - before
    os.kill(struck, number)
    try:
        if number == signal.SIGSTOP:
            wait_until(lambda: checkpoint_steps(recipe)[-1] == runs.STEPS, driver)
    finally:
        _continue(struck)
    runs.end(driver)
    assert FAILED not in runs.kinds_of(recipe)
    runs.ends_as(recipe, undisturbed)


def test_a_worker_that_dies_under_a_frozen_controller_is_missed_by_the_driver(
    ray_cluster, digits, folder, undisturbed
):
    recipe = runs.long_recipe("frozen-controller", digits, folder, train=SHORT)
    before = set(runs.worker_pids(ray_cluster, "TrainController"))
    driver = runs.start(recipe, ray_cluster, folder, "tests.faults.quick_looks")
    (frozen,) = set(runs.worker_pids(ray_cluster, "TrainController")) - before
    os.kill(frozen, signal.SIGSTOP)
    try:
        *_, killed = runs.worker_pids(ray_cluster)
        os.kill(killed, signal.SIGKILL)
        runs.end(driver)
    finally:
        _continue(frozen)
    assert {FAILED, RESUMED} <= set(runs.kinds_of(recipe))
    runs.ends_as(recipe, undisturbed)


def test_a_worker_that_is_killed_while_its_group_starts_leaves_no_place_behind(
    ray_cluster, digits, folder, undisturbed
):
    recipe = runs.long_recipe("killed-at-start", digits, folder)
    before = set(runs.worker_pids(ray_cluster))
    driver = runs.start_of_workers(recipe, ray_cluster, folder, before)
    *_, killed = set(runs.worker_pids(ray_cluster)) - before
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: EventKind.FIRST_STEP in runs.kinds_of(recipe), driver)
    assert len(runs.groups(ray_cluster, "!=", "REMOVED")) == 1
    runs.end(driver)
    assert runs.kinds_of(recipe).count(FAILED) == 1
    runs.ends_as(recipe, undisturbed)


def test_a_killed_driver_loses_nothing_when_the_job_is_started_again(
    ray_cluster, digits, folder, undisturbed
):
    recipe = runs.long_recipe("driver-killed", digits, folder)
    runs.end(runs.start(recipe, ray_cluster, folder), -signal.SIGKILL, by=signal.SIGKILL)
    runs.end(runs.start(recipe, ray_cluster, folder))
    assert RESUMED in runs.kinds_of(recipe)
    assert runs.seconds_of(recipe)["lost"] == 0  # what a driver that died had done is not known
    runs.ends_as(recipe, undisturbed)


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


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_killed_ray_ends_its_command_in_one_line_and_the_same_command_continues(
    name, digits, tmp_path
):
    recipe = runs.long_recipe(f"killed-{name}", digits, tmp_path)
    driver = runs.start(recipe, NO_RAY, tmp_path)
    processes = psutil.Process(driver.process.pid).children(recursive=True)
    (killed,) = (one.pid for one in processes if one.name() == name)
    os.kill(killed, signal.SIGKILL)
    code, output = driver.wait(30)
    assert code == 1, output
    *_, last = output.splitlines()
    assert last.startswith("error: Ray on this machine has ended"), output
    assert "run the same command again" in last
    _, left = psutil.wait_procs(processes, timeout=120)  # Ray's agents ask for its GCS for a minute
    assert not left
    runs.end(runs.start(recipe, NO_RAY, tmp_path))
    assert RESUMED in runs.kinds_of(recipe)


def test_a_killed_controller_leaves_no_place_on_a_ray_beside_another_one(
    ray_cluster, digits, tmp_path
):
    recipe = runs.long_recipe("killed-beside", digits, tmp_path, optim={"steps": 2 * runs.STEPS})
    driver = runs.start(recipe, NO_RAY, tmp_path)
    commands = {}
    for process in psutil.Process(driver.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # an idle worker of Ray's
            commands[process.pid] = " ".join(process.cmdline())
    (controller,) = (pid for pid, command in commands.items() if "TrainController" in command)
    (address,) = {found[1] for one in commands.values() if (found := GCS_ADDRESS.search(one))}
    places = [sys.executable, "-c", PLACES, address]
    (before,) = subprocess.check_output(places, text=True).split()
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: runs.kinds_of(recipe).count(EventKind.FIRST_STEP) == 2, driver)
    after = subprocess.check_output(places, text=True).split()
    assert len(after) == 1
    assert before not in after
    runs.end(driver)


def taken_at(step: int, size: int) -> Snapshot:
    where = Position(Progress(step), step, step, 1, {"w": [size]}, {}, "print")
    return snapshot_of(0, 1, {"weight|w|0": torch.full((size,), float(step))}, where)


class Engine(FakeEngine):
    """With weights of 0.6 MiB: a disk of 2 MiB holds the last two checkpoints and no third."""

    NUM = 150_000

    def snapshot(self, position: Position, memory: Any = None) -> Snapshot:
        weights = torch.full((self.NUM,), self.weight)
        return take_snapshot([("weight", "w", 0, weights)], position, 0, 1, memory)


def test_a_disk_that_is_full_costs_the_saves_that_find_no_room_and_nothing_else(small_disk):
    worker = Worker(
        make_job(small_disk, checkpoint={"keep_last": 9}), Engine(shapes={"w": [Engine.NUM]})
    )
    for step in (1, 2, 3, 4, 5):
        worker.engine.weight = float(step)
        worker.saver.save(Progress(step=step))
    run = locate(worker.job.recipe.run_folder)
    failed = [text for kind, text, _ in worker.actor.events if kind == "checkpoint failed"]
    assert len(failed) == 2
    assert all("No space left on device" in text for text in failed)
    # Room is made, and the next one counts again.
    (run.child(folder_name(1))).delete()
    worker.engine.weight = 6.0
    worker.saver.save(Progress(step=6))
    newest = checkpoint_to_resume(run)
    assert newest is not None
    assert newest.position.step == 6
    assert float(newest.weights()["w"][0]) == 6.0


def test_a_store_that_is_away_in_a_save_costs_that_save_and_nothing_else(tmp_path):
    (tmp_path / "bucket").mkdir()
    with (
        serve_s3(tmp_path) as upstream,
        FaultProxy(upstream) as proxy,
        this_process_uses(proxy.port),
    ):
        run = locate("s3://bucket/run")
        told: list[tuple[str, str]] = []
        keep = CheckpointConfig(keep_last=9)
        writer = CheckpointWriter(run, keep, lambda kind, text, _: told.append((kind, text)))
        for step in (1, 2, 3):
            proxy.faults.set("503", 1000 if step == 2 else 0, path=folder_name(2))
            writer.write(taken_at(step, 9))
        proxy.faults.set("", 0)
        assert [kind for kind, _ in told] == ["checkpoint failed"]
        newest = checkpoint_to_resume(run)
        assert newest is not None
        assert newest.position.step == 3
        assert [step for step, place in list_checkpoints(run) if open_checkpoint(place)] == [3, 1]
