"""MLflow's pages of a sweep in a real browser: what they show by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mlflow.tracking import MlflowClient

from docs.screenshots import Pages, browsing, newest_sweep, serving
from tests.browser.synthetic_sweep import write_sweep

TRIALS = [f"digits-sweep-lr{rate}" for rate in ("0.003", "0.01", "0.03", "0.1")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder = tmp_path_factory.mktemp("sweep")
    uri = write_sweep(folder).tracking.uri
    with serving(uri) as address, browsing() as driver:
        yield Pages(driver, address, newest_sweep(MlflowClient(uri)), folder / "pictures")


def picture(pages: Pages, name: str) -> int:
    """Bytes of a picture; one of an empty page has few."""
    path = pages._folder / f"{name}.png"
    assert path.read_bytes()[:4] == b"\x89PNG"
    return path.stat().st_size


def test_the_run_list_shows_a_sweeps_trials_below_it(pages):
    assert pages.runs() == TRIALS
    assert picture(pages, "runs") > 30_000
    assert pages.console_errors == []


def test_the_view_of_a_sweep_draws_its_rates_against_dev_accuracy(pages):
    assert pages.view() == ["optim.learning_rate", "dev/top1"]
    assert picture(pages, "view") > 30_000
    assert pages.console_errors == []


def test_the_compare_view_draws_the_learning_rate_against_accuracy(pages):
    assert pages.compared() == ["optim.learning_rate", "dev/top1"]
    assert picture(pages, "compare") > 30_000
    assert pages.console_errors == []


def test_accuracy_can_be_drawn_over_exaflops(pages):
    assert pages.scatter("study/exaflops", "dev/top1") == ["study/exaflops", "dev/top1"]
    assert pages.console_errors == []


def test_the_parent_keeps_its_report_and_its_recipe(pages):
    assert {"report.html", "recipe.yaml"} <= set(pages.artifacts())
    assert pages.console_errors == []
