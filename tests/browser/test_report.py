"""The report page in a real browser: it shows its figures and prints; nothing is cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.browser.pages import A4_WIDTH, find, show
from tests.browser.synthetic_study import MODELS

AXE = Path(__file__).parents[2] / "build" / "axe.min.js"
PAPER = "figure[id^='the_paper_s_table_6']"
DATA = "figure[id='how_does_5_shot_linear_accuracy_grow_with_the_amount_of_data']"


@pytest.fixture
def shown(study_page: Path, browser: webdriver.Chrome) -> webdriver.Chrome:
    """The page, drawn, on a screen of 1280 pixels."""
    show(browser, study_page, 1280)
    return browser


def test_it_shows_every_figure_and_the_console_is_empty(shown: webdriver.Chrome) -> None:
    figures = find(shown, "figure:has(.chart)")
    assert len(figures) >= 10
    assert all(len(one.find_elements(By.CSS_SELECTOR, "svg")) == 1 for one in figures)
    log: Any = shown.get_log("browser")
    assert log == []


def test_the_papers_figure_is_shown_when_it_is_opened(shown: webdriver.Chrome) -> None:
    assert not any(one.is_displayed() for one in find(shown, f"{PAPER} svg"))
    find(shown, f"{PAPER} summary")[0].click()
    assert find(shown, f"{PAPER} svg")[0].size["width"] > 300


def test_names_at_the_ends_of_lines_stand_inside_a_narrow_page(
    study_page: Path, browser: webdriver.Chrome
) -> None:
    for width in (1280, 390):
        show(browser, study_page, width)
        drawing = find(browser, f"{DATA} svg")[0].rect
        names = [one for one in find(browser, f"{DATA} text") if one.text in MODELS]
        assert {one.text for one in names} == set(MODELS)
        assert all(one.rect["x"] >= drawing["x"] for one in names)
        right = drawing["x"] + drawing["width"]
        assert all(one.rect["x"] + one.rect["width"] <= right + 1 for one in names)


CUT_OFF = """
const cut = [];
for (const part of document.querySelectorAll("main *, header *, footer *")) {
  if (part.closest(".scroll, pre, svg") || !part.getClientRects().length) continue;
  const box = part.getBoundingClientRect();
  if (box.right > innerWidth + 1 || box.left < -1) cut.push(part.outerHTML.slice(0, 120));
}
for (const drawing of document.querySelectorAll("figure svg")) {
  const all = drawing.getBoundingClientRect();
  const place = drawing.closest(".chart").getBoundingClientRect();
  if (all.right > place.right + 1) cut.push("a drawing is wider than its place");
  for (const text of drawing.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    if (!box.width) continue;
    if (box.left < all.left - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1)
      cut.push(text.textContent);
  }
}
return cut;
"""


@pytest.mark.parametrize("width", [1280, 390, A4_WIDTH])
def test_nothing_is_cut_off(study_page: Path, browser: webdriver.Chrome, width: int) -> None:
    show(browser, study_page, width, media="print" if width == A4_WIDTH else "")
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT_OFF) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_wrong(study_page: Path, browser: webdriver.Chrome, width: int) -> None:
    show(browser, study_page, width)
    assert axe_violations(browser) == []


def axe_violations(browser: webdriver.Chrome) -> list[Any]:
    """What axe finds wrong with all that the page shows, folded parts too."""
    browser.execute_script(
        "for (const one of document.querySelectorAll('details')) one.open = true"
    )
    browser.execute_script(AXE.read_text())
    found: list[Any] = browser.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document).then(r => done(r.violations.map(v => [v.id, v.nodes.length,"
        " v.nodes[0].html, v.nodes[0].failureSummary])))"
    )
    return found


def test_print_is_one_page_wide(study_page: Path, browser: webdriver.Chrome) -> None:
    show(browser, study_page, A4_WIDTH, media="print")
    wide = "return [...document.querySelectorAll('table')].filter(t => t.getClientRects().length)"
    widths = browser.execute_script(f"{wide}.map(t => t.getBoundingClientRect().right)")
    assert max(widths) <= A4_WIDTH


def test_a_script_that_somebody_brought_into_the_page_does_not_run(shown: webdriver.Chrome) -> None:
    brought = (
        "const script = document.createElement('script');"
        "script.textContent = 'window.brought = true';"
        "document.body.append(script); return window.brought ?? false"
    )
    assert not shown.execute_script(brought)
    told: Any = shown.get_log("browser")  # and so not of the next test
    assert "Content Security Policy" in str(told)
