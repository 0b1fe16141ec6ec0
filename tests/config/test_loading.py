"""Recipes: what is read, what is refused, and what the refusal says."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_tag
from ray._private.label_utils import validate_label_selector

from vit_ray.config import Recipe, load_recipe
from vit_ray.config.loading import parse_yaml, write_yaml
from vit_ray.config.recipe import KEYS, PLACES, recipe_from_dict
from vit_ray.config.schema import _ALIASES, keys_of
from vit_ray.config.training_sections import OptimConfig, is_due
from vit_ray.launch.resolved_run import check_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("name: run\noptim: {learning_rate: 1e-3, epochs: 3}\n")
    return file


def test_mlflows_variables_give_what_the_recipe_does_not_say(path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@mlflow:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "team")
    found = load_recipe(path, ["tracking.experiment=mine"]).tracking
    assert (found.uri, found.experiment) == ("http://me:hunter2@mlflow:5000", "mine")
    assert load_recipe(path).tracking.experiment == "team"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(ValueError, match=r"tracking\.uri: .* MLFLOW_TRACKING_URI"):
        load_recipe(path)
    assert Recipe(name="other").tracking.uri == "sqlite:///mlflow.db"


@pytest.mark.parametrize("name", ["50%", "a(b)", "a" * 251, "a/../b", "/a"])
def test_a_tag_that_mlflow_refuses_is_refused_with_the_recipe(path, name):
    with pytest.raises(MlflowException):
        _validate_tag(name, "x")
    with pytest.raises(ValueError, match=r"tracking\.tags: "):
        load_recipe(path, {"tracking.tags": {name: "x"}})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("0x10", 16), ("1e3", 1000.0), ("3e-4", 0.0003), ("1:30", "1:30"),
        ("on", "on"), ("2026-01-01", "2026-01-01"), ("{1: a, on: b}", {"1": "a", "on": "b"}),
        ("{<<: {a: 1}, b: 2}", {"a": 1, "b": 2}),
    ],
)  # fmt: skip
def test_values_are_read_as_yaml_1_2_and_of_jsons_kinds(text, value):
    """YAML 1.1 reads 8, 90, true and a date."""
    assert parse_yaml(text, "here") == value
    assert parse_yaml(write_yaml({"key": value}), "here") == {"key": value}


def test_a_recipe_takes_over_its_base_and_changes_it(path):
    child = path.parent / "child.yaml"
    child.write_text("base: run.yaml\nname: child\noptim: {epochs: 5}\n")
    recipe = load_recipe(child)
    assert (recipe.name, recipe.optim.epochs) == ("child", 5)
    assert recipe.optim.learning_rate == 0.001


CONVERT = "convert: {source: images, destination: here}\n"


def test_paths_in_a_recipe_are_of_its_folder_and_those_of_the_command_of_the_current_one(
    path, monkeypatch
):
    folder, cwd = path.parent / "studies", path.parent / "elsewhere"
    folder.mkdir()
    cwd.mkdir()
    (folder / "study.yaml").write_text(
        "base: ../run.yaml\noutput: ../runs\ninit_from: ~/a.npz\n"
        "data: {train: set, eval: s3://b/set}\ntracking: {uri: 'sqlite:///m.db'}\n"
        "sweep: {space: {init_from: [a.npz, hf://a/b]}}\n"
        "study: {models: [{label: a, changes: {data.train: part, model: {pool: gap}}}], transfer: ["
        "{name: own, recipe: ../run.yaml, changes: {data: {eval: test}}}, "
        "{name: shipped, recipe: finetune/pets}]}\n"
    )
    (cwd / "mine.yaml").write_text("base: ../studies/study.yaml\n" + CONVERT)
    monkeypatch.chdir(cwd)
    recipe = load_recipe("mine.yaml", ["evaluate={few_shot_train: few, few_shot_test: few}"])
    assert recipe.optim.epochs == 3
    assert (recipe.data.train, recipe.data.eval) == (f"{folder}/set", "s3://b/set")
    assert recipe.output == f"{path.parent}/runs"
    assert recipe.init_from == str(Path.home() / "a.npz")
    assert recipe.tracking.uri == f"sqlite:///{folder}/m.db"
    assert recipe.evaluate.few_shot_train == "few"
    assert recipe.convert.source == f"{cwd}/images"
    assert recipe.sweep.space == {"init_from": [f"{folder}/a.npz", "hf://a/b"]}
    changes = {"data.train": f"{folder}/part", "model": {"pool": "gap"}}
    assert recipe.study.models[0].changes == changes
    own, shipped = recipe.study.transfer
    assert (own.recipe, shipped.recipe) == (str(path), "finetune/pets")
    assert own.changes == {"data": {"eval": f"{folder}/test"}}
    changed = load_recipe(folder / "study.yaml", ["data.train=mine", "output=runs"])
    assert (changed.data.train, changed.output) == ("mine", "runs")
    assert changed.data.eval == "s3://b/set"


def test_a_recipe_is_the_same_by_any_name_and_from_any_folder(path, monkeypatch):
    """A repeated conversion compares its source as text."""
    path.write_text("name: run\ndata: {train: ./set, eval: ../test}\n" + CONVERT)
    folder = path.parent
    (folder / "below").mkdir()
    (folder / "link").symlink_to(folder)
    first = load_recipe(path)
    assert (first.convert.source, first.data.train) == (f"{folder}/images", f"{folder}/set")
    for cwd, names in (
        (folder, ("run.yaml", "./run.yaml", "below/../run.yaml", "link/run.yaml")),
        (folder / "below", ("../run.yaml",)),
    ):
        monkeypatch.chdir(cwd)
        assert [load_recipe(name) for name in names] == [first] * len(names)


def test_paths_in_a_shipped_recipe_are_of_the_current_folder_and_those_in_a_copy_are_not(
    path, monkeypatch
):
    file = ROOT / "jobs/recipes/digits.yaml"
    path.write_text("base: digits\ndata: {train: set}\n")
    own = load_recipe(path)
    assert own.data.train == str(path.parent / "set")
    assert own.data.eval == load_recipe(file).data.eval == "quickstart/data/test"
    # A checkout, or an image for clusters, beside another installed package.
    installed = path.parent / "vit_ray" / "recipes"
    installed.mkdir(parents=True)
    monkeypatch.setattr("vit_ray.config.loading._PLACES", (installed,))
    assert load_recipe(file).output == "quickstart/runs"
    copy = path.parent / "jobs/recipes/digits.yaml"  # no checkout
    copy.parent.mkdir(parents=True)
    copy.write_text(file.read_text())
    assert load_recipe(copy).output == f"{copy.parent}/quickstart/runs"


def test_every_key_with_a_path_is_of_the_recipes_folder(path):
    keys = [key.name for key in KEYS if "a folder, a file or an s3://" in key.allowed]
    assert sorted(keys) == sorted(PLACES)
    path.write_text(
        "name: run\ndeduplicate: {source: a, evaluation_sets: [b, s3://b/c], destination: d}\n"
    )
    sets = load_recipe(path).deduplicate.evaluation_sets
    assert sets == (f"{path.parent}/b", "s3://b/c")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        # A wrong value, and what is allowed.
        ("model.image_size=0", "model.image_size=0: give integer > 0 | [integer > 0, integer > 0]"),
        ("model.image_size=[224, big]", 'model.image_size=[224, "big"]: give integer > 0 | ['),
        ("data.train=5", "data.train=5: give a folder, a file or an s3:// address"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: give [number >= 0 and <= 1, number"),
        ("workers.label_selector=H100", "workers.label_selector='H100': give {NAME: VALUE}"),
        ("train.loss=focal", "train.loss='focal': give softmax | sigmoid | masked_patch | MODULE"),
        ("train.zero_stage=7", "train.zero_stage=7: give 0 | 1 | 2 | 3"),
        ("train.averaging=1.0", "train.averaging=1.0: give number >= 0 and < 1"),
        ("sweep={learning_rates: []}", "sweep.learning_rates=[]: give [number > 0, ...]"),
        ("convert={source: a, destination: b, image_pattern: val}", "convert.image_pattern='val'"),
        ("tracking.register_as=a/b", "tracking.register_as='a/b'"),
        ('output=""', "output='': give a folder, a file or an s3:// address"),
        ("train.global_batch_size=12.5", "train.global_batch_size=12.5"),
        ("name=a/b", "name='a/b'"),
        # A wrong key, and the one that was meant.
        ("study.models=[a]", "study.models.0=a is a section of keys"),
        ("study.models=[{name: ViT-B/16, lable: x}]", "did you mean study.models.0.label?"),
        ("optim.lerning_rate=1", "did you mean optim.learning_rate"),
        ("zero_stage=2", "did you mean train.zero_stage"),
        ("optim.lr=1", "did you mean optim.learning_rate?"),
        ("gpus=8", "did you mean workers.num_workers?"),
        ("name.first=x", "name is a value, not a section"),
        ("xyz=1", "unknown key xyz (valid in this section: name, "),
        # An address that MLflow does not open.
        ("tracking.uri=mlflow.db", "give sqlite:///FILE"),
        ("tracking.uri=htp://localhost:5000", "htp://"),
        ("tracking.uri=file:///srv/mlruns", "a folder of files"),
        ("tracking.uri=postgres://u:hunter2@db/mlflow", "postgresql://"),
        ("tracking.uri=sqlite://mlflow.db", "such as sqlite:///mlflow.db"),
        # Values that do not go together.
        ("model.image_size=225", "image_size=225 is not a multiple of the patches of ViT"),
        ("model.image_size=[224, 230]", "the nearest is [224, 224]"),
        ("optim.steps=5", "the length of the run is given twice"),
        ("workers.num_workers=[4, 1]", "minimum above its maximum"),
        ("data.augment={min_area: 0.9, max_area: 0.1}", "min_area=0.9 is larger than max_area=0.1"),
        ("train={label_smoothing: 0.1, loss: sigmoid}", "label_smoothing=0.1 with loss=sigmoid"),
        ("train={compile: true, zero_stage: 3}", "compile=true does not work with zero_stage=3"),
        ("train={offload: true, zero_stage: 0}", "offload=true with zero_stage=0"),
        ("train.profile_steps=[9, 3]", "profile_steps=[9, 3] ends before it begins"),
        # No override.
        ("x" * 300, "expected key=value"),  # longer than a file's name can be
        ("optim=[", "not valid YAML"),
        ("base=x", "give x as the recipe"),
        (r'output="\ud800"', "not valid YAML: 'utf-8' codec can't encode character"),
        # From Python, of kinds that JSON does not have.
        ({"name": b"x"}, "name=b'x'"),
        ({"seed": np.float32(1)}, "seed="),
        ({"optim": {"steps": {1}}}, "not set; give texts"),
        ({5: 1}, "unknown key 5"),
    ],
)
def test_a_wrong_override_says_which_key_and_what_to_change(path, override, named):
    overrides = [override] if isinstance(override, str) else override
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        load_recipe(path, overrides)
    assert "hunter2" not in str(caught.value)


def test_all_wrong_keys_of_a_mapping_are_named_and_a_text_is_no_list(path):
    assert load_recipe(path, {"output": Path("x")}).output == "x"
    with pytest.raises(ValueError, match=r"seed=-1: .*unknown key model.dpth; .*unknown key lr; "):
        load_recipe(path, {"seed": -1, "lr": 1, "model.dpth": 2})
    with pytest.raises(ValueError, match=r"overrides='optim.steps=5'"):
        load_recipe(path, "optim.steps=5")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data: {train: ' '}", r"data\.train=' ': give a folder"),
        ("tracking: {uri: 'x://u:hunter2@h/db', uri: x}", 'found duplicate key "uri"$'),
    ],
)
def test_a_file_with_a_blank_path_or_a_key_twice_is_refused_without_its_values(path, text, told):
    path.write_text(f"name: run\n{text}\n")
    with pytest.raises(ValueError, match=told) as caught:
        load_recipe(path)
    assert "hunter2" not in str(caught.value)


LISTS: dict[str, list[Any]] = {
    "convert.classes": ["cat", "dog", "cat"], "convert.columns": ["caption", "caption"],
    "deduplicate.evaluation_sets": ["data/a", "data/a"], "optim.frozen": ["head", "head"],
    "optim.decay_at": [0.3, 0.3], "evaluate.shots": [1, 1], "evaluate.metrics": ["a.b", "a.b"],
    "train.callbacks": ["a.b", "a.b"], "sweep.learning_rates": [0.1, 0.3, 0.1],
    "study.data_fractions": [0.5, 0.5], "study.epochs": [7, 7.0], "study.steps": [9, 9],
    "study.images": [9, 9], "study.seeds": [0, 1, 0],
}  # fmt: skip


@pytest.mark.parametrize("key", LISTS)
def test_a_list_that_has_a_value_twice_is_refused(key):
    section, _, name = key.partition(".")
    needed: dict[str, dict[str, Any]] = {
        "convert": {"source": "a", "destination": "b"},
        "deduplicate": {"source": "a", "destination": "b"},
        "study": {"models": [{"label": "a"}]},
    }
    tree = {"name": "run", section: {**needed.get(section, {}), name: LISTS[key]}}
    told = "ascending order" if key == "optim.decay_at" else "twice"
    with pytest.raises(ValueError, match=f"^here: {section}.*{name}.*{told}"):
        recipe_from_dict(tree, "here")


def test_a_row_of_a_study_has_no_value_twice_and_a_pair_or_a_networks_stages_may():
    model = {"name": "ResNet", "stages": [1, 1], "width_factor": 1}
    row: dict[str, Any] = {"label": "a", "model": model, "steps": [5, 6]}
    tree = {"name": "run", "workers": {"num_workers": [2, 2]}, "study": {"models": [row]}}
    recipe_from_dict(tree, "here")
    row["steps"] = [5, 5]
    with pytest.raises(ValueError, match=r"study\.models\.0\.steps: \[5, 5\] has 5 twice"):
        recipe_from_dict(tree, "here")


def test_a_row_of_a_study_has_no_other_size_of_images_unasked():
    rows: list[dict[str, Any]] = [{"label": "a", "model": {"name": "R50x1"}}, {"label": "b"}]
    tree = {"name": "run", "model": {"image_size": 32}, "study": {"models": rows}}
    with pytest.raises(ValueError, match=r"study 'a': model has no image_size"):
        recipe_from_dict(tree, "here")
    recipe_from_dict({**tree, "model": {"image_size": 224}}, "here").with_changes(seed=1)
    for changes in ({"model": {"image_size": 64}}, {"model.image_size": 64}):
        rows[0]["changes"] = changes  # asked for
        recipe_from_dict(tree, "here")
    rows[0] = {"label": "a", "model": {"name": "R50x1", "image_size": 224}}
    models = recipe_from_dict(tree, "here").with_changes(seed=1).study.models
    assert [row.model and row.model.image_size for row in models] == [224, None]


def test_names_of_other_programs_point_to_keys_that_exist():
    assert set(_ALIASES.values()) <= {key.name for key in keys_of(Recipe)}


def test_shipped_recipes_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits") == load_recipe(ROOT / "jobs/recipes/digits.yaml")
    assert load_recipe("vit_h14_jft") == load_recipe("paper/vit_h14_jft")
    assert load_recipe("finetune/cifar10").sweep is not None
    (tmp_path / "cifar10" / "step-00000001").mkdir(parents=True)  # a run of this name
    assert load_recipe("cifar10").sweep is None
    (tmp_path / "mine.yaml").write_text("base: digits\nname: mine\n")
    assert load_recipe("mine.yaml").model == load_recipe("digits").model
    (tmp_path / "digits").write_text("name: own\n")
    assert load_recipe("digits").name == "own"


def test_a_training_records_its_own_keys_and_a_file_those_of_its_commands_too(path):
    recipe = load_recipe(path, ["verify.path=x", "sweep.seeds=2"]).with_absolute_paths()
    trained = {"name", "seed", "output", "resume", "init_from", "model", "data", "optim", "train"}
    trained |= {"checkpoint", "evaluate", "workers", "tracking", "storage", "paper"}
    assert recipe.recorded().keys() == trained
    assert {key.partition(".")[0] for key in recipe.flat()} == trained
    assert recipe.written("convert", "verify", "name").keys() == trained | {"verify"}
    assert recipe_from_dict(recipe.written("verify", "sweep"), "here") == recipe
    assert recipe.with_changes(train={"zero_stage": 3}).train.zero_stage == 3
    with pytest.raises(ValueError, match=r"train\.zero_stage=9"):
        recipe.with_changes(train={"zero_stage": 9})


def test_paths_become_absolute_and_addresses_stay(path):
    recipe = load_recipe(path, ["data.train=some/set", "data.eval=s3://bucket/set"])
    absolute = recipe.with_absolute_paths()
    assert absolute.data.train == f"{Path.cwd()}/some/set"
    assert absolute.data.eval == "s3://bucket/set"
    assert absolute.tracking.uri == f"sqlite:///{Path.cwd()}/mlflow.db"
    assert absolute.with_absolute_paths() == absolute
    tree = {
        "vtab": {"data": "a", "tasks": [{"name": "one", "group": "natural"}]},
        "sweep": {"space": {"init_from": ["a", "b"]}},
        "study": {"models": [{"label": "b", "changes": {"data.train": "a"}}]},
    }
    written = recipe.with_changes(**tree).with_absolute_paths().written(*tree)
    assert json.dumps(written).count(json.dumps(str(Path("a").absolute()))) == len(tree)


def test_a_length_in_steps_or_epochs_comes_to_steps_and_is_longer_than_the_warm_up():
    assert OptimConfig(steps=7).total_steps(1000, 100) == 7
    assert OptimConfig(epochs=2.0).total_steps(1000, 100) == 20
    with pytest.raises(ValueError, match=r"set optim\.steps or optim\.epochs"):
        OptimConfig().total_steps(1000, 100)
    for steps, proposed in ((1, 0), (5, 1), (9, 1), (500, 50)):
        with pytest.raises(ValueError, match=rf"set optim.warmup_steps={proposed}$"):
            OptimConfig(steps=steps, warmup_steps=500).total_steps(1000, 100)
        OptimConfig(steps=steps, warmup_steps=proposed).total_steps(1000, 100)


def test_steps_at_which_something_is_due():
    steps = range(1, 10)
    assert [step for step in steps if is_due(step, None, ())] == []
    assert [step for step in steps if is_due(step, 3, ())] == [3, 6, 9]
    assert [step for step in steps if is_due(step, 4, (5,))] == [4, 5, 8]


@pytest.mark.parametrize(
    ("workers", "train", "told"),
    [
        # An elastic run derives its passes from the group, also with equal bounds.
        ([3, 3], {"micro_batch_size": 12}, r"workers.num_workers\): 64 = 21 x 3 \+ 1"),
        (64, {"mixup": 0.2}, r"in passes of 2 \(.*, or pairs of train.mixup\): 64 = 0 x 128"),
    ],
)
def test_a_batch_that_does_not_divide_names_what_asks_for_it(path, workers, train, told):
    sizes = {"global_batch_size": 64, **train}
    recipe = load_recipe(path).with_changes(train=sizes, workers={"num_workers": workers})
    with pytest.raises(ValueError, match=told):
        check_batch(recipe, 1000)
    check_batch(recipe.with_changes(workers={"num_workers": [4, 4]}), 1000)


def test_an_address_is_of_a_kind_that_mlflow_opens(path):
    for uri in (
        "sqlite:////srv/mlflow.db", "sqlite+pysqlite:///mlflow.db", "databricks://profile",
        "postgresql+psycopg2://u:p@db/mlflow", "https://u:p@mlflow.example/x", "databricks",
    ):  # fmt: skip
        assert load_recipe(path, [f"tracking.uri={uri}"]).tracking.uri == uri


@pytest.mark.parametrize("key", ["pool", "ray.io/accelerator-type", "-a", "a b", "a/b/c", ""])
def test_labels_select_nodes_by_rays_own_rules(key):
    values = ("H100", "!spot", "in(a,b)", "!in(a, b-1)", "in()", "in(a,", "-a", "a_", "a b", "!!a")
    for value in values:
        override = [f"workers.label_selector={json.dumps({key: value})}"]
        if validate_label_selector({key: value}) is None:
            found = load_recipe("digits", override).workers.label_selector
            assert found == {key: value.replace(" ", "")}
        else:
            with pytest.raises(ValueError, match="does not select nodes by a label of Ray's; give"):
                load_recipe("digits", override)
