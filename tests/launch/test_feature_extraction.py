"""Whether features are there already, and whether they are these."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.small_sets import write_set
from tests.recipes import recipe_with
from vit_ray import lock
from vit_ray.commands.trained.features import run_extract
from vit_ray.config import Recipe
from vit_ray.evaluate.feature_files import (
    FeatureRows,
    part_name,
    read_facts,
    write_facts,
    write_part,
)
from vit_ray.launch import feature_extraction as extraction
from vit_ray.launch.feature_extraction import extract_features
from vit_ray.launch.pool.pool_training import RunFailedError
from vit_ray.launch.prepared_run import PreparedRun
from vit_ray.models import build_model
from vit_ray.models.weights import save_weights
from vit_ray.storage import Location, locate

SIZES = {"patch_size": 4, "depth": 1, "width": 8, "mlp_dim": 8, "num_heads": 2}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does not start."""
    monkeypatch.setattr(extraction, "check_start", lambda *_, **__: None)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = write_set(tmp_path / "set", [("a", [0]), ("b", [1])], ["ant", "bee"]).path
    weights = tmp_path / "weights.safetensors"
    save_weights(build_model("ViT", 5, 8, **SIZES), weights, layout="vit_ray")
    return recipe_with(
        "extracted",
        output=str(tmp_path / "runs"),
        init_from=str(weights),
        model={"name": "ViT", "image_size": 8, **SIZES},
        extract={"data": path, "path": str(tmp_path / "features")},
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PreparedRun]:
    """Runs that were started, none of which writes anything."""
    runs: list[PreparedRun] = []
    monkeypatch.setattr(extraction, "run_prepared", lambda run, **_: runs.append(run))
    return runs


def begun(recipe: Recipe) -> tuple[Location, dict[str, Any]]:
    """A folder of features that an extraction has begun, and what it says of them."""
    assert recipe.extract is not None
    with pytest.raises(RunFailedError):
        extract_features(recipe)
    folder = locate(recipe.extract.path)
    facts = read_facts(folder)
    assert facts is not None
    return folder, facts


def test_the_model_has_the_weights_outputs_and_not_the_sets(
    recipe: Recipe, started: list[PreparedRun]
) -> None:
    with pytest.raises(RunFailedError, match="holds files of 0 of 2 images"):
        extract_features(recipe)
    (prepared,) = started
    assert prepared.num_classes == 5
    assert prepared.resolved.streams["eval"].gives_keys
    assert prepared.extraction is not None
    assert prepared.extraction.with_logits


def test_features_that_are_whole_are_not_computed_again(
    recipe: Recipe, started: list[PreparedRun]
) -> None:
    folder, facts = begun(recipe)
    write_facts(folder, {**facts, "is_complete": True, "files": []})
    assert extract_features(recipe).uri == folder.uri
    assert len(started) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"precision": "fp32"}}, "precision: bf16 there, fp32 here"),
        ({"data": {"eval_augment": {"kind": "resize"}}}, "eval_augment: "),
        ({"model": {"image_size": 12}}, "model: "),
        ({"init_resize": "bicubic"}, "init_resize: bilinear there, bicubic here"),
    ],
)
def test_features_of_something_else_are_left_alone(
    recipe: Recipe, started: list[PreparedRun], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunFailedError):
        extract_features(recipe)
    with pytest.raises(ValueError, match=f"holds features with other settings.*{message}"):
        extract_features(recipe.with_changes(**changes))
    assert len(started) == 1


def test_what_only_training_uses_does_not_make_other_features(
    recipe: Recipe, started: list[PreparedRun]
) -> None:
    with pytest.raises(RunFailedError):
        extract_features(recipe)
    with pytest.raises(RunFailedError):
        extract_features(recipe.with_changes(model={"dropout": 0.1, "head_bias": -10.0}))
    assert len(started) == 2


def test_a_second_extraction_into_a_folder_is_refused(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "RELEASE_S", 0.1)
    refusals: list[str] = []

    def run_meanwhile(prepared: PreparedRun, **_: Any) -> None:
        with pytest.raises(
            ValueError, match=r"extract\.path: .*/features is in use by another driver"
        ) as e:
            extract_features(recipe)
        refusals.append(str(e.value))

    monkeypatch.setattr(extraction, "run_prepared", run_meanwhile)
    with pytest.raises(RunFailedError):
        extract_features(recipe)
    assert len(refusals) == 1


def test_features_that_another_process_has_ended_meanwhile_are_taken(
    recipe: Recipe, started: list[PreparedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def ended_by_another(folder: Location, what: str) -> Iterator[int]:
        facts = extraction.plan_extraction(recipe).facts
        write_facts(folder, {**facts, "is_complete": True, "files": []})
        yield 1

    monkeypatch.setattr(extraction, "lock_run", ended_by_another)
    extract_features(recipe)
    assert started == []


def test_the_end_says_how_fast_it_was_and_what_waited(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(prepared: PreparedRun, **_: Any) -> Any:
        assert prepared.extraction is not None
        rows = np.arange(2)
        part = FeatureRows(["a", "b"], rows, rows, np.ones((2, 8), np.float32), None)
        write_part(locate(prepared.extraction.folder), part_name(0, 2, 0, 1), [part])
        waits = {"extract/image_wait_fraction": 0.021, "extract/file_wait_fraction": 0.003}
        return SimpleNamespace(metrics={"extract/images_per_s": 1520.4, **waits, "other": 1.0})

    monkeypatch.setattr(extraction, "run_prepared", run)
    for _ in range(2):  # a finished one is not repeated, and has the same figures
        assert run_extract(recipe) == 0
        assert capsys.readouterr().out.splitlines()[-1] == (
            "1,520 images/s from the first batch on; 2.1% of the time waited for images, 0.3% for "
            "files to be written"
        )


def test_files_that_nothing_tells_of_are_left_alone(
    recipe: Recipe, started: list[PreparedRun], tmp_path: Path
) -> None:
    (tmp_path / "features").mkdir()
    name = "features-000000000000-000000000008-00000-of-00001.parquet"
    (tmp_path / "features" / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds features without features\.json"):
        extract_features(recipe)
    assert started == []


def test_weights_and_section_are_needed(recipe: Recipe) -> None:
    with pytest.raises(ValueError, match="extract is not set"):
        extract_features(recipe.with_changes(extract=None))
    with pytest.raises(ValueError, match="init_from is not set"):
        extract_features(recipe.with_changes(init_from=None))
