"""A Ray that a command has started for itself, and that is killed."""

import os
import signal

import psutil
import pytest

from tests.conftest import Head
from tests.end_to_end.runs import Driver, checkpoint_steps, wait_until, write_recipe
from tests.faults.runs import kinds_of, long_recipe
from vit_ray.outcomes import EventKind

NO_RAY = Head("", "")


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_killed_ray_ends_its_command_in_one_line_and_the_same_command_continues(
    name, digits, tmp_path
):
    recipe = long_recipe(f"killed-{name}", digits, tmp_path)
    path = str(write_recipe(recipe, tmp_path))
    driver = Driver(NO_RAY, "pretrain", path)
    wait_until(lambda: bool(checkpoint_steps(recipe)), driver)
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
    code, output = Driver(NO_RAY, "pretrain", path).wait()
    assert code == 0, output
    assert EventKind.RESUMED in kinds_of(recipe)
