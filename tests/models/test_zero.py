"""Models under ZeRO stage 3, where a parameter is there only around its own module's forward."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_partitioned_models_take_the_same_steps_as_whole_ones(tmp_path: Path) -> None:
    result = tmp_path / "losses.json"
    command = [sys.executable, "-m", "tests.models.zero_steps", str(tmp_path / "meet"), str(result)]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(result.read_text())
    assert len(found) == 14
    for case in found:
        # The optimiser adds up flattened parameters, and so rounds another way.
        assert case["3"] == pytest.approx(case["0"], rel=1e-5)
        assert case["3"][2] < case["3"][0]
