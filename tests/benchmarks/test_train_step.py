"""What a job's step costs, from measurements that are made up."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from benchmarks import train_step
from benchmarks.train_step import OUT_OF_MEMORY, Measured, measure, run_apart, table

NAMES = ["bare", "zero0", "job"]


def arguments(**changes: Any) -> argparse.Namespace:
    known = {"model": "ViT-Ti/16", "batch": 8, "precision": "bf16", "compile": False}
    known |= {"rows": NAMES, "rounds": 1, "row_s": 60.0}
    return argparse.Namespace(**{**known, **changes})


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_each_row_has_the_batch_that_it_was_measured_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is halved for all while one runs out of memory."""

    def run(name: str, args: argparse.Namespace) -> Measured | str:
        if name == "job":
            return "ModuleNotFoundError: No module named 'ray'"
        return OUT_OF_MEMORY if name == "zero0" and args.batch > 2 else Measured(0.5)

    monkeypatch.setattr(train_step, "run_apart", run)
    args = arguments()
    best = measure(args)
    head, _, *rows = table(best, args).splitlines()
    assert [dict(zip(cells(head), cells(row), strict=True))["batch"] for row in rows] == ["2"] * 3
    assert cells(rows[0])[:4] == ["bare torch loop", "2", "500.0", "4.0"]
    tables = [part for part in capsys.readouterr().out.split("\n\n") if "|---|" in part]
    assert [cells(line)[1] for line in tables[0].splitlines()[2:]] == ["8"]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_memory_has_a_bar_where_the_prediction_is_of_what_ran(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the compiler saves is not predicted."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    shown = table({"zero0": Measured(0.5, 4.0, 5.0)}, arguments(compile=is_compiled))
    assert "| 4.00 | 5.00 | 1.250" in shown
    assert ("(bar 0.9 to 1.1)" in shown) is not is_compiled


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        (
            "Traceback:\n[rank0]: torch.AcceleratorError: CUDA error: no kernel | image\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
            "[W1122 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called\n",
            "torch.AcceleratorError: CUDA error: no kernel / image",
        ),
        ("Killed\n", "Killed"),
        ("", "exit code 9"),
        (f"{OUT_OF_MEMORY}\n[W1122] Warning: was not called\n", OUT_OF_MEMORY),
    ],
)
def test_a_row_that_fails_names_the_error_and_not_what_was_said_after_it(
    errors: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def run(*_: Any, stderr: IO[str], **__: Any) -> Any:
        stderr.write(errors)
        return subprocess.CompletedProcess([], 9)

    monkeypatch.setattr(subprocess, "run", run)
    assert run_apart("zero0", arguments()) == told


def test_a_row_that_hangs_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends, but leaves a process that has its output open."""
    lives = f"[{sys.executable!r}, '-c', 'import time; time.sleep(120)']"
    pid = tmp_path / "pid"
    (tmp_path / "script.py").write_text(
        "import subprocess, sys, time\n"
        "if sys.argv[-1] == 'job': time.sleep(20)\n"
        "if sys.argv[-1] == 'bare':\n"
        f"    open({str(pid)!r}, 'w').write(str(subprocess.Popen({lives}).pid))\n"
        "print('{\"step_s\": 0.25}')\n"
    )
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    assert run_apart("job", arguments(row_s=0.1)) == "has not ended after 0 s"
    try:
        assert run_apart("bare", arguments(row_s=40.0)) == Measured(0.25)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
