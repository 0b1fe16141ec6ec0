"""`vit-ray init`: the recipe it writes passes the dry run, and nothing is overwritten."""

import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from tests.commands.command_line import run_cli
from tests.data.converting import run_in_this_process
from tests.data.pictures import encoded, picture
from vit_ray.commands import datasets, trainings
from vit_ray.config import Recipe, load_recipe
from vit_ray.data import open_dataset
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.resolved_run import resolve_run

WEIGHTS = "hf://google/vit-base-patch16-224-in21k"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, without the hub; conversions run in this process."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "connect", lambda recipe: ClusterShape(1, 1, 0, 0.0))
    run_in_this_process(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "model_info", refuse)
    return tmp_path


def write_images(folder: Path, classes: int, count: int, height: int, width: int) -> None:
    for label in range(classes):
        (folder / f"class_{label}").mkdir(parents=True)
        for number in range(count):
            content = encoded(picture(number, height, width), quality=90)
            (folder / f"class_{label}" / f"{number}.jpg").write_bytes(content)


def told_by(*words: str) -> str:
    """What a command prints that succeeds."""
    done = run_cli(*words)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_folder_with_splits_gets_a_recipe_that_passes_the_dry_run(here):
    write_images(here / "my set" / "train", 3, 40, 40, 60)
    write_images(here / "my set" / "test", 3, 5, 40, 60)
    advice, splits, end = told_by("init", "my set").splitlines()
    assert advice.startswith("fewer than 100,000 images: from random weights expect little")
    assert advice.endswith(f"vit-ray init 'my set' --out OTHER.yaml --weights {WEIGHTS}")
    assert "the hub" not in advice  # of small pictures it is not asked
    assert splits == "my set: train 120 images of 3 classes, test 15 images of 3 classes"
    assert end.endswith("next: vit-ray convert my-set.yaml")
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
    planned = told_by("pretrain", "my-set.yaml", "--dry-run")
    assert "120 of 3 classes (plan.num_images)" in planned


def test_five_images_can_be_converted_and_trained_on(here):
    write_images(here / "images", 2, 2, 40, 40)
    content = encoded(picture(9, 40, 40), quality=90)
    (here / "images" / "class_0" / "9.jpg").write_bytes(content)
    assert "5 images of 2 classes, 1 of them are held out" in told_by("init", "images")
    told_by("convert", "images.yaml")
    resolved = resolve_run(load_recipe("images.yaml"))
    assert (resolved.num_images, resolved.streams["eval"].num_images) == (4, 1)


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
    for split, count in (("train", 6), ("test", 2), ("val", 3)):
        write_images(Path(images, split), 2, count, 40, 40)
    told_by("init", images, "--out=mine.yaml")
    lines = Path("mine.yaml").read_text().splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("#   vit-ray convert")]
    assert len(commands) == 2
    for _, *words in commands:
        told_by(*words)
    data, converted = load_recipe("mine.yaml").data, (here / cwd / folder).resolve()
    # The test split may have no labels.
    assert (data.train, data.eval) == (f"{converted}/train", f"{converted}/validation")
    assert open_dataset(f"{converted}/train").num_images == 12
    assert open_dataset(f"{converted}/validation").num_images == 6


@pytest.mark.parametrize(
    ("folder", "name"),
    [("_photos", "photos"), ("2024", "2024"), ("holiday \U0001f600", "holiday")],
)
def test_a_folder_of_any_name_gets_a_recipe_which_may_stand_in_another_folder(folder, name, here):
    """Also where no run can have it, where YAML takes it for another value, or of rare letters."""
    write_images(here / folder, 2, 2, 40, 40)
    (here / "configs").mkdir()
    told_by("init", f"{here}/{folder}", f"--weights={WEIGHTS}", "--out=configs/mine.yaml")
    tuned = load_recipe("configs/mine.yaml")
    assert (tuned.name, tuned.init_from) == (f"{name}-tuned", WEIGHTS)
    assert tuned.convert is not None
    assert tuned.convert.source == f"{here}/{folder}"
    told_by("init", folder)
    assert load_recipe(f"{name}.yaml").name == name


def test_few_large_images_fine_tune_published_weights_where_the_hub_answers(here, monkeypatch):
    write_images(here / "images", 2, 20, 70, 90)
    asked = []
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **given: asked.append(given["timeout"]))
    told = told_by("init", "images")
    assert asked == [3.0]  # seconds
    (other,) = re.findall(rf"so the recipe fine-tunes {WEIGHTS} \(not: vit-ray (.+?)\)", told)
    told_by(*shlex.split(other))
    plain, recipe = load_recipe("OTHER.yaml"), load_recipe("images.yaml")
    assert (plain.init_from, plain.name, recipe.name) == (None, "images", "images-tuned")
    assert (recipe.init_from, recipe.model.name) == (WEIGHTS, "ViT-B/16")
    monkeypatch.setattr(trainings, "finetune", lambda recipe: 3)
    assert run_cli("start", "images").exit_code == 3


def test_of_weights_a_recipe_to_fine_tune_them_is_written_beside_another_folders_file(here):
    write_images(here / "images", 2, 20, 70, 90)
    (here / "configs").mkdir()
    (here / "b.npz").write_bytes(b"")
    told = told_by("init", "images", "--weights=b.npz", "--out=configs/mine.yaml")
    assert told.startswith("images: 40 images of 2 classes, 4 of them are held out")
    recipe = load_recipe("configs/mine.yaml")
    train = f"{here}/data/images/train"
    assert (recipe.init_from, recipe.output) == (f"{here}/b.npz", f"{here}/runs")
    assert (recipe.data.train, recipe.data.held_out_fraction) == (train, 0.1)
    assert recipe.convert is not None
    assert (recipe.convert.source, recipe.convert.destination) == (f"{here}/images", train)
    model = recipe.model
    assert (model.name, recipe.optim.name, model.image_size) == ("ViT-B/16", "sgd", 224)
    assert recipe.data.augment.kind == "resize_crop"
    told_by("finetune", "configs/mine.yaml", "--dry-run")


def test_start_converts_every_split_and_trains_for_a_first_look(here, monkeypatch):
    trained: list[Recipe] = []
    monkeypatch.setattr(trainings, "pretrain", lambda recipe: trained.append(recipe) or 3)
    for split, count in (("train", 40), ("test", 5)):
        write_images(here / "images" / split, 3, count, 40, 60)
    done = run_cli("start", "images")
    assert done.exit_code == 3, done.stderr  # that of the training
    again = run_cli("start", "images")
    assert (again.exit_code, f"already done: {here}/data/images/test" in again.stdout) == (3, True)
    recipe, continued = trained
    assert recipe == continued
    assert (recipe.name, recipe.optim.epochs, recipe.optim.warmup_steps) == ("images-first", 5, 0)
    sets = [recipe.data.train, recipe.data.eval]
    assert sets == [f"{here}/data/images/{split}" for split in ("train", "test")]
    assert [open_dataset(str(path)).num_images for path in sets] == [120, 15]


def test_nothing_is_overwritten_and_what_cannot_be_trained_on_is_refused(here):
    (here / "images.yaml").write_text("mine")
    (here / "empty").mkdir()
    write_images(here / "images", 2, 1, 40, 40)
    write_images(here / "one", 1, 2, 40, 40)
    (here / "texts" / "a").mkdir(parents=True)
    (here / "texts" / "a" / "1.jpg").write_text("a text")
    (here / "texts" / "a" / "2.jpg").write_bytes(b"")
    for words, told in [
        (["images"], "'images.yaml' exists already"),
        (["images", "--weights=b.npz", "--out=b.yaml"], "--weights b.npz: no such file"),
        (["images", "--out=no/where.yaml"], "there is no folder 'no'"),
        (["images", "--out=two\nlines.yaml"], "not valid YAML"),
        (["nothing"], "no such folder or file as "),
        (["empty"], "has no files of the format 'folder'; expected"),
        (["one"], "'one' has 1 class; a classifier needs at least two"),
        (["texts"], "convert.source='texts': none of 2 sampled images can be used; the first: "),
    ]:
        done = run_cli("init", *words)
        assert (done.exit_code, told in done.stderr) == (2, True), done.stderr
    assert (here / "images.yaml").read_text() == "mine"
    assert sorted(path.name for path in here.glob("*.yaml")) == ["images.yaml"]
