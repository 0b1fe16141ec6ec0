"""A training's result as MLflow loads it: against the model itself, and MLflow's own format."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient
from PIL import Image

from tests.models.small import TINY_VIT, small_model
from tests.newcomer.follow import blocks
from tests.trained_runs import tiny_recipe, write_run
from vit_ray.config.keys import used_sections
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.data.augment import augmentation_of
from vit_ray.data.crops import crop_of
from vit_ray.launch.run import RunResult, _log_model
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker, log_models, recorded_models, replay

ROOT = Path(__file__).parents[2]
DATA = {
    "name": "test", "digest": "5" * 32, "source": "data/test", "context": "evaluation",
    "profile": {"num_images": 300},
}  # fmt: skip
CLASSES = ["cat", "dog", "emu", "fox", "gnu"]
(TWO_LINES,) = (
    block.text
    for block in blocks(ROOT / "docs" / "experiments.md")
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
    recipe = recipe.with_changes(name="tiny-lr0.1")  # as a trial
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


def record(recipe: Any, checkpoint: str) -> str:
    """Id of a run that has logged the model, as a training does it."""
    opening = RunOpening(
        recipe.tracking, recipe.name, Path(recipe.run_folder) / "metrics.jsonl", datasets=[DATA]
    )
    tracker = Tracker.begin(opening)
    tracker.log.metrics(7, {"eval/top1": 0.75})
    tracker.log.model(
        recipe.name, 7, reference=reference_of(recipe), card="# the card",
        params={"checkpoint": checkpoint}, register_as="tiny",
    )  # fmt: skip
    assert tracker.finish("FINISHED")
    ((_, model),) = recorded_models(tracker.log.path)
    assert log_models(recipe.tracking.uri, [model]) == [""]
    assert tracker.run_id is not None
    return tracker.run_id


def reference_of(recipe: Any) -> dict[str, Any]:
    return {**used_sections(recipe.recorded()), "classes": CLASSES}


@pytest.mark.slow
def test_a_fresh_process_gets_the_models_logits_from_uint8_images(trained, tmp_path):
    recipe, model, checkpoint = trained
    run_id = record(recipe, checkpoint)
    run = MlflowClient(recipe.tracking.uri).get_run(run_id)
    (output,) = run.outputs.model_outputs
    np.save(tmp_path / "images.npy", pictures())
    expected = logits_of(recipe, model, pictures())
    script = "import sys\nimport numpy as np\nimages = np.load('images.npy')\n"
    for uri, file in ((f"models:/{output.model_id}", "logged"), ("models:/tiny/1", "registered")):
        script += TWO_LINES.replace("models:/NAME/1", uri) + f"np.save('{file}', logits)\n"
    script += "table = model.predict([images[0]], params={'output': 'classes'})\n"
    script += "assert list(table.columns) == ['class', 'probability', 'label']\n"
    script += "assert model.unwrap_python_model().model.logits(images[:2]).shape == (2, 5)\n"
    script += "assert 'ray' not in sys.modules"  # whoever uses a model starts nothing
    bare = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env=bare)
    for file in ("logged.npy", "registered.npy"):
        found = np.load(tmp_path / file)
        assert (found.dtype, found.shape) == (np.float32, (70, 5))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_has_its_card_and_no_copy_of_the_weights_and_is_sent_again_as_one(
    trained, tmp_path
):
    """Also where an earlier attempt was cut off before the model's files were there."""
    recipe, _, checkpoint = trained
    run_id = record(recipe, checkpoint)
    client = MlflowClient(recipe.tracking.uri)
    run = client.get_run(run_id)
    (output,) = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert len(client.get_metric_history(run_id, "eval/top1")) == 1
    assert model.tags["mlflow.note.content"] == "# the card"
    kept = [path for path in (tmp_path / "mlruns").rglob("*") if path.is_file()]
    assert {"MLmodel", "README.md", "requirements.txt"} <= {path.name for path in kept}
    assert sum(path.stat().st_size for path in kept) < 20_000
    log = Path(recipe.run_folder) / "metrics.jsonl"
    assert replay(log, recipe.tracking.uri).refused == []
    (same,) = client.search_logged_models([run.info.experiment_id])
    (version,) = client.search_model_versions("name = 'tiny'")
    assert (version.run_id, version.source) == (run_id, f"models:/{same.model_id}")
    client.finalize_logged_model(same.model_id, "FAILED")
    replay(log, recipe.tracking.uri)
    (again,) = client.search_logged_models([run.info.experiment_id])
    assert (again.status, again.model_id == same.model_id) == ("READY", False)


def test_a_checkpoint_that_is_gone_is_named_and_a_moved_one_can_be_given(trained, tmp_path):
    recipe, model, checkpoint = trained
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps(reference_of(recipe)))

    def loaded(place: str) -> Any:
        """As MLflow makes it, without its enforcement of signatures."""
        from vit_ray.launch.logged_model import LoggedModel

        made = LoggedModel()
        config, artifacts = {"checkpoint": place}, {"reference.json": str(reference)}
        made.load_context(SimpleNamespace(artifacts=artifacts, model_config=config))
        return made

    moved = tmp_path / "elsewhere"
    Path(checkpoint).rename(moved)
    with pytest.raises(ValueError, match=rf"refers to the checkpoint {checkpoint}, which cannot"):
        loaded(checkpoint)
    images = pictures()[:2]
    found = loaded(str(moved)).predict(None, images)
    np.testing.assert_allclose(found, logits_of(recipe, model, images), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "loss", "steps", "registered"),
    [
        ("pretrain", "softmax", 7, ["tiny"]),
        ("sweep_trial", "softmax", 7, [None]),
        ("pretrain", "softmax", 6, []),  # it was stopped
        ("evaluate", "softmax", 7, []),
        ("pretrain", "masked_patch", 7, []),  # it has no head
    ],
)
def test_what_is_trained_to_its_end_is_logged_and_what_is_no_trial_registered(
    kind, loss, steps, registered
):
    tree = {"name": "run", "tracking": {"register_as": "tiny"}, "train": {"loss": loss}}
    prepared: Any = SimpleNamespace(
        recipe=recipe_from_dict(tree, "test"),
        kind=kind,
        trains=kind != "evaluate",
        resolved=SimpleNamespace(manifest=SimpleNamespace(classes=CLASSES)),
    )
    logged: list[Any] = []
    record = SimpleNamespace(model=lambda *words, **named: logged.append((*words, named)))
    result = RunResult("id", "run", steps, 7, {}, "/runs/run/step-00000007")
    opened: Any = SimpleNamespace(record=record)
    _log_model(result, prepared, opened)
    assert [model["register_as"] for _, _, model in logged] == registered
    for name, step, model in logged:
        assert (name, step, model["reference"]["classes"]) == ("run", 7, CLASSES)
        assert model["params"]["checkpoint"] == "/runs/run/step-00000007"
