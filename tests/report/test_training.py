"""The page of one training: images, errors, time, events, data, from what is in MLflow."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param
from mlflow.tracking import MlflowClient

from tests.report.made_pages import made_page
from tests.report.made_runs import made
from tests.tracking.stored_runs import store_run
from vit_ray.evaluation.examples import picture, training_files
from vit_ray.report import runs as report_runs
from vit_ray.report.document import with_content
from vit_ray.report.figures.chart_list import curve_series
from vit_ray.report.page import write_report
from vit_ray.report.runs import Archive
from vit_ray.report.time_spent import time_section
from vit_ray.report.training import training_sections

CRAFTED = '<script>alert(1)</script> "&'
CLASSES = [CRAFTED, "=1+1", "x" * 300, *(f"class {i}" for i in range(3, 30))]
SECONDS = {"training": 7200.0, "starting": 900.0, "place_wait": 1800.0, "lost": 100.0}
METRICS = {
    "eval/top1": 0.5,
    "eval/best_top1": 0.75,
    "result/step": 20,
    "result/evaluations": 3,
    "cost/core_days": 0.5,
    "run/wall_s": 10_000,
    **{f"run/{kind}_s": seconds for kind, seconds in SECONDS.items()},
}
EVENTS = [("later", 200.0, 7), (f"first {CRAFTED}", 100.0, 3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    MlflowClient(uri).create_experiment("e", artifact_location=str(folder / "artifacts"))
    return uri


def record(uri, *, num_classes=5, files=True):
    """A finished training whose every second image is wrong; its id."""
    client = MlflowClient(uri)
    run = made({"workers.num_workers": 4}, kind="pretrain",
               **{"mlflow.source.name": f"pretrain.py {CRAFTED}"})  # fmt: skip
    run_id = client.create_run("1", run_name=CRAFTED, tags=run.tags).info.run_id
    values = {**run.run.data.metrics, **METRICS}
    curve = [Metric("eval/top1", 0.1 * step / 10, step, step) for step in (10, 20, 30)]
    client.log_batch(
        run_id,
        [*curve, *(Metric(k, float(v), 30, 30) for k, v in values.items())],
        [Param(k, str(v)) for k, v in run.params.items()],
    )
    facts = json.dumps({"num_images": 200, "num_classes": num_classes})
    place = json.dumps({"uri": "/data/flowers"})
    held = Dataset("flowers", "d" * 32, "vit_ray", place, profile=facts)
    client.log_inputs(run_id, [DatasetInput(held, [InputTag("mlflow.data.context", "evaluation")])])
    squares = [np.full((96, 96, 3), 9, np.uint8)] * 4
    about = [
        {
            "sample": i,
            "classes": [CLASSES[i]],
            "predicted": CLASSES[i - i % 2],
            "loss": 0.1,
            "probability": 0.25 * i,
        }
        for i in range(4)
    ]
    labels = np.zeros((4, 1), np.int32)
    texts = {
        f"evaluation/{name}": content
        for name, content in picture("examples", squares, about).items()
    }
    texts |= {
        f"images/{name}": content
        for name, content in training_files(np.stack(squares), range(4), labels, CLASSES).items()
    }
    rows = [[name, name, 3] for name in CLASSES[:num_classes]] + [[CRAFTED, "=1+1", 1]]
    lines = [["class", "predicted", "images"], *rows]
    texts["evaluation/confusion.csv"] = "\n".join(
        ",".join(f'"{str(cell).replace(chr(34), chr(34) * 2)}"' for cell in line) for line in lines
    ).encode()
    for number, (text, time_s, step) in enumerate(EVENTS):
        event = {"kind": "restarted", "text": text, "step": step, "time_s": time_s}
        texts[f"history/{number}.json"] = json.dumps([event]).encode()
    for place, content in texts.items() if files else ():
        artifacts = client.get_run(run_id).info.artifact_uri
        folder, _, name = place.rpartition("/")
        path = Path(artifacts) / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    client.set_terminated(run_id, "FINISHED")
    return run_id


def sections(uri, run_id):
    """By title, without a page."""
    archive = Archive(uri, run_id)
    return {one.title: one for one in training_sections(archive, archive.runs[0])}


@pytest.fixture(scope="module")
def page(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return made_page(store, record(store), folder / "report.html")


def test_images_stand_with_what_they_were_taken_for(page):
    shown = re.findall(r'<div role="img" aria-label="(.*?)"', page.text)
    crafted = CRAFTED.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    crafted = crafted.replace('"', "&#34;")
    assert shown[:4] == [
        f"{crafted} (0.0%)", f"{crafted} (25.0%), not =1+1", f"{'x' * 300} (50.0%)",
        f"{'x' * 300} (75.0%), not class 3",
    ]  # fmt: skip
    assert shown[4:] == [crafted] * 4  # training images, of which nothing is predicted
    assert page.text.count('<li class="wrong">') == 2
    assert len(re.findall(r"--strip: url\(data:image/jpeg;base64,[\w+/=]+\)", page.text)) == 2
    assert "<script>alert" not in page.text


def test_the_sections_are_in_the_order_in_which_they_are_read(page):
    heads = re.findall("<h2>(.*?)</h2>", page.text)
    assert heads[:7] == [
        "Learning curves", "Images and errors", "Where the time went", "Events", "Data",
        "How to run it again", "Trainings",
    ]  # fmt: skip
    assert "pretrain.py &lt;script&gt;" in page.text
    assert "goodput 72.0 %" in page.text


def test_the_best_evaluation_is_marked_on_its_curves_alone(page):
    rows = page.charts["validation_top_1"].rows
    assert [row.get("state") for row in rows] == [None, "best evaluation", None]


def test_the_best_evaluation_is_marked_where_a_long_curve_leaves_it_out(store, monkeypatch):
    archive = Archive(store, record(store))
    (run,) = archive.runs
    monkeypatch.setattr(archive, "curves", lambda *_: {run.run_id: [(10, 0.1), (30, 0.3)]})
    (series,) = curve_series(archive, [run], "eval/top1", {run.run_id: "mine"})
    assert [(p.x, p.y, p.state) for p in series.points] == [
        (10, 0.1, ""), (20, 0.75, "best evaluation"), (30, 0.3, ""),
    ]  # fmt: skip


def test_each_class_stands_against_each_in_shares_of_its_images(page):
    rows = page.tables["confusion_matrix"]
    assert len(rows) == 5
    mine = next(row for row in rows if row["class"] == CRAFTED)
    assert (mine["images"], mine[CRAFTED], mine["'=1+1"]) == ("4", "75.0", "25.0")
    assert 'class="number bar" style="--part: 75.0%"' in page.text


def test_of_many_classes_the_most_frequent_errors_stand(store):
    (table,) = sections(store, record(store, num_classes=30))["Images and errors"].tables
    assert table.caption == "Most frequent errors: 1 of 1 pairs of classes"
    assert table.rows == [[CRAFTED, "=1+1", 1, 0.25]]


def test_of_few_classes_there_is_no_table(store):
    assert not sections(store, record(store, num_classes=4))["Images and errors"].tables


def test_every_second_has_its_class(page):
    rows = {row["spent on"]: row for row in page.tables["where_the_time_went"]}
    assert {name: float(row["time"]) for name, row in rows.items()} == {
        "training": 7200, "starting": 900, "waiting for a place": 1800, "lost": 100,
    }  # fmt: skip


def test_a_data_set_is_named_by_its_address(page):
    (row,) = page.tables["data_sets_of_the_training"]
    assert row["from"] == "/data/flowers"


def test_events_of_all_attempts_are_in_the_order_of_time(page):
    rows = page.tables["events"]
    assert [(row["step"], row["what happened"]) for row in rows] == [
        ("3", f"first {CRAFTED}"), ("7", "later"),
    ]  # fmt: skip


def test_a_training_whose_files_are_away_has_the_rest(store):
    found = sections(store, record(store, files=False))
    assert [one.title for one in with_content([*found.values()])] == [
        "Where the time went", "Data", "How to run it again",
    ]  # fmt: skip


def test_the_place_of_files_that_are_away_is_a_path(store, tmp_path):
    client, folder = MlflowClient(store), tmp_path / "it's a%20place"
    experiment = client.create_experiment("named", artifact_location=folder.as_uri())
    run_id = store_run(client, experiment, "r", tags={"vit_ray.kind": "pretrain"})
    missing = write_report(store, run_id, tmp_path / "page.html").missing
    assert (
        f"the files of run r cannot be read at {folder}/{run_id}/artifacts: images" in missing[-1]
    )


def test_the_page_says_that_the_files_of_its_training_are_away(store, tmp_path):
    away, there = record(store, files=False), record(store)
    place = MlflowClient(store).get_run(away).info.artifact_uri
    sentence = (
        f"the files of run {CRAFTED} cannot be read at {place.removeprefix('file://')}: images, "
        "errors and events are not shown"
    )
    assert sentence in write_report(store, away, tmp_path / "away.html").missing
    missing = write_report(store, there, tmp_path / "there.html").missing
    assert not [one for one in missing if one.startswith("the files of")]


def test_files_that_are_not_next_to_the_store_come_through_its_client(store, tmp_path, monkeypatch):
    run_id = record(store)
    near = sections(store, run_id)
    monkeypatch.setattr(report_runs, "files_elsewhere", lambda *_: None)
    found = sections(store, run_id)
    assert found["Events"].tables[0].rows == near["Events"].tables[0].rows != []
    pictures = [one.strip for one in found["Images and errors"].galleries]
    assert pictures == [one.strip for one in near["Images and errors"].galleries] != []
    missing = write_report(store, run_id, tmp_path / "there.html").missing
    assert not [one for one in missing if one.startswith("the files of")]


EVENT = b'[{"kind": "k", "text": "t", "step": 1, "time_s": 1e20}]'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"{}",
        b"[{}]",
        b"\xff\xfe",
        b'{"a": [1]}',
        EVENT,
        b"class,predicted,images\n" + b"".join(b"%d,%d,0\n" % (n, n) for n in range(9)),
    ],
)
def test_files_of_something_else_are_left_out(store, content):
    run_id = record(store)
    folder = Path(MlflowClient(store).get_run(run_id).info.artifact_uri)
    for name in ("evaluation/examples.json", "evaluation/confusion.csv", "history/0.json"):
        (folder / name).write_bytes(content)
    found = sections(store, run_id)
    assert not found["Images and errors"].galleries
    assert not found["Images and errors"].tables
    assert [row[2] for row in found["Events"].tables[0].rows] == [3]


def test_the_page_says_where_the_model_card_is(store):
    run_id, client = record(store), MlflowClient(store)
    assert "Model card" not in " ".join(sections(store, run_id)["How to run it again"].texts)
    model = client.create_logged_model("1", name="flowers", source_run_id=run_id)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 30)])
    assert "Model card" not in " ".join(sections(store, run_id)["How to run it again"].texts)
    card = Path(model.artifact_location) / "artifacts" / "README.md"
    card.parent.mkdir(parents=True)
    card.write_text("# flowers")
    assert sections(store, run_id)["How to run it again"].texts[-1] == f"Model card: {card}"
    archive = Archive(store, run_id)
    archive.is_server, archive.address = True, "https://mlflow.example.org"
    page = f"https://mlflow.example.org/#/experiments/1/models/{model.model_id}"
    assert archive.card(archive.runs[0]) == page


def test_the_time_of_several_trainings_is_one_sum(store):
    runs = [Archive(store, record(store, files=False)).runs[0] for _ in range(2)]
    untold = made()  # of an earlier version
    (table,) = time_section([*runs, untold]).tables
    assert table.rows[0] == ["training", 14_400.0, 0.72]
    assert with_content([time_section([untold])]) == []
