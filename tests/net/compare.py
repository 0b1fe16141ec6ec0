"""What differs between two recordings of a part, and which differences are intended."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTENDED = Path(__file__).with_name("intended.toml")
MADE_UP = ("any: 1 != 2", "any: only in the first", "any: only in the second", "+1", "-1")
"""Differences that no entry may name."""


@dataclass
class Intended:
    """Differences of one part that a change makes on purpose."""

    part: str
    pattern: str
    """A regular expression that is searched in the lines of `differences`."""
    issue: str
    reason: str
    is_used: bool = False


def read_intended(file: Path = INTENDED) -> list[Intended]:
    return [Intended(**entry) for entry in tomllib.loads(file.read_text()).get("difference", [])]


def unintended(part: str, before: Any, after: Any, intended: list[Intended]) -> list[str]:
    """The lines of `differences` that no entry covers.

    Raises:
        ValueError: a pattern would cover any difference of the part.
    """
    found = [*differences(before, after, part)]
    covered: set[str] = set()
    for entry in (entry for entry in intended if entry.part == part):
        if any(re.search(entry.pattern, f"{part} > {line}") for line in MADE_UP):
            raise ValueError(
                f"intended.toml: pattern={entry.pattern!r} matches any difference of part {part}; "
                "name what has changed"
            )
        lines = {line for line in found if re.search(entry.pattern, line)}
        entry.is_used |= bool(lines)
        covered |= lines
    return [line for line in found if line not in covered]


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
