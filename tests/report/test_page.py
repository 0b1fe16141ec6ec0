"""The page: its first sentences, what is missing, and that no text of a run becomes code."""

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from tests.report.made_store import Store, scale_of
from vit_ray.evaluation.examples import picture
from vit_ray.report.page import (
    Written,
    confusion,
    events,
    gallery,
    keep_page,
    write_report,
)
from vit_ray.report.runs import load_runs


class Tags(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.text = ""
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.found.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(store: Store, selection: str = "made") -> Written:
    folder = Path(store.uri.removeprefix("sqlite:///")).parent
    return write_report(store.uri, selection, folder / "r.html")


def test_a_study_begins_with_what_its_laws_determine(study_page):
    first, ratio, count, cost, proxy = study_page.lead
    # It does not lead: it was trained with more.
    assert first.startswith("ViT-B/16 with 78.7 % after 0.1478 exaFLOPs; the best ResNet is R101x1")
    logs = [math.log(scale_of("R", s) / scale_of("ViT", s)) / 0.3 for s in range(5)]
    ends = np.exp(stats.t.interval(0.95, 4, np.mean(logs), stats.sem(logs)))
    assert ratio.startswith(
        "At equal accuracy ResNets need 0.54 times the compute of ViTs (95 % over seeds: "
        f"{ends[0]:.2g} to {ends[1]:.2g}) from "
    )
    assert count.startswith("62 of 64 cells have finished; 2 of other data or recipes are in tab")
    assert cost.startswith("Total cost of 64 trainings: ")
    assert "a proxy: trained on cifar10, pets, and not on" in proxy
    titles = re.findall("<h2>(.*?)</h2>", study_page.page.read_text())
    assert titles == ["Accuracy against compute", "Tables of the paper", "Trainings", "Speed"]


def test_what_is_missing_names_each_gap_once(study_page):
    assert study_page.missing == [
        "1 failed: study-ViT-S_16-e7-s5",
        "1 not finished, shown as far as recorded: study-ViT-S_16-e7-s6",
        "1 another record of a training that is shown by a newer or finished one: "
        "study-ViT-S_16-e7-s0",
        "2 of 66 cells of study have not begun",
    ]


def test_a_sweep_begins_with_its_choice_and_its_test_result(sweep_page):
    won, tested, cost, proxy = sweep_page.lead
    assert won.startswith(
        "Learning rate 0.03 wins on the dev split (90.00 %), by 1.00 points over 0.1: "
    )
    assert "more than noise cannot be said (less than the binomial error" in won
    assert "0.03 reaches 90.0 +- 1.0 % (95 %: 88 to 92, 3 seeds) on the test set." in tested
    assert cost == "Total cost of 7 trainings: 3.8 exaFLOPs."
    assert "a proxy" in proxy  # Table 2 stands beside the paper's
    # A trial that ASHA stopped is neither missing nor apart.
    assert sweep_page.missing == []
    text = Tags(sweep_page.page).text
    assert "stopped early" in text
    assert "killed" not in text
    assert len([name for name in sweep_page.figures if "learning rate" in name]) == 1


def put_rates(store: Store, name: str) -> None:
    """A sweep of two rates, the smaller one better."""
    sweep = store.put(name, kind="sweep")
    for rate, top1 in ((0.01, 0.9), (0.03, 0.5)):
        put_trial(store, f"{name}-lr{rate}", sweep, rate, top1)


def put_trial(store: Store, name: str, sweep: str, rate: float, top1: float) -> None:
    store.put(
        name, {"dev/top1": top1}, {"optim.learning_rate": rate}, kind="sweep_trial",
        group=f"{sweep} {rate}", parent=sweep, tags={"vit_ray.sweep_stage": "sweep_trial"},
    )  # fmt: skip


def test_each_sweep_of_an_experiment_has_a_figure_of_its_own_and_a_sentence(store):
    for name in ("rates,1", "rates,2", "same", "same"):
        put_rates(store, name)
    put_trial(store, "trial", "0" * 32, 0.1, 0.5)  # its parent is not in MLflow
    run_id, written = store.put("keeps", kind="sweep"), page_of(store)
    names = [text.partition(": ")[0] for text in written.lead[:4]]
    assert names[:2] == ["rates,1", "rates,2"]
    assert len({*names}) == 4
    assert all(re.fullmatch("same [0-9a-f]{6}", name) for name in names[2:])
    assert written.lead[4].startswith("Learning rate 0.1 wins")
    assert "0.01 is the smallest rate tried: try 0.003." in written.lead[0]
    drawn = [one.partition(":")[0] for one in written.figures if "rate" in one]
    assert drawn[:4] == names
    for _ in range(2):  # the second page replaces the tables of the first
        keep_page(store.client, run_id, written)
    assert len(store.client.list_artifacts(run_id, "figures")) == len(written.figures) >= 4
    (listed,) = (one for name, one in written.tables.items() if name.startswith("Trainings"))
    kept = store.client.download_artifacts(run_id, "tables/trainings.json")
    assert len(json.loads(Path(kept).read_text())["data"]) == len(listed)


def test_a_training_begins_with_its_result_on_its_own_set(store):
    """Sets of one name and other sizes are not compared; what is fine-tuned is with its own set."""
    store.put("fails", {"eval/top1": 0.5}, kind="pretrain", group="f", status="FAILED")
    assert "failed; its top-1 is 50.00 %" in page_of(store).lead[0]
    store.put("held out", {"dev/top1": 0.5}, kind="pretrain", group="h")
    assert "images held out of the training set" in page_of(store).lead[0]
    store.put("other set", {"eval/top1": 0.99}, kind="pretrain", group="d", test=(301, 10))
    first = store.put("first", {"eval/top1": 0.9}, kind="pretrain", group="a", test=(300, 10))
    lead = " ".join(page_of(store).lead)
    assert all(f"{count} test images" in lead for count in (300, 301))
    store.put("scratch", {"eval/top1": 188 / 300}, kind="pretrain", group="b", test=(300, 10))
    tags, start = {"vit_ray.init_run": first}, {"init_from": "/runs/first"}
    store.put(
        "t", {"eval/top1": 0.92}, start, kind="finetune", group="c", tags=tags, test=(300, 10)
    )
    told = "Fine-tuned 92.0 % (95 %: 88 to 95, 300 test images) against 62.7 % from scratch."
    assert page_of(store).lead[0] == told


CRAFTED = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7 * 7 }}&"


def test_names_of_runs_are_text(store):
    parent = store.put(CRAFTED, kind="study", tags={"mlflow.source.name": CRAFTED})
    store.put(
        CRAFTED, {"eval/top1": 0.5, "study/exaflops": 1.0},
        {"model.name": CRAFTED, "optim.name": CRAFTED}, group=CRAFTED, parent=parent,
        data=CRAFTED, tags={"vit_ray.study_label": CRAFTED, "vit_ray.git_commit": CRAFTED},
    )  # fmt: skip
    tags = Tags(page_of(store, parent).page)
    assert "script" not in tags.found
    assert CRAFTED in tags.text
    assert "49" not in re.findall(r"\b49\b", tags.text)


def test_a_page_is_one_small_file_without_a_script(study_page, sweep_page):
    for written in (study_page, sweep_page):
        text = written.page.read_text()
        assert "script" not in Tags(written.page).found
        assert not re.search(r'(?:src|href)="(?!data:)', text)
        assert "default-src 'none'" in text
        assert len(text) < 600_000
        assert [*written.page.parent.glob("report*")] == [written.page]


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
    known = {"loss": 0.1, "sample": 0}
    about = [
        known | {"classes": [CLASSES[i]], "predicted": CLASSES[i - i % 2], "probability": i / 4}
        for i in range(4)
    ]
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
    (shown,) = gallery(store.client, run, "evaluation/examples", "?")
    assert shown.labels == [
        ("rose (0.0%)", False), ("rose (25.0%), not =1+1", True),
        (f"{'x' * 300} (50.0%)", False), (f"{'x' * 300} (75.0%), not daisy", True),
    ]  # fmt: skip
    assert Image.open(io.BytesIO(shown.strip)).width == 96 * 4
    assert gallery(store.client, run, "evaluation/errors", "?") == []
    assert events(store.client, run).to_numpy().tolist() == [
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
    alike = [f"{'n' * 45}{number}" for number in range(5)]  # as their first letters are
    rows = [f'"{name}","{name}",{number + 1}' for number, name in enumerate(alike)]
    rows = ["class,predicted,images", *rows, f'"{alike[0]}","{alike[1]}",3']
    (table,) = confusion("\n".join(rows).encode()).values()
    assert table["images"].tolist() == [4, 2, 3, 4, 5]
    assert table.loc[alike[0], alike[:2]].tolist() == ["25.00", "75.00"]
