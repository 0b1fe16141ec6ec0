"""Jobs that read trained or published weights, here and in a bucket, and what they do with them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.data.s3_server import serve_s3, this_process_uses
from tests.data.small_sets import write_set
from tests.models.small import (
    FAMILIES,
    TINY_VIT,
    relative_difference,
    small_model,
    some_images,
)
from tests.models.weights import published
from tests.recipes import recipe_with
from tests.trained_runs import tiny_recipe, write_run
from vit_ray.checkpoints import init_weights
from vit_ray.checkpoints.init_weights import open_weights, planned_load, published_use
from vit_ray.commands.trained_model import export, inspect, load_trained_model, read_images
from vit_ray.config import Recipe
from vit_ray.config.training_sections import ModelConfig
from vit_ray.launch.resolved_run import NEW_HEAD, Kind, ResolvedRun, resolve_evaluation
from vit_ray.launch.run import prepared_training
from vit_ray.models import build_model
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.positions import resize_table
from vit_ray.models.weights import load_weights, save_weights
from vit_ray.training.objective import build_objective, normalize


def test_the_averaged_weights_of_a_checkpoint_are_taken_where_it_has_them(tmp_path):
    weight, average = small_model("ViT"), small_model("ViT")
    with torch.no_grad():
        average.head.bias.add_(1)
    recipe = tiny_recipe(tmp_path, init_from=write_run(tmp_path / "run", weight, average))
    for averaged, expected in ((None, average), (False, weight)):
        model, *_ = load_trained_model(recipe, averaged)
        assert torch.equal(model.head.bias, expected.head.bias)


def test_a_model_pre_trained_without_labels_has_a_fresh_head(tmp_path):
    objective = MaskedPatchObjective(small_model("ViT"))
    run = write_run(tmp_path / "run", objective)
    model, report, _ = load_trained_model(tiny_recipe(tmp_path, init_from=run), None)
    assert report.new == ["head.bias", "head.weight"]
    assert report.ignored == ["mask.token", "prediction.bias", "prediction.weight"]
    model.keep_all_tokens()
    expected = objective.model.encode(objective.model.embed(some_images()))
    assert torch.equal(model.encode(model.embed(some_images())), expected)


@pytest.mark.parametrize(("family", "is_objective"), [("ViT", False), ("R+ViT", True)])
def test_positions_of_a_checkpoint_are_taken_for_the_grid_of_its_recipe(
    family, is_objective, tmp_path
):
    # 2 x 8 tokens are as many as 4 x 4, and another picture.
    source = small_model(family, image_size=(16, 64))
    trained = MaskedPatchObjective(source) if is_objective else source
    size = {"name": family, **FAMILIES[family]}
    run = write_run(tmp_path / "run", trained, image_size=[16, 64], **size)
    expected = resize_table(source.positions[0].table.detach(), (2, 8), (4, 4))
    here = tiny_recipe(tmp_path, init_from=run, model={"image_size": 32, **size})
    model, *_ = load_trained_model(here, None)
    assert torch.equal(model.positions[0].table, expected)
    tuned = small_model(family, num_classes=9)
    open_weights(run).load_into(tuned, True)
    assert torch.equal(tuned.positions[0].table, expected)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Path]:
    """The folder that is `s3://models` to this process, by a real S3 server."""
    folder = tmp_path / "buckets" / "models"
    folder.mkdir(parents=True)
    with serve_s3(folder.parent) as port, this_process_uses(port, timeout_s=20):
        yield folder


def cleared() -> nn.Module:
    """The model of `small_model` with zeros for what that draws from its seed."""
    model = small_model("ViT", num_classes=9)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize(
    ("own", "other", "remedy"),
    [
        ({"representation": True}, {"representation": False}, "representation=true"),
        ({"representation": False}, {"representation": True}, "representation=false"),
        ({}, {"pool": "gap"}, "pool=cls"),
    ],
)
def test_a_trained_head_is_not_exported_behind_other_layers_or_as_a_zero_one(
    own, other, remedy, tmp_path
):
    run = write_run(tmp_path / "run", small_model("ViT", **own))
    path = tmp_path / "model.npz"
    recipe = tiny_recipe(tmp_path, init_from=run, export={"path": str(path)})
    with pytest.raises(ValueError, match=f"set model.{remedy} to export the trained head"):
        export(recipe.with_changes(model=other))
    assert not path.exists()
    export(recipe.with_changes(model=own))


@pytest.mark.parametrize(
    ("name", "layout", "place"),
    [("model.npz", "jax", "here"), ("hub", "huggingface", "there"), ("run", None, "there")],
)
def test_every_job_reads_weights_of_every_form_here_and_in_a_bucket(
    name, layout, place, bucket, monkeypatch
):
    source = small_model("ViT", num_classes=9)
    if layout is None:
        write_run(bucket / name, source)
    else:
        save_weights(source, bucket / name, layout)
    # Files larger than a piece are put together again.
    monkeypatch.setattr(init_weights, "_PIECE_BYTES", 10_000)
    path = str(bucket / name) if place == "here" else f"s3://models/{name}"
    exported, report, _ = load_trained_model(tiny_recipe(bucket, init_from=path), None)
    size = ModelConfig(name="ViT", image_size=32, **TINY_VIT)
    planned = planned_load(size, 9, path, False)
    assert (planned.loaded, planned.ignored) == (report.loaded, report.ignored)
    assert report.source.startswith(path)
    trained = cleared()
    open_weights(path).load_into(trained, False)
    for model in (exported, trained):
        assert_equal(model, source)
    exports = {"path": "s3://models/exported", "layout": "huggingface"}
    export(tiny_recipe(bucket, init_from=path, export=exports))
    given = cleared()
    load_weights(given, bucket / "exported")
    assert_equal(given, source)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    tensors = model.state_dict()
    for key, tensor in other.state_dict().items():
        assert torch.equal(tensors[key], tensor), key


def test_weights_of_a_run_with_another_model_are_refused_with_all_keys_that_differ(tmp_path):
    known = {"name": "ViT", "image_size": 32, **TINY_VIT}
    run = write_run(tmp_path / "run", small_model("ViT"), **known)
    changes = {"depth": TINY_VIT["depth"] + 1, "mlp_dim": 96, "image_size": 48, "dropout": 0.5}
    told = "the weights are of model.depth=2, model.mlp_dim=64$"
    with pytest.raises(ValueError, match=told):
        planned_load(ModelConfig(**{**known, **changes}), 9, run, True)
    # Another function of the same tensors.
    heads = small_model("ViT", num_heads=2)
    run = write_run(tmp_path / "heads", heads, **{**known, "num_heads": 2})
    with pytest.raises(ValueError, match=r"step-00000007.*; build it with num_heads=2"):
        load_trained_model(tiny_recipe(tmp_path, init_from=run), None)


def test_figures_of_spread_images_are_written_and_kept_in_mlflow(tmp_path):
    random, folder = np.random.default_rng(0), tmp_path / "pictures"
    for index in range(6):
        path = folder / f"class{index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    (folder / "class0" / "broken.jpg").write_bytes(b"not a picture")

    def inspecting(images: Path, count: int, **more: Any) -> Recipe:
        section = {"images": str(images), "num_images": count, "path": f"{tmp_path}/figures"}
        return tiny_recipe(tmp_path, inspect=section, **more)

    # Of seven files by name, numbers 0, 2 and 4: class0/0, class0/4 and class1/1.
    spread, alone = inspecting(folder, 3), inspecting(folder / "class1", 1)
    read = read_images(spread, spread.inspect)
    assert read.shape == (3, 32, 32, 3)
    np.testing.assert_array_equal(read[2], read_images(alone, alone.inspect)[0])
    run = write_run(tmp_path / "run", small_model("ViT"))
    inspect(inspecting(folder, 5, init_from=run))
    names = {"filters", "position_similarity", "attention_distance", "attention_rollout"}
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == names
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (kept,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert kept.info.status == "FINISHED"
    files = client.list_artifacts(kept.info.run_id, "inspection")
    assert {Path(file.path).stem for file in files} == names


TINY = {"width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 16}
OURS = {"mean": [0.5] * 3, "std": [0.5] * 3}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
CLASSES = ["ant", "bee", "cow"]


def write_published(folder: Path, layout: str) -> tuple[str, dict[str, Any]]:
    """A tiny ViT under the names of a layout, and its arrays under those of the JAX files.

    What stands beside timm's and transformers' files says that inputs are normalised by ImageNet's
    mean and deviation, and that the classes are in another order than the data set's.
    """
    folder.mkdir()
    arrays = published.drawn(published.jax_shapes(TINY, 3, has_representation=False))
    of_jax, weights = folder / "ViT-B_16.npz", folder / "model.safetensors"
    np.savez(of_jax, **arrays)  # type: ignore[arg-type]
    if layout == "jax":
        return str(of_jax), arrays
    model = build_model("ViT", 3, depth=1, **TINY)
    load_weights(model, of_jax)
    of_jax.unlink()
    save_weights(model, weights, layout)
    save_file(load_file(weights), weights, {"format": "pt"})  # without our metadata
    config: dict[str, Any] = {"pretrained_cfg": IMAGENET, "label_names": CLASSES[::-1]}
    if layout == "huggingface":
        config = {"num_attention_heads": 2, "id2label": dict(enumerate(CLASSES[::-1]))}
        told = {f"image_{key}": value for key, value in IMAGENET.items()}
        (folder / "preprocessor_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), arrays


def test_images_are_cropped_as_timm_crops_them(tmp_path):
    (tmp_path / "model.safetensors").touch()
    settings = {"architecture": "vit_base_patch16_224", "num_classes": 3}
    for facts, crop in [
        ({"crop_pct": 0.9}, {"kind": "center_crop", "resize": 248}),  # timm: floor(224 / 0.9)
        ({"crop_pct": 1.0, "crop_mode": "squash"}, {"kind": "resize"}),
    ]:
        settings["pretrained_cfg"] = {"input_size": [3, 224, 224], **facts}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        found = published_use(str(tmp_path / "model.safetensors"))
        assert found is not None
        assert found["data"]["eval_augment"] == crop


@pytest.mark.parametrize("layout", ["jax", "timm", "huggingface"])
def test_a_published_vit_goes_through_every_command(layout, tmp_path):
    path, arrays = write_published(tmp_path / "published", layout)
    data = write_set(tmp_path / "set", [(str(k), [k % 3]) for k in range(6)], CLASSES).path
    recipe = recipe_with(
        "published", output=str(tmp_path / "runs"), init_from=path, optim={"steps": 1},
        model={"name": "ViT", "depth": 1, **TINY}, data={"train": data, "eval": data},
        workers={"num_workers": 1}, train={"global_batch_size": 2, "micro_batch_size": 2},
    )  # fmt: skip
    pixels = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)
    statistics = OURS if layout == "jax" else IMAGENET
    mean, std = (torch.tensor(statistics[key]) for key in ("mean", "std"))
    inputs = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
    expected = published.jax_vit_logits(arrays, inputs, patch=16, depth=1)

    def logits(model: torch.nn.Module) -> Tensor:
        with torch.no_grad():
            return model(normalize(pixels, torch.float32)).double()

    def loaded_by(run: ResolvedRun, kind: Kind) -> torch.nn.Module:
        """The model as a worker builds it."""
        model = build_objective(run.recipe, run.num_classes).eval()
        open_weights(str(run.recipe.init_from)).load_into(model, NEW_HEAD[kind])
        return model

    evaluated = resolve_evaluation(recipe)
    assert relative_difference(logits(loaded_by(evaluated, "evaluate")), expected) < 1e-4
    inspected, *_ = load_trained_model(recipe, None)
    assert relative_difference(logits(inspected), expected) < 1e-4
    with prepared_training(recipe, "finetune") as finetuning:
        tuned = loaded_by(finetuning.resolved, "finetune")
    assert torch.equal(logits(tuned), torch.zeros(2, 3, dtype=torch.float64))  # a new head
    block = dict(inspected.named_parameters())["blocks.0.mlp.expand.weight"]
    assert torch.equal(dict(tuned.named_parameters())["blocks.0.mlp.expand.weight"], block)
    assert evaluated.answers is not None
    assert evaluated.answers.classes == tuple(CLASSES if layout == "jax" else CLASSES[::-1])
