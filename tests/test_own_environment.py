"""A test begins with nothing of the machine, of its user or of earlier tests."""

import importlib
import inspect
import os
from pathlib import Path

import pytest

from tests import conftest, foreign_settings

FOREIGN = [
    "AWS_PROFILE",
    "MLFLOW_TRACKING_URI",
    "RAY_NAMESPACE",
    "HF_TOKEN",
    "https_proxy",
    "TMPDIR",
    "LC_ALL",
]


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


def test_settings_of_the_machine_go_before_ray_reads_them():
    text = inspect.getsource(conftest)
    assert text.index("\nfrom tests import foreign_settings") < text.index("\nimport ray\n")
