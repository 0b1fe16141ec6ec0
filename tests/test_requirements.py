"""What pyproject.toml declares and what constraints.txt pins must fit together."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [
    Requirement(text)
    for part in (PROJECT["dependencies"], PROJECT["optional-dependencies"]["dev"])
    for text in part
]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in lines]
    return {canonicalize_name(m[1]): m[2] for m in found if m}


@pytest.mark.parametrize("requirement", DECLARED, ids=[r.name for r in DECLARED])
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    version = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)
