"""What users have is what it was at the base revision, for what depends on no processor."""

import contextlib
import json
from pathlib import Path

import pytest

from tests.data.converting import run_in_this_process
from tests.net import mutations
from tests.net.__main__ import KEPT, KEPT_PARTS, compare, record
from tests.net.commands import Result, run_here
from tests.net.compare import differences, unintended
from tests.net.trees import ROOT


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands for data sets do their tasks one after another in this process."""

    def run_commands(folder: Path, commands: list[list[str]], own: None) -> list[Result]:
        with contextlib.chdir(folder):
            return [run_here(words) for words in commands]

    run_in_this_process(monkeypatch)
    monkeypatch.setattr("tests.net.commands.run_commands", run_commands)
    monkeypatch.setattr("vit_ray.commands.datasets.connect", lambda _: None)
    monkeypatch.setattr("vit_ray.commands.datasets.check_shared", lambda *_: None)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("part", KEPT_PARTS)
def test_what_users_have_is_what_was_kept(part, tmp_path):
    record(tmp_path, [part])
    assert compare(KEPT, tmp_path, [part]) == 0


def test_each_mutation_has_one_place_and_a_test():
    known = mutations.read_list()
    assert len(known) >= 40
    assert {one.name: len(one.places()) for one in known} == {one.name: 1 for one in known}
    for one in known:
        file, _, name = one.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()


def test_a_comparison_names_each_difference_but_those_that_are_intended(tmp_path, capsys):
    for name, loss in (("before", 1.5), ("after", 2.5)):
        (tmp_path / name).mkdir()
        found = json.dumps({"ViT": {"step 1": loss, "step 2": 0.5}})
        (tmp_path / name / "losses.json").write_text(found)
    before, after = tmp_path / "before", tmp_path / "after"
    assert compare(before, after, ["losses"]) == 1
    assert "losses > ViT > step 1: 1.5 != 2.5" in capsys.readouterr().out.splitlines()
    assert compare(before, before, ["losses"]) == 0
    assert compare(before, tmp_path / "absent", ["losses"]) == 1
    lines = [*differences({"a": 1, "b": ["c"], "d": 2}, {"a": 1, "b": ["c", "e"]}, "losses")]
    assert lines == ['losses > b > +"e"', "losses > d: only in the first"]
    assert unintended("losses", lines, []) == lines
    assert unintended("losses", lines, ["> d:"]) == lines[:1]
    for pattern in (".*", "^losses", ">", ": ", "only in the first"):
        with pytest.raises(ValueError, match="matches any difference of part losses"):
            unintended("losses", lines, [pattern])
