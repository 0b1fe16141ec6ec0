"""What tests stand on: an environment of their own, hosts that are cut off, and one second try."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import foreign_settings, hosts
from tests.conftest import ROOT
from tests.hosts import Host
from tests.rerun import refusal

FOREIGN = [
    "AWS_PROFILE", "MLFLOW_TRACKING_URI", "RAY_NAMESPACE", "HF_TOKEN", "https_proxy", "TMPDIR",
    "LC_ALL",
]  # fmt: skip


@pytest.mark.parametrize("number", [1, 2])
def test_a_test_finds_nothing_of_the_machine_and_of_earlier_tests(number):
    assert [*Path().iterdir(), *Path.home().iterdir()] == []
    assert [name for name in (*FOREIGN, "LEFT") if name in os.environ] == []
    for name in (*FOREIGN, "LEFT"):
        os.environ[name] = "1"
    importlib.reload(foreign_settings)  # as before anything else is imported
    assert [name for name in (*FOREIGN, "LEFT") if name in os.environ] == ["LEFT"]
    Path("runs").mkdir()
    (Path.home() / ".cache").mkdir()


def running(seconds: str) -> bool:
    ps = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True)
    return f"sleep {seconds}" in ps.stdout


def answers(host: Host, address: str, port: int) -> bool:
    script = f"import socket; socket.create_connection(('{address}', {port}), timeout=2)"
    return host.run(sys.executable, "-c", script)[0] == 0


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def serve(host: Host, port: int) -> None:
    host.serve("http.log", sys.executable, "-m", "http.server", str(port))
    wait_for(lambda: answers(host, host.address, port))


def test_hosts_reach_each_other_are_cut_off_lost_and_start_again_and_leave_nothing():
    hosts.require()
    seconds = [f"{number}{os.getpid()}" for number in (77, 78)]
    with hosts.network() as net:
        one, two = net.join("one"), net.join("two", private=["/var/tmp"])
        assert one.run("hostname") == (0, "one\n")
        assert two.address in one.run("getent", "hosts", "two")[1]
        for host, number in zip((one, two), seconds, strict=True):
            host.serve("sleep.log", "sleep", number)
        wait_for(lambda: f"sleep {seconds[0]}" in one.processes())
        wait_for(lambda: f"sleep {seconds[1]}" in two.processes())
        assert f"sleep {seconds[0]}" not in two.processes()
        for place in ("/dev/shm/mark", "/var/tmp/mark", "/tmp/ray/m"):
            one.run("touch", place)
            assert two.run("ls", place)[0] != 0, place
            one.run("rm", place)
        serve(one, 8101)
        wait_for(lambda: answers(two, one.address, 8101))
        one.cut()
        assert not answers(two, one.address, 8101)
        assert answers(one, one.address, 8101)  # its own interface is up
        one.heal()
        wait_for(lambda: answers(two, one.address, 8101))
        two.lose()
        assert two.processes() == []
        assert [running(number) for number in seconds] == [True, False]
        again = net.join("two")
        assert again.address == two.address
        serve(again, 8103)
        wait_for(lambda: answers(one, again.address, 8103))
    assert not running(seconds[0])
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert net._token not in listed
    assert not net._folder.exists()


NAME, OTHER = "tests/test_a.py::test_a@ray", "tests/test_b.py::test_b@ray"


@pytest.mark.parametrize(
    ("history", "failed", "reason"),
    [
        ({}, [NAME], None),
        ({}, [NAME, OTHER], "2 tests failed"),
        ({}, ["tests/test_a.py::test_a@tests/test_a.py"], "does not run under Ray"),
        ({"now": OTHER}, [NAME], "already run again in this run"),
        ({"before": NAME, "now": None}, [NAME], "one of the last 10 runs"),
    ],
)
def test_one_test_under_ray_is_run_again_unless_it_was_in_the_last_ten_runs(
    history, failed, reason
):
    found = refusal(history, "now", failed)
    assert found is None if reason is None else reason in (found or "")


CASE = """
import pathlib
import pytest

@pytest.mark.xdist_group("ray")
def test_that_fails_at_first():
    mark = pathlib.Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")
"""
CONFTEST = """
from tests.rerun import pytest_sessionfinish

def pytest_addoption(parser):
    parser.addoption("--slow")
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE, CASE.replace("if not mark.exists()", "if True")])
def test_a_session_whose_one_failure_passes_alone_has_passed_once(case, tmp_path):
    (tmp_path / "test_case.py").write_text(case)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    options = ["-p", "xdist", "-n1", "--dist=loadgroup", "-p", "no:cacheprovider"]
    codes = []
    for run in ("1", "2"):
        (tmp_path / "mark").unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *options]
        own = {**environment, "VIT_RAY_CI_RUN": run}
        codes.append(subprocess.run(command, cwd=tmp_path, env=own, timeout=120).returncode)
    assert codes == [0 if case == CASE else 1, 1]
    history = (tmp_path / "cache" / "vit_ray" / "reruns.jsonl").read_text().splitlines()
    assert [json.loads(line)[0] for line in history] == ["1", "2"]
