"""Features, few-shot accuracy and accuracy of each class by workers, against one plain forward."""

import csv
import io
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow.parquet as pq
import torch

from tests.conftest import Digits
from tests.end_to_end.runs import runs_of, small_recipe
from vit_ray.commands.features import run_few_shot_job
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.images.crops import training_crop
from vit_ray.evaluate.features import read_features
from vit_ray.launch.extraction import extract_features
from vit_ray.launch.lane import kept_lanes
from vit_ray.launch.preflight import augmentation_of
from vit_ray.launch.run import evaluate
from vit_ray.models import build_model
from vit_ray.models.weights import save_weights
from vit_ray.train.objective import normalize


def plain_forward(recipe: Recipe, model: Any, path: str) -> tuple[list[str], Any, Any, Any]:
    """Keys, labels, head inputs and logits of every image, in the order of the files."""
    manifest = open_dataset(path)
    tables = [pq.read_table(f"{manifest.root}/{file.path}") for file in manifest.files]
    rows = [row for table in tables for row in table.to_pylist()]
    augmentation = augmentation_of(recipe, recipe.data.eval_augment)
    images = np.stack([training_crop(row["image"], augmentation, (0, 0, 0)) for row in rows])
    inputs: list[torch.Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        logits = model.eval()(normalize(torch.from_numpy(images), torch.float32))
    hook.remove()
    labels = np.array([row["labels"][0] for row in rows])
    return [row["key"] for row in rows], labels, inputs[0].numpy(), logits.numpy()


def test_workers_write_what_one_forward_gives_and_measure_each_class(
    digits: Digits, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.safetensors"
    recipe = small_recipe(
        "features",
        digits,
        tmp_path,
        init_from=str(weights),
        train={"averaging": 0.0},
        extract={"data": digits.test, "path": str(tmp_path / "features"), "rows_per_file": 64},
        evaluate={
            "batch_size": 32,
            "few_shot_train": digits.train,
            "few_shot_test": digits.test,
            "shots": [1, 5],
        },
    )
    torch.manual_seed(3)
    config = recipe.model
    model = build_model(config.name, 10, config.image_size, **config.options())
    torch.nn.init.normal_(model.get_parameter("head.weight"), std=0.5)
    save_weights(model, weights, layout="vit_ray")
    keys, labels, features, logits = plain_forward(recipe, model, digits.test)
    with kept_lanes():
        folder = extract_features(recipe)
        metrics = evaluate(
            recipe.with_changes(evaluate={"few_shot_train": None, "few_shot_test": None})
        )
        assert run_few_shot_job(recipe) == 0

    columns = ["key", "label", "sample", "feature", "logits"]
    parts = list(read_features(folder, columns))
    found = {c: np.concatenate([part[c] for part in parts]) for c in columns}
    order = np.argsort(found["sample"])
    assert found["key"][order].tolist() == keys
    assert np.array_equal(found["label"][order], labels)
    np.testing.assert_allclose(found["feature"][order], features, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["logits"][order], logits, rtol=1e-4, atol=1e-5)

    right = logits.argmax(axis=1) == labels
    assert np.isclose(metrics["eval/top1"], right.mean(), atol=1e-6)
    runs = {run.data.tags["vit_ray.kind"]: run for run in runs_of(recipe)}
    mlflow.set_tracking_uri(recipe.tracking.uri)
    uri = f"runs:/{runs['evaluate'].info.run_id}/evaluation/per_class.csv"
    rows = list(csv.reader(io.StringIO(mlflow.artifacts.load_text(uri))))[1:]
    assert [int(row[3]) for row in rows] == [int(right[labels == k].sum()) for k in range(10)]
    assert 0.0 < runs["few_shot"].data.metrics["few_shot/5_shot_top1"] < 1.0
    assert 0.0 < runs["few_shot"].data.metrics["knn/1_shot_top1"] < 1.0
