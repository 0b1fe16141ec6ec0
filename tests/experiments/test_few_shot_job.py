"""The few-shot job's figures from files of features, against those of arrays in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.data.small_sets import write_set
from tests.recipes import recipe_with
from vit_ray.commands.trained.features import print_few_shot
from vit_ray.config import Recipe
from vit_ray.evaluate.feature_files import FeatureRows, part_name, write_facts, write_part
from vit_ray.evaluate.few_shot import few_shot_accuracy, neighbor_accuracy, ranks_in_class
from vit_ray.experiments.few_shot_job import FewShotRow, measure, run_few_shot, table_csv
from vit_ray.storage import Location, locate

SHOTS, SEEDS = (1, 5), 2


def write_features(folder: Path, features: Any, labels: Any, samples: Any) -> Location:
    """Files of 100 images, as workers write them."""
    location, names = locate(str(folder)), []
    for first in range(0, len(samples), 100):
        rows = slice(first, first + 100)
        names.append(part_name(first, first + 100, 0, 1))
        keys = [str(sample) for sample in samples[rows]]
        part = FeatureRows(keys, labels[rows], samples[rows], features[rows], None)
        write_part(location, names[-1], [part])
    write_facts(location, {"is_complete": True, "files": names})
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
    rows = measure(few_shot_recipe(), pool, test, labels[:1000], 10)
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
    (row,) = measure(recipe, pool, pool, labels, 2)
    assert row.linear == row.neighbors == [1.0] * 5
    with pytest.raises(ValueError, match="class 0 has 2 examples"):
        measure(few_shot_recipe(evaluate={"shots": [3]}), pool, pool, labels, 2)


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
