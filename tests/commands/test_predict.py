"""`vit-ray predict`: what it prints and writes of images in every kind of place, and refuses."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.stats import binomtest

import vit_ray
from tests.commands.command_line import run_cli
from tests.launch.test_trained_model import COUNT, run_of, write_images
from tests.models.small import small_model
from vit_ray.models.weights import save_weights


@pytest.fixture
def run(tmp_path: Path) -> str:
    files = write_images(tmp_path / "data")
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for number, file in enumerate(files):
        folder = tmp_path / "images" / ("deep" if number % 2 else "")
        (folder / f"{number:02}.jpg").write_bytes(file)
    return run_of(tmp_path)


def expected(run: str, folder: Path) -> dict[str, Any]:
    paths = sorted((folder / "images").rglob("*.jpg"))
    return dict(zip((path.name for path in paths), vit_ray.load(run).predict(paths), strict=True))


def test_the_classes_of_a_folder_are_printed_and_written_as_tables_and_a_picture(run, tmp_path):
    outputs = [f"--out={tmp_path}/found{suffix}" for suffix in (".parquet", ".png")]
    done = run_cli("predict", run, str(tmp_path / "images"), *outputs)
    assert done.exit_code == 0, done.stderr
    best = expected(run, tmp_path)
    lines = dict(line.split(": ") for line in done.stdout.splitlines())
    told = {Path(path).name: text.partition(", ")[0] for path, text in lines.items()}
    assert told == {name: f"{one.name} {one.probability:.1%}" for name, one in best.items()}
    table = pq.read_table(tmp_path / "found.parquet")
    assert table.column_names == ["image", "label", "class", "probability", "expected", "problem"]
    rows = {Path(row["image"]).name: row for row in table.to_pylist()}
    # Of a folder the first batch is full, as one list of all files has it.
    assert {name: (row["class"], row["label"]) for name, row in rows.items()} == {
        name: (one.name, one.label) for name, one in best.items()
    }
    for name, row in rows.items():
        assert row["probability"] == pytest.approx(best[name].probability, rel=1e-5)
    with Image.open(tmp_path / "found.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 1000


def test_images_in_folders_of_classes_are_right_or_wrong_and_other_files_are_named(run, tmp_path):
    classes = vit_ray.load(run).classes
    best = expected(run, tmp_path)
    for number, path in enumerate(sorted((tmp_path / "images").rglob("*.jpg"))):
        found = best[path.name].name
        other = next(name for name in classes if name != found)
        folder = tmp_path / "sorted" / (other if number < 3 else found)
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    others = [f"{number:02}.heic" for number in range(60)]
    for other in others:
        (tmp_path / "sorted" / other).write_bytes(b"x")
    done = run_cli("predict", run, str(tmp_path / "sorted"), f"--out={tmp_path}/a.parquet")
    assert done.exit_code == 0, done.stderr
    right = COUNT - 3
    low, high = binomtest(right, COUNT).proportion_ci(method="wilson")
    told = f"in folders of classes: {right} right, 3 wrong: {right / COUNT:.2%} "
    assert f"{told}({low:.1%} to {high:.1%} at 95 %, {COUNT} images)\n" in done.stderr
    assert (
        f"60 files without the name of an image are skipped: {', '.join(others)}\n" in done.stderr
    )
    assert all(line.count("%") == min(5, len(classes)) for line in done.stdout.splitlines())
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert sum(row["class"] == row["expected"] for row in rows) == right


def test_a_converted_set_is_read(run, tmp_path):
    done = run_cli("predict", run, str(tmp_path / "data"))
    assert done.exit_code == 0, done.stderr
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    assert lines[0][0].endswith("0.jpg")
    trained, data = vit_ray.load(run), vit_ray.open_dataset(str(tmp_path / "data"))
    found = trained.predict([sample.image for sample in data])
    assert trained.predict(data) == found
    assert trained.predict(data[0]) == trained.predict(data[0].image)
    assert [text.partition(" ")[0] for *_, text in lines] == [one.name for one in found]


def test_a_file_alone_is_used_with_a_recipe_or_keys(run, tmp_path):
    save_weights(small_model("ViT"), tmp_path / "a.npz", "jax")
    image = str(tmp_path / "images" / "00.jpg")
    done = run_cli("predict", str(tmp_path / "a.npz"), image)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "does not record its model; give the recipe that trained it" in done.stderr
    keys = "name=ViT image_size=32 depth=2 width=32 mlp_dim=64 num_heads=4 patch_size=8"
    given = [f"model.{key}" for key in keys.split()]
    done = run_cli("predict", str(tmp_path / "a.npz"), *given, image)
    assert done.exit_code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.split(": ")[1].split()[0] in {"0", "1", "2", "3", "4"}


def test_what_cannot_be_read_is_listed_with_the_reason_and_the_rest_is_predicted(run, tmp_path):
    (tmp_path / "images" / "-empty.jpg").write_bytes(b"")
    (tmp_path / "images" / "z_text.jpg").write_text("a text")
    table = tmp_path / "found.parquet"
    done = run_cli("predict", run, str(tmp_path / "images"), f"--out={table}")
    assert done.exit_code == 1
    assert len(done.stdout.splitlines()) == COUNT
    assert "-empty.jpg: it has no bytes" in done.stderr
    assert "z_text.jpg: not decodable: it is not one of JPEG, PNG" in done.stderr
    rows = pq.read_table(table).to_pylist()
    bad = {Path(row["image"]).name: row["class"] for row in rows if row["problem"]}
    assert (bad, len(rows)) == ({"-empty.jpg": None, "z_text.jpg": None}, COUNT + 2)
    # Of no readable image there are the reasons, and a picture of a title.
    outputs = [f"--out={tmp_path}/none{suffix}" for suffix in (".parquet", ".png")]
    done = run_cli("predict", run, str(tmp_path / "images" / "-empty.jpg"), *outputs)
    assert (done.exit_code, done.stdout) == (1, "")
    (row,) = pq.read_table(tmp_path / "none.parquet").to_pylist()
    assert row["problem"].startswith("it has no bytes")
    with Image.open(tmp_path / "none.png") as picture:
        assert picture.height < 50
