"""The report page, built from a real MLflow store and read back by parsers we did not write."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from mlflow.tracking import MlflowClient

from tests.report.made_pages import made_page
from tests.tracking.stored_runs import store_run
from vit_ray.report.figures.chart_list import cells
from vit_ray.report.page import write_report
from vit_ray.report.runs import Archive
from vit_ray.tracking.mlflow_client import page_hint

MODELS = {"ViT-Ti/16": 1.3, "ViT-S/16": 4.6, "R50x1": 4.1, "R50x1+ViT-B/32": 8.5}
TRAINED_ON = ["data/digits", "data/faces"]
EVIL = '<script>alert("x")</script> & co'


class Page(HTMLParser):
    """Tags with attributes, and the visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of four models by two data sizes, one cell of which never finished."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("scaling")
    parent = store_run(client, experiment, "digits-study", tags={"vit_ray.kind": "study"})
    store_run(client, experiment, "unrelated", metrics={"eval/top1": 0.999})
    expected = {}
    for i, (model, gmacs) in enumerate(MODELS.items()):
        for fraction in (0.25, 1.0):
            name = f"cell-{i}-{fraction}"
            metrics = {
                "study/exaflops": 6e-9 * gmacs * 1000 * fraction,
                "study/train_images": 1400 * fraction,
                "study/images_seen": 14000 * fraction,
                "few_shot/5_shot_top1": 0.5 + 0.08 * i + 0.1 * fraction,
                "eval/top1": 0.6 + 0.07 * i + 0.1 * fraction,
                "train/images_per_s": 1234.5,
            }
            tags = {
                "vit_ray.kind": "study_cell",
                "vit_ray.study_label": model,
                "vit_ray.git_commit": "0123abc",
                "vit_ray.data_fingerprint": "feedbeef",
                "mlflow.parentRunId": parent,
            }
            params = {"model.name": model, "data.fraction": fraction, "optim.epochs": 10.0}
            params |= {"data.train": TRAINED_ON[i % len(TRAINED_ON)], "note": EVIL}
            curve = [(step, 2.3 / (1 + step / 50 + i)) for step in range(0, 1000, 2)]
            store_run(
                client, experiment, name, params=params, tags=tags, metrics=metrics, curve=curve
            )
            expected[name] = metrics
    tags = {"vit_ray.kind": "study_cell", "mlflow.parentRunId": parent}
    store_run(client, experiment, f"cell-dead {EVIL}", tags=tags, status=None)
    return uri, parent, expected


@pytest.fixture(scope="module")
def built(study, tmp_path_factory):
    uri, parent, _ = study
    return made_page(uri, parent, tmp_path_factory.mktemp("out") / "deep" / "report.html")


def test_the_page_is_well_formed_and_asks_nothing_of_the_network(built):
    page = Page(built.text)
    assert page.open == []
    active = {"script", "link", "img", "iframe", "object", "base", "form", "input", "button"}
    assert not {tag for tag, _ in page.tags} & active
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "onload", "onclick"} & set(attributes)
        assert "href" not in attributes or tag == "a"
    # The browser holds the page to it.
    policy = next(a["content"] for _, a in page.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    assert "script" not in policy
    style = re.search("<style>.*?</style>", built.text, re.DOTALL).group(0)
    assert "url(" not in style
    assert "@import" not in style


def test_text_from_mlflow_is_shown_as_text_not_run(built):
    assert EVIL in Page(built.text).text


def test_every_number_of_every_cell_is_in_the_table(built, study):
    rows = {row["run"]: row for row in built.rows}
    assert set(rows) == {*study[2], f"cell-dead {EVIL}"}
    for name, metrics in study[2].items():
        row = rows[name]
        assert float(row["exaFLOPs"]) == pytest.approx(metrics["study/exaflops"])
        assert float(row["5-shot %"]) == pytest.approx(100 * metrics["few_shot/5_shot_top1"])
        assert float(row["top-1 %"]) == pytest.approx(100 * metrics["eval/top1"])
        assert row["status"] == "finished"
    dead = rows[f"cell-dead {EVIL}"]
    assert (dead["status"], dead["top-1 %"]) == ("running", "")


def test_only_the_family_of_the_given_run_is_shown(built):
    assert "unrelated" not in built.text


def test_a_whole_experiment_can_be_reported(study, tmp_path):
    text = write_report(study[0], "scaling", tmp_path / "all.html").page.read_text()
    assert "unrelated" in text
    assert "99.90" in text


def test_the_page_says_that_results_are_a_proxy_and_whose_the_papers_are(built):
    text = Page(built.text).text
    assert "These results are a proxy: trained on data/digits, data/faces" in text
    assert "JFT-300M, which is private" in text
    assert "Table 6: scaling" in text
    assert "the paper's columns" not in text  # none of its models was trained


def test_every_run_is_a_point_at_its_values_and_the_paper_has_a_figure_of_its_own(built, study):
    start = "how_does_5_shot_linear_accuracy_grow_with_compute"
    mine = [chart for name, chart in built.charts.items() if name.startswith(start)]
    assert len(mine) == 2  # of two amounts of data
    keys = ("study/exaflops", "few_shot/5_shot_top1")
    expected = sorted(tuple(metrics[key] for key in keys) for metrics in study[2].values())
    found = sorted((row["x"], row["y"]) for chart in mine for row in chart.rows)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected])
    assert [y for _, y in found] == pytest.approx([y for _, y in expected])
    assert all(chart.x.is_log for chart in mine)
    theirs = built.charts["the_paper_s_table_6_imagenet_top_1_after_jft_300m_against_compute"].rows
    assert len(theirs) == 18
    assert {"x": 4262.0, "y": 0.8808}.items() <= theirs[5].items()


def test_the_page_has_its_figures(built):
    figures = re.findall('<div class="chart">(.*?)</div>', built.text, re.S)
    assert len(figures) == len(built.charts)
    points = [p for figure in figures[:2] for p in ET.fromstring(figure).iter()
              if p.get("aria-roledescription") == "point"]  # fmt: skip
    assert len(points) == 8


def test_of_long_curves_recorded_points_are_drawn(built):
    lines = {}
    for row in built.charts["training_loss"].rows:
        lines.setdefault(row["line"], []).append((row["x"], row["y"]))
    assert {len(line) for line in lines.values()} == {300}
    curves = [{step: 2.3 / (1 + step / 50 + i) for step in range(0, 1000, 2)} for i in range(4)]
    for number, line in lines.items():
        assert (line[0][0], line[-1][0]) == (0, 998)
        recorded = curves[number // 2]
        assert [y for _, y in line] == pytest.approx([recorded[x] for x, _ in line], rel=1e-6)


def test_every_figure_is_a_file_too(built):
    folder = built.page.with_name("report-figures")
    assert {path.name for path in folder.iterdir()} == {f"{name}.svg" for name in built.charts}


def test_the_table_of_trainings_says_how_each_was_made_and_where_mlflow_has_it(built, study):
    rows = {row["run"]: row for row in built.rows}
    whole = rows["cell-0-0.25"]
    assert (whole["git commit"], whole["data fingerprint"]) == ("0123abc", "feedbeef")
    assert re.fullmatch("[0-9a-f]{32}", whole["run id"])
    page = Page(built.text)
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    runs = "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning"
    assert [link for link in links if link.startswith("http")] == [runs]  # there is no server
    assert f"mlflow ui --backend-store-uri {study[0]} and then {runs}" in page.text


def test_runs_lead_to_the_pages_of_an_mlflow_server(study):
    archive = Archive(study[0], study[1])
    archive.is_server, archive.address = True, "https://mlflow.example.org"
    first = archive.runs[1]
    link = f"https://mlflow.example.org/#/experiments/1/runs/{first.run_id}"
    assert archive.link(first) == link
    assert cells(archive.runs, archive).links[1] == link
    runs = "https://mlflow.example.org/#/experiments/1/runs?workflowType=machine_learning"
    assert archive.opening.endswith(f"in MLflow: {runs}")
    MlflowClient(study[0]).set_experiment_tag("1", "mlflow.sharedViewState.vit_ray", "{}")
    viewed = Archive(study[0], study[1]).opening
    assert viewed.endswith(page_hint(study[0], "1", has_view=True))


def test_a_sweep_is_a_table_of_rates_with_the_final_mean(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("sweeps")
    parent = store_run(client, experiment, "tune", tags={"vit_ray.kind": "sweep"})
    trials = [("sweep_trial", 0.001, 0, 0.8), ("sweep_trial", 0.003, 0, 0.99)]
    trials += [("finetune", 0.003, seed, top1) for seed, top1 in enumerate((0.94, 0.95, 0.96))]
    for stage, rate, seed, top1 in trials:
        tags = {"vit_ray.kind": stage, "vit_ray.sweep_stage": stage}
        tags["mlflow.parentRunId"] = parent
        params = {"optim.learning_rate": rate, "seed": seed}
        name = f"{stage}-lr{rate}-seed{seed}"
        key = "dev/top1" if stage == "sweep_trial" else "eval/top1"
        store_run(client, experiment, name, params=params, tags=tags, metrics={key: top1})
    page = Page(write_report(uri, parent, tmp_path / "r.html").page.read_text())
    places = [attributes["id"] for tag, attributes in page.tags if tag == "tr" and attributes]
    linked = [a["href"] for tag, a in page.tags if tag == "a" and a["href"].startswith("#")]
    assert linked == [f"#{place}" for place in places[2:]]  # the retrainings, in their order
    text = page.text
    assert "Test top-1 95.00 +- 1.00 % over 3 seeds, learning rate 0.003 (" in text
    first = text.index("Learning rate 0.003 wins on the dev split (99.00 %), best of 2.")
    assert "0.003 is the largest rate tried: try 0.009." in text[first:]
    assert "Best" not in text  # neither the dev split's 99 nor the best seed's 96


@pytest.mark.parametrize("keys", [["steps", "lr"], ["weight_decay"]])
def test_a_sweep_over_other_keys_is_one_sweep(tmp_path, keys):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("sweeps")
    parent = store_run(client, experiment, "tune", tags={"vit_ray.kind": "sweep"})
    whole = {"lr": "optim.learning_rate", "seed": "seed"}
    for value, top1 in ((1, 0.8), (2, 0.9)):
        params = {whole.get(key, f"optim.{key}"): value for key in keys} | {"seed": 0}
        name = "tune-" + "-".join(f"{key}{value}" for key in keys)
        tags = {"mlflow.parentRunId": parent, "vit_ray.kind": "sweep_trial"}
        tags["vit_ray.sweep_stage"] = "sweep_trial"
        store_run(client, experiment, name, params=params, tags=tags, metrics={"dev/top1": top1})
    text = Page(write_report(uri, "sweeps", tmp_path / "r.html").page.read_text()).text
    assert "wins on the dev split (90.00 %), best of 2" in text
    assert "best of 1" not in text


def test_each_task_of_vtab_has_its_own_sweep(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("vtab")
    parent = store_run(client, experiment, "vtab", tags={"vit_ray.kind": "vtab"})
    tags = {"mlflow.parentRunId": parent, "vit_ray.kind": "sweep_trial"}
    tags["vit_ray.sweep_stage"] = "sweep_trial"
    for task, best in (("svhn", 0.8), ("dtd", 0.6)):
        for rate, top1 in ((0.01, best), (0.03, best - 0.1)):
            params = {"optim.learning_rate": rate, "data.train": task, "seed": 0}
            name, own = f"vtab-{task}-lr{rate}", tags | {"vit_ray.vtab_task": task}
            store_run(client, experiment, name, params=params, tags=own, metrics={"dev/top1": top1})
    text = Page(write_report(uri, "vtab", tmp_path / "r.html").page.read_text()).text
    for task, best in (("svhn", "80.00"), ("dtd", "60.00")):
        won = f"learning rate 0.01 wins on the dev split ({best} %), best of 2"
        assert f"vtab-{task}: {won}" in text


def test_a_plain_training_without_study_numbers_still_makes_a_page(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("plain")
    store_run(client, experiment, "one", curve=[(0, 2.0), (10, 1.0)])
    text = write_report(uri, "plain", tmp_path / "r.html").page.read_text()
    assert "Training loss" in text
    assert "Accuracy against compute" not in text
    assert "proxy" not in Page(text).text


def test_runs_of_another_program_with_numbers_that_are_not_finite_are_on_the_page(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("foreign")
    for fraction in ("inf", "nan", "0.5"):
        tags, params = {"vit_ray.kind": "study_cell"}, {"data.fraction": fraction, "seed": fraction}
        store_run(client, experiment, f"of-{fraction}", {"eval/top1": 0.5}, params, tags)
    page = Page(write_report(uri, "foreign", tmp_path / "r.html").page.read_text())
    assert "of-inf" in page.text


def test_what_does_not_exist_is_refused_with_what_does(study, tmp_path):
    uri = study[0]
    with pytest.raises(ValueError, match="no experiment 'scalign'; it has Default, scaling"):
        write_report(uri, "scalign", tmp_path / "r.html")
    with pytest.raises(ValueError, match="MLflow has no run 0000"):
        write_report(uri, "0" * 32, tmp_path / "r.html")
    missing = tmp_path / "typo.db"
    with pytest.raises(ValueError, match="no such file; give the MLflow database"):
        write_report(f"sqlite:///{missing}", "scaling", tmp_path / "r.html")
    assert not missing.exists()


def test_a_module_that_a_run_names_is_shown_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "mischief.py").write_text("raise SystemExit('its code was run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("own")
    parts = ("model.name", "train.loss", "optim.name", "data.augment.own")
    params = dict.fromkeys(parts, "mischief.part")
    tags = {"vit_ray.kind": "pretrain", "vit_ray.model": "mischief.part"}
    store_run(client, experiment, "own", {"eval/top1": 0.5}, params, tags)
    assert "mischief.part" in write_report(uri, "own", tmp_path / "page.html").page.read_text()
