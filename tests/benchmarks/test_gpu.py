"""The report of one GPU, from scripts that end, fail, and take too long."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu

TABLE = "| a | b |\\n|---|---|\\n| 1 | 2 |"


@pytest.fixture(autouse=True)
def child_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the process id of what a script started, which lives longer than any test."""
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    pid = tmp_path / "pid"
    lives = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    child = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {lives!r}])"
    bodies = {
        "ends.py": f"print('begun'); print('\\n\\n{TABLE}\\n')",
        "fails.py": f"print('\\n\\n{TABLE}\\n'); raise RuntimeError('no such device')",
        "slow.py": f"print('\\n\\n{TABLE}\\n', flush=True); {child}",
        "silent.py": child,
    }
    for name, body in bodies.items():
        (tmp_path / name).write_text(body)
    return pid


@pytest.mark.parametrize(
    ("name", "has_table", "said"),
    [
        ("ends.py", True, "`python benchmarks/ends.py`"),
        ("fails.py", False, "Not run: `RuntimeError: no such device`"),
    ],
)
def test_a_section_shows_the_last_table_or_why_there_is_none(
    name: str, has_table: bool, said: str
) -> None:
    shown = gpu.run_section([name], 60)
    assert said in shown
    assert ("| 1 | 2 |" in shown) is has_table


@pytest.mark.parametrize(
    ("name", "has_table", "said"),
    [
        ("slow.py", True, "Cut off after 7 s; until then:"),
        ("silent.py", False, "Cut off after 7 s; no table yet."),
    ],
)
def test_a_section_that_takes_too_long_ends_with_what_it_started(
    name: str, has_table: bool, said: str, child_pid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_wait = subprocess.Popen.wait

    def time_out_once_it_has_begun(process: object, timeout: float | None = None) -> int:
        """As after the limit, on a machine of any speed."""
        if timeout is None:
            return plain_wait(process)
        assert timeout == 7
        wait_until(lambda: child_pid.exists() and bool(child_pid.read_text()))
        raise subprocess.TimeoutExpired(name, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", time_out_once_it_has_begun)
    shown = gpu.run_section([name], 7)
    assert said in shown
    assert ("| 1 | 2 |" in shown) is has_table
    wait_until(lambda: has_ended(int(child_pid.read_text())))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or nobody has asked yet how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_most_valuable_sections_come_first_and_all_fit_into_ten_minutes() -> None:
    args = gpu.parser().parse_args([])
    parts = [section.part for section in gpu.sections(args)]
    assert list(dict.fromkeys(parts)) == ["model", "activations", "decode", "trainer", "memory"]
    assert parts[:3] == ["model"] * 3
    scripts = {section.command[0] for section in gpu.sections(args)}
    assert scripts == {
        "model_step.py", "activation_memory.py", "device_decode.py", "train_step.py",
    }  # fmt: skip
    assert all((Path(gpu.__file__).parent / script).is_file() for script in scripts)
    assert args.total_s < 600
    assert set(parts) == set(gpu.LIMITS_S)
    assert all(gpu.LIMITS_S[part] < args.total_s / 3 for part in parts)
