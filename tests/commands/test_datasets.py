"""The jobs that look after data sets, run as their commands run them."""

import re
import shutil

from tests.data.small_sets import keys_of
from vit_ray.commands.datasets import run_deduplicate, run_subset, run_verify
from vit_ray.config import load_recipe
from vit_ray.data import open_dataset


def test_a_set_without_evaluation_images_is_whole_and_damage_is_the_exit_code(
    ray_cluster, digits, tmp_path, capsys
):
    """50 of the set's own 300, and what else is equal to one of them."""
    part, clean = tmp_path / "part", tmp_path / "clean"

    def recipe(name: str, keys: str):
        return load_recipe("digits", [f"{name}={{{keys}}}"])

    wanted = f"source: {digits.test}, destination: {part}, count: 50"
    run_subset(recipe("subset", wanted))
    assert open_dataset(str(part)).num_images == 50
    wanted = f"source: {digits.test}, evaluation_sets: [{part}], destination: {clean}"
    run_deduplicate(recipe("deduplicate", wanted))
    kept = {*keys_of(open_dataset(str(clean)))}
    assert not {*keys_of(open_dataset(str(part)))} & kept
    assert 200 < open_dataset(str(clean)).num_images == len(kept) <= 250
    told = r"(\d+) exact and (\d+) near duplicates of 300 images"
    exact, near = map(int, re.search(told, capsys.readouterr().out).groups())
    assert exact >= 50
    assert exact + near == 300 - len(kept)
    assert run_verify(recipe("verify", f"path: {clean}, decode_fraction: 0.5")) == 0
    assert "0 problems; the data set is complete and undamaged" in capsys.readouterr().out
    shutil.copytree(digits.test, tmp_path / "set")
    shard = open_dataset(digits.test).files[0].path
    (tmp_path / "set" / shard).write_bytes(b"gone")
    assert run_verify(recipe("verify", f"path: {tmp_path}/set")) == 1
    assert f"{shard}: it cannot be opened: " in capsys.readouterr().out
