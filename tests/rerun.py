"""In continuous integration a failed test under Ray is run once more, alone, at most one a run.

`tests/conftest.py` imports the hook. A run of continuous integration is named by VIT_RAY_CI_RUN;
without it nothing is run twice. The same test twice in ten runs fails.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 900
NUM_RUNS = 10


def refusal(history: dict[str, str | None], run: str, failed: list[str]) -> str | None:
    """Why no test is run again, or None; xdist's names of those under Ray end in `@ray`."""
    if len(failed) != 1:
        return f"{len(failed)} tests failed, and only one may be run again"
    if not failed[0].endswith("@ray"):
        return f"{failed[0]} does not run under Ray"
    if history.get(run) is not None:
        return f"{history[run]} was already run again in this run"
    if failed[0] in list(history.values())[-NUM_RUNS:]:
        return f"{failed[0]} was already run again in one of the last {NUM_RUNS} runs"
    return None


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers, and Ray with them
def pytest_sessionfinish(session: pytest.Session) -> None:
    run, config = os.environ.get("VIT_RAY_CI_RUN"), session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not run or reporter is None or hasattr(config, "workerinput"):
        return
    # Outside the checkout, which is new in each run: the test that was run twice, by run.
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file, history = Path(cache) / "vit_ray" / "reruns.json", {}
    with contextlib.suppress(OSError, ValueError):
        history = json.loads(file.read_text())
    history.setdefault(run, None)
    failed = reporter.stats.get("failed", []) + reporter.stats.get("error", [])
    names = list(dict.fromkeys(report.nodeid for report in failed))
    if names and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        reason = refusal(history, run, names)
        if reason is None:
            history[run] = names[0]
            reason = _failure_alone(names[0].removesuffix("@ray"))
        if reason is None:
            session.exitstatus = pytest.ExitCode.OK
            reporter.write_line(f"\n{failed[0].longreprtext}")
            reporter.stats.pop("failed", None)
            reporter.stats.pop("error", None)
            reporter.stats.setdefault("passed", []).extend(failed[:1])
        told = reason or f"failed, and passed when run again alone: {names[0]}"
        reporter.write_line(f"\nrerun: {told}\nrerun: the last {NUM_RUNS} runs are in {file}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dict(list(history.items())[-NUM_RUNS:])))


def _failure_alone(name: str) -> str | None:
    """The end of what pytest prints, or None where the test passes."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--slow=also", name]
    environment = {key: v for key, v in os.environ.items() if key != "VIT_RAY_CI_RUN"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"{name} took more than {LIMIT_S} s when run again alone"
    has_passed = done.returncode == 0 and re.search(r"^(=+ )?1 passed", done.stdout, re.MULTILINE)
    return None if has_passed else done.stdout[-3000:]
