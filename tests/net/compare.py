"""What differs between two recordings of a part, and which differences are intended."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTENDED = Path(__file__).with_name("intended.toml")


@dataclass
class Intended:
    """Differences of one part that a change makes on purpose."""

    part: str
    pattern: str
    """A regular expression that is searched in the lines of `differences`."""
    issue: str
    reason: str
    is_used: bool = False

    def covers(self, line: str) -> bool:
        is_covered = re.search(self.pattern, line) is not None
        self.is_used |= is_covered
        return is_covered


def read_intended(file: Path = INTENDED) -> list[Intended]:
    """The entries of `intended.toml`."""
    return [Intended(**entry) for entry in tomllib.loads(file.read_text()).get("difference", [])]


def unintended(part: str, before: Any, after: Any, intended: list[Intended]) -> list[str]:
    """The lines of `differences` that no entry covers.

    Raises:
        ValueError: a pattern would cover any difference of the part.
    """
    entries = [entry for entry in intended if entry.part == part]
    for entry in entries:
        if all(re.search(entry.pattern, line) for line in leaves(before, part)):
            raise ValueError(
                f"intended.toml: pattern={entry.pattern!r} matches all of part {part}; "
                "name what has changed"
            )
    found = []
    for line in differences(before, after, part):
        covering = [entry for entry in entries if entry.covers(line)]  # each is then noted as used
        found += [] if covering else [line]
    return found


def leaves(recorded: Any, name: str) -> Iterator[str]:
    """A line for each value, as if it had changed."""
    if isinstance(recorded, dict) and recorded:
        for key, value in recorded.items():
            yield from leaves(value, f"{name} > {key}")
    elif isinstance(recorded, list) and recorded:
        for value in recorded:
            yield f"{name} > -{json.dumps(value)}"
    else:
        yield f"{name}: {recorded!r} != 'another value'"


def differences(one: Any, other: Any, name: str) -> Iterator[str]:
    """A line for each leaf that is not in both or not the same."""
    if isinstance(one, list) and isinstance(other, list):
        before, after = ([json.dumps(item) for item in items] for items in (one, other))
        for line in difflib.unified_diff(before, after, n=0, lineterm=""):
            if not line.startswith(("---", "+++", "@@")):
                yield f"{name} > {line}"
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            path = f"{name} > {key}"
            if key in one and key in other:
                yield from differences(one[key], other[key], path)
            else:
                yield f"{path}: only in the {'first' if key in one else 'second'}"
    elif one != other:
        yield f"{name}: {one!r} != {other!r}"
