"""What a dry run says of a conversion, against what the conversion then makes."""

import itertools
import platform
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.commands.command_line import run_cli
from tests.data.convert.archives import example, record, samples, tar_of, write_hub_file
from tests.data.convert.test_tfrecords import binary_picture
from tests.data.converting import config_of, convert
from tests.data.pictures import jpeg, write_class_folders
from vit_ray.data.convert import checks, rows
from vit_ray.data.convert.checks import estimate_conversion
from vit_ray.data.convert.rows import Row, Unit
from vit_ray.data.convert.sources import rows_of


def test_what_is_said_before_is_what_comes(serial, image_folder, tmp_path):
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


def test_a_source_that_takes_long_is_counted_in_part(image_folder, monkeypatch):
    """The time is over within the first of three folders of 100 images each."""
    monkeypatch.setattr(checks, "COUNTED_S", -1.0)
    said = estimate_conversion(config_of(str(image_folder), "set"))
    assert (said.num_counted, said.num_parts, said.num_images) == (1, 3, 300)
    text = run_plan(image_folder)
    assert text.startswith(
        "images      about 300 images of at least 3 classes (1 of 3 parts counted)\n"
    )


@pytest.mark.parametrize("num_tars", [1, 3])
def test_a_file_that_is_not_counted_to_its_end_is_extrapolated_by_bytes(
    num_tars, tmp_path, monkeypatch
):
    files = samples([jpeg(i) for i in range(100)], [b"%d" % (i // 50) for i in range(100)])
    for number in range(num_tars):
        (tmp_path / f"{number}.tar").write_bytes(tar_of(files))
    clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second for each row
    monkeypatch.setattr(checks, "time", clock)
    monkeypatch.setattr(rows, "time", clock)
    said = estimate_conversion(config_of(tmp_path, "set"))
    assert (said.num_counted, said.num_parts, said.num_classes) == (0, num_tars, 1)
    assert said.num_images == pytest.approx(100 * num_tars, rel=0.5)
    assert run_plan(tmp_path).startswith(
        f"images      about {said.num_images} images of at least 1 classes"
    )


def test_parquet_files_without_rows_or_names_count_as_the_others(tmp_path):
    files = [tmp_path / f"train-{number:05d}-of-00003.parquet" for number in range(3)]
    write_hub_file(files[1], [jpeg(0)] * 3, ["cat"] * 3)
    write_hub_file(files[2], [jpeg(1)] * 2, ["dog"] * 2)
    pq.write_table(pq.read_table(files[1]).slice(0, 0), files[0])
    said = estimate_conversion(config_of(tmp_path, "set"))
    assert (said.num_images, said.num_classes, said.num_sampled) == (5, 2, 5)


def test_of_parquet_files_no_more_images_are_read_than_are_sampled(tmp_path, monkeypatch):
    """The others are counted by the footers, until the time is over."""
    images = [jpeg(i, 200, 300) for i in range(20)]
    for number in range(3):
        write_hub_file(tmp_path / f"train-{number:05d}-of-00003.parquet", images, ["a", "b"] * 10)
    read: list[str] = []

    def counted(unit: Unit, *, with_images: bool = True) -> Iterator[Row]:
        for row in rows_of(unit, with_images=with_images):
            read.extend([row.key] if row.image else [])
            yield row

    monkeypatch.setattr(checks, "rows_of", counted)
    monkeypatch.setattr(checks, "SAMPLED", 4)
    said = estimate_conversion(config_of(tmp_path, "set"))
    assert (said.num_images, said.num_classes, said.num_counted) == (60, 2, 3)
    assert said.source_bytes == pytest.approx(3 * sum(map(len, images)), rel=0.1)
    assert len(read) == said.num_sampled == 4
    monkeypatch.setattr(checks, "COUNTED_S", -1.0)
    said = estimate_conversion(config_of(tmp_path, "set"))
    assert (said.num_images, said.num_counted) == (60, 1)


def test_a_name_that_is_not_unicode_is_counted_as_rejected(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    (tmp_path / "list.csv").write_bytes(b"path,label\na.jpg,cat\ncaf\xe9.jpg,cat\n")
    said = estimate_conversion(config_of(tmp_path / "list.csv", "set"))
    assert (said.num_images, said.num_rejected) == (2, 1)
    assert said.reason == "its name or its label is not valid UTF-8"


def test_what_lies_before_damage_is_counted(tmp_path):
    content = b"".join(record(example(image=jpeg(i), label=[i])) for i in range(3))
    (tmp_path / "a.tfrecord").write_bytes(content[:-20])
    assert estimate_conversion(config_of(tmp_path / "a.tfrecord", "set")).num_images == 2


def test_a_source_of_no_usable_image_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_text("a text")
    with pytest.raises(ValueError, match="none of 1 sampled images can be used; the first: "):
        estimate_conversion(config_of(tmp_path, "set"))


def test_a_source_whose_images_are_packed_keeps_its_bytes(tmp_path):
    content = b"".join(
        record(example(image=binary_picture(), label_x_position=[place])) for place in (3, 20)
    )
    (tmp_path / "a.tfrecord").write_bytes(content)
    said = estimate_conversion(config_of(tmp_path, "set", label_field="dspr-loc"))
    assert (said.num_images, said.num_classes, said.num_rejected) == (2, 16, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tfrecord"]
    assert (tmp_path / "a.tfrecord").read_bytes() == content


def run_plan(source: Path, *overrides: str) -> str:
    keys = f"convert.source={source}", "convert.destination=nowhere"
    done = run_cli("convert", "digits", *keys, *overrides, "--dry-run")
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_plan_names_rejected_images_and_the_machine(tmp_path):
    for split, count in (("train", 12), ("test", 5)):
        write_class_folders(tmp_path / split, num_classes=2, per_class=count)
    next((tmp_path / "train").rglob("*.jpg")).write_bytes(b"no image")
    lines = run_plan(tmp_path, "convert.split=train").splitlines()
    assert lines[0] == "images      24 images of 2 classes (2 of 2 parts counted)"
    assert lines[3].startswith("rejected    1 of 24 sampled images; the first: ")
    assert f"cores of this machine ({platform.node()}), " in lines[4]
    assert lines[4].endswith(" images/s per core")
    refused = run_cli("convert", "digits", f"convert.source={tmp_path}",
                      "convert.destination=nowhere", "--dry-run")  # fmt: skip
    assert refused.exit_code == 2
    assert "has several splits: test, train; give one as convert.split" in refused.stderr
