"""What differs between two recordings of a part, and which differences are intended."""

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

INTENDED = Path(__file__).with_name("intended.toml")
MADE_UP = ("any: 1 != 2", "any: only in the first", "any: only in the second", "+1", "-1")
"""Differences that no entry may name."""


def read_intended(file: Path = INTENDED) -> dict[str, dict[str, str]]:
    """Patterns and their reasons, by part."""
    return tomllib.loads(file.read_text())


def unintended(part: str, lines: list[str], patterns: Collection[str]) -> list[str]:
    """Those of the `differences` of a part that no pattern covers.

    Raises:
        ValueError: a pattern would cover any difference of the part.
    """
    for pattern in patterns:
        if any(re.search(pattern, f"{part} > {line}") for line in MADE_UP):
            raise ValueError(
                f"intended.toml: {pattern!r} matches any difference of part {part}; name what has "
                "changed"
            )
    return [line for line in lines if not any(re.search(p, line) for p in patterns)]


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
