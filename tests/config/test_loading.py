"""Recipes: what is read, what is refused, and what the refusal says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_tag
from pydantic import ValidationError
from ray._private.label_utils import validate_label_selector

from tests.models.small import FAMILIES, small_model
from vit_ray.config import Recipe, load_recipe, require
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.training_sections import OptimConfig, accumulation_steps
from vit_ray.config.validation import _ALIASES, dotted_keys, fields_below, is_list
from vit_ray.models import build_model

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "jobs" / "recipes").rglob("*.yaml"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("name: run\noptim: {learning_rate: 1e-3, epochs: 3}\n")
    return file


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_loads_and_names_its_command(recipe: Path) -> None:
    load_recipe(recipe)
    assert f"jobs/recipes/{recipe.relative_to(ROOT / 'jobs' / 'recipes')}" in recipe.read_text()


def test_mlflows_variables_give_what_the_recipe_does_not_say(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@mlflow:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "team")
    found = load_recipe(path, ["tracking.experiment=mine"]).tracking
    assert (found.uri, found.experiment) == ("http://me:hunter2@mlflow:5000", "mine")
    assert "tracking.uri=http://mlflow:5000 is taken from MLFLOW_TRACKING_URI" in caplog.text
    assert "MLFLOW_EXPERIMENT_NAME" not in caplog.text
    assert load_recipe(path).tracking.experiment == "team"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(ValueError, match=r"tracking\.uri"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["50%", "a(b)", "a" * 251, "a/../b", "/a"])
def test_a_tag_that_mlflow_refuses_is_refused_with_the_recipe(path: Path, name: str) -> None:
    with pytest.raises(MlflowException):
        _validate_tag(name, "x")
    with pytest.raises(ValueError, match=r"tracking\.tags"):
        load_recipe(path, {"tracking.tags": {name: "x"}})


def test_numbers_may_be_written_with_an_exponent_and_no_point(path: Path) -> None:
    assert load_recipe(path).optim.learning_rate == 0.001
    assert load_recipe(path, ["optim.learning_rate=3e-4"]).optim.learning_rate == 0.0003


@pytest.mark.parametrize("number", ["010", "1:30", "-007"])
def test_a_number_is_not_read_to_another_base_than_it_seems(number: str, path: Path) -> None:
    """YAML 1.1 reads 8, 90 and -7."""
    with pytest.raises(ValueError, match=f"seed='{number}': Input should be a valid integer"):
        load_recipe(path, [f"seed={number}"])
    assert load_recipe(path, ["seed=0x10"]).seed == 16


def test_overrides_reach_sections_that_the_file_does_not_have(path: Path) -> None:
    recipe = load_recipe(path, ["train.zero_stage=3", "evaluate.shots=[1, 2]"])
    assert recipe.train.zero_stage == 3
    assert recipe.evaluate.shots == (1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_any_family_and_size_is_built_from_a_recipe(family: str, path: Path) -> None:
    size = ", ".join(f"{key}: {list_of(value)}" for key, value in FAMILIES[family].items())
    model = load_recipe(path, [f"model={{name: {family}, image_size: [32, 64], {size}}}"]).model
    built = build_model(model.name, 5, model.image_size, **model.options())
    expected = small_model(family, image_size=(32, 64))
    assert {n: p.shape for n, p in built.named_parameters()} == {
        n: p.shape for n, p in expected.named_parameters()
    }


def list_of(value: int | tuple[int, ...]) -> int | list[int]:
    """As YAML writes it."""
    return list(value) if isinstance(value, tuple) else value


def test_a_recipe_takes_over_its_base_and_changes_it(path: Path) -> None:
    child = path.parent / "child.yaml"
    child.write_text("base: run.yaml\nname: child\noptim: {epochs: 5}\n")
    recipe = load_recipe(child)
    assert (recipe.name, recipe.optim.epochs) == ("child", 5)
    assert recipe.optim.learning_rate == 0.001


def test_a_base_that_leads_back_is_refused(path: Path) -> None:
    path.write_text("base: run.yaml\nname: run\n")
    with pytest.raises(ValueError, match="base names the recipe itself"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.image_size=0", "model.image_size=0: Input should be greater than 0"),
        ("model.image_size=[224, big]", "model.image_size.1='big': Input should be a valid int"),
        ("workers.num_workers=two", "workers.num_workers='two': Input should be a valid integer"),
        ("workers.num_workers=[1]", "workers.num_workers.1 is required but not given"),
        ("data.train=5", "data.train=5: Input should be a valid string"),
        ("optim.betas=0.9", "optim.betas=0.9: a list is needed, such as [0.9, 0.999]"),
        ("workers.label_selector=H100", "workers.label_selector='H100': a mapping is needed, "),
        ("study.models=[a]", "study.models.0='a': .*; did you mean study.models.0.label=a?"),
    ],
)
def test_only_the_kind_of_value_that_was_meant_is_told_of(
    path: Path, override: str, message: str
) -> None:
    """A number where a number or a list may be given is not to become a list."""
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: {message}").replace(r"\.\*", ".*")
    ) as e:
        load_recipe(path, [override])
    assert ";" not in str(e.value).replace("; did you mean", "")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("study.models=[{name: ViT-B/16, lable: x}]", "did you mean study.models.0.label?"),
        ("optim.lerning_rate=1", "unknown key optim.lerning_rate; did you mean optim.learning_rat"),
        ("zero_stage=2", "unknown key zero_stage; did you mean train.zero_stage"),
        ("lr=1", "unknown key lr; did you mean optim.learning_rate?"),
        ("optim.lr=1", "unknown key optim.lr; did you mean optim.learning_rate?"),
        ("batch_size=1", "unknown key batch_size; did you mean train.global_batch_size?"),
        ("train.batch_size=1", "did you mean train.global_batch_size?"),
        ("epochs=1", "did you mean optim.epochs?"),
        ("wd=0.1", "did you mean optim.weight_decay?"),
        ("gpus=8", "did you mean workers.num_workers?"),
        ("model=ViT-H/14", "model is a section of keys; did you mean model.name=ViT-H/14?"),
        ("xyz=1", "unknown key xyz (valid in this section: name, "),
        ("model={name: ViT, image_size: 16, patch_size: 5}", "is not a multiple of patches of 5 p"),
        ("model.image_size=225", "model.name=ViT-B/16: model.image_size=225 is not a multiple of"),
        ("model.image_size=[224, 230]", "the nearest image_size is [224, 224]"),
        (
            "model={name: ViT, width: 10, num_heads: 3}",
            "num_heads=3 does not divide model.width=10",
        ),
        (
            "study.models=[{label: tiny, model: {image_size: 30}}]",
            "study 'tiny': model.name=ViT-B/16: model.image_size=30 is not a multiple",
        ),
        ("train.zero_stage=7", "train.zero_stage=7: Input should be 0, 1, 2 or 3"),
        ("optim.learning_rate=fast", "optim.learning_rate='fast': Input should be a valid number"),
        ("train.global_batch_size=12.5", "train.global_batch_size=12.5"),
        ("train.compile=yes please", "train.compile='yes please'"),
        ("optim.steps=5", "the length of the run is given 2 times"),
        ("workers.num_workers=[4, 1]", "minimum above its maximum"),
        ("data.augment={min_area: 0.9, max_area: 0.1}", "min_area=0.9 is larger than max_area=0.1"),
        ("train={label_smoothing: 0.1, loss: sigmoid}", "label_smoothing=0.1 with loss=sigmoid"),
        ("train={compile: true, zero_stage: 3}", "compile=true does not work with zero_stage=3"),
        ("train={offload: true, zero_stage: 0}", "offload=true with zero_stage=0"),
        ("train.averaging=1.0", "averaging=1.0 would keep the initial"),
        ("train.profile_steps=[9, 3]", "profile_steps=[9, 3] ends before it begins"),
        ("evaluate.few_shot_train=x", "few_shot_train and few_shot_test go together"),
        (
            "evaluate={few_shot_train: x, few_shot_test: y, shots: []}",
            "shots=[] with few_shot_train",
        ),
        ("sweep={learning_rates: []}", "sweep.learning_rates=[]: Tuple should have at least 1"),
        ("name=a/b", "name='a/b'"),
        ("train.zero_stage", "expected key=value"),
        ("x" * 300, "expected key=value"),  # longer than a file's name can be
        ("name.first=x", "name is a value, not a section"),
        ("optim={", "not valid YAML"),
        (r'output="\ud800"', "not valid YAML: 'utf-8' codec can't encode character"),
    ],
)
def test_a_wrong_override_says_which_key_and_what_to_change(
    path: Path, override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_recipe(path, [override])


def test_an_override_of_python_is_of_a_recipes_kinds(path: Path) -> None:
    message = r"override of output: PosixPath\('x'\) is of Python's type PosixPath; give a text"
    with pytest.raises(ValueError, match=message):
        load_recipe(path, {"output": Path("x")})


LISTS = {
    "convert.classes": ["cat", "dog", "cat"],
    "convert.columns": ["caption", "caption"],
    "deduplicate.evaluation_sets": ["data/a", "data/a"],
    "optim.frozen": ["head", "head"],
    "optim.decay_at": [0.3, 0.3],
    "checkpoint.keep_steps": [5, 6, 5],
    "evaluate.shots": [1, 1],
    "evaluate.metrics": ["parts.top3", "parts.top3"],
    "train.callbacks": ["parts.note", "parts.note"],
    "sweep.learning_rates": [0.1, 0.3, 0.1],
    "study.data_fractions": [0.5, 0.5],
    "study.epochs": [7, 7.0],
    "study.steps": [9, 9],
    "study.images": [9, 9],
    "study.seeds": [0, 1, 0],
}
OWN_NAMES = ("vtab.tasks", "study.models", "study.transfer")
"""Sections in lists, whose names are compared; `models` of a study where its cells are."""


@pytest.mark.parametrize("key", LISTS)
def test_a_list_that_has_a_value_twice_is_refused(key: str) -> None:
    section, _, name = key.partition(".")
    tree: dict[str, Any] = {
        "convert": {"source": "a", "destination": "b"},
        "deduplicate": {
            "source": "a",
            "destination": "b",
            "evaluation_sets": ["c", "d"],
        },
        "study": {"models": [{"label": "a"}]},
        "name": "run",
    }
    tree = {"name": "run", section: {**tree.get(section, {}), name: LISTS[key]}}
    told = "=.*ascending order" if key == "optim.decay_at" else r"=\[.* twice; list each once"
    with pytest.raises(ValueError, match=f"^here: {section}.*{name}{told}"):
        recipe_from_dict(tree, "here")
    # A checkpoint that was begun with it opens.
    if section in ("evaluate", "checkpoint"):
        assert Recipe.model_validate_json(json.dumps(tree)).name == "run"


def test_a_row_of_a_study_has_no_value_twice_and_a_pair_or_a_networks_stages_may() -> None:
    model = {"name": "ResNet", "stages": [1, 1], "width_factor": 1}
    rows: list[dict[str, Any]] = [{"label": "a", "model": model}, {"label": "b", "steps": [5, 6]}]
    tree = {"name": "run", "model": model, "workers": {"num_workers": [2, 2]}}
    tree["study"] = {"models": rows}
    recipe_from_dict(tree, "here")
    rows[1]["steps"] = [5, 5]
    with pytest.raises(ValueError, match=r"study\.models\.1\.steps=\[5, 5\] has 5 twice"):
        recipe_from_dict(tree, "here")


def test_a_row_of_a_study_has_no_other_size_of_images_unasked() -> None:
    rows: list[dict[str, Any]] = [{"label": "a", "model": {"name": "R50x1"}}, {"label": "b"}]
    tree = {"name": "run", "model": {"image_size": 32}, "study": {"models": rows}}
    told = r"study 'a': model has no image_size, and would get the default 224 where"
    with pytest.raises(ValueError, match=told):
        recipe_from_dict(tree, "here")
    rows[0]["model"]["image_size"] = 224
    recipe = recipe_from_dict(tree, "here").with_changes(seed=1)
    assert recipe.study is not None
    assert [row.model and row.model.image_size for row in recipe.study.models] == [224, None]
    del rows[0]["model"]["image_size"]
    recipe_from_dict({**tree, "model": {"image_size": 224}}, "here").with_changes(seed=1)
    for changes in ({"model": {"image_size": 64}}, {"model.image_size": 64}):
        rows[0]["changes"] = changes  # asked for
        recipe_from_dict(tree, "here")


def test_every_list_of_the_schema_is_told_above() -> None:
    found = {key for key, field in fields_below(Recipe) if is_list(field.annotation)}
    keys = ("data_fractions", "epochs", "steps", "images", "seeds")
    axes = {f"study.models.{key}" for key in keys}
    assert found - {key for key in found if key.endswith(".stages")} == {
        *LISTS, *OWN_NAMES, *axes
    }  # fmt: skip


def test_aliases_point_to_keys_that_exist() -> None:
    assert set(_ALIASES.values()) <= set(dotted_keys(Recipe))
    assert not set(_ALIASES) & set(Recipe.model_fields)


def test_an_old_recipe_in_a_checkpoint_is_read_whatever_its_geometry(path: Path) -> None:
    tree = {"name": "old", "model": {"name": "ViT", "image_size": 16, "patch_size": 5}}
    with pytest.raises(ValueError, match="patches of 5 pixels"):
        recipe_from_dict(tree, "test")
    assert Recipe.model_validate_json(json.dumps(tree)).model.patch_size == 5


def test_shipped_recipes_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits") == load_recipe(ROOT / "jobs/recipes/digits.yaml")
    assert load_recipe("vit_h14_jft") == load_recipe("paper/vit_h14_jft")
    assert load_recipe("finetune/cifar10").sweep is not None
    assert load_recipe("cifar10").sweep is None
    (tmp_path / "mine.yaml").write_text("base: digits\nname: mine\n")
    assert load_recipe("mine.yaml").model == load_recipe("digits").model
    (tmp_path / "digits").write_text("name: own\n")
    assert load_recipe("digits").name == "own"


def test_a_name_that_is_nearly_a_shipped_recipes_is_told(path: Path) -> None:
    with pytest.raises(ValueError, match=r"'digist': no such file; similar: digits"):
        load_recipe("digist")


def test_a_key_deep_in_a_list_is_named(path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown key study\.models\.0\.model\.dpth"):
        load_recipe(path, ["study={models: [{label: a, model: {name: ViT, dpth: 3}}]}"])


def test_a_missing_file_names_its_neighbours(path: Path) -> None:
    with pytest.raises(ValueError, match=r"rn\.yaml.*no such file; similar: run\.yaml"):
        load_recipe(path.parent / "rn.yaml")


def test_a_file_that_is_no_mapping_is_refused(path: Path) -> None:
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_recipe(path)


def test_a_recipe_cannot_be_changed_after_loading(path: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe(path).name = "other"  # type: ignore[misc]


def test_flat_values_come_back_as_they_were(path: Path) -> None:
    recipe = load_recipe(path, ["optim.learning_rate=0.1234567891"])
    assert recipe.flat()["optim.learning_rate"] == "0.1234567891"


def test_changes_are_checked_too(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.with_changes(train={"zero_stage": 3}).train.zero_stage == 3
    with pytest.raises(ValueError, match=r"train\.zero_stage=9"):
        recipe.with_changes(train={"zero_stage": 9})


def test_paths_become_absolute_and_addresses_stay(path: Path) -> None:
    recipe = load_recipe(path, ["data.train=some/set", "data.eval=s3://bucket/set"])
    absolute = recipe.with_absolute_paths()
    assert Path(absolute.data.train or "").is_absolute()
    assert absolute.data.eval == "s3://bucket/set"
    assert absolute.tracking.uri == f"sqlite:///{Path.cwd()}/mlflow.db"
    assert absolute.with_absolute_paths() == absolute
    tasks = [{"name": "one", "group": "natural"}]
    vtab = (
        recipe.with_changes(vtab={"data": "some/vtab", "tasks": tasks}).with_absolute_paths().vtab
    )
    assert vtab is not None
    assert vtab.data == str(Path("some/vtab").absolute())


@pytest.mark.parametrize(
    ("length", "steps"), [({"steps": 7}, 7), ({"epochs": 2.0}, 20), ({"images": 501}, 5)]
)
def test_a_length_in_steps_epochs_or_images_comes_to_steps(
    length: dict[str, float], steps: int
) -> None:
    assert OptimConfig(**length).total_steps(1000, 100) == steps


def test_a_run_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set one of optim\.steps, optim\.epochs, optim\.images"):
        OptimConfig().total_steps(1000, 100)


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    for steps, proposed in ((1, 0), (5, 1), (9, 1), (500, 50)):
        message = rf"is not shorter than the run \({steps} .*set optim.warmup_steps={proposed}$"
        with pytest.raises(ValueError, match=message):
            OptimConfig(steps=steps, warmup_steps=500).total_steps(1000, 100)
        OptimConfig(steps=steps, warmup_steps=proposed).total_steps(1000, 100)


def test_accumulation_is_the_quotient_or_names_the_nearest_batch() -> None:
    assert accumulation_steps(4096, 64, 8) == 8
    with pytest.raises(ValueError, match=r"(?s)100 = 6 x 16 \+ 4.*nearest valid .* is 96"):
        accumulation_steps(100, 4, 4)


def test_the_same_tree_gives_the_same_recipe() -> None:
    recipe = recipe_from_dict({"name": "a", "optim": {"betas": [0.9, 0.95]}}, "test")
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_key_that_a_job_needs_is_named_where_it_is_not_set() -> None:
    for value in (0, "", False):
        assert require(value, "plan.num_gpus", "a number") is value
    with pytest.raises(ValueError, match=r"^sweep is not set; give sweep\.learning_rates$"):
        require(None, "sweep", "sweep.learning_rates")


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("mlflow.db", "a path is not an address of MLflow's; give sqlite:///FILE"),
        ("htp://localhost:5000", "htp:// is not an address of MLflow's"),
        ("file:///srv/mlruns", "MLflow 3 does not open a folder of files, such as mlruns"),
        ("postgres://u:hunter22@db/mlflow", "postgresql://"),
        ("sqlite://mlflow.db", "a third slash"),
        ("mongodb+srv://db", "mongodb:// is not an address"),
    ],
)
def test_an_address_that_mlflow_cannot_open_is_refused_with_the_recipe(
    path: Path, uri: str, told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        load_recipe(path, [f"tracking.uri={uri}"])
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///mlflow.db",
        "sqlite:////srv/mlflow.db",
        "sqlite+pysqlite:///mlflow.db",
        "postgresql+psycopg2://u:p@db/mlflow",
        "http://localhost:5000",
        "https://u:p@mlflow.example/x",
        "databricks",
        "databricks://profile",
    ],
)
def test_every_kind_of_address_that_mlflow_opens_is_taken(path: Path, uri: str) -> None:
    assert load_recipe(path, [f"tracking.uri={uri}"]).tracking.uri == uri


@pytest.mark.parametrize("key", ["pool", "ray.io/accelerator-type", "-a", "a b", "a/b/c", ""])
@pytest.mark.parametrize(
    "value", ["H100", "!spot", "in(a,b)", "!in(a, b-1)", "in()", "in(a,", "-a", "a_", "a b", "!!a"]
)
def test_labels_select_nodes_by_rays_own_rules(key: str, value: str) -> None:
    told = f"workers.label_selector={{{json.dumps(key)}: {json.dumps(value)}}}"
    if validate_label_selector({key: value}) is None:
        found = load_recipe("digits", [told]).workers.label_selector
        assert found == {key: value.replace(" ", "")}
    else:
        with pytest.raises(ValueError, match="does not select nodes by a label of Ray's; give"):
            load_recipe("digits", [told])
