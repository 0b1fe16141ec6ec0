"""What all benchmarks share: rounds in turn, the line of the machine, tables, and the result file.

Of the standard library alone, since some run where torch is and nothing else is installed.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Way = TypeVar("Way")
Found = TypeVar("Found")


def in_turn(ways: Sequence[Way], turn: int) -> list[Way]:
    """All ways, in the order of one round: each round begins with another, so that none always
    follows the same one."""
    first = turn % max(1, len(ways))
    return [*ways[first:], *ways[:first]]


def measure_rounds(
    ways: Iterable[Way], rounds: int, measure: Callable[[Way], Found]
) -> dict[Way, list[Found]]:
    """What each way gave, round by round, by which changes of the machine's pace fall on all."""
    found: dict[Way, list[Found]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way in in_turn(list(found), turn):
            found[way].append(measure(way))
    return found


def measure_apart(command: list[str], **environment: str) -> dict[str, Any]:
    """The last line, JSON, that a process of its own prints.

    Raises:
        CalledProcessError: it failed.
    """
    whole = {**os.environ, **environment}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=whole)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def reason(error: BaseException) -> str:
    """Why a row was not measured, in one cell."""
    return " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:160]


def processor() -> str:
    """Its model, where Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> str:
    """Date, processor and cores."""
    return f"{time.strftime('%Y-%m-%d')}, {processor()}, {os.cpu_count()} cores"


def header(columns: str) -> list[str]:
    """The first two lines of a Markdown table.

    Args:
        columns: their names, with ` | ` between them.
    """
    return [f"| {columns} |", "|---" * (columns.count(" | ") + 1) + "|"]


def finish(text: str, out: Path | None) -> None:
    """Print a result, and keep it in a file if one is given."""
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text.rstrip("\n") + "\n")
