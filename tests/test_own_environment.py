"""A test begins with nothing of the machine, of its user or of earlier tests."""

import os
import subprocess
import sys

from tests.conftest import ROOT

TESTS = """
import os
from pathlib import Path
import pytest
from tests.conftest import *

@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_there(number: int) -> None:
    assert [*Path().iterdir(), *Path.home().iterdir()] == []
    names = "AWS_PROFILE MLFLOW_TRACKING_URI RAY_ADDRESS HF_TOKEN https_proxy TMPDIR LC_ALL LEFT"
    assert [name for name in names.split() if name in os.environ] == []
    os.environ["LEFT"] = "1"
    Path("runs").mkdir()
    (Path.home() / ".cache").mkdir()
"""


def test_a_test_finds_nothing_of_the_machine_and_of_earlier_tests(tmp_path):
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / ".ray").mkdir()
    foreign = {
        "AWS_PROFILE": "me", "MLFLOW_TRACKING_URI": "http://host", "RAY_ADDRESS": "host:1",
        "HF_TOKEN": "secret", "https_proxy": "http://host", "TMPDIR": str(tmp_path),
        "LC_ALL": "de_DE", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_a.py"],
        cwd=tmp_path, env={**os.environ, **foreign}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout + done.stderr
