"""What tests stand on: an environment of their own, and one second try under Ray."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import foreign_settings
from tests.conftest import ROOT
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
    history = json.loads((tmp_path / "cache" / "vit_ray" / "reruns.json").read_text())
    assert list(history) == ["1", "2"]
