"""docs/security.md: the test of each of its rows is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_page_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (?!who|---)(.*) \|$", page, re.M)
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), (file, name)
