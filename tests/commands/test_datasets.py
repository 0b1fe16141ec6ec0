"""The jobs that look after data sets, run as their commands run them."""

import re
from pathlib import Path

import pytest

from tests.data.small_sets import keys_of
from vit_ray.commands.datasets import run_deduplicate, run_subset, run_verify
from vit_ray.config import load_recipe
from vit_ray.data import open_dataset
from vit_ray.data.parts import subset

ROOT = Path(__file__).parents[2]


def recipe_with(*overrides: str):
    return load_recipe(ROOT / "jobs" / "recipes" / "digits.yaml", list(overrides))


def test_a_part_is_taken_and_verified(ray_cluster, digits, tmp_path, capsys):
    target = tmp_path / "part"
    section = f"{{source: {digits.train}, destination: {target}, count: 100}}"
    assert run_subset(recipe_with(f"subset={section}")) == 0
    assert open_dataset(str(target)).num_images == 100
    assert run_verify(recipe_with(f"verify={{path: {target}, decode_fraction: 0.5}}")) == 0
    assert "0 problems; the data set is complete and undamaged" in capsys.readouterr().out


def test_damage_is_printed_and_is_the_exit_code(ray_cluster, digits, tmp_path, capsys):
    whole = open_dataset(digits.test)
    for name in [file.path for file in whole.files] + ["manifest.parquet"]:
        (tmp_path / name).write_bytes((Path(digits.test) / name).read_bytes())
    (tmp_path / whole.files[0].path).write_bytes(b"gone")
    assert run_verify(recipe_with(f"verify={{path: {tmp_path}}}")) == 1
    printed = capsys.readouterr().out
    assert f"{whole.files[0].path}: it cannot be opened: " in printed
    assert "restore" in printed


def test_evaluation_images_are_left_out(ray_cluster, digits, tmp_path, capsys):
    """50 of the set's own 300, and what else is equal to one of them."""
    part = subset(digits.test, str(tmp_path / "part"), count=50)
    target = tmp_path / "clean"
    section = f"{{source: {digits.test}, evaluation_sets: [{part.path}], "
    assert run_deduplicate(recipe_with(f"deduplicate={section} destination: {target}}}")) == 0
    clean = open_dataset(str(target))
    assert not set(keys_of(part)) & set(keys_of(clean))
    assert set(keys_of(clean)) < set(keys_of(open_dataset(digits.test)))
    assert 200 < clean.num_images == len(set(keys_of(clean))) <= 250
    printed = capsys.readouterr().out
    exact, near = re.search(
        r"(\d+) exact and (\d+) near duplicates of 300 images", printed
    ).groups()
    assert int(exact) >= 50
    assert int(exact) + int(near) == 300 - clean.num_images


@pytest.mark.parametrize(
    ("job", "name"),
    [(run_verify, "verify"), (run_subset, "subset"), (run_deduplicate, "deduplicate")],
)
def test_a_job_without_its_section_says_what_to_give(job, name):
    with pytest.raises(ValueError, match=f"{name} is not set; give {name}"):
        job(recipe_with())
