"""What the page of one training shows: images, confusion, events, data."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.report.made_store import Store
from vit_ray.evaluation.examples import picture
from vit_ray.report.page import confusion, events, gallery, write_report
from vit_ray.report.runs import Files, load_runs

CLASSES = ["rose", "=1+1", "x" * 300, "daisy", "tulip"]


def lines(*rows: tuple[str, str, int]) -> bytes:
    """A confusion of five classes, each right three times, with these rows besides."""
    known = [(name, name, 3) for name in CLASSES]
    quoted = ['"class","predicted","images"', *(f'"{a}","{b}",{n}' for a, b, n in [*known, *rows])]
    return "\n".join(quoted).encode()


@pytest.fixture
def training(store: Store) -> tuple[Store, Any]:
    """With every second image wrong, two events, and a confusion of five classes."""
    run_id = store.put("run", {"eval/top1": 0.5}, kind="pretrain", group="g",
                       tags={"mlflow.source.name": "pretrain.py mine"})  # fmt: skip
    folder = Path(store.client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    squares = [np.full((96, 96, 3), 9, np.uint8)] * 4
    about = [
        {"sample": i, "classes": [CLASSES[i]], "predicted": CLASSES[i - i % 2], "loss": 0.1,
         "probability": 0.25 * i}
        for i in range(4)
    ]  # fmt: skip
    files = {f"evaluation/{k}": v for k, v in picture("examples", squares, about).items()}
    files["evaluation/confusion.csv"] = lines(("rose", "=1+1", 1))
    for number, (text, time_s) in enumerate((("later", 200.0), ("first", 100.0))):
        event = {"kind": "restarted", "text": text, "step": 3, "time_s": time_s}
        files[f"history/{number}.json"] = json.dumps([event]).encode()
    for place, content in files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(content)
    return store, load_runs(store.uri, "made").loc[run_id]


def test_images_stand_with_what_they_were_taken_for(training):
    store, run = training
    shown = gallery(Files(store.uri), run, "evaluation/examples", "?")
    assert shown.texts == [
        "rose (0.0%)", "rose (25.0%), not =1+1", f"{'x' * 300} (50.0%)",
        f"{'x' * 300} (75.0%), not daisy",
    ]  # fmt: skip
    assert shown.wrong == [False, True, False, True]
    assert Image.open(io.BytesIO(shown.strip)).width == 96 * 4
    assert gallery(Files(store.uri), run, "evaluation/errors", "?") is None
    assert events(Files(store.uri), run).to_numpy().tolist() == [
        ["1970-01-01 00:01:40", "restarted", "3", "first"],
        ["1970-01-01 00:03:20", "restarted", "3", "later"],
    ]


def test_a_page_of_one_training_shows_all_of_it(training, tmp_path):
    store, run = training
    text = write_report(store.uri, run["run_id"], tmp_path / "page.html").page.read_text()
    assert text.count('role="img"') == 4
    shown = ("later", "Command: pretrain.py mine", "Confusion matrix", "/data", f"{10_000:032x}")
    assert [one for one in shown if one not in text] == []


def test_the_confusion_matrix_has_the_shares_of_each_class():
    (table,) = confusion(lines(("rose", "=1+1", 1))).values()
    shares = table.loc["rose", ["images", "rose", "=1+1", "daisy"]].tolist()
    assert shares == [4, "75.00", "25.00", ""]
    assert table.loc["daisy", "daisy"] == "100.00"
