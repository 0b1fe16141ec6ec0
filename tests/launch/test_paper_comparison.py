"""Our accuracies beside the paper's: never beside a number of another test set, and labelled."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.small_sets import write_set
from vit_ray.config import Recipe
from vit_ray.config.command_sections import PaperConfig
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.launch.paper_comparison import evaluation_table, result_table, training_table
from vit_ray.paper import TEST_SETS

CIFAR: dict[str, Any] = {
    "model": "ViT-L/16", "data": "cifar10/test", "counts": (10_000, 10),
    "top1": [0.989, 0.99, 0.991],
}  # fmt: skip


@pytest.mark.parametrize(("changes", "pretraining", "label", "note", "papers"), [
    ({}, "imagenet21k", "data", "", {"paper, Table 2": 99.15, "paper, Table 5": 99.16}),
    ({"counts": (10_000, 2)}, "imagenet21k", "proxy", "not 10000 of 2", {}),
    ({"model": "ViT"}, "imagenet21k", "proxy", "does not have this model", {}),
    ({}, None, "proxy", "paper.pretraining is not set", None),
])  # fmt: skip
def test_a_result_of_the_papers_test_set_model_and_pretraining_is_data_and_any_other_a_proxy(
    changes, pretraining, label, note, papers
):
    config = PaperConfig(task="cifar10", pretraining=pretraining)
    ours, *found = result_table(config, **{**CIFAR, **changes})
    assert (ours["label"], ours["runs"]) == (label, "3")
    assert note in (ours["note"] or "")
    assert bool(ours["note"]) == (label == "proxy")
    assert (ours["top-1 %"], ours["deviation %"]) == pytest.approx((99.0, 0.1))
    if papers is None:
        assert len(found) == 5
    else:
        assert {row["row"]: float(row["top-1 %"]) for row in found} == papers
    assert {row["label"] for row in found} <= {"paper"}


def imagenet(folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Recipe:
    write_set(folder / "test", [(str(i), [i % 2]) for i in range(8)], ["a", "b"])
    small = {name: type(one)(one.title, 2, 8) for name, one in TEST_SETS.items()}
    monkeypatch.setattr("vit_ray.launch.paper_comparison.TEST_SETS", small)
    tree = {"name": "e", "model": {"name": "ViT-B/16"}, "data": {"eval": str(folder / "test")}}
    return recipe_from_dict({**tree, **sections}, "test")


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("own_labels", ["ImageNet"]), ("imagenet_real", ["ImageNet ReaL"]), ("imagenet_v2", [])],
)
def test_imagenet_is_told_from_real_by_the_labels_that_are_measured(
    kind, shown, tmp_path, monkeypatch
):
    paper = {"task": "imagenet", "pretraining": "imagenet"}
    recipe = imagenet(tmp_path, monkeypatch, benchmark={"kind": kind}, paper=paper)
    table = evaluation_table(recipe, {"eval/top1": 0.5})
    assert [row["test set"] for row in table[1:]] == shown
    assert evaluation_table(recipe, {"few_shot/5_shot_top1": 0.5}) is None
    (row,) = training_table(imagenet(tmp_path / "sweep", monkeypatch), [0.5, 0.7])
    assert (row["top-1 %"], row["deviation %"]) == pytest.approx((60, 14.14), abs=0.01)
    assert (row["runs"], row["test set"]) == ("2", "sweep/test")
