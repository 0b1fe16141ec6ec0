"""`vit-ray init`: the recipe it writes passes the dry run, and nothing is overwritten."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import HfApi, constants
from PIL import Image

from tests.commands.command_line import run_cli
from tests.data.converting import run_in_this_process
from tests.data.pictures import encoded, picture
from vit_ray.commands import datasets, train
from vit_ray.config import Recipe, load_recipe
from vit_ray.data import open_dataset
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.resolved_run import resolve_run

WEIGHTS = "hf://google/vit-base-patch16-224-in21k"


def refuse(*_: object, **__: object) -> None:
    raise OSError("no network")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, without the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "model_info", refuse)
    return tmp_path


def write_images(folder: Path, classes: int, count: int, height: int, width: int) -> None:
    for label in range(classes):
        (folder / f"class_{label}").mkdir(parents=True)
        for number in range(count):
            content = encoded(picture(number, height, width), quality=90)
            (folder / f"class_{label}" / f"{number}.jpg").write_bytes(content)


def test_a_folder_with_splits_gets_a_recipe_that_passes_the_dry_run(here):
    write_images(here / "my set" / "train", 3, 40, 40, 60)
    write_images(here / "my set" / "test", 3, 5, 40, 60)
    done = run_cli("init", "my set")
    assert done.exit_code == 0, done.stderr
    advice, splits, _ = done.stdout.splitlines()
    assert "CIFAR-10 a small ViT reaches 57.5 %" in advice
    assert advice.endswith(f"vit-ray init 'my set' --out OTHER.yaml --weights {WEIGHTS}")
    assert "the hub" not in advice  # of small pictures it is not asked
    assert splits == "my set: train 120 images of 3 classes, test 15 images of 3 classes"
    assert done.stdout.endswith("my-set.yaml is written; next: vit-ray convert my-set.yaml\n")
    recipe = load_recipe("my-set.yaml")
    assert recipe.convert is not None
    assert (recipe.convert.source, recipe.convert.split) == (f"{here}/my set", "train")
    sets = here / "data" / "my-set"
    assert (recipe.data.train, recipe.data.eval) == (f"{sets}/train", f"{sets}/test")
    assert recipe.data.held_out_fraction == 0
    # Sides of 40 pixels are ten patches of four.
    assert (recipe.model.image_size, recipe.model.patch_size) == (40, 4)
    assert recipe.train.global_batch_size == 16
    steps = recipe.optim.total_steps(120, 16)
    assert recipe.optim.warmup_steps == pytest.approx(steps / 20, abs=1)
    planned = run_cli("pretrain", "my-set.yaml", "--dry-run")
    assert planned.exit_code == 0, planned.stderr
    assert "120 of 3 classes (plan.num_images)" in planned.stdout
    assert "this machine, no GPU    about " in planned.stdout
    text = (here / "my-set.yaml").read_text()
    assert "convert.split=test convert.destination=data/my-set/test" in text
    assert "finetune" not in text  # pictures of 40 pixels
    assert "# 7 steps per epoch. " in text


@pytest.mark.parametrize(
    ("cwd", "images", "folder"),
    [
        ("", "data/pets", "data/pets-converted"),
        ("pets", ".", "../pets-converted"),
        ("all/of us", "..", "../../all-converted"),
    ],
)
def test_the_printed_conversions_work_where_the_images_lie_around_the_results(
    cwd, images, folder, here, monkeypatch
):
    (here / cwd).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(here / cwd)
    monkeypatch.setattr(datasets, "connect", lambda recipe: ClusterShape(1, 1, 0, 0.0))
    run_in_this_process(monkeypatch)
    for split, count in (("train", 6), ("test", 2), ("val", 3)):
        write_images(Path(images, split), 2, count, 40, 40)
    done = run_cli("init", images, "--out=mine.yaml")
    assert done.exit_code == 0, done.stderr
    lines = Path("mine.yaml").read_text().splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("#   vit-ray convert")]
    assert len(commands) == 2
    for _, *words in commands:
        done = run_cli(*words)
        assert done.exit_code == 0, done.stderr
    recipe = load_recipe("mine.yaml")
    # The test split may have no labels.
    converted = (here / cwd / folder).resolve()
    assert (recipe.data.train, recipe.data.eval) == (
        f"{converted}/train",
        f"{converted}/validation",
    )
    assert open_dataset(recipe.data.train or "").num_images == 12
    assert open_dataset(recipe.data.eval or "").num_images == 6


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("_photos", "photos"), ("2024", "2024"), ("holiday \U0001f600", "holiday"),
    ],
)  # fmt: skip
def test_a_folder_of_any_name_gets_a_recipe(folder, name, here):
    """Also where no run can have it, where YAML takes it for another value, or of rare letters."""
    write_images(here / folder, 2, 2, 40, 40)
    done = run_cli("init", folder)
    assert done.exit_code == 0, done.stderr
    (file,) = here.glob("*.yaml")
    recipe = load_recipe(file.name)
    assert (recipe.name, recipe.convert and recipe.convert.source) == (name, f"{here}/{folder}")


def test_a_recipe_that_cannot_be_read_is_not_written(here):
    write_images(here / "images", 2, 2, 40, 40)
    done = run_cli("init", "images", "--out=two\nlines.yaml")
    assert (done.exit_code, "not valid YAML" in done.stderr) == (2, True)
    assert [path.name for path in here.iterdir()] == ["images"]


def test_paths_of_a_recipe_behind_a_link_are_those_of_its_own_folder(here):
    write_images(here / "proj" / "images", 2, 4, 8, 8)
    (here / "shared" / "conf").mkdir(parents=True)
    (here / "proj" / "link").symlink_to(here / "shared" / "conf")
    done = run_cli("init", "proj/images", "--out=proj/link/mine.yaml")
    assert done.exit_code == 0, done.stderr
    recipe = load_recipe("proj/link/mine.yaml")
    assert recipe.convert is not None
    assert recipe.convert.source == str(here / "proj" / "images")
    assert recipe.output == str(here / "runs")


def test_few_large_images_fine_tune_published_weights_where_the_hub_answers(here, monkeypatch):
    write_images(here / "images", 2, 20, 70, 90)
    asked = []
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **given: asked.append(given["timeout"]))
    done = run_cli("init", "images")
    assert (done.exit_code, asked) == (0, [3.0]), done.stderr
    assert done.stdout.startswith("fewer than 100,000 images: from random weights expect little")
    assert f"so the recipe fine-tunes {WEIGHTS} (not: vit-ray init images" in done.stdout
    (other,) = re.findall(r"\(not: vit-ray (.+?)\)", done.stdout)
    assert run_cli(*shlex.split(other)).exit_code == 0
    plain, recipe = load_recipe("OTHER.yaml"), load_recipe("images.yaml")
    assert (plain.init_from, plain.name, recipe.name) == (None, "images", "images-tuned")
    assert (recipe.init_from, recipe.model.name) == (WEIGHTS, "ViT-B/16")
    assert "vit-ray finetune images.yaml --dry-run" in (here / "images.yaml").read_text()
    write_images(here / "small", 2, 2, 40, 60)
    assert run_cli("init", "small").exit_code == 0
    assert load_recipe("small.yaml").init_from is None
    assert len(asked) == 1
    monkeypatch.setattr(datasets, "connect", lambda recipe: ClusterShape(1, 1, 0, 0.0))
    run_in_this_process(monkeypatch)
    monkeypatch.setattr(train, "finetune", lambda recipe: 3)
    assert run_cli("start", "images").exit_code == 3


def test_large_images_without_a_test_split_hold_some_out(here):
    count, batch = 3, 4
    write_images(here / "images", 2, count, 230, 300)
    done = run_cli("init", "images", "--out", "mine.yaml")
    assert done.exit_code == 0, done.stderr
    assert "the hub did not answer; to fine-tune" in done.stdout
    assert f"vit-ray init images --out OTHER.yaml --weights {WEIGHTS}\n" in done.stdout
    recipe = load_recipe(here / "mine.yaml")
    assert (recipe.model.name, recipe.model.image_size) == ("ViT-Ti/16", 224)
    assert recipe.data.held_out_fraction == 0.166667  # one of six
    assert recipe.train.global_batch_size == batch
    lines = (here / "mine.yaml").read_text().splitlines()
    (first,) = (line for line in lines if "name=images-first" in line)
    look = load_recipe("mine.yaml", shlex.split(first.removeprefix("#"), comments=True)[3:])
    assert (look.name, look.optim.epochs, look.optim.warmup_steps) == ("images-first", 5, 0)
    planned = run_cli("pretrain", "mine.yaml", "--dry-run")
    assert planned.exit_code == 0, planned.stderr


def test_of_weights_a_recipe_to_fine_tune_them_is_written_beside_another_folders_file(here):
    write_images(here / "images", 2, 20, 70, 90)
    (here / "configs").mkdir()
    refused = run_cli("init", "images", "--weights=b.npz")
    assert (refused.exit_code, "--weights b.npz: no such file" in refused.stderr) == (2, True)
    (here / "b.npz").write_bytes(b"")
    done = run_cli("init", "images", "--weights=b.npz", "--out=configs/mine.yaml")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("images: 40 images of 2 classes, 4 of them are held out")
    recipe = load_recipe("configs/mine.yaml")
    train = f"{here}/data/images/train"
    assert (recipe.name, recipe.init_from) == ("images-tuned", f"{here}/b.npz")
    assert recipe.output == f"{here}/runs"
    assert (recipe.data.train, recipe.data.held_out_fraction) == (train, 0.1)
    assert recipe.convert is not None
    assert (recipe.convert.source, recipe.convert.destination) == (f"{here}/images", train)
    assert (recipe.model.name, recipe.optim.name, recipe.model.image_size) == (
        "ViT-B/16", "sgd", 224,
    )  # fmt: skip
    assert (
        "vit-ray finetune configs/mine.yaml --dry-run"
        in (here / "configs" / "mine.yaml").read_text()
    )
    planned = run_cli("finetune", "configs/mine.yaml", "--dry-run")
    assert planned.exit_code == 0, planned.stderr
    assert "(tried: two passes of a ViT-Ti/16; " in planned.stdout
    text = (here / "configs" / "mine.yaml").read_text()
    assert "the paper's for fine-tuning" not in text  # whose crops are of 384 pixels from 448
    assert load_recipe("configs/mine.yaml").data.augment.kind == "resize_crop"


def test_five_images_can_be_converted_and_trained_on(here, monkeypatch):
    monkeypatch.setattr(datasets, "connect", lambda recipe: ClusterShape(1, 1, 0, 0.0))
    run_in_this_process(monkeypatch)
    write_images(here / "images", 2, 2, 40, 40)
    content = encoded(picture(9, 40, 40), quality=90)
    (here / "images" / "class_0" / "9.jpg").write_bytes(content)
    done = run_cli("init", "images")
    assert "5 images of 2 classes, 1 of them are held out" in done.stdout, done.stderr
    assert run_cli("convert", "images.yaml").exit_code == 0
    resolved = resolve_run(load_recipe("images.yaml"))
    assert (resolved.num_images, resolved.streams["eval"].num_images) == (4, 1)


@pytest.mark.parametrize("place", ["~/images", "{0}/images"])
def test_places_that_are_not_of_the_current_folder_stay_in_a_recipe_elsewhere(
    place, here, monkeypatch
):
    monkeypatch.setenv("HOME", str(here))
    write_images(here / "images", 2, 2, 40, 40)
    (here / "configs").mkdir()
    images = place.format(here)
    done = run_cli("init", images, f"--weights={WEIGHTS}", "--out=configs/mine.yaml")
    assert done.exit_code == 0, done.stderr
    tree = yaml.safe_load((here / "configs" / "mine.yaml").read_text())
    assert (tree["convert"]["source"], tree["init_from"]) == (images, WEIGHTS)


def test_parquet_of_the_hub_is_looked_at_without_being_packed(here):
    content = io.BytesIO()
    Image.fromarray(np.zeros((70, 90, 3), np.uint8)).save(content, "PNG")
    struct = [{"bytes": content.getvalue(), "path": None}] * 8
    names = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table = pa.table({"image": struct, "label": [0, 1] * 4})
    (here / "hub").mkdir()
    table = table.replace_schema_metadata({"huggingface": str(names).replace("'", '"')})
    pq.write_table(table, here / "hub" / "train-00000-of-00001.parquet")
    before = sorted(here.rglob("*"))
    done = run_cli("init", "hub")
    assert done.exit_code == 0, done.stderr
    assert load_recipe(here / "hub.yaml").model.image_size == 64
    assert [path for path in sorted(here.rglob("*")) if path not in before] == [here / "hub.yaml"]


def test_classes_without_images_are_named(here, monkeypatch):
    monkeypatch.setattr(datasets, "connect", lambda recipe: ClusterShape(1, 1, 0, 0.0))
    run_in_this_process(monkeypatch)
    write_images(here / "images", 2, 20, 40, 40)
    (here / "images" / "notes").mkdir()
    (here / "images" / "notes" / "notes.txt").write_text("a text")
    (here / "images" / "damaged").mkdir()
    (here / "images" / "damaged" / "1.jpg").write_bytes(b"")
    run_cli("init", "images")
    for _ in range(2):  # made, and there already
        done = run_cli("convert", "images.yaml", "convert.max_rejected_fraction=0.1")
        assert "2 classes have no images: damaged, notes\n" in done.stdout, done.stderr
    classes = open_dataset("data/images/train").classes
    assert classes == ["class_0", "class_1", "damaged", "notes"]  # the order of other conversions


def test_start_converts_every_split_and_trains_for_a_first_look(here, monkeypatch):
    monkeypatch.setattr(datasets, "connect", lambda recipe: ClusterShape(1, 1, 0, 0.0))
    run_in_this_process(monkeypatch)
    trained: list[Recipe] = []
    monkeypatch.setattr(train, "pretrain", lambda recipe: trained.append(recipe) or 3)
    for split, count in (("train", 40), ("test", 5)):
        write_images(here / "images" / split, 3, count, 40, 60)
    done = run_cli("start", "images")
    assert done.exit_code == 3, done.stderr  # that of the training
    sizes = [open_dataset(f"data/images/{split}").num_images for split in ("train", "test")]
    assert sizes == [120, 15]
    again = run_cli("start", "images")
    assert (again.exit_code, f"already done: {here}/data/images/test" in again.stdout) == (3, True)
    recipe, continued = trained
    assert recipe == continued
    assert recipe.name == "images-first"
    converted = (f"{here}/data/images/train", f"{here}/data/images/test")
    assert (recipe.data.train, recipe.data.eval) == converted
    assert (recipe.optim.epochs, recipe.optim.warmup_steps) == (5, 0)


def test_nothing_is_overwritten_and_what_cannot_be_trained_on_is_refused(here):
    (here / "images.yaml").write_text("mine")
    (here / "empty").mkdir()
    write_images(here / "images", 2, 1, 40, 40)
    write_images(here / "one", 1, 2, 40, 40)
    (here / "texts" / "a").mkdir(parents=True)
    (here / "texts" / "a" / "1.jpg").write_text("a text")
    (here / "texts" / "a" / "2.jpg").write_bytes(b"")
    for words, told in [
        (["images"], "'images.yaml' exists already; run the commands that it lists, move it"),
        (["images", "--out=no/where.yaml"], "there is no folder 'no'"),
        (["nothing"], "no such folder or file; check the path"),
        (["empty"], "has no files of the format 'folder'; expected"),
        (["one"], "'one' has 1 class; a classifier needs at least two"),
        (["texts"], "convert.source='texts': none of 2 sampled images can be used; the first: "),
    ]:
        done = run_cli("init", *words)
        assert (done.exit_code, done.stdout) == (2, ""), words
        assert told in done.stderr
        assert done.stderr.count("\n") == 1
    assert (here / "images.yaml").read_text() == "mine"
    assert sorted(path.name for path in here.glob("*.yaml")) == ["images.yaml"]
