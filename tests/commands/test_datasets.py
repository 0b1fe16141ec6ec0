"""The jobs that look after data sets, run as their commands run them."""

import re
import shutil

from tests.data.small_sets import keys_of
from vit_ray.commands.datasets import run_deduplicate, run_subset, run_verify
from vit_ray.config import load_recipe
from vit_ray.data import open_dataset
from vit_ray.data.parts import subset


def recipe_with(*overrides: str):
    return load_recipe("digits", list(overrides))


def test_a_part_is_taken_and_verified(ray_cluster, digits, tmp_path, capsys):
    target = tmp_path / "part"
    section = f"{{source: {digits.train}, destination: {target}, count: 100}}"
    assert run_subset(recipe_with(f"subset={section}")) == 0
    assert open_dataset(str(target)).num_images == 100
    assert run_verify(recipe_with(f"verify={{path: {target}, decode_fraction: 0.5}}")) == 0
    assert "0 problems; the data set is complete and undamaged" in capsys.readouterr().out


def test_damage_is_printed_and_is_the_exit_code(ray_cluster, digits, tmp_path, capsys):
    shutil.copytree(digits.test, tmp_path / "set")
    shard = open_dataset(digits.test).files[0].path
    (tmp_path / "set" / shard).write_bytes(b"gone")
    assert run_verify(recipe_with(f"verify={{path: {tmp_path}/set}}")) == 1
    assert f"{shard}: it cannot be opened: " in capsys.readouterr().out


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
    told = r"(\d+) exact and (\d+) near duplicates of 300 images"
    exact, near = re.search(told, printed).groups()
    assert int(exact) >= 50
    assert int(exact) + int(near) == 300 - clean.num_images
