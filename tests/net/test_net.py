"""What users have is what it was at the base revision, for what depends on no processor."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.net import mutations
from tests.net.__main__ import KEPT, PARTS, compare, write_part
from tests.net.compare import Intended, unintended
from tests.net.trees import HERE, ROOT

KEPT_PARTS = sorted(set(PARTS) & {file.stem for file in KEPT.glob("*.json")})


def test_what_users_have_is_what_was_kept(tmp_path: Path) -> None:
    """Recorded by two processes at once; images are converted without Ray."""
    command = [sys.executable, "-m", "tests.net", "record", str(tmp_path)]
    own = {**HERE.environment(), "NET_WITHOUT_RAY": "1"}
    with_data = {"choices", "order", "pixels"}
    halves = [with_data & {*KEPT_PARTS}, {*KEPT_PARTS} - with_data]
    running = [subprocess.Popen([*command, *half], cwd=ROOT, env=own) for half in halves]
    assert [process.wait() for process in running] == [0, 0]
    assert compare(KEPT, tmp_path, KEPT_PARTS) == 0


def test_each_mutation_has_one_place_and_a_test() -> None:
    known = mutations.read_list()
    assert len(known) >= 40
    assert {one.name: len(one.places()) for one in known} == {one.name: 1 for one in known}
    for one in known:
        file, _, name = one.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()


def test_a_comparison_names_each_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, loss, tags in (("before", 1.5, ["a"]), ("after", 2.5, ["a", "b"])):
        (tmp_path / name).mkdir()
        write_part(tmp_path / name, "losses", {"ViT": {"step 1": loss, "step 2": 0.5}})
        write_part(tmp_path / name, "mlflow", {"tags": tags})
    before, after = tmp_path / "before", tmp_path / "after"
    assert compare(before, after, ["losses", "mlflow"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "losses > ViT > step 1: 1.5 != 2.5",
        'mlflow > tags > +"b"',
    ]
    assert compare(before, before, ["losses", "mlflow"]) == 0
    assert compare(before, tmp_path / "absent", ["losses"]) == 1


def test_an_intended_difference_is_covered_and_a_whole_part_is_refused() -> None:
    before, after = {"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 2}}
    lines = ["losses > b > d: only in the first"]
    assert unintended("losses", before, after, []) == lines
    assert unintended("losses", before, after, [Intended("losses", "> d:", "60", "left")]) == []
    assert unintended("losses", before, after, [Intended("mlflow", "> d:", "60", "left")]) == lines
    for pattern in (".*", "^losses", ">", ": "):
        with pytest.raises(ValueError, match="matches all of part losses"):
            unintended("losses", before, after, [Intended("losses", pattern, "60", "left")])
