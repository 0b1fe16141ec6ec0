"""A training's result as MLflow loads it: against the model itself, and MLflow's own format."""

from __future__ import annotations

import io
import json
import math
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlflow
import numpy as np
import pytest
import torch
import yaml
from mlflow.models.signature import ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types.schema import ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.utils.environment import _PythonEnv
from PIL import Image

from tests.models.small import TINY_VIT, small_model
from tests.newcomer.follow import blocks
from tests.trained_runs import tiny_recipe, write_run
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.recorded_recipe import used_sections
from vit_ray.data.augment import augmentation_of
from vit_ray.data.crops import crop_of
from vit_ray.launch.record import mlflow_model
from vit_ray.launch.record.mlflow_model import card_of, model_files
from vit_ray.launch.run import RunResult, _log_model
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker, replay

ROOT = Path(__file__).parents[3]
METRICS = {"eval/top1": 0.75, "few_shot/5_shot_top1": 0.5}
DATA = {
    "name": "test", "digest": "5" * 32, "source": "data/test", "context": "evaluation",
    "profile": {"num_images": 300},
}  # fmt: skip
CLASSES = ["cat", "dog", "emu", "fox", "gnu"]
(TWO_LINES,) = (
    block.text
    for block in blocks(ROOT / "docs" / "fine_tuning.md")
    if "pyfunc.load_model" in block.text
)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Any, torch.nn.Module, str]:
    """A recipe, its model, and the address of the model's checkpoint; a store with a schema."""
    model = small_model("ViT").eval()
    trained = {"name": "small", "model": {"name": "ViT", "image_size": 32, **TINY_VIT}}
    run = write_run(tmp_path / "runs" / "small", model, facts={"recipe": trained})
    (checkpoint,) = Path(run).glob("step-*")
    recipe = tiny_recipe(
        tmp_path, data={"eval_augment": {"kind": "center_crop"}}, train={"precision": "fp32"}
    )
    return recipe, model, str(checkpoint)


def pictures(side: int = 48) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (70, side, side + 8, 3), dtype=np.uint8)


def logits_of(recipe: Any, model: torch.nn.Module, images: np.ndarray) -> np.ndarray:
    """As an evaluation has them: files without loss, cut by the data room."""
    crops = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        augmentation = augmentation_of(recipe.model, recipe.data.eval_augment)
        crops.append(crop_of(file.getvalue(), augmentation, (0, 0, 0)))
    pixels = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        return model(pixels).numpy()


def files_of(recipe: Any, checkpoint: str) -> dict[str, str]:
    return model_files(used_sections(recipe.recorded()), CLASSES, checkpoint)


def record(
    recipe: Any, checkpoint: str, register_as: str | None = None, is_sent: bool = True
) -> str:
    """Id of a run that has logged the model, as a training does it."""
    opening = RunOpening(
        recipe.tracking.model_copy(update={"system_metrics": False}),
        recipe.name,
        Path(recipe.run_folder) / "metrics.jsonl",
        datasets=[DATA],
    )
    tracker = Tracker.start(opening)
    files = files_of(recipe, checkpoint)
    tracker.log.metrics(7, METRICS)
    measured = {**METRICS, "train/loss": 0.5, "eval/loss": math.inf}
    tracker.log.model(files, recipe.name, 7, {"checkpoint": checkpoint}, register_as, measured)
    assert tracker.finish("FINISHED") is is_sent
    run_id = tracker.run_id
    assert run_id is not None
    return run_id


@pytest.mark.slow
def test_a_fresh_process_gets_the_models_logits_from_uint8_images(
    trained: Any, tmp_path: Path
) -> None:
    recipe, model, checkpoint = trained
    run_id = record(recipe, checkpoint, register_as="tiny")
    run = MlflowClient(recipe.tracking.uri).get_run(run_id)
    (output,) = run.outputs.model_outputs
    np.save(tmp_path / "images.npy", pictures())
    expected = logits_of(recipe, model, pictures())
    script = "import sys\nimport numpy as np\nimages = np.load('images.npy')\n"
    for uri, file in ((f"models:/{output.model_id}", "logged"), ("models:/tiny/1", "registered")):
        script += TWO_LINES.replace("models:/NAME/1", uri) + f"np.save('{file}', logits)\n"
    script += "assert 'ray' not in sys.modules"  # whoever uses a model starts nothing
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    for file in ("logged.npy", "registered.npy"):
        found = np.load(tmp_path / file)
        assert (found.dtype, found.shape) == (np.float32, (70, 5))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_no_weights_are_copied(trained: Any, tmp_path: Path) -> None:
    recipe, _, checkpoint = trained
    record(recipe, checkpoint)
    kept = [path for path in (tmp_path / "mlruns").rglob("*") if path.is_file()]
    assert "MLmodel" in {path.name for path in kept}
    wheels = [path for path in kept if path.suffix == ".whl"]
    assert [path.parent.name for path in wheels] == ["wheels"]
    assert sum(path.stat().st_size for path in kept if path not in wheels) < 20_000


def test_the_model_has_its_metrics_with_their_data_set_and_its_run_has_each_once(
    trained: Any,
) -> None:
    recipe, _, checkpoint = trained
    run_id = record(recipe, checkpoint)
    client = MlflowClient(recipe.tracking.uri)
    (output,) = client.get_run(run_id).outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    found = {one.key: (one.value, one.step, one.dataset_name) for one in model.metrics}
    assert found == {
        "eval/top1": (0.75, 7, "test"),
        "few_shot/5_shot_top1": (0.5, 7, "test"),
    }
    for key in METRICS:
        assert len(client.get_metric_history(run_id, key)) == 1


def test_the_environment_names_the_wheel_beside_it_and_nothing_that_nobody_owns(
    trained: Any, tmp_path: Path
) -> None:
    recipe, _, checkpoint = trained
    run_id = record(recipe, checkpoint)
    mlflow.set_tracking_uri(recipe.tracking.uri)
    (output,) = MlflowClient(recipe.tracking.uri).get_run(run_id).outputs.model_outputs
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{output.model_id}"))
    lines = (folder / "requirements.txt").read_text().splitlines()
    wheel = f"wheels/vit_ray-{version('vit-ray')}-py3-none-any.whl"
    assert lines == [f"mlflow=={version('mlflow')}", wheel]
    assert (folder / wheel).is_file()
    # MLflow's own reading of what it builds an environment from.
    read = _PythonEnv.from_yaml(str(folder / "python_env.yaml"))
    assert read.dependencies == ["-r requirements.txt"]
    assert read.python == platform.python_version()


def test_the_card_is_a_file_of_the_model_and_its_description(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, checkpoint = trained
    card = card_of(recipe, CLASSES, checkpoint)
    assert "5 classes, images of 32 x 32 pixels" in card
    assert "| steps | 7 of 2 images |" in card
    assert 'params={"output": "classes"}' in card
    files = {**files_of(recipe, checkpoint), "README.md": card}
    opening = RunOpening(recipe.tracking, "x", Path(recipe.run_folder) / "metrics.jsonl")
    tracker = Tracker.start(opening)
    tracker.log.model(files, "x", 7, {}, None)
    assert tracker.finish()
    client = MlflowClient(recipe.tracking.uri)
    (output,) = client.get_run(str(tracker.run_id)).outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert model.tags["mlflow.note.content"] == card
    (kept,) = (tmp_path / "mlruns").rglob("README.md")
    assert kept.read_text() == card
    assert card_of(recipe, CLASSES, str(tmp_path / "nothing")) == ""
    # A storage that fails at this moment must not fail the training.
    unreachable = Mock(side_effect=OSError("S3 does not answer"))
    monkeypatch.setattr(mlflow_model, "open_checkpoint", unreachable)
    assert card_of(recipe, CLASSES, checkpoint) == ""


def test_the_folder_is_as_mlflow_itself_writes_it(trained: Any, tmp_path: Path) -> None:
    recipe, _, checkpoint = trained
    ours = tmp_path / "ours"
    ours.mkdir()
    for name, text in files_of(recipe, checkpoint).items():
        (ours / name).write_text(text)
    example = np.array(json.loads((ours / "input_example.json").read_text()), np.uint8)
    signature = ModelSignature(
        Schema([TensorSpec(np.dtype("uint8"), (-1, -1, -1, 3))]),
        Schema([TensorSpec(np.dtype("float32"), (-1, 5))]),
        ParamSchema([ParamSpec("output", "string", "logits")]),
    )
    signature._is_signature_from_type_hint = True
    mlflow.pyfunc.save_model(
        tmp_path / "theirs",
        loader_module="vit_ray.launch.record.mlflow_model",
        data_path=str(ours / "reference.json"),
        model_config={"checkpoint": checkpoint},
        signature=signature,
        input_example=example,
        pip_requirements=["vit-ray"],
    )
    mine, theirs = (
        yaml.safe_load((tmp_path / one / "MLmodel").read_text()) for one in ("ours", "theirs")
    )
    shown = ("signature", "is_signature_from_type_hint", "saved_input_example_info")
    for key in (*shown, "mlflow_version"):
        assert mine[key] == theirs[key]
    flavor, other = (one["flavors"]["python_function"] for one in (mine, theirs))
    for key in ("loader_module", "config", "python_version"):
        assert flavor[key] == other[key]
    for name in ("input_example.json", "serving_input_example.json"):
        told = (json.loads((tmp_path / one / name).read_text()) for one in ("ours", "theirs"))
        assert next(told) == next(told)


def test_a_model_that_is_sent_again_is_logged_and_registered_once(
    trained: Any, tmp_path: Path
) -> None:
    recipe, _, checkpoint = trained
    run_id = record(recipe, checkpoint, register_as="tiny")
    done = replay(Path(recipe.run_folder) / "metrics.jsonl", recipe.tracking.uri)
    assert done.refused == []
    client = MlflowClient(recipe.tracking.uri)
    run = client.get_run(run_id)
    assert len(client.search_logged_models([run.info.experiment_id])) == 1
    assert len(run.outputs.model_outputs) == 1
    (version,) = client.search_model_versions("name = 'tiny'")
    model = client.get_logged_model(run.outputs.model_outputs[0].model_id)
    assert (version.run_id, version.source) == (run_id, model.artifact_location)


def test_what_was_cut_off_before_its_files_were_there_is_finished(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, checkpoint = trained
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "log_model_artifacts", lambda *_: 1 / 0)
        record(recipe, checkpoint, is_sent=False)
    client = MlflowClient(recipe.tracking.uri)
    experiment = client.get_experiment_by_name("vit_ray")
    (begun,) = client.search_logged_models([experiment.experiment_id])
    assert begun.status == "PENDING"
    replay(Path(recipe.run_folder) / "metrics.jsonl", recipe.tracking.uri)
    (model,) = client.search_logged_models([experiment.experiment_id])
    assert (model.model_id, model.status) == (begun.model_id, "READY")


def test_a_checkpoint_that_is_gone_is_named_and_a_moved_one_can_be_given(
    trained: Any, tmp_path: Path
) -> None:
    recipe, model, checkpoint = trained
    run_id = record(recipe, checkpoint)
    moved = Path(checkpoint).parents[2] / "elsewhere"
    Path(checkpoint).rename(moved)
    mlflow.set_tracking_uri(recipe.tracking.uri)
    (output,) = MlflowClient(recipe.tracking.uri).get_run(run_id).outputs.model_outputs
    uri = f"models:/{output.model_id}"
    with pytest.raises(ValueError, match=rf"refers to the checkpoint {checkpoint}, which cannot"):
        mlflow.pyfunc.load_model(uri)
    found = mlflow.pyfunc.load_model(uri, model_config={"checkpoint": str(moved)})
    images = pictures()[:2]
    np.testing.assert_allclose(found.predict(images), logits_of(recipe, model, images), atol=1e-5)


def test_it_takes_images_in_every_form_and_names_classes(trained: Any, tmp_path: Path) -> None:
    recipe, model, checkpoint = trained
    (tmp_path / "logged").mkdir()
    for name, text in files_of(recipe, checkpoint).items():
        (tmp_path / "logged" / name).write_text(text)
    found = mlflow.pyfunc.load_model(str(tmp_path / "logged"))
    (pixels,) = images = pictures()[:1]
    Image.fromarray(pixels).save(tmp_path / "image.png")
    expected = logits_of(recipe, model, images)
    forms = {
        "paths": [str(tmp_path / "image.png")],
        "Pillow": [Image.fromarray(pixels)],
        "one image": pixels,
        "floats": images / np.float64(255),
        "what JSON has": images.tolist(),
    }
    for form, given in forms.items():
        np.testing.assert_allclose(found.predict(given), expected, atol=1e-6, err_msg=form)
    table = found.predict(images, params={"output": "classes"})
    assert table["class"].tolist() == [CLASSES[expected.argmax()]]
    share = torch.from_numpy(expected).softmax(1).max()
    assert table["probability"].tolist() == [pytest.approx(float(share), rel=1e-6)]
    with pytest.raises(ValueError, match=r"output='names'; give one of logits, classes"):
        found.predict(images, params={"output": "names"})
    with pytest.raises(ValueError, match=r"from -1 to 1; give floats in \[0, 1\]"):
        found.predict(np.linspace(-1, 1, 48).reshape(1, 4, 4, 3))


def test_a_log_that_was_tampered_with_writes_a_models_files_nowhere_else(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, _ = trained
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    opening = RunOpening(recipe.tracking, "x", Path(recipe.run_folder) / "metrics.jsonl")
    tracker = Tracker.start(opening)
    tracker.log.model(
        {"../../planted": "text", str(tmp_path / "absolute"): "text"}, "x", 1, {}, None
    )
    assert tracker.finish()
    found = [path for path in tmp_path.rglob("*") if path.name in ("planted", "absolute")]
    assert [path.relative_to(tmp_path).parts[0] for path in found] == ["mlruns"] * 2


def prepared(kind: str, **sections: Any) -> Any:
    tree = {"name": "run", "output": "/runs", "tracking": {"register_as": "tiny"}, **sections}
    manifest = SimpleNamespace(classes=CLASSES)
    return SimpleNamespace(
        recipe=recipe_from_dict(tree, "test"),
        kind=kind,
        trains=kind != "evaluate",
        resolved=SimpleNamespace(manifest=manifest),
    )


def logged(run: Any, steps: int = 7) -> list[Any]:
    """What the recorder is asked for a run of seven steps that has come so far."""
    asked: list[Any] = []
    result = RunResult("id", "run", steps, 7, {}, "/runs/run/step-00000007")
    record = SimpleNamespace(model=lambda *words: asked.append(words))
    _log_model(result, run, SimpleNamespace(record=record))
    return asked


def test_what_is_trained_to_its_end_is_logged_and_registered() -> None:
    ((files, name, step, params, register_as, _),) = logged(prepared("pretrain"))
    assert (name, step, register_as) == ("run", 7, "tiny")
    assert params["checkpoint"] == "/runs/run/step-00000007"
    flavor = yaml.safe_load(files["MLmodel"])["flavors"]["python_function"]
    assert flavor["config"] == {"checkpoint": "/runs/run/step-00000007"}


def test_trials_are_logged_and_never_registered() -> None:
    ((*_, register_as, _),) = logged(prepared("sweep_trial"))
    assert register_as is None


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (prepared("pretrain"), 6),
        (prepared("evaluate"), 7),
        (prepared("pretrain", tracking={"log_model": False}), 7),
        (prepared("pretrain", train={"loss": "masked_patch"}), 7),
    ],
    ids=["stopped", "evaluation", "not wanted", "no head"],
)
def test_nothing_else_is_logged(run: Any, steps: int) -> None:
    assert logged(run, steps) == []


@pytest.mark.parametrize("name", ["a/b", "a:1", ""])
def test_a_name_that_the_registry_would_refuse_is_refused_with_the_recipe(name: str) -> None:
    with pytest.raises(ValueError, match=r"tracking\.register_as"):
        prepared("pretrain", tracking={"register_as": name})
