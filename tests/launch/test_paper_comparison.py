"""Our accuracies beside the paper's: never beside a number of another test set, and labelled."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.small_sets import write_set
from vit_ray.config import Recipe
from vit_ray.config.command_sections import PaperConfig
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.launch.paper_comparison import evaluation_table, result_table, training_table
from vit_ray.paper import TABLE_6, TEST_SETS, table_2, table_5


def test_the_papers_tables_agree_with_one_another():
    longest = {row.name: row.imagenet for row in TABLE_6}
    for model in ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32"):
        assert table_5(model, "jft300m", "imagenet") == pytest.approx(longest[model])
    # Only ImageNet has more (resolution, averaging) in Table 2 than in Table 5.
    for task in ("cifar10", "cifar100", "flowers", "pets"):
        two = table_2("ViT-H/14", "jft300m", task)
        assert two[0] == table_5("ViT-H/14", "jft300m", task)
    assert table_2("ViT-L/16", "imagenet21k", "imagenet") == pytest.approx((0.8530, 0.0002))
    assert table_5("ViT-H/14", "imagenet", "cifar10") is None
    assert table_5("R50x1", "imagenet", "cifar10") is None


def rows_of(ours: dict[str, Any], **paper: Any) -> list[dict[str, str]]:
    found = result_table(PaperConfig(**paper), **ours)
    return [{key: "" if v is None else str(v) for key, v in row.items()} for row in found]


CIFAR: dict[str, Any] = {
    "model": "ViT-L/16", "data": "cifar10/test", "counts": (10_000, 10),
    "top1": [0.989, 0.99, 0.991],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "paper", "note", "num_papers"),
    [
        ({}, {}, "paper.task is not set", 0),
        ({}, {"task": "cifar10"}, "paper.pretraining is not set", 5),
        (
            {"counts": (10_000, 2)},
            {"task": "cifar10", "pretraining": "imagenet21k"},
            "not 10000 of 2",
            0,
        ),
        (
            {"model": "ViT"},
            {"task": "cifar10", "pretraining": "imagenet21k"},
            "does not have this model",
            0,
        ),
    ],
)
def test_a_result_of_the_papers_test_set_model_and_pretraining_is_data_and_any_other_a_proxy(
    changes, paper, note, num_papers
):
    ours, *papers = rows_of(CIFAR, task="cifar10", pretraining="imagenet21k")
    assert (ours["label"], ours["runs"], ours["note"]) == ("data", "3", "")
    measured = float(ours["top-1 %"]), float(ours["deviation %"])
    assert measured == pytest.approx((99.0, 0.1))
    found = {row["row"]: (row["label"], float(row["top-1 %"])) for row in papers}
    assert found == {"paper, Table 2": ("paper", 99.15), "paper, Table 5": ("paper", 99.16)}
    ours, *papers = rows_of({**CIFAR, **changes}, **paper)
    assert ours["label"] == "proxy"
    assert note in ours["note"]
    assert len(papers) == num_papers


def imagenet(folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Recipe:
    write_set(folder / "test", [(str(i), [i % 2]) for i in range(8)], ["a", "b"])
    small = {name: type(one)(one.title, 2, 8) for name, one in TEST_SETS.items()}
    monkeypatch.setattr("vit_ray.launch.paper_comparison.TEST_SETS", small)
    tree = {"name": "e", "model": {"name": "ViT-B/16"}, "data": {"eval": str(folder / "test")}}
    return recipe_from_dict({**tree, **sections}, "test")


@pytest.mark.parametrize(
    ("kind", "task", "shown"),
    [
        ("own_labels", "imagenet", "ImageNet"),
        ("imagenet_real", "imagenet", "ImageNet ReaL"),
        ("imagenet_v2", "imagenet", None),
    ],
)
def test_imagenet_is_told_from_real_by_the_labels_that_are_measured(
    kind, task, shown, tmp_path, monkeypatch
):
    recipe = imagenet(
        tmp_path, monkeypatch, benchmark={"kind": kind},
        paper={"task": task, "pretraining": "imagenet"},
    )  # fmt: skip
    table = evaluation_table(recipe, {"eval/top1": 0.5})
    assert [row["test set"] for row in table[1:]] == ([shown] if shown else [])
    assert evaluation_table(recipe, {"few_shot/5_shot_top1": 0.5}) is None


def test_a_sweep_has_its_mean_its_deviation_and_its_runs(tmp_path, monkeypatch):
    recipe = imagenet(tmp_path, monkeypatch)
    (row,) = training_table(recipe, [0.5, 0.7])
    assert row["top-1 %"] == pytest.approx(60)
    assert row["deviation %"] == pytest.approx(14.14, abs=0.01)
    assert row["runs"] == "2"
    assert row["test set"] == f"{tmp_path.name}/test"
    assert training_table(recipe, [0.5])[0]["deviation %"] is None
