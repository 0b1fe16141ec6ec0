"""A Ray that a command has started for itself: it is killed, or a process of it is."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import Head
from tests.end_to_end.runs import wait_until
from tests.faults.runs import STEPS, end, kinds_of, long_recipe, start
from vit_ray.outcomes import EventKind

NO_RAY = Head("", "")
GCS_ADDRESS = re.compile(r"--gcs-address=(\S+)")
PLACES = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
groups = ray.util.placement_group_table().values()
print(*(group["placement_group_id"] for group in groups if group["state"] != "REMOVED"))
"""


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_killed_ray_ends_its_command_in_one_line_and_the_same_command_continues(
    name, digits, tmp_path
):
    recipe = long_recipe(f"killed-{name}", digits, tmp_path)
    driver = start(recipe, NO_RAY, tmp_path)
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
    end(start(recipe, NO_RAY, tmp_path))
    assert EventKind.RESUMED in kinds_of(recipe)


def test_a_killed_controller_leaves_no_place_on_a_ray_beside_another_one(
    ray_cluster, digits, tmp_path
):
    recipe = long_recipe("killed-beside", digits, tmp_path, optim={"steps": 2 * STEPS})
    driver = start(recipe, NO_RAY, tmp_path)
    commands = {}
    for process in psutil.Process(driver.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # an idle worker of Ray's
            commands[process.pid] = " ".join(process.cmdline())
    (controller,) = (pid for pid, command in commands.items() if "TrainController" in command)
    (address,) = {found[1] for one in commands.values() if (found := GCS_ADDRESS.search(one))}
    places = [sys.executable, "-c", PLACES, address]
    (before,) = subprocess.check_output(places, text=True).split()
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: kinds_of(recipe).count(EventKind.FIRST_STEP) == 2, driver)
    after = subprocess.check_output(places, text=True).split()
    assert len(after) == 1
    assert before not in after
    end(driver)
