"""What an evaluation takes for right, by the benchmark section and the files that it names."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.small_sets import write_set
from tests.models.small import TINY_VIT, small_model
from tests.recipes import recipe_with
from vit_ray.data.dataset import Manifest
from vit_ray.evaluation.ground_truth import Answers
from vit_ray.launch.prepared_run import PreparedRun, answers_of, prepare_evaluation
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.models.weights import save_weights

CLASSES = [f"n{number:08d}" for number in range(6)]
KEYS = [f"ILSVRC2012_val_{number:08d}" for number in (6, 1, 5, 2, 4, 3)]


@pytest.fixture
def validation(tmp_path: Path) -> Manifest:
    """Six images, image i of class i - 1, in an order of its own and in two row groups."""
    rows = [(key, [int(key[-1]) - 1]) for key in KEYS]
    return write_set(tmp_path / "validation", rows, CLASSES)


def right(answers: Answers, labels: list[int]) -> list[list[int]]:
    batch = np.array(labels, np.int32)[:, None]
    return answers.of_batch(batch, np.arange(len(labels))).tolist()


def test_real_labels_reach_each_image_of_a_set_in_another_order(validation, tmp_path):
    file = tmp_path / "real.json"
    file.write_text(json.dumps([[0], [1, 5], [2], [], [4], [5]]))
    benchmark = {"kind": "imagenet_real", "label_file": str(file)}
    recipe = recipe_with("evaluated", benchmark=benchmark)
    answers = answers_of(recipe, validation, validation)
    found = right(answers, [5, 0, 4, 1, 3, 2])
    assert found == [[5, -1], [0, -1], [4, -1], [1, 5], [-1, -1], [2, -1]]
    evaluated = recipe.with_changes(data={"eval": validation.path})
    prepared = PreparedRun("evaluate", resolve_run(evaluated, needs_train=False), answers=answers)
    assert prepared.num_eval_images == 5  # one has no label
    assert replace(prepared, answers=None).num_eval_images == 6
    some = Answers(tuple(CLASSES), 6, by_class=np.array([[0], [-1], [2], [-1], [-1], [5]]))
    assert replace(prepared, answers=some).num_eval_images == 3  # as ObjectNet's


def test_a_set_of_some_of_the_models_classes_is_evaluated_among_these(validation, tmp_path):
    part = write_set(tmp_path / "part", [("a", [0]), ("b", [1])], [CLASSES[1], CLASSES[4]])
    with pytest.raises(ValueError, match=r"has 2 classes and the model has 6.*kind=class_names"):
        answers_of(recipe_with(), part, validation)
    weights = tmp_path / "weights.npz"
    save_weights(small_model("ViT", num_classes=6), weights)
    recipe = recipe_with(
        data={"eval": part.path}, init_from=str(weights), output=str(tmp_path / "runs"),
        benchmark={"kind": "class_names", "model_classes": validation.path},
        model={"name": "ViT", "image_size": 32, **TINY_VIT},
    )  # fmt: skip
    prepared = prepare_evaluation(recipe)
    assert (prepared.num_classes, prepared.answers.num_outputs) == (6, 6)
    assert prepared.answers.classes == (CLASSES[1], CLASSES[4])


@pytest.mark.parametrize("key", ["id2label", "label_names"])
def test_the_models_class_order_is_known_from_the_folder_of_its_weights(
    validation, tmp_path, key, caplog
):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"")
    config = tmp_path / "hub" / "config.json"
    recipe = recipe_with(init_from=str(tmp_path / "hub"))

    def found(names: list[str]) -> list[list[int]]:
        told = {str(index): name for index, name in enumerate(names)}
        config.write_text(json.dumps({key: told if key == "id2label" else names}))
        return right(answers_of(recipe, validation, validation), [0, 5, 2])

    assert found(CLASSES[::-1]) == [[5], [0], [3]]
    # Other names for the classes, or none, leave the order of the data set.
    in_order = [[0], [5], [2]]
    assert found([f"LABEL_{index}" for index in range(6)]) == in_order
    assert not caplog.text
    assert found(["tench", "goldfish", "shark", "ray", "cock", "hen"]) == in_order
    assert "names its 6 classes otherwise than the data set" in caplog.text
    config.unlink()
    assert right(answers_of(recipe, validation, validation), [0, 5, 2]) == in_order
