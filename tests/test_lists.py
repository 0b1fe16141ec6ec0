"""The lists of paths in `.ci/run` and the Makefile: one that has moved is no longer tested."""

import re
import subprocess

from tests.conftest import ROOT


def test_each_path_that_continuous_integration_looks_at_exists():
    text = (ROOT / ".ci/run").read_text()
    lists = re.findall(r"^decides_\w+=\([^)]*\)", text, re.MULTILINE)
    assert len(lists) == text.count("\ndecides_") == 4
    command = "set -f; " + "; ".join(f"{one}; echo ${{{one.split('=')[0]}[@]}}" for one in lists)
    named = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    paths = named.stdout.split()
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_path_of_the_makefiles_lists_exists():
    rule = "print-lists: ; @echo $(NUMERIC) $(PUBLISHED)"
    command = ["make", "--silent", "-C", str(ROOT), f"--eval={rule}", "print-lists"]
    named = subprocess.run(command, capture_output=True, text=True, check=True)
    paths = named.stdout.split()
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
