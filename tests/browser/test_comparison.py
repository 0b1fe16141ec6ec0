"""The page of two runs against each other in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains

from tests.browser.pages import POINTS, find, show, tooltip, wait
from tests.browser.synthetic_study import PAIR, STEPS

LOSS = "figure[data-chart='chart-training_loss_compared']"


def test_it_draws_both_runs_and_the_console_is_empty(
    comparison_page: Path, browser: webdriver.Chrome
) -> None:
    show(browser, comparison_page, 1280)
    (drawing,) = find(browser, f"{LOSS} svg")
    assert drawing.is_displayed()
    assert len(find(browser, f"{LOSS} .mark-line path")) == len(PAIR)
    log: Any = browser.get_log("browser")
    assert log == []


def test_who_points_at_the_curve_that_was_picked_sees_its_exact_values(
    comparison_page: Path, browser: webdriver.Chrome
) -> None:
    show(browser, comparison_page, 1280)
    find(browser, f"{LOSS} select option")[1].click()
    wait(browser, lambda: len(find(browser, f"{LOSS} {POINTS}")) == len(STEPS))
    first = find(browser, f"{LOSS} {POINTS}")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", first)
    ActionChains(browser).move_to_element(first).perform()
    text = wait(browser, lambda: tooltip(browser))
    assert PAIR[0] in text
    assert "2.3" in text  # the loss of step 0
