"""The few-shot job's figures from files of features, against those of arrays in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.data.small_sets import write_set
from tests.experiments.flows import Parent, in_process
from tests.models.small import TINY_VIT, small_model
from tests.recipes import recipe_with
from vit_ray.commands.trained.features import print_few_shot
from vit_ray.config import Recipe
from vit_ray.data.format.labels import all_first_labels
from vit_ray.evaluate.feature_files import FeatureRows, part_name, write_facts, write_part
from vit_ray.evaluate.few_shot import few_shot_accuracy, neighbor_accuracy, ranks_in_class
from vit_ray.experiments import few_shot_job, training
from vit_ray.experiments.few_shot_job import FewShotRow, measure, run_few_shot, table_csv
from vit_ray.launch.feature_extraction import plan_extraction
from vit_ray.launch.pool.pool_training import RunFailedError
from vit_ray.launch.stopping import RunStoppedError
from vit_ray.models.weights import save_weights
from vit_ray.storage import Location, locate

SHOTS, SEEDS = (1, 5), 2


def write_features(
    folder: Path | str, features: Any, labels: Any, samples: Any, **facts: Any
) -> Location:
    """Files of 100 images, as workers write them."""
    location, names = locate(str(folder)), []
    for first in range(0, len(samples), 100):
        rows = slice(first, first + 100)
        names.append(part_name(first, first + 100, 0, 1))
        keys = [str(sample) for sample in samples[rows]]
        part = FeatureRows(keys, labels[rows], samples[rows], features[rows], None)
        write_part(location, names[-1], [part])
    write_facts(location, {**facts, "is_complete": True, "files": names})
    return location


def few_shot_recipe(**changes: Any) -> Recipe:
    evaluate = {"shots": list(SHOTS), "few_shot_seeds": SEEDS}
    return recipe_with("digits", evaluate=evaluate).with_changes(**changes)


def test_figures_are_those_of_all_features_in_memory(tmp_path: Path) -> None:
    features, labels = load_digits(return_X_y=True)
    features = features.astype(np.float32)
    order = np.random.default_rng(0).permutation(1000)  # workers' files have any order
    pool = write_features(tmp_path / "train", features[order], labels[order], order)
    test = write_features(tmp_path / "test", features[1000:], labels[1000:], np.arange(797))
    rows = measure(few_shot_recipe().evaluate, pool, test, labels[:1000], 10)
    train, tests = (features[:1000], labels[:1000]), (features[1000:], labels[1000:])
    linear = few_shot_accuracy(*train, *tests, num_classes=10, shots=SHOTS, seeds=SEEDS)
    for row, shots in zip(rows, SHOTS, strict=True):
        assert row.shots == shots
        assert np.mean(row.linear) == pytest.approx(linear[shots])
        for seed in range(SEEDS):
            drawn = ranks_in_class(labels[:1000], 10, seed) < shots
            expected = neighbor_accuracy(
                features[:1000][drawn], labels[:1000][drawn], [tests], num_classes=10
            )
            assert row.neighbors[seed] == pytest.approx(expected)


def test_an_image_without_a_feature_is_not_drawn(tmp_path: Path) -> None:
    """Three images a class, of which the first of class 0 could not be decoded."""
    labels = np.repeat([0, 1], 3)
    samples = np.arange(1, 6)
    features = np.where(labels[:, None] == 0, -1.0, 1.0).astype(np.float32)
    pool = write_features(tmp_path / "train", features[1:], labels[1:], samples)
    recipe = few_shot_recipe(evaluate={"shots": [2], "few_shot_seeds": 5})
    (row,) = measure(recipe.evaluate, pool, pool, labels, 2)
    assert row.linear == row.neighbors == [1.0] * 5
    with pytest.raises(ValueError, match="class 0 has 2 examples"):
        measure(few_shot_recipe(evaluate={"shots": [3]}).evaluate, pool, pool, labels, 2)


def test_sets_that_cannot_be_measured_are_refused_before_ray_starts(tmp_path: Path) -> None:
    rows = [(str(i), [i % 2]) for i in range(7)]
    train = write_set(tmp_path / "train", rows, ["ant", "bee"]).path
    other = write_set(tmp_path / "other", rows, ["bee", "ant"]).path
    with pytest.raises(ValueError, match=r"evaluate\.few_shot_train is not set"):
        run_few_shot(few_shot_recipe())
    sets = {"few_shot_train": train, "few_shot_test": other}
    with pytest.raises(ValueError, match="has other classes"):
        run_few_shot(few_shot_recipe(evaluate=sets))
    with pytest.raises(ValueError, match=r"class 1 \('bee'\) has 3 examples.*use shots up to 3"):
        run_few_shot(few_shot_recipe(evaluate={**sets, "few_shot_test": train}))


def test_the_table_has_mean_and_deviation_and_the_csv_every_draw(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = FewShotRow(5, [0.5, 0.7], [0.25, 0.25])
    assert row.metrics() == {
        "few_shot/5_shot_top1": pytest.approx(0.6),
        "few_shot/5_shot_top1_std": pytest.approx(0.1 * 2**0.5),
        "knn/5_shot_top1": 0.25,
        "knn/5_shot_top1_std": 0.0,
    }
    print_few_shot([row])
    assert "60.00% +- 14.14%" in capsys.readouterr().out
    assert table_csv([row]).splitlines()[1:] == ["5,0,0.5,0.25", "5,1,0.7,0.25"]


class Extractions:
    """Stands for the extractions of a job: features that show their class, unless one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        sets = {}
        for part, images in (("train", 6), ("test", 4)):
            rows = [(str(i), [i % 2]) for i in range(images)]
            sets[f"few_shot_{part}"] = write_set(folder / part, rows, ["ant", "bee"]).path
        save_weights(small_model("ViT"), folder / "weights.npz")
        self.recipe = few_shot_recipe(
            output=str(folder / "runs"), init_from=str(folder / "weights.npz"),
            model={"name": "ViT", "image_size": 32, **TINY_VIT},
            evaluate={**sets, "shots": [1]},
        )  # fmt: skip
        self.done: list[str] = []
        self.ends: list[Exception] = []
        """Raised by the next ones."""
        self.earlier: str | None = None
        self.parent = Parent(self.recipe)
        in_process(monkeypatch, self.parent, None)
        monkeypatch.setattr(training, "extract_features", self)
        monkeypatch.setattr(few_shot_job, "open_parent", self.open_parent)
        monkeypatch.setattr(few_shot_job, "earlier_run", lambda one, kind: f"{kind} of {one.name}")
        monkeypatch.setattr(few_shot_job, "is_finished", lambda *_: self.parent.run.is_complete)

    @contextmanager
    def open_parent(self, *arguments: Any, **_: Any) -> Iterator[Parent]:
        self.earlier = arguments[4]
        yield self.parent

    def __call__(self, recipe: Recipe, _: Any) -> Location:
        self.done.append(recipe.name)
        features = plan_extraction(recipe)
        assert not features.are_whole()
        if self.ends:
            write_facts(features.folder, features.facts)
            raise self.ends.pop(0)
        labels = all_first_labels(features.prepared.resolved.manifest.path)
        shown = np.eye(2, dtype=np.float32)[labels]
        order = np.arange(len(labels))
        return write_features(features.folder.uri, shown, labels, order, **features.facts)


@pytest.fixture
def extractions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Extractions:
    return Extractions(monkeypatch, tmp_path)


def test_a_job_extracts_both_sets_once_and_records_what_it_measures(
    extractions: Extractions,
) -> None:
    for _ in range(2):
        result = run_few_shot(extractions.recipe)
        assert result is not None
        assert [row.linear for row in result.rows] == [[1.0] * SEEDS]
    assert extractions.done == ["digits-train", "digits-test"]
    assert extractions.earlier is None  # the second is a record of its own
    calls = extractions.parent.calls
    assert calls.last("results")[1]["few_shot/1_shot_top1"] == 1.0
    assert calls.last("text") == ("few_shot.csv", table_csv(result.rows))
    assert extractions.parent.run.is_complete


def test_an_extraction_that_failed_is_started_again_and_the_other_is_kept(
    extractions: Extractions,
) -> None:
    extractions.ends = [RunFailedError("a node is gone")] * 2
    with pytest.raises(RunFailedError, match="a node is gone"):
        run_few_shot(extractions.recipe)
    assert extractions.done == ["digits-train", "digits-train", "digits-test"]
    assert extractions.parent.calls.kinds() == ["started again"]
    extractions.ends = [RunFailedError("a node is gone")]
    assert run_few_shot(extractions.recipe) is not None
    assert extractions.done[3:] == ["digits-train"] * 2
    assert extractions.earlier == "few_shot of digits-few-shot"


def test_a_job_that_was_stopped_has_no_figures_and_continues_with_what_is_missing(
    extractions: Extractions,
) -> None:
    extractions.ends = [RunStoppedError("on request")]
    assert run_few_shot(extractions.recipe) is None
    assert not extractions.parent.run.is_complete
    assert run_few_shot(extractions.recipe) is not None
    assert extractions.done == ["digits-train", "digits-test", "digits-train"]


def test_features_of_other_weights_are_refused_before_ray_starts(extractions: Extractions) -> None:
    run_few_shot(extractions.recipe)
    resized = extractions.recipe.with_changes(init_resize="bicubic")
    with pytest.raises(ValueError, match="holds features with other settings"):
        run_few_shot(resized)
    assert len(extractions.done) == 2
