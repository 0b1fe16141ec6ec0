"""What workers make of a folder of transformers, against its own ViT: features, accuracy of each
class, few-shot accuracy, and a fine-tuned head.
"""

import csv
import io
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from tests.conftest import Digits
from tests.end_to_end.runs import runs_of, weights_of
from tests.recipes import small_recipe
from vit_ray.commands.train import evaluate
from vit_ray.commands.trained.features import run_few_shot_job
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.images.augmentations import augmentation_of
from vit_ray.data.images.crops import training_crop
from vit_ray.evaluate.feature_files import read_features
from vit_ray.launch import feature_extraction as extraction
from vit_ray.launch.feature_extraction import extract_features
from vit_ray.launch.run import finetune

PROCESSOR = ViTImageProcessor(
    do_resize=False, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
)


def published(recipe: Recipe, folder: Path) -> ViTForImageClassification:
    """A ViT of transformers: other inputs than ours, and classes in another order."""
    size = recipe.model
    config = ViTConfig(
        hidden_size=size.width, intermediate_size=size.mlp_dim, num_hidden_layers=size.depth,
        num_attention_heads=size.num_heads, patch_size=size.patch_size, image_size=size.image_size,
        hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6,
        id2label={k: str(9 - k) for k in range(10)}, label2id={str(9 - k): k for k in range(10)},
    )  # fmt: skip
    torch.manual_seed(3)
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        torch.nn.init.normal_(model.classifier.weight, std=0.5)
    model.save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    return model


def plain_forward(recipe: Recipe, model: Any, path: str) -> tuple[list[str], Any, Any, Any]:
    """Keys, labels, head inputs and logits of every image, in the order of the files."""
    manifest = open_dataset(path)
    tables = [pq.read_table(f"{manifest.root}/{file.path}") for file in manifest.files]
    rows = [row for table in tables for row in table.to_pylist()]
    augmentation = augmentation_of(recipe.model, recipe.data.eval_augment)
    images = [training_crop(row["image"], augmentation, (0, 0, 0)) for row in rows]
    with torch.no_grad():
        found = model(**PROCESSOR(images, return_tensors="pt"), output_hidden_states=True)
        features = model.vit.layernorm(found.hidden_states[-1])[:, 0]
    labels = np.array([row["labels"][0] for row in rows])
    return [row["key"] for row in rows], labels, features.numpy(), found.logits.numpy()


@pytest.mark.slow
@pytest.mark.usefixtures("worker_pool")
def test_workers_write_what_one_forward_gives_and_measure_each_class(
    digits: Digits,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extraction, "ROWS_PER_FILE", 64)
    hub = tmp_path / "hub"
    recipe = small_recipe(
        "features",
        digits,
        tmp_path,
        init_from=str(hub),
        model={"representation": False},
        train={"averaging": 0.0},
        extract={"data": digits.test, "path": str(tmp_path / "features")},
        evaluate={
            "batch_size": 32,
            "few_shot_train": digits.train,
            "few_shot_test": digits.test,
            "shots": [1, 5],
        },
    )
    peer = published(recipe, hub)
    keys, labels, features, logits = plain_forward(recipe, peer, digits.test)
    folder = extract_features(recipe)
    without = {"few_shot_train": None, "few_shot_test": None}
    assert evaluate(recipe.with_changes(evaluate=without)) == 0
    assert run_few_shot_job(recipe) == 0
    frozen = ["embedding", "class_token", "positions", "blocks", "norm"]
    optim = {"frozen": frozen, "learning_rate": 0.1}
    probe = recipe.with_changes(name="probe", optim=optim, evaluate=without)
    probed = finetune(probe)

    columns = ["key", "label", "sample", "feature", "logits"]
    parts = list(read_features(folder, columns))
    found = {c: np.concatenate([part[c] for part in parts]) for c in columns}
    order = np.argsort(found["sample"])
    assert found["key"][order].tolist() == keys
    assert np.array_equal(found["label"][order], labels)
    np.testing.assert_allclose(found["feature"][order], features, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["logits"][order], logits, rtol=1e-4, atol=1e-5)

    # The published weights were the first ones, inputs and all; the new head alone has learned.
    weights = weights_of(probe)
    tuned = features @ weights["head.weight"].numpy().T + weights["head.bias"].numpy()
    accuracy = (tuned.argmax(axis=1) == labels).mean()
    assert probed.metrics["eval/top1"] == pytest.approx(accuracy, abs=1.01 / len(labels))
    assert accuracy > 0.15  # 0.1 is chance, and these features tell little

    # The outputs are in the order that the folder's config.json names.
    right = 9 - logits.argmax(axis=1) == labels
    assert 0.0 < right.mean() < 1.0
    runs = {run.data.tags["vit_ray.kind"]: run for run in runs_of(recipe)}
    assert np.isclose(runs["evaluate"].data.metrics["eval/top1"], right.mean(), atol=1e-6)
    assert "proxy" in capsys.readouterr().out
    mlflow.set_tracking_uri(recipe.tracking.uri)
    (row,) = csv.DictReader(
        io.StringIO(
            mlflow.artifacts.load_text(f"runs:/{runs['evaluate'].info.run_id}/paper/row.csv")
        )
    )
    assert row["label"] == "proxy"
    assert float(row["top-1 %"]) == pytest.approx(100 * right.mean())
    uri = f"runs:/{runs['evaluate'].info.run_id}/evaluation/per_class.csv"
    rows = list(csv.reader(io.StringIO(mlflow.artifacts.load_text(uri))))[1:]
    assert {row[1]: int(row[3]) for row in rows} == {
        str(k): int(right[labels == k].sum()) for k in range(10)
    }
    assert 0.0 < runs["few_shot"].data.metrics["few_shot/5_shot_top1"] < 1.0
    assert 0.0 < runs["few_shot"].data.metrics["knn/1_shot_top1"] < 1.0
