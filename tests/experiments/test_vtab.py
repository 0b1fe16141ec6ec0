"""VTAB's tasks under one parent run: none is dropped, and means are of whole groups."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.small_sets import keys_of, write_set
from tests.experiments.trials_here import in_process, parent_of, result_of
from tests.models.small import TINY_VIT, small_model
from tests.recipes import recipe_with
from vit_ray.commands import trainings
from vit_ray.config import Recipe, load_recipe
from vit_ray.data import open_dataset
from vit_ray.experiments import sweep, vtab
from vit_ray.experiments.vtab import TaskResult, run_vtab, task_recipe, vtab_metrics, vtab_table
from vit_ray.launch.run import RunResult
from vit_ray.models.weights import save_weights
from vit_ray.outcomes import RunFailedError
from vit_ray.paper import VTAB_TASKS

# Appendix F of BiT, arXiv:1912.11370.
NO_FLIPS = {"dspr-ori", "dspr-loc", "snorb-azim"}
NO_CROPS = {"clevr-count", "clevr-dist", "dmlab", "kitti-dist", "dspr-loc"}
# Means that the paper prints: Table 9's last column, and the last column of Table 2.
PAPERS_MEANS = {"ViT-H/14 (JFT)": 77.6, "ViT-L/16 (JFT)": 76.3, "ViT-L/16 (I21k)": 72.7}


def test_the_shipped_recipe_has_the_papers_tasks_groups_setting_and_exceptions():
    recipe = load_recipe("vtab_1k")
    tasks = recipe.vtab.tasks
    assert tuple(task.name for task in tasks) == VTAB_TASKS
    groups = [task.group for task in tasks]
    assert groups == ["natural"] * 7 + ["specialized"] * 4 + ["structured"] * 8
    assert (recipe.optim.learning_rate, recipe.optim.steps) == (0.01, 2500)
    assert recipe.model.image_size == 384
    for task in tasks:
        augment = task_recipe(recipe, task).data.augment
        assert augment.flip == (task.name not in NO_FLIPS), task.name
        assert (augment.kind == "resize") == (task.name in NO_CROPS), task.name
        assert augment.resize == recipe.data.augment.resize
    assert task_recipe(recipe, tasks[0]).data.train == "s3://BUCKET/vtab/caltech101/train"


def small_vtab(folder: Path, present: tuple[str, ...], images: int = 8) -> Recipe:
    for task in present:
        for part in ("train", "test"):
            rows = [(str(i), [i % 2]) for i in range(images)]
            write_set(folder / "vtab" / task / part, rows, ["a", "b"])
    save_weights(small_model("ViT"), folder / "weights.npz")
    groups = {"pets": "natural", "svhn": "natural", "eurosat": "specialized", "dmlab": "structured"}
    tasks = [{"name": name, "group": group} for name, group in groups.items()]
    return recipe_with(
        "v", output=str(folder / "runs"), init_from=str(folder / "weights.npz"),
        model={"name": "ViT", "image_size": 32, **TINY_VIT}, optim={"steps": 2},
        train={"global_batch_size": 4, "micro_batch_size": 4},
        vtab={"data": str(folder / "vtab"), "tasks": tasks},
    )  # fmt: skip


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parent of the tasks, and what stands for their trainings: nothing is started."""
    parent, calls = parent_of(recipe_with("v"))
    kept = SimpleNamespace(parent=parent, calls=calls, train=None, trainings=[])
    in_process(monkeypatch, lambda recipe, **keys: kept.train(recipe, **keys))

    def opened(*arguments: Any) -> Any:
        kept.trainings = [one.name for one in arguments[-1]]
        return nullcontext(parent)

    monkeypatch.setattr(vtab, "open_parent", opened)
    monkeypatch.setattr(sweep, "open_parent", lambda *_, **__: nullcontext(parent))
    return kept


def test_tasks_that_are_absent_or_fail_are_rows_and_leave_their_means_open(
    tmp_path, record, capsys, monkeypatch
):
    def train(recipe: Recipe, **_: Any) -> RunResult:
        if recipe.name == "v-dmlab":
            raise RunFailedError("no memory\ntrace")
        if recipe.name == "v-eurosat":
            raise ValueError("the data are damaged")
        return result_of(recipe, 2, 2, top1=0.5)

    record.train = train
    monkeypatch.setenv("COLUMNS", "200")
    result = run_vtab(small_vtab(tmp_path, ("pets", "eurosat", "dmlab")))
    assert [row.error for row in result.rows] == [
        "", "absent: no converted data", "failed: the data are damaged", "failed: no memory"
    ]  # fmt: skip
    assert not result.published.is_complete
    assert not record.parent.run.is_complete
    assert record.calls.results.call_args.args[1] == {"vtab/pets_top1": 0.5, "vtab/tasks": 1.0}
    note, text = record.calls.tag.call_args.args
    assert note == "mlflow.note.content"
    assert text.startswith("Of 4 tasks, 1 have an accuracy; their mean is 50.00%\n\n")
    pets, absent = result.table[:2]
    assert (pets["ours, top-1 %"], pets["paper: ViT-H/14 (JFT) %"]) == (50.0, 97.2)
    assert pets["label"] == "proxy"  # of 8 images, not of 1,000
    assert (absent["label"], absent["note"]) == ("", "absent: no converted data")
    monkeypatch.setattr(trainings, "run_vtab", lambda _: result)
    assert trainings.vtab(recipe_with("v")) == 1
    assert "absent" in capsys.readouterr().out


def test_a_mean_is_of_all_its_tasks_and_beside_the_papers():
    recipe = load_recipe("vtab_1k")
    rows = [TaskResult(task, top1=0.5, num_images=1000) for task in recipe.vtab.tasks]
    table = vtab_table(rows, True)
    titles = ["mean of natural", "mean of specialized", "mean of structured", "mean"]
    assert [line["task"] for line in table[len(rows) :]] == titles
    assert table[-1]["ours, top-1 %"] == 50.0
    for name, mean in PAPERS_MEANS.items():
        assert table[-1][f"paper: {name} %"] == pytest.approx(mean, abs=0.06)
    found = vtab_metrics(rows)
    assert next(iter(found)) == "eval/top1"  # what MLflow's pages show first
    assert found["eval/top1"] == found["vtab/mean_top1"] == 0.5
    assert {line["label"] for line in table} == {"data"}
    assert {line["label"] for line in vtab_table(rows, False)} == {"proxy"}  # another model
    # Without a task of the natural ones, or with one of the user's own instead.
    own = replace(rows[0], task=rows[0].task.model_copy(update={"name": "mine"}))
    for others in (rows[1:], [own, *rows[1:]], [replace(rows[0], top1=None), *rows[1:]]):
        found = vtab_table(others, True)[len(others) :]
        assert [line["task"] for line in found] == titles[1:3]
        assert "vtab/natural_top1" not in vtab_metrics(others)


def test_each_task_may_choose_its_point_on_a_fifth_of_its_images(tmp_path, record):
    """The trainings are faked; the split, the choice and the table are as they are."""
    trials: dict[str, Recipe] = {}
    tagged: set[tuple[str, str]] = set()

    def train(recipe: Recipe, *, tags: dict[str, str], **_: Any) -> RunResult:
        trials[recipe.name] = recipe
        tagged.add((tags["vit_ray.sweep_stage"], tags["vit_ray.vtab_task"]))
        # SVHN prefers the small rate.
        rate = recipe.optim.learning_rate
        top1 = 0.5 + (-rate if "svhn" in recipe.name else rate) + 0.01 * recipe.seed
        return result_of(recipe, 2, 2, top1=top1)

    record.train = train
    swept = {"learning_rates": [0.1, 0.2], "dev_fraction": 0.2, "seeds": 2}
    recipe = small_vtab(tmp_path, ("pets", "svhn"), images=30).with_changes(sweep=swept)
    each = recipe.with_changes(vtab={"sweep_each": True})
    with pytest.raises(ValueError, match=r"v-pets: its fine-tunings run one after another"):
        run_vtab(each.with_changes(sweep={"scheduler": "asha"}))
    result = run_vtab(each)
    assert record.trainings == ["v-pets", "v-svhn"]  # as the cluster is checked for them
    pets, svhn = result.rows[:2]
    assert (pets.chosen, svhn.chosen) == ("learning_rate=0.2", "learning_rate=0.1")
    assert pets.top1 == pytest.approx(0.705)
    assert pets.deviation == pytest.approx(0.01 / 2**0.5)
    stages = ("sweep_trial", "finetune")
    assert tagged == {(kind, task) for task in ("pets", "svhn") for kind in stages}
    of_pets = [one for name, one in trials.items() if name.startswith("v-pets")]
    counts = [open_dataset(str(one.data.train)).num_images for one in of_pets]
    assert counts == [24, 24, 30, 30]
    assert result.table[0]["chosen"] == "learning_rate=0.2"
    # Without it, the recipe's own rate is trained with once.
    assert task_recipe(recipe, recipe.vtab.tasks[0]).sweep is None  # type: ignore[union-attr]


def test_a_task_with_more_classes_than_its_split_has_images_is_split_800_to_200(tmp_path):
    """As Sun397: 1,000 images of 397 classes."""
    recipe = small_vtab(tmp_path, ())
    labels = np.random.default_rng(0).permutation(np.arange(1000) % 397)
    rows = [(f"{k}", [int(label)]) for k, label in enumerate(labels)]
    for part in ("train", "test"):
        write_set(tmp_path / "vtab" / "pets" / part, rows, [f"c{k:03d}" for k in range(397)])
    recipe = recipe.with_changes(sweep={"learning_rates": [0.1], "dev_fraction": 0.2})
    each = recipe.with_changes(vtab={"sweep_each": True})
    plan = sweep.plan_sweep(task_recipe(each, each.vtab.tasks[0]), by_class=False)
    (trial,) = plan.trials
    parts = [open_dataset(str(path)) for path in (trial.data.train, trial.data.eval)]
    assert [part.num_images for part in parts] == [800, 200]
    assert sorted([*keys_of(parts[0]), *keys_of(parts[1])]) == sorted(key for key, _ in rows)
