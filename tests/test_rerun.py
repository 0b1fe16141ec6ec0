"""Which failed test is run a second time, and that a session with one is counted as passed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rerun import refusal

ROOT = Path(__file__).parents[1]
NAME = "tests/test_a.py::test_a@ray"


@pytest.mark.parametrize(
    ("history", "failed", "reason"),
    [
        ({}, [NAME], None),
        ({}, [NAME, "tests/test_b.py::test_b@ray"], "2 tests failed"),
        ({}, ["tests/test_a.py::test_a@tests/test_a.py"], "does not run under Ray"),
        ({"now": "tests/test_b.py::test_b@ray"}, [NAME], "already run again in this run"),
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
    if not mark.exists() or {always}:
        mark.touch()
        raise AssertionError("the first time")

def test_that_passes():
    pass
"""
CONFTEST = """
from tests.rerun import pytest_sessionfinish, pytest_terminal_summary

def pytest_addoption(parser):
    parser.addoption("--slow")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("always", "runs", "codes"), [(False, ["1", "2"], [0, 1]), (True, ["1"], [1])]
)
def test_a_session_whose_one_failure_passes_alone_has_passed(always, runs, codes, tmp_path):
    """Unless the same test failed in the run before."""
    (tmp_path / "test_case.py").write_text(CASE.format(always=always))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    options = ["-p", "xdist", "-n1", "--dist=loadgroup", "-p", "no:cacheprovider"]
    found, output = [], ""
    for run in runs:
        (tmp_path / "mark").unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=tmp_path,
            env={**environment, "VIT_RAY_CI_RUN": run},
            capture_output=True,
            text=True,
            timeout=120,
        )
        found.append(done.returncode)
        output = done.stdout
    assert found == codes, output
    assert "test_case.py::test_that_fails_at_first@ray" in output
    history = (tmp_path / "cache" / "vit_ray" / "reruns.jsonl").read_text().splitlines()
    assert [json.loads(line)[0] for line in history] == runs
