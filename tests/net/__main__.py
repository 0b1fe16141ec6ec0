"""A net under refactoring: what the code does, recorded before a change and compared after it.

    python -m tests.net record FOLDER [PART ...]    one JSON file for each part, by default all
    python -m tests.net compare A B [PART ...]      prints what differs; exits 1 if anything does
    python -m tests.net mutations [NAME ...]        each mutation must fail its test; exits 1 if not
    python -m tests.net keep                        renews kept/ where a format has changed

PART is order, formats, dry_run, losses, mlflow or faults. Two recordings of one commit on one
machine are equal. `losses` and `mlflow` hold bit-exact floats, which depend on the processor;
`order` and `formats` do not, and are kept in `kept/`.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("kept")
KEPT_PARTS = ["order", "formats"]
ON_RAY = ["mlflow", "faults"]
"""What needs a cluster: pytest starts it, and runs `test_PART` of `on_ray.py`."""
PARTS = [*KEPT_PARTS, "dry_run", "losses", *ON_RAY]


def record(folder: Path, parts: list[str]) -> None:
    """Write `PART.json` for each part."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        start_s = time.monotonic()
        if part in ON_RAY:
            _run_on_ray(part, folder)
        else:
            write_part(folder, part, importlib.import_module(f"tests.net.{part}").record())
        print(f"{part}: {time.monotonic() - start_s:.0f} s", flush=True)


def write_part(folder: Path, part: str, found: Any) -> None:
    """One leaf a line, so that `diff` reads it too."""
    text = json.dumps(found, indent=1, sort_keys=True, default=str)
    (folder / f"{part}.json").write_text(text + "\n")


def _run_on_ray(name: str, folder: Path) -> None:
    test = f"{Path(__file__).with_name('on_ray.py')}::test_{name}"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "VIT_RAY_NET_FOLDER": str(folder.absolute())}
    if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
        sys.exit(f"{name} could not be recorded; pytest says why above")


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """A line for each leaf that is not in both or not the same."""
    if isinstance(one, list) and isinstance(other, list):
        before, after = ([json.dumps(item) for item in items] for items in (one, other))
        for line in difflib.unified_diff(before, after, n=0, lineterm=""):
            if not line.startswith(("---", "+++", "@@")):
                yield f"{name} > {line}"
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            path = f"{name} > {key}" if name else str(key)
            if key in one and key in other:
                yield from differences(one[key], other[key], path)
            else:
                yield f"{path}: only in {'the first' if key in one else 'the second'}"
    elif one != other:
        yield f"{name}: {one!r} != {other!r}"


def compare(first: Path, second: Path, parts: list[str]) -> int:
    """Print the differences; 1 if there are any."""
    one, other = (
        {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
        for folder in (first, second)
    )
    one, other = ({part: each[part] for part in parts if part in each} for each in (one, other))
    found = list(differences(one, other))
    print("\n".join(found) or f"equal: {', '.join(one)}")
    return 1 if found or not one else 0


def main(*words: str) -> int:
    """The command line."""
    match words:
        case ["record", folder, *parts] if set(parts) <= set(PARTS):
            record(Path(folder), parts or PARTS)
        case ["compare", first, second, *parts] if set(parts) <= set(PARTS):
            return compare(Path(first), Path(second), parts or PARTS)
        case ["mutations", *names]:
            return int(importlib.import_module("tests.net.mutations").run(names))
        case ["keep"]:
            _run_on_ray("keep", KEPT)
            record(KEPT, KEPT_PARTS)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
