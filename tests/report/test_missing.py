"""Half a study: what the page says of its gaps, and which of two runs it shows of one cell."""

import math
import re
import sqlite3
from html import unescape

import pytest
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from tests.report.made_pages import made_page
from tests.tracking.stored_runs import store_run
from vit_ray.report.figures.charts import STATES
from vit_ray.report.page import write_report
from vit_ray.report.runs import Archive

MADE = 1_760_000_000_000


class Store:
    """A study of which each cell is made as it is told."""

    def __init__(self, folder):
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client = MlflowClient(self.uri)
        place = f"file://{folder}/artifacts"
        self.experiment = self.client.create_experiment("scaling", artifact_location=place)
        self.study = self.run("the-study", "study", "RUNNING")

    def run(self, name, kind="study_cell", status="FINISHED", start=0, metrics=None, **tags):
        known = {"vit_ray.kind": kind, **{f"vit_ray.{key}": text for key, text in tags.items()}}
        if kind == "study_cell":
            known["mlflow.parentRunId"] = self.study
        ended = status if status != "RUNNING" else None
        times = {"start_ms": MADE + start, "time_ms": MADE}
        run_id = store_run(
            self.client, self.experiment, name, metrics, tags=known, status=ended, **times
        )
        self.client.log_text(run_id, "", "recipe.yaml")
        return run_id

    def page(self, folder):
        made = self.made(folder)
        return unescape(made.text), made.rows

    def made(self, folder):
        return made_page(self.uri, self.study, folder / "page.html")


@pytest.fixture
def drawn_store(tmp_path):
    return Store(tmp_path)


@pytest.fixture
def store(drawn_store, blank_figures):
    return drawn_store


WHOLE = {"study/exaflops": 2.0, "eval/top1": 0.5}


def test_a_study_that_is_whole_lacks_nothing(store, tmp_path):
    store.run("cell-a", metrics=WHOLE)
    assert "What is missing" not in store.page(tmp_path)[0]


@pytest.mark.parametrize(
    ("status", "metrics", "told"),
    [
        ("FAILED", {}, "1 failed: cell-b"),
        ("KILLED", {}, "1 stopped before the end: cell-b"),
        ("RUNNING", {"train/loss": 1.0}, "1 not finished, shown as far as recorded: cell-b"),
        ("FINISHED", {"study/exaflops": 1.0}, "1 finished without an accuracy, and so in no fig"),
        ("FINISHED", {"eval/top1": 0.5}, "1 finished without exaFLOPs, and so not in figures over"),
    ],
)
def test_a_cell_that_is_not_whole_is_told_and_stands_in_the_table(
    store, tmp_path, status, metrics, told
):
    store.run("cell-a", metrics=WHOLE)
    store.run("cell-b", status=status, metrics=metrics)
    text, rows = store.page(tmp_path)
    assert told in text
    assert {row["run"]: row["status"] for row in rows}["cell-b"] == status.lower()


@pytest.mark.parametrize("first_is_finished", [True, False])
def test_of_two_runs_of_one_cell_the_finished_one_is_shown(store, tmp_path, first_is_finished):
    ends = ("FINISHED", "FAILED") if first_is_finished else ("FAILED", "FINISHED")
    for start, status in enumerate(ends):
        metrics = WHOLE if status == "FINISHED" else {"eval/top1": 0.1}
        store.run("cell-a", status=status, start=start, metrics=metrics)
    text, rows = store.page(tmp_path)
    assert [(row["run"], row["top-1 %"]) for row in rows] == [("cell-a", "50.0")]
    assert "1 another record of a training that is shown by a newer or finished one: cell-a" in text


def test_the_papers_tables_have_one_run_of_each_cell(store, tmp_path):
    for start, top1 in enumerate((0.1, 0.9)):
        store.run("cell-a", start=start, metrics={**WHOLE, "eval/top1": top1})
    table = store.page(tmp_path)[0].split("<caption>Table 6: scaling")[1].split("</table>")[0]
    assert "90.00" in table
    assert "50.00" not in table


def test_of_two_finished_runs_of_one_cell_the_newer_is_shown(store, tmp_path):
    store.run("cell-a", start=5, metrics={**WHOLE, "eval/top1": 0.9})
    store.run("cell-a", start=2, metrics=WHOLE)
    assert [row["top-1 %"] for row in store.page(tmp_path)[1]] == ["90.0"]


def test_cells_that_no_run_is_of_are_counted(store, tmp_path):
    store.client.set_tag(store.study, "vit_ray.num_cells", "5")
    store.run("cell-a", metrics=WHOLE)
    assert "4 of 5 cells of the-study have not begun" in store.page(tmp_path)[0]


def test_cells_of_a_study_that_is_recorded_twice_have_begun(store, tmp_path):
    params = [Param("model.name", "ViT-B/16"), Param("seed", "0")]
    again = store.run("again", "study", num_cells="1")
    store.client.set_tag(store.study, "vit_ray.num_cells", "1")
    for parent in (store.study, again):
        cell = store.run(f"cell of {parent}", metrics=WHOLE)
        store.client.set_tag(cell, "mlflow.parentRunId", parent)
        store.client.log_batch(cell, params=params)
    text = write_report(store.uri, "scaling", tmp_path / "page.html").page.read_text()
    assert "1 another record of a training" in text
    assert "have not begun" not in text


def test_figures_of_a_study_compare_its_cells_alone(store, tmp_path):
    cost = {"cost/core_days": 9.0, "study/train_images": 1e6, "few_shot/5_shot_top1": 0.4}
    store.run("cell-a", metrics={**WHOLE, **cost})
    tuned = {**WHOLE, **cost, "eval/top1": 0.99, "cost/core_days": 0.1, "few_shot/5_shot_top1": 0.9}
    for kind in ("finetune", "pretrain", "evaluate", "inspection"):
        store.run(f"by-{kind}", kind, metrics=tuned, **{"study_cell": "cell-a"})
        child = store.client.search_runs([store.experiment], f"attributes.run_name = 'by-{kind}'")
        store.client.set_tag(child[0].info.run_id, "mlflow.parentRunId", store.study)
    made = store.made(tmp_path)
    text = made.text
    assert {row["run"] for row in made.rows} == {"cell-a", "by-finetune", "by-pretrain"}
    assert "cell-a on unknown data reaches 50.00 % top-1 accuracy" in text
    table = text.split("<caption>Table 6: scaling")[1].split("</table>")[0]
    assert "99.00" not in table
    drawn = [row["y"] for chart in made.charts.values() for row in chart.rows]
    assert {0.4, 0.5} <= {*drawn}
    assert not {0.9, 0.99} & {*drawn}


def test_an_accuracy_on_held_out_images_is_told(store, tmp_path):
    store.run("cell-a", metrics=WHOLE)
    store.run("cell-b", metrics={"study/exaflops": 2.0, "dev/top1": 0.5})
    text = store.page(tmp_path)[0]
    told = "measured on held-out training images, and so not compared with accuracies on a test set"
    assert f"1 {told}: cell-b" in text


def test_an_accuracy_on_held_out_images_alone_lacks_nothing(store, tmp_path):
    store.run("cell-b", metrics={"study/exaflops": 2.0, "dev/top1": 0.5})
    assert "measured on held-out" not in store.page(tmp_path)[0]


BEST = {
    "eval/top1": 0.5, "eval/best_top1": 0.75, "result/step": 40.0, "result/evaluations": 12.0,
}  # fmt: skip


def test_the_best_evaluation_is_the_result_beside_the_last(store, tmp_path):
    store.run("cell-a", metrics={**WHOLE, **BEST})
    made = store.made(tmp_path)
    text, (row,) = made.text, made.rows
    assert (row["top-1 %"], row["last top-1 %"], row["best at step"]) == ("75.0", "50.0", "40.0")
    assert row["measured on"] == "best of 12 evaluations on the test set"
    assert "1 with an accuracy that is the best of 12 evaluations on the test set: cell-a" in text
    assert [y for _, y in drawn_points(made)] == [0.75]


@pytest.mark.parametrize("status", ["FAILED", "KILLED", "RUNNING", "dev split"])
def test_a_point_that_is_no_result_is_told_from_one_without_pointing_at_it(
    drawn_store, tmp_path, status
):
    store = drawn_store
    is_dev = status == "dev split"
    store.run("cell-a", metrics=WHOLE)
    key = "dev/top1" if is_dev else "eval/top1"
    run = store.run("cell-b", status="FINISHED" if is_dev else status,
                    metrics={"study/exaflops": 3.0, key: 0.25})  # fmt: skip
    losses = [Metric("train/loss", 1.0 / (1 + step), MADE, step) for step in range(100)]
    store.client.log_batch(run, losses)
    made = store.made(tmp_path)
    states = {row["y"]: row.get("state") for row in made.charts[COMPUTE].rows}
    assert states == {0.5: None, 0.25: status.lower()}
    drawn = [chart.states for chart in made.charts.values() if chart.states]
    assert drawn == [{status.lower(): STATES[status.lower()][0]}] * (
        1 if is_dev else 2
    )  # the curve
    drawing = tmp_path / "page-figures" / f"{COMPUTE}.svg"
    assert status.lower() in drawing.read_text()


def test_a_best_that_held_out_images_chose_is_no_best_of_the_test_set(store, tmp_path):
    store.run("cell-a", metrics={**WHOLE, **BEST, "dev/loss": 1.0, "dev/best_loss": 0.5})
    text, ((row),) = store.page(tmp_path)
    assert (row["top-1 %"], row["last top-1 %"]) == ("75.0", "50.0")
    assert "evaluations on the test set" not in text


def test_a_best_on_held_out_images_alone_is_told_as_one_on_these(store, tmp_path):
    best = {key.replace("eval/", "dev/"): value for key, value in BEST.items()}
    store.run("cell-a", metrics={"study/exaflops": 2.0, **best})
    text, ((row),) = store.page(tmp_path)
    assert (row["top-1 %"], row["measured on"]) == ("75.0", "dev split")
    assert "evaluations on the test set" not in text


def test_an_experiment_without_runs_is_a_page_that_says_so(store, tmp_path):
    store.client.create_experiment("empty")
    page = write_report(store.uri, "empty", tmp_path / "page.html").page
    assert "'empty' holds no runs yet" in unescape(page.read_text())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_neither_drawn_nor_an_accuracy(store, tmp_path, value):
    store.run("cell-a", metrics=WHOLE)
    store.run("cell-b", metrics={"study/exaflops": 3.0, "eval/top1": value, "train/loss": value})
    store.run("cell-c", metrics={"study/exaflops": value, "eval/top1": 0.25})
    made = store.made(tmp_path)
    text, rows = made.text, made.rows
    assert "1 finished without an accuracy, and so in no figure of accuracy: cell-b" in text
    assert "1 finished without exaFLOPs, and so not in figures over compute: cell-c" in text
    held = {row["run"]: (row["exaFLOPs"], row["top-1 %"]) for row in rows}
    assert held == {"cell-a": ("2.0", "50.0"), "cell-b": ("3.0", ""), "cell-c": ("", "25.0")}
    assert not re.search(r"\b(nan|NaN|Infinity|inf)\b", text)
    assert drawn_points(made) == [("cell-a", 0.5)]


COMPUTE = "how_does_top_1_accuracy_grow_with_compute"


def drawn_points(made):
    """Runs and accuracies of the figure over compute."""
    (*_, x, y) = (0, 2, 3)
    rows = made.charts[COMPUTE].values.rows
    return [(row[0], row[y]) for row in rows if math.isfinite(row[x]) and math.isfinite(row[y])]


def test_metrics_of_odd_names_are_as_good_as_any(store, tmp_path):
    odd = {
        "transfer/a task: v2.0 top1_top1": 0.625,
        "transfer/_top1": 0.1,
        "eval/top1/of/what": 0.2,
        "few_shot/5_shot_top1 ": 0.3,
        "top1": 0.4,
        "study/exaflops.": 5.0,
    }
    store.run("cell-a", metrics={**WHOLE, **odd})
    text, ((row),) = store.page(tmp_path)
    assert row["a task: v2.0 top1 top-1 after fine-tuning %"] == "62.5"
    assert (row["exaFLOPs"], row["top-1 %"]) == ("2.0", "50.0")
    assert not {"10.0", "20.0", "30.0", "40.0", "5.0"} & {*row.values()}
    assert "What is missing" not in text


def test_an_experiment_of_another_project_is_a_page_of_what_it_has(store, tmp_path):
    """Its runs have neither our tags nor our metrics, and a parent that is not there."""
    other = store.client.create_experiment("theirs", artifact_location=f"file://{tmp_path}/theirs")
    for name, status in (("sgd", "FINISHED"), ("adam", "FAILED"), ("", "RUNNING")):
        tags = {"mlflow.parentRunId": "0" * 32, "mlflow.user": "them"}
        run = store.client.create_run(other, MADE, tags, name or None).info.run_id
        store.client.log_metric(run, "val_acc", 0.9)
        store.client.log_param(run, "data.train", "[not a list")
        store.client.log_param(run, "optim.epochs", "ten")
        if status != "RUNNING":
            store.client.set_terminated(run, status)
    made = made_page(store.uri, "theirs", tmp_path / "page.html")
    text = unescape(made.text)
    assert "1 finished without an accuracy, and so in no figure of accuracy: sgd" in text
    assert "1 failed: adam" in text
    assert sorted(row["status"] for row in made.rows) == ["failed", "finished", "running"]


def test_a_run_that_is_deleted_meanwhile_leaves_the_others(store, tmp_path, monkeypatch):
    """For good, with all that MLflow had of it, between the search for runs and their curves."""
    ids = [store.run(f"cell-{name}", metrics=WHOLE) for name in "ab"]
    for run_id in ids:
        for step in range(3):
            store.client.log_metric(run_id, "train/loss", 1.0 / (1 + step), step=step)
    read = Archive.curves

    def delete_first(archive, *asked):
        with sqlite3.connect(store.uri.removeprefix("sqlite:///")) as plain:
            for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
                plain.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (ids[0],))  # noqa: S608
        return read(archive, *asked)

    monkeypatch.setattr(Archive, "curves", delete_first)
    made = store.made(tmp_path)
    assert {row["run"] for row in made.rows} == {"cell-a", "cell-b"}  # as they were found
    assert [row["y"] for row in made.charts["training_loss"].rows] == [1.0, 0.5, 0.3333333]
