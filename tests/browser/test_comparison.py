"""The page of two runs against each other in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains

from tests.browser.synthetic_study import STEPS, write_study
from tests.browser.test_report import (
    POINTS,
    browser,
    find,
    show,
    test_axe_finds_nothing_wrong,
    test_nothing_is_cut_off,
    tooltip,
    wait,
)
from vit_ray.report.compare import compare
from vit_ray.report.compare_page import write_comparison

# Of the page here, too.
__all__ = ["browser", "test_axe_finds_nothing_wrong", "test_nothing_is_cut_off"]
PAIR = ("synthetic-ViT-S/16-data1.0", "synthetic-R50x1-data1.0")
LOSS = "figure[data-chart='chart-training_loss_compared']"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    write_study(folder)
    made = folder / "compare.html"
    write_comparison(compare(f"sqlite:///{folder}/mlflow.db", "synthetic", PAIR), made)
    return made


def test_it_draws_both_runs_and_the_console_is_empty(page: Path, browser: webdriver.Chrome) -> None:
    show(browser, page, 1280)
    (drawing,) = find(browser, f"{LOSS} svg")
    assert drawing.is_displayed()
    assert len(find(browser, f"{LOSS} .mark-line path")) == len(PAIR)
    log: Any = browser.get_log("browser")
    assert log == []


def test_who_points_at_the_curve_that_was_picked_sees_its_exact_values(
    page: Path, browser: webdriver.Chrome
) -> None:
    show(browser, page, 1280)
    find(browser, f"{LOSS} select option")[1].click()
    wait(browser, lambda: len(find(browser, f"{LOSS} {POINTS}")) == len(STEPS))
    first = find(browser, f"{LOSS} {POINTS}")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", first)
    ActionChains(browser).move_to_element(first).perform()
    text = wait(browser, lambda: tooltip(browser))
    assert PAIR[0] in text
    assert "2.3" in text  # the loss of step 0
