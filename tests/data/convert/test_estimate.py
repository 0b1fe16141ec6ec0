"""What a dry run says of a conversion, against what the conversion then makes."""

import itertools
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.commands.command_line import run_cli
from tests.data.convert.archives import samples, tar_of, write_files
from tests.data.converting import config_of, convert
from tests.data.pictures import jpeg
from vit_ray.data.convert import checks, rows
from vit_ray.data.convert.checks import estimate_conversion


def run_plan(source: Path) -> list[str]:
    keys = f"convert.source={source}", "convert.destination=nowhere"
    done = run_cli("convert", "digits", *keys, "--dry-run")
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_what_is_said_before_is_what_comes(serial, image_folder, tmp_path):
    settings = {"rows_per_row_group": 8, "shard_mib": 0.02}
    said = estimate_conversion(config_of(image_folder, tmp_path / "set", **settings))
    assert not (tmp_path / "set").exists()
    made = convert(image_folder, tmp_path / "set", **settings)
    assert (said.num_images, said.num_classes) == (made.num_images, made.num_classes)
    files = [file for file in image_folder.rglob("*") if file.is_file()]
    assert said.source_bytes == sum(file.stat().st_size for file in files)
    assert said.num_shards == pytest.approx(made.num_shards, abs=1)
    assert (said.num_sampled, said.num_rejected, said.reason) == (128, 0, "")
    assert said.seconds > 0


def test_a_source_that_takes_long_is_counted_in_part(image_folder, monkeypatch):
    """The time is over within the first of three folders of 100 images each."""
    monkeypatch.setattr(checks, "COUNTED_S", -1.0)
    said = estimate_conversion(config_of(image_folder, "set"))
    assert (said.num_counted, said.num_parts, said.num_images) == (1, 3, 300)
    text = "images      about 300 images of at least 3 classes (1 of 3 parts counted)"
    assert run_plan(image_folder)[0] == text


@pytest.mark.parametrize("num_tars", [1, 3])
def test_a_file_that_is_not_counted_to_its_end_is_extrapolated_by_bytes(
    num_tars, tmp_path, monkeypatch
):
    content = tar_of(
        samples([jpeg(i) for i in range(100)], [b"%d" % (i // 50) for i in range(100)])
    )
    write_files(tmp_path, {f"{number}.tar": content for number in range(num_tars)})
    clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second for each row
    monkeypatch.setattr(checks, "time", clock)
    monkeypatch.setattr(rows, "time", clock)
    said = estimate_conversion(config_of(tmp_path, "set"))
    assert (said.num_counted, said.num_parts, said.num_classes) == (0, num_tars, 1)
    assert said.num_images == pytest.approx(100 * num_tars, rel=0.5)


def test_rejected_images_and_the_machine_are_named(tmp_path):
    files = {f"{label}/{i}.jpg": jpeg(i) for label in ("cat", "dog") for i in range(12)}
    lines = run_plan(write_files(tmp_path / "some", files | {"cat/0.jpg": b"no image"}))
    assert lines[0] == "images      24 images of 2 classes (2 of 2 parts counted)"
    assert lines[3].startswith("rejected    1 of 24 sampled images; the first: ")
    assert f"cores of this machine ({platform.node()}), " in lines[4]
    write_files(tmp_path / "none", {"cat/1.jpg": "a text"})
    with pytest.raises(ValueError, match="none of 1 sampled images can be used; the first: "):
        estimate_conversion(config_of(tmp_path / "none", "set"))
