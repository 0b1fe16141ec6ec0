"""The report of one GPU, from scripts that end, fail, and take too long."""

import argparse
import importlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu

TABLE = "| a | b |\\n|---|---|\\n| 1 | 2 |"
# As torch and NCCL write them.
CUDA_ERROR = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
[rank0]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

[rank0]:[W1122 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called
"""


@pytest.fixture(autouse=True)
def child_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the process id of what a script started, which lives longer than any test."""
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    pid = tmp_path / "pid"
    lives = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    command = f"([{sys.executable!r}, '-c', {lives!r}])"
    child = f"import subprocess; subprocess.run{command}"
    pid.touch()
    waits = f"import os, subprocess; subprocess.Popen{command}"
    waits += f"\nwhile not os.path.getsize({str(pid)!r}): pass"
    bodies = {
        "ends.py": f"print('begun'); print('\\n\\n{TABLE}\\n')",
        "fails.py": f"print('\\n\\n{TABLE}\\n'); raise RuntimeError('no such device')",
        "lacks.py": "import missing",
        "says_nothing.py": "",
        "slow.py": f"print('\\n\\n{TABLE}\\n', flush=True); {child}",
        "silent.py": child,
        "leaves.py": f"print('\\n\\n{TABLE}\\n'); {waits}",
        "asserts.py": f"import sys; sys.stderr.write({CUDA_ERROR!r}); sys.exit(1)",
    }
    for name, body in bodies.items():
        (tmp_path / name).write_text(body)
    return pid


@pytest.mark.parametrize(
    ("name", "has_table", "said"),
    [
        ("ends.py", True, "`python benchmarks/ends.py`"),
        ("fails.py", True, "Ended by `RuntimeError: no such device`; until then:"),
        ("lacks.py", False, "Ended by `ModuleNotFoundError: No module named 'missing'`; no table"),
        ("says_nothing.py", False, "Ended by `exit code 0`; no table yet."),
        (
            "asserts.py",
            False,
            "`torch.AcceleratorError: CUDA error: an illegal memory access was enc",
        ),
    ],
)
def test_a_section_shows_the_last_table_and_why_there_is_no_more(
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
        if timeout == gpu.KILLED_S:
            return plain_wait(process, timeout)
        assert timeout == 7
        wait_until(lambda: bool(child_pid.read_text()))
        raise subprocess.TimeoutExpired(name, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", time_out_once_it_has_begun)
    shown = gpu.run_section([name], 7)
    assert said in shown
    assert ("| 1 | 2 |" in shown) is has_table
    wait_until(lambda: has_ended(int(child_pid.read_text())))


def test_what_a_section_leaves_running_ends_with_it(child_pid: Path) -> None:
    """It would take memory and time from the sections that follow."""
    assert "| 1 | 2 |" in gpu.run_section(["leaves.py"], 60)
    wait_until(lambda: has_ended(int(child_pid.read_text())))


def test_the_section_that_runs_ends_with_a_report_that_is_stopped(
    child_pid: Path, tmp_path: Path
) -> None:
    code = (
        "import pathlib, signal; from benchmarks import gpu; "
        f"gpu.HERE = pathlib.Path({str(tmp_path)!r}); "
        "signal.signal(signal.SIGTERM, gpu._stop); gpu.run_section(['silent.py'], 600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: bool(child_pid.read_text()))
    process.send_signal(signal.SIGTERM)
    assert "stopped" in process.communicate(timeout=60)[1]
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


def test_the_most_valuable_sections_come_first() -> None:
    args = gpu.parser().parse_args([])
    parts = [section.part for section in gpu.sections(args)]
    assert list(dict.fromkeys(parts)) == [
        "model", "switches", "activations", "trainer", "sizes", "memory",
    ]  # fmt: skip
    assert parts[:3] == ["model"] * 3
    scripts = {section.command[0] for section in gpu.sections(args)}
    assert scripts == {
        "model_step.py", "step_switches.py", "activation_memory.py", "train_step.py",
        "input_sizes.py",
    }  # fmt: skip
    assert all((Path(gpu.__file__).parent / script).is_file() for script in scripts)
    assert set(parts) == set(gpu.LEAST_S) == set(gpu.MOST_S)


def test_the_arguments_of_each_section_are_those_of_its_script() -> None:
    """A wrong one would show at the first run alone."""
    for section in gpu.sections(gpu.parser().parse_args([])):
        script = importlib.import_module(f"benchmarks.{section.command[0].removesuffix('.py')}")
        accepted = re.findall(r"--[\w-]+", Path(script.__file__ or "").read_text())
        assert {word for word in section.command if word[:2] == "--"} <= set(accepted)


@pytest.mark.parametrize(
    ("takes_s", "at_least"),
    [
        (lambda number, limit_s: limit_s, 1.0),  # all hang
        (lambda number, limit_s: min(limit_s, 1.0), 1.0),
        (lambda number, limit_s: limit_s if number % 2 else 1.0, 1.0),
        (lambda number, limit_s: limit_s + 2.0, 0.7),  # to end a process takes time
    ],
)
def test_each_section_has_its_least_time_and_all_fit_into_ten_minutes(
    takes_s: Callable[[int, float], float], at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, granted = [1000.0], list[float]()

    def run_section(command: list[str], limit_s: float) -> str:
        granted.append(limit_s)
        now_s[0] += takes_s(len(granted), limit_s)
        return ""

    monkeypatch.setattr(gpu.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(gpu, "run_section", run_section)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    gpu.main()
    parts = [section.part for section in gpu.sections(gpu.parser().parse_args([]))]
    assert len(granted) == len(parts)
    for part, limit_s in zip(parts, granted, strict=True):
        assert at_least * gpu.LEAST_S[part] - 1e-6 <= limit_s <= gpu.MOST_S[part]
    assert now_s[0] <= 1000 + 590  # of 600; those beyond 570 are of processes that end late


def test_what_a_section_does_not_use_goes_to_those_that_follow() -> None:
    parts = ["model", "model", "memory"]
    least_s = sum(gpu.LEAST_S[part] for part in parts)
    assert gpu.granted_s(parts, least_s + 20) == gpu.LEAST_S["model"] + 20
    later_s = least_s + 20 - 5
    assert gpu.granted_s(parts[1:], later_s) == gpu.MOST_S["model"]  # 5 of 125 were used
    assert gpu.granted_s(["memory"], 1e6) == gpu.MOST_S["memory"]
    assert gpu.granted_s(parts, least_s / 2) == gpu.LEAST_S["model"] / 2


def test_scripts_that_all_hang_are_all_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In five seconds, and not ten minutes."""

    def hangs(args: argparse.Namespace) -> Any:
        yield from (gpu.Section(part, f"a {part}", ["silent.py"]) for part in gpu.LEAST_S)

    monkeypatch.setattr(gpu, "sections", hangs)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--total-s", "5"])
    gpu.main()
    printed = capsys.readouterr().out
    assert printed.count("Cut off after ") == len(gpu.LEAST_S)
    assert "Not run" not in printed


REQUIRED_BY_TORCH = {
    "torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath",
    "networkx", "setuptools", "sympy", "typing_extensions", "triton", "nvidia",
}  # fmt: skip
LACKS_THE_REST = f"""
from importlib.machinery import PathFinder

plain = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    found = plain(name, path, target)
    is_known = name.partition(".")[0] in {REQUIRED_BY_TORCH!r} or name.startswith("_")
    places = found and str([found.origin, found.submodule_search_locations])
    return None if found and not is_known and "site-packages" in places else found

PathFinder.find_spec = find_spec
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (
            "model_step.py --models ViT-Ti/16 --modes eager --batch 1 2 --rounds 1 --threads 1",
            ["| vit_ray | [12] | [0-9.]+ | ", "| timm | - | - | .*No module named 'timm' |"],
        ),
        ("activation_memory.py --models ViT-Ti/16 --batch 2", ["| ViT-Ti/16 | 2 | 0.[0-9]+ | no"]),
        (
            "train_step.py --model ViT-Ti/16 --batch 1 --steps 1 --rounds 1 --rows bare zero1",
            ["| bare torch loop | 1 | [0-9.]+ | ", "| loop .*1.* | not run: `.*No module named 'n"],
        ),
        (
            "input_sizes.py --models ViT-Ti/16 --sizes 30 --most 1",
            ["| ViT-Ti/16 | 32 | .* | 1 | 1 "],
        ),
    ],
)
def test_on_a_machine_with_torch_alone_each_part_measures_or_names_what_it_lacks(
    command: str, rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "HERE", Path(gpu.__file__).parent)
    (tmp_path / "sitecustomize.py").write_text(LACKS_THE_REST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shown = gpu.run_section(command.split(), 300)
    for row in rows:
        assert re.search(row.replace("|", r"\|"), shown), shown


def test_a_report_that_cannot_be_written_is_printed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "report.md"  # as in a folder that is only to be read
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out), "--total-s", "0"])
    gpu.main()
    printed = capsys.readouterr()
    assert printed.out.count("Not run: no time was left.") == 10
    assert "Not written: " in printed.err


@pytest.mark.parametrize(
    ("name", "told"),
    [("NVIDIA H200", "MFU is of 989 TFLOP/s"), ("Other 1", "peak rate of Other 1 is not known")],
)
def test_the_report_says_what_mfu_is_of(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert told in gpu.environment_table().splitlines()[0]
    assert "No GPU here" not in gpu.environment_table()


def test_a_gpu_that_torch_does_not_see_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.environment_table().count("nvidia-smi") == 0
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "`nvidia-smi` is here all the same" in gpu.environment_table()
    assert "CUDA_VISIBLE_DEVICES (7)" in gpu.environment_table()
