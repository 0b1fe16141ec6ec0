"""`report compare A B` as it is typed."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tests.tracking.stored_runs import store_run
from vit_ray.commands import cli
from vit_ray.commands.job_list import COMMANDS
from vit_ray.commands.trained.compare import parse_words


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with the runs `a` and `b` in the experiment `mine`."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("mine")
    for name, top1, rate in (("a", 0.5, "0.1"), ("b", 0.75, "0.3")):
        curve = [(step, 3 / (1 + step * top1)) for step in range(5)]
        params = {"optim.learning_rate": rate}
        store_run(client, experiment, name, {"eval/top1": top1}, params, curve=curve)
    return uri


def compare(*words: str) -> int:
    return cli.run_recipe(COMMANDS["report"], ("compare", *words), is_dry=False)


def test_two_runs_are_compared_and_their_curves_drawn_over_each_other(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"tracking.uri={uri}", "tracking.experiment=mine", f"output={tmp_path}/runs")
    assert compare("a", "b", *words) == 0
    shown = capsys.readouterr().out
    for text in (
        "a single run",
        "A: a",
        "optim.learning_rate",
        "0.3",
        "75.00",
        "+25.00",
        "one seed",
    ):
        assert text in shown
    folder = tmp_path / "runs" / "compare-a-b"
    assert f"with curves of both: {folder}/compare.html" in shown
    assert {path.name for path in folder.iterdir()} == {"compare.html", "compare-figures"}
    files = {path.name for path in (folder / "compare-figures").iterdir()}
    assert {"list.csv", "training_loss_compared.png", "differences.tex"} <= files
    drawing = (folder / "compare-figures" / "training_loss_compared.svg").read_text()
    assert "A: a" in drawing
    assert "B: b" in drawing


def test_a_page_shows_the_differences_and_both_runs_curves(uri: str, tmp_path: Path) -> None:
    words = (f"tracking.uri={uri}", "tracking.experiment=mine", f"output={tmp_path}/runs")
    assert compare("a", "b", *words) == 0
    page = (tmp_path / "runs" / "compare-a-b" / "compare.html").read_text()
    body = page[page.index("<body") : page.index("<footer>")]
    cells = [unescape(re.sub("<.*?>", "", c)) for c in re.findall(r"<t[hd]\b.*?</t[hd]>", body)]
    assert cells[cells.index("top-1 accuracy %") :][:4] == [
        "top-1 accuracy %", "50.00", "75.00", "+25.00",
    ]  # fmt: skip
    assert cells[cells.index("optim.learning_rate") :][1:3] == ["0.1", "0.3"]
    assert "one seed on a side" in body
    assert cells.count("mine") == 2
    (spec,) = re.findall('<script type="application/json"[^>]*>(.*?)</script>', body)
    lines = json.loads(spec)["transform"][0]["from"]["data"]["values"]
    rows = json.loads(spec)["data"]["values"]
    for line, letter, top1 in zip(lines, ("A: a", "B: b"), (0.5, 0.75), strict=True):
        assert line["name"] == letter
        drawn = [(row["x"], row["y"]) for row in rows if row["line"] == line["line"]]
        assert drawn == [(step, pytest.approx(3 / (1 + step * top1))) for step in range(5)]


def test_a_recipe_says_where_the_runs_are(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"name: mine\ntracking: {{uri: '{uri}', experiment: mine}}\noutput: {tmp_path}/runs\n"
    )
    assert compare("a", "b", str(recipe)) == 0
    assert "+25.00" in capsys.readouterr().out


def test_what_is_wrong_is_told_in_a_line(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = (f"tracking.uri={uri}", "tracking.experiment=mine")
    for words, told in (
        (("a", *place), "error: report compare: expected two runs, given 1 arguments"),
        (("a", "c", *place), "error: compare: experiment 'mine' has no run 'c'"),
        (("a", "b", f"tracking.uri={uri}"), "error: tracking.experiment=vit_ray: MLflow has no"),
        (("a", "b", "tracking.ury=x"), "did you mean tracking.uri"),
        (("a", "b", f"tracking.uri={uri}.db"), "no such file"),
    ):
        assert compare(*words) == 2
        assert told in capsys.readouterr().err


def test_an_mlflow_that_goes_away_amid_a_comparison_is_told(
    uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: object, **__: object) -> None:
        raise MlflowException("the database is away")

    monkeypatch.setattr(MlflowClient, "search_runs", search)
    assert compare("a", "b", f"tracking.uri={uri}", "tracking.experiment=mine") != 0
    assert "cannot be used: the database is away" in capsys.readouterr().err


def test_a_store_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    assert compare("a", "b", f"tracking.uri=sqlite:///{tmp_path}/no.db") == 2
    assert not (tmp_path / "no.db").exists()


def test_help_of_the_comparison_is_that_of_the_report() -> None:
    done = CliRunner().invoke(cli.vit_ray, ["report", "compare", "--help"])
    assert done.exit_code == 0
    assert "report compare A B" in " ".join(done.output.split())


def test_the_words_are_two_runs_a_recipe_and_overrides() -> None:
    names, recipe = parse_words(("a", "seed=3", "b", "digits"))
    assert names == ("a", "b")
    assert (recipe.seed, recipe.tracking.experiment) == (3, "digits")
