"""A trained model for images: an evaluation's logits bit by bit, here and as MLflow loads it."""

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
from numpy.typing import NDArray
from PIL import Image, ImageOps

import vit_ray
from tests.data.converting import convert, in_this_process
from tests.data.pictures import jpeg, turned
from tests.data.small_sets import SHARD, write_encoded
from tests.models.small import TINY_VIT, small_model
from tests.newcomer.follow import blocks
from tests.trained_runs import tiny_recipe, write_run
from tests.training.engine_runs import build_engine
from tests.training.ranks import run_ranks
from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict, used_sections
from vit_ray.config.training_sections import TrainConfig
from vit_ray.data import open_dataset
from vit_ray.data.order import Partition
from vit_ray.data.shard_writer import EncodedImage
from vit_ray.data.stream.batches import BatchReader, StreamJob
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.launch.run import PreparedRun, RunResult, _log_model
from vit_ray.launch.trained_model import class_names, training_set
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker, log_models, recorded_models, replay
from vit_ray.training.objective import build_objective
from vit_ray.worker.evaluation import _predictions

ROOT = Path(__file__).parents[2]
CLASSES = ["cat", "dog", "emu", "fox", "gnu"]
COUNT, BATCH = 19, 8
SIZE: dict[str, Any] = {"name": "ViT", "image_size": 32, **TINY_VIT}


def write_images(folder: Path) -> list[bytes]:
    """A converted set of pictures in several sizes and formats; their files in its order."""
    folder.mkdir()
    files = [jpeg(number, 40 + number, 90 - number) for number in range(COUNT)]
    for number in (3, 11):
        png = io.BytesIO()
        Image.open(io.BytesIO(files[number])).save(png, "PNG")
        files[number] = png.getvalue()
    images = [
        EncodedImage(file, (number % 5,), f"{number}.jpg", *Image.open(io.BytesIO(file)).size)
        for number, file in enumerate(files)
    ]
    write_encoded(folder, SHARD, images, CLASSES, rows=4)
    return files


def run_of(folder: Path, **train: Any) -> str:
    """A run whose recipe has the set in `data`, batches of 8, and what is given of `train`."""
    recipe = {
        "name": "run", "output": str(folder), "model": SIZE, "evaluate": {"batch_size": BATCH},
        "data": {"train": str(folder / "data"), "eval_augment": {"kind": "center_crop"}},
        "train": {"precision": "fp32", **train},
    }  # fmt: skip
    model = small_model("ViT")
    with torch.no_grad():
        model.get_parameter("head.bias").sub_(10)  # where bf16 numbers are 0.06 apart
    return write_run(folder / "run", model, facts={"recipe": recipe})


def evaluated(_: int, folder: str, run: str) -> dict[str, Any]:
    """Logits of an evaluation's own pass, and those of `load`, by precision."""
    found = {}
    for precision in ("fp32", "bf16"):
        train = TrainConfig(precision=precision, zero_stage=1)
        recipe = tiny_recipe(
            Path(folder), data={"eval": f"{folder}/data"}, train=train.model_dump(), init_from=run
        )
        spec = resolve_run(recipe, needs_train=False).streams["eval"]
        reader = BatchReader(StreamJob(spec, Partition(1, BATCH), 0, False))
        batches = [reader.batch(0, at, at + BATCH)[0] for at in range(0, COUNT, BATCH)]
        model = build_objective(recipe, 5)
        open_weights(run).load_into(model, False)
        engine = build_engine(train, 1, BATCH, model=model)
        logits = [one[b["weight"] > 0].numpy() for b, _, one in _predictions(engine, batches)]
        engine.close()
        images = [image for _, image in vit_ray.open_dataset(f"{folder}/data").encoded()]
        ours = vit_ray.load(run, recipe.with_changes(evaluate={"batch_size": BATCH}))
        found[precision] = np.concatenate(logits), ours.logits(images)
    return found


def test_logits_are_those_of_an_evaluation_to_the_last_bit(tmp_path):
    write_images(tmp_path / "data")
    (found,) = run_ranks(1, evaluated, str(tmp_path), run_of(tmp_path))
    for precision, (expected, logits) in found.items():
        assert expected.shape == (COUNT, 5)
        np.testing.assert_array_equal(logits, expected, err_msg=precision)
    assert not np.array_equal(found["fp32"][0], found["bf16"][0])


def test_a_run_knows_its_model_crop_precision_and_classes(tmp_path):
    files = write_images(tmp_path / "data")
    model = vit_ray.load(run_of(tmp_path))
    assert model.classes == CLASSES
    # By Pillow and torch alone: the shorter side to 37, the middle 32 x 32 pixels, in [-1, 1].
    opened = Image.open(io.BytesIO(files[3])).convert("RGB")
    scale = 37 / min(opened.size)
    left, top = ((side * scale - 32) / 2 / scale for side in opened.size)
    box = (left, top, left + 32 / scale, top + 32 / scale)
    plain = np.asarray(opened.resize((32, 32), Image.Resampling.BILINEAR, box), np.float32)
    pixels = model.transform(files[3])
    np.testing.assert_allclose(pixels.permute(1, 2, 0), plain / 127.5 - 1, atol=0.05)
    with torch.no_grad():
        expected = model.model(pixels[None]).softmax(1)[0]
    (found,) = model.predict(files[3])
    assert (found.name, found.label) == (CLASSES[int(expected.argmax())], int(expected.argmax()))
    assert found.probability == pytest.approx(float(expected.max()), rel=1e-6)
    (tmp_path / "sigmoids").mkdir()
    write_images(tmp_path / "sigmoids" / "data")
    model = vit_ray.load(run_of(tmp_path / "sigmoids", loss="sigmoid"))
    (found,) = model.predict(files[0])
    largest = float(torch.from_numpy(model.logits(files[0])).sigmoid().max())
    assert found.probability == pytest.approx(largest, rel=1e-6)
    assert largest < 0.01  # of softmax at least a fifth


@pytest.mark.parametrize("applied", [True, False])
def test_images_are_turned_as_those_of_the_training_were(tmp_path, applied):
    image = turned("JPEG", 6)
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "1.jpg").write_bytes(image)
    with in_this_process():
        convert(tmp_path / "images", tmp_path / "data", apply_orientation=applied)
    model = vit_ray.load(run_of(tmp_path))
    shown = Image.open(io.BytesIO(image))
    expected = ImageOps.exif_transpose(shown) if applied else shown
    difference = np.abs(model.crop(image).astype(int) - model.crop(expected.convert("RGB")))
    assert difference.mean() < 6  # the least of another turn is 20


def test_an_image_is_the_same_as_file_bytes_picture_pixels_and_floats(tmp_path):
    files = write_images(tmp_path / "data")
    model = vit_ray.load(run_of(tmp_path))
    (tmp_path / "a.png").write_bytes(files[3])
    picture = Image.open(tmp_path / "a.png")
    pixels = np.asarray(picture.convert("RGB"))
    forms = [tmp_path / "a.png", files[3], picture, pixels, pixels / 255, [pixels], pixels[None]]
    expected = model.logits(str(tmp_path / "a.png"))
    assert expected.shape == (1, 5)
    for form in forms:
        np.testing.assert_array_equal(model.logits(form), expected)
    assert model.predict([]) == []
    for image, told in (
        (np.zeros((4, 4), np.uint8), r"uint8 \(4, 4\); give \(H, W, 3\), integers in"),
        (np.full((4, 4, 3), 300), r"int64 \(4, 4, 3\); give"),
        (np.full((4, 4, 3), np.nan), r"float64 \(4, 4, 3\); give"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 \(0, 4, 3\); give"),
        (b"", "it has no bytes"),
    ):
        with pytest.raises(ValueError, match=told):
            model.predict([image])


def test_classes_of_another_data_set_are_not_believed(tmp_path, caplog):
    write_images(tmp_path / "data")
    data = open_dataset(str(tmp_path / "data"))
    for fingerprint, names in ((data.fingerprint, tuple(CLASSES)), ("other", ())):
        recipe = {"data": {"train": data.path}}
        facts = {"recipe": recipe, "data_fingerprint": fingerprint}
        run = write_run(tmp_path / fingerprint, small_model("ViT"), facts=facts)
        position = open_weights(run).position
        assert class_names(run, training_set(run, position, None), 5) == names
    assert [record.getMessage().count("classes are numbers") for record in caplog.records] == [1]


def test_a_copied_project_knows_the_classes_of_its_own_data(tmp_path):
    (tmp_path / "first").mkdir()
    write_images(tmp_path / "first" / "data")
    run_of(tmp_path / "first")
    moved = (tmp_path / "first").rename(tmp_path / "second")
    assert vit_ray.load(moved / "run").classes == CLASSES


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Recipe, str]:
    """A recipe, and its checkpoint."""
    crop = {"eval_augment": {"kind": "center_crop"}}
    recipe = tiny_recipe(tmp_path, data=crop, train={"precision": "fp32"})
    recipe = recipe.with_changes(name="tiny-lr0.1")  # as a trial
    run = Path(write_run(tmp_path / "runs" / "small", small_model("ViT").eval(),
                         facts={"recipe": {"name": "small", "model": SIZE}}))  # fmt: skip
    (checkpoint,) = run.glob("step-*")
    return recipe, str(checkpoint)


def pictures() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (70, 48, 56, 3), dtype=np.uint8)


def reference_of(recipe: Recipe) -> dict[str, Any]:
    return {**used_sections(recipe.recorded()), "classes": CLASSES}


def record(recipe: Recipe, checkpoint: str) -> str:
    """Id of a run that has logged the model, as a training does it."""
    log = Path(recipe.run_folder) / "metrics.jsonl"
    tracker = Tracker.begin(RunOpening(recipe.tracking, recipe.name, log))
    tracker.log.metrics(7, {"eval/top1": 0.75})
    tracker.log.model(
        recipe.name, 7, reference=reference_of(recipe), card="# the card",
        params={"checkpoint": checkpoint}, register_as="tiny",
    )  # fmt: skip
    assert tracker.finish("FINISHED")
    assert log_models(recipe.tracking.uri, recorded_models(tracker.log)) == []
    return tracker.run_id


@pytest.mark.slow
def test_a_fresh_process_gets_the_models_logits_from_mlflow(trained, tmp_path):
    recipe, checkpoint = trained
    run = MlflowClient(recipe.tracking.uri).get_run(record(recipe, checkpoint))
    (output,) = run.outputs.model_outputs
    np.save(tmp_path / "images.npy", pictures())
    texts = [block.text for block in blocks(ROOT / "docs" / "experiments.md")]
    (two_lines,) = (text for text in texts if "pyfunc.load_model" in text)
    script = "import sys\nimport numpy as np\nimages = np.load('images.npy')\n"
    for uri, file in ((f"models:/{output.model_id}", "logged"), ("models:/tiny/1", "registered")):
        script += two_lines.replace("models:/NAME/1", uri) + f"np.save('{file}', logits)\n"
    script += "table = model.predict([images[0]], params={'output': 'classes'})\n"
    script += "assert list(table.columns) == ['class', 'probability', 'label']\n"
    script += "assert model.unwrap_python_model().model.logits(images[:2]).shape == (2, 5)\n"
    script += "assert 'ray' not in sys.modules"  # whoever uses a model starts nothing
    bare = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env=bare)
    expected = vit_ray.load(checkpoint, recipe).logits([*pictures()])
    for file in ("logged.npy", "registered.npy"):
        found = np.load(tmp_path / file)
        assert (found.dtype, found.shape) == (np.float32, (70, 5))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_has_its_card_and_no_copy_of_the_weights_and_is_sent_again_as_one(
    trained, tmp_path
):
    """Also where an earlier attempt was cut off before the model's files were there."""
    recipe, checkpoint = trained
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
    from vit_ray.launch.logged_model import LoggedModel

    recipe, checkpoint = trained
    reference, moved = tmp_path / "reference.json", tmp_path / "elsewhere"
    reference.write_text(json.dumps(reference_of(recipe)))
    expected = vit_ray.load(checkpoint, recipe).logits([*pictures()[:2]])
    Path(checkpoint).rename(moved)
    artifacts, model = {"reference.json": str(reference)}, LoggedModel()
    gone, found = (
        SimpleNamespace(artifacts=artifacts, model_config={"checkpoint": place})
        for place in (checkpoint, str(moved))
    )
    with pytest.raises(ValueError, match=rf"refers to the checkpoint {checkpoint}, which cannot"):
        model.load_context(gone)
    model.load_context(found)
    np.testing.assert_allclose(model.predict(None, pictures()[:2]), expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "loss", "steps", "registered"), [
    ("pretrain", "softmax", 7, ["tiny"]),
    ("sweep_trial", "softmax", 7, [None]),
    ("pretrain", "softmax", 6, []),  # it was stopped
    ("evaluate", "softmax", 7, []),
    ("pretrain", "masked_patch", 7, []),  # it has no head
])  # fmt: skip
def test_what_is_trained_to_its_end_is_logged_and_what_is_no_trial_registered(
    kind, loss, steps, registered
):
    tree = {"name": "run", "tracking": {"register_as": "tiny"}, "train": {"loss": loss}}
    recipe, manifest = recipe_from_dict(tree, "test"), SimpleNamespace(classes=CLASSES)
    resolved: Any = SimpleNamespace(recipe=recipe, manifest=manifest)
    prepared = PreparedRun(kind, resolved)
    logged: list[Any] = []
    record = SimpleNamespace(model=lambda *words, **named: logged.append((*words, named)))
    result = RunResult("id", "run", steps, 7, {}, "/runs/run/step-00000007", steps == 7)
    opened: Any = SimpleNamespace(record=record)
    _log_model(result, prepared, opened)
    assert [model["register_as"] for _, _, model in logged] == registered
    for name, step, model in logged:
        assert (name, step, model["reference"]["classes"]) == ("run", 7, CLASSES)
        assert model["params"]["checkpoint"] == "/runs/run/step-00000007"
