"""Our accuracies beside the paper's: never beside a number of another test set, and labelled."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.small_sets import write_set
from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.launch import paper_comparison
from vit_ray.launch.paper_comparison import training_table
from vit_ray.paper import TEST_SETS


@pytest.mark.parametrize(("model", "num_classes", "pretraining", "label", "note", "papers"), [
    ("ViT-L/16", 10, "imagenet21k", "data", "",
     {"paper, Table 2": 99.15, "paper, Table 5": 99.16}),
    ("ViT-L/16", 2, "imagenet21k", "proxy", "not 10000 of 2", {}),
    ("ViT", 10, "imagenet21k", "proxy", "does not have this model", {}),
    ("ViT-L/16", 10, None, "proxy", "paper.pretraining is not set", None),
])  # fmt: skip
def test_a_result_of_the_papers_test_set_model_and_pretraining_is_data_and_any_other_a_proxy(
    model, num_classes, pretraining, label, note, papers, monkeypatch
):
    test = SimpleNamespace(path="cifar10/test", num_images=10_000, num_classes=num_classes)
    monkeypatch.setattr(paper_comparison, "open_dataset", lambda _: test)
    paper = {"task": "cifar10", "pretraining": pretraining}
    tree = {"name": "e", "model": {"name": model}, "data": {"eval": "test"}, "paper": paper}
    ours, *found = training_table(recipe_from_dict(tree, "test"), [0.989, 0.99, 0.991])
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
    monkeypatch.setattr(paper_comparison, "TEST_SETS", small)
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
    benchmark = {"kind": kind, "label_file": "real.json"}
    recipe = imagenet(tmp_path, monkeypatch, benchmark=benchmark, paper=paper)
    table = training_table(recipe, [0.5], kind)
    assert [row["test set"] for row in table[1:]] == shown
    (row,) = training_table(imagenet(tmp_path / "sweep", monkeypatch), [0.5, 0.7])
    assert (row["top-1 %"], row["deviation %"]) == pytest.approx((60, 14.14), abs=0.01)
    assert (row["runs"], row["test set"]) == ("2", "sweep/test")
