"""A run folder that was copied or moved, with or without what lay beside it."""

import shutil
from pathlib import Path

import pytest

from tests.commands.test_fork import write_parent
from tests.launch.test_seen_batch import recipe_on, sets
from vit_ray.launch.named_run import find_run, named_folder, where_it_lies
from vit_ray.storage import locate

__all__ = ["sets"]


def test_a_copy_reads_what_was_copied_with_it_and_else_what_the_run_read(tmp_path):
    first, second = tmp_path / "first", tmp_path / "a" / "second"
    for name in ("runs/digits", "runs/other", "data/train"):
        (first / name).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    recipe = {
        "name": "digits",
        "output": f"{first}/runs",
        "init_from": f"{first}/runs/other",
        "data": {"train": f"{first}/data/train", "eval": f"{tmp_path}/elsewhere"},
        "evaluate": {"few_shot_train": "s3://bucket/set"},
        # As checkpoints of older versions record it.
        "deduplicate": {"evaluation_sets": [f"{first}/data/train", "s3://bucket/set"]},
    }

    def places(folder: Path) -> list[str]:
        found = where_it_lies(recipe, locate(str(folder)))
        assert found["deduplicate"]["evaluation_sets"] == [
            found["data"]["train"],
            "s3://bucket/set",
        ]
        data = found["data"]["train"], found["data"]["eval"], found["evaluate"]["few_shot_train"]
        return [found["output"], found["init_from"], *data]

    here = places(first / "runs" / "digits")
    others = [f"{tmp_path}/elsewhere", "s3://bucket/set"]
    assert here == [f"{first}/runs", f"{first}/runs/other", f"{first}/data/train", *others]
    shutil.copytree(first / "runs" / "digits", tmp_path / "alone")
    assert places(tmp_path / "alone") == here
    shutil.copytree(first, second)
    copied = [f"{second}/runs", f"{second}/runs/other", f"{second}/data/train", *others]
    assert places(second / "runs" / "digits") == copied
    shutil.rmtree(second / "data")
    assert places(second / "runs" / "digits") == [*copied[:2], f"{first}/data/train", *others]
    relative = {"name": "digits", "output": "runs", "data": {"train": "data"}}
    assert where_it_lies(relative, locate(str(first / "runs" / "digits"))) == relative


@pytest.mark.parametrize(("folder", "name"), [("renamed", "renamed"), ("digits (old)", None)])
def test_a_renamed_run_is_found_where_it_lies(folder, name, sets, tmp_path):
    recipe = recipe_on(sets, output=str(tmp_path / "runs"))
    moved = Path(write_parent(recipe)).rename(tmp_path / "runs" / folder)
    found = find_run(str(moved)).recipe
    # A folder whose name is no run's has the run's recorded name.
    assert (found.output, found.name) == (str(tmp_path / "runs"), name or recipe.name)


def test_a_copied_project_is_opened_on_its_own_data(sets, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    plain = recipe_on(sets, output=str(first / "runs"))
    shutil.copytree(str(plain.data.train), first / "data")
    recipe = plain.with_changes(data={"train": str(first / "data")})
    write_parent(recipe)
    first.rename(second)
    found = find_run(str(second / "runs" / recipe.name))
    assert found.resolved.manifest.path == str(second / "data")
    assert found.recipe.output == str(second / "runs")


def test_a_variable_that_names_no_store_is_named_with_the_run(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(ValueError, match=r"^0{32}: uri: a path .*MLFLOW_TRACKING_URI.*mlruns$"):
        named_folder("0" * 32, [])
