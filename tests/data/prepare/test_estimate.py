"""What a dry run says of a conversion, against what the conversion then makes."""

import platform
from pathlib import Path

import pytest

from tests.commands.command_line import run_cli
from tests.data.converting import config_of, convert
from tests.data.pictures import write_class_folders
from vit_ray.data.prepare import estimate
from vit_ray.data.prepare.estimate import estimate_conversion


def test_what_is_said_before_is_what_comes(
    serial: None, image_folder: Path, tmp_path: Path
) -> None:
    settings = {"rows_per_row_group": 8, "shard_mib": 0.02}
    target = str(tmp_path / "set")
    said = estimate_conversion(config_of(str(image_folder), target, **settings))
    assert not (tmp_path / "set").exists()
    made = convert(str(image_folder), target, **settings)
    assert (said.num_images, said.num_classes) == (made.num_images, made.num_classes)
    files = [file for file in image_folder.rglob("*") if file.is_file()]
    assert said.source_bytes == sum(file.stat().st_size for file in files)
    assert said.num_shards == pytest.approx(made.num_shards, abs=1)
    assert (said.num_sampled, said.num_rejected, said.reason) == (128, 0, "")
    assert said.seconds > 0


def test_a_source_that_takes_long_is_counted_in_part(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over within the first of three folders of 100 images each."""
    monkeypatch.setattr(estimate, "COUNTED_S", -1.0)
    said = estimate_conversion(config_of(str(image_folder), "set"))
    assert (said.num_counted, said.num_parts, said.num_images) == (1, 3, 3)
    text = run_plan(image_folder)
    assert text.startswith("images      about 3 of 1 classes (1 of 3 parts counted)\n")


def run_plan(source: Path, *overrides: str) -> str:
    keys = f"convert.source={source}", "convert.destination=nowhere"
    done = run_cli("convert", "digits", *keys, *overrides, "--dry-run")
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_plan_names_splits_rejected_images_and_the_machine(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("test", 5)):
        write_class_folders(tmp_path / split, num_classes=2, per_class=count)
    next((tmp_path / "train").rglob("*.jpg")).write_bytes(b"no image")
    lines = run_plan(tmp_path, "convert.split=train").splitlines()
    assert lines[0] == "images      24 of 2 classes (2 of 2 parts counted)"
    assert lines[1] == "splits      test, train (convert.split=train)"
    assert lines[4].startswith("rejected    1 of 24 images that were tried; the first: ")
    assert f"cores of this machine ({platform.node()}), at " in lines[5]
    refused = run_cli("convert", "digits", f"convert.source={tmp_path}",
                      "convert.destination=nowhere", "--dry-run")  # fmt: skip
    assert refused.exit_code == 2
    assert "has several splits: test, train; give one as convert.split" in refused.stderr
