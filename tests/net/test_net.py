"""The parts of the net that cost seconds and depend on no processor, and the net itself."""

import json
from pathlib import Path

import pytest

from tests.net import formats, mutations, order
from tests.net.__main__ import KEPT, ROOT, compare, differences, write_part


def test_the_order_of_48_worlds_is_the_kept_one() -> None:
    """Runs resume by it; `python -m tests.net record tests/net/kept order` renews it."""
    found = order.record()
    assert len(found) == 48
    assert list(differences(json.loads((KEPT / "order.json").read_text()), found)) == []
    # The global batches are the same for every number of ranks.
    batches: dict[str, set[str]] = {}
    for world, digests in found.items():
        batches.setdefault(world.partition(", ")[2], set()).add(digests["samples"])
    assert {len(unlike) for unlike in batches.values()} == {1}


def test_a_kept_checkpoint_and_a_kept_data_set_are_read_as_they_were() -> None:
    kept = json.loads((KEPT / "formats.json").read_text())
    assert list(differences(kept, formats.record())) == []


def test_each_mutation_has_one_place_and_a_test_file() -> None:
    known = mutations.read_list()
    assert len(known) >= 40
    assert {one.name: len(one.places()) for one in known} == {one.name: 1 for one in known}
    assert [one.test for one in known if not (ROOT / one.test.partition("::")[0]).is_file()] == []


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
