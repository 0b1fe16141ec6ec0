"""The report page in a real browser: it draws, answers and prints; no page of ours is cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.pages import A4_WIDTH, POINTS, find, show, tooltip, wait
from tests.browser.synthetic_study import MODELS

AXE = Path(__file__).parents[2] / "build" / "axe.min.js"
COMPUTE = "figure[data-chart='chart-how_does_5_shot_linear_accuracy_grow_with_compute_100k_images']"
"""Of the smallest of three amounts of data."""
PAPER = "figure[data-chart^='chart-the_paper_s_table_6']"
DATA = "figure[data-chart='chart-how_does_5_shot_linear_accuracy_grow_with_the_amount_of_data']"
LOSS = "figure[data-chart='chart-training_loss']"
NUM_CELLS = 3 * len(MODELS)
NUM_PAPER = 18


@pytest.fixture
def shown(study_page: Path, browser: webdriver.Chrome) -> webdriver.Chrome:
    """The page, drawn, on a light screen of 1280 pixels."""
    show(browser, study_page, 1280)
    return browser


def test_it_draws_every_figure_and_the_console_is_empty(shown: webdriver.Chrome) -> None:
    figures = find(shown, "figure[data-chart]")
    assert len(figures) >= 10
    assert all(len(one.find_elements(By.CSS_SELECTOR, "svg")) == 1 for one in figures)
    assert len(find(shown, f"{COMPUTE} {POINTS}")) == NUM_CELLS // 3
    log: Any = shown.get_log("browser")
    assert log == []


def test_who_points_at_a_run_sees_its_exact_values(shown: webdriver.Chrome) -> None:
    first = find(shown, f"{COMPUTE} {POINTS}")[0]
    shown.execute_script("arguments[0].scrollIntoView({block: 'center'})", first)
    ActionChains(shown).move_to_element(first).perform()
    text = wait(shown, lambda: tooltip(shown))
    assert "ViT-Ti/16 10%" in text
    assert "0.00525" in text  # exaFLOPs: 6 x 1.25 GMAC x 100,000 images x 7
    assert "5-shot linear accuracy" in text


def test_arrow_keys_go_from_point_to_point(shown: webdriver.Chrome) -> None:
    chart = find(shown, f"{COMPUTE} .chart")[0]
    chart.send_keys(Keys.ARROW_RIGHT)
    first = wait(shown, lambda: tooltip(shown))
    chart.send_keys(Keys.ARROW_RIGHT)
    wait(shown, lambda: tooltip(shown) not in ("", first))
    chart.send_keys(Keys.ARROW_LEFT)
    wait(shown, lambda: tooltip(shown) == first)
    chart.send_keys(Keys.ESCAPE)
    wait(shown, lambda: not tooltip(shown))


def test_a_switch_takes_a_family_away(shown: webdriver.Chrome) -> None:
    boxes = find(shown, f"{COMPUTE} .switches input")
    box = next(one for one in boxes if one.get_attribute("value") == "ResNet")
    box.send_keys(Keys.SPACE)  # as without a mouse
    count = lambda: len(find(shown, f"{COMPUTE} {POINTS}"))  # noqa: E731
    wait(shown, lambda: count() == NUM_CELLS // 3 - 2)
    box.click()
    wait(shown, lambda: count() == NUM_CELLS // 3)


def test_the_papers_figure_is_drawn_when_it_is_opened(shown: webdriver.Chrome) -> None:
    assert not any(one.is_displayed() for one in find(shown, f"{PAPER} svg"))
    find(shown, f"{PAPER} summary")[0].click()
    wait(shown, lambda: len(find(shown, f"{PAPER} {POINTS}")) == NUM_PAPER)
    assert not find(shown, f"{PAPER} .still")
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


def test_a_run_can_be_picked_out_of_the_curves(shown: webdriver.Chrome) -> None:
    assert not find(shown, f"{LOSS} {POINTS}")
    find(shown, f"{LOSS} select option")[2].click()
    wait(shown, lambda: len(find(shown, f"{LOSS} {POINTS}")) == 100)


def test_a_click_on_a_heading_sorts_a_table(shown: webdriver.Chrome) -> None:
    heads = find(shown, "#trainings thead th")
    column = [head.text for head in heads].index("exaFLOPs")
    # A cell whose text is its value has no attribute; one whose value is not known an empty one.
    script = "return arguments[0].dataset.value ?? arguments[0].textContent"
    values = lambda: [  # noqa: E731
        shown.execute_script(script, row.find_elements(By.CSS_SELECTOR, "th, td")[column])
        for row in find(shown, "#trainings tbody tr")
    ]
    button = heads[column].find_element(By.TAG_NAME, "button")
    for falls in (False, True):
        button.send_keys(Keys.ENTER)
        known = [float(value) for value in values() if value]
        assert known == sorted(known, reverse=falls)
        assert len(known) == NUM_CELLS
        assert values()[-1] == ""  # what is not known comes last
    assert heads[column].get_attribute("aria-sort") == "descending"


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_wrong(
    study_page: Path, browser: webdriver.Chrome, width: int, scheme: str
) -> None:
    show(browser, study_page, width, **{"color-scheme": scheme})
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


def test_print_is_one_page_wide_and_light(study_page: Path, browser: webdriver.Chrome) -> None:
    show(browser, study_page, A4_WIDTH, media="print", **{"color-scheme": "dark"})
    wide = "return [...document.querySelectorAll('table')].filter(t => t.getClientRects().length)"
    widths = browser.execute_script(f"{wide}.map(t => t.getBoundingClientRect().right)")
    assert max(widths) <= A4_WIDTH
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(ground) == "rgb(255, 255, 255)"


def test_a_script_that_somebody_brought_into_the_page_does_not_run(shown: webdriver.Chrome) -> None:
    brought = (
        "const script = document.createElement('script');"
        "script.textContent = 'window.brought = true';"
        "document.body.append(script); return window.brought ?? false"
    )
    assert not shown.execute_script(brought)
    told: Any = shown.get_log("browser")  # and so not of the next test
    assert "Content Security Policy" in str(told)


def test_without_scripts_the_figures_are_there(study_page: Path, browser: webdriver.Chrome) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get("about:blank")
        browser.get(study_page.as_uri())
        assert len(find(browser, f"{COMPUTE} .still svg")) == 1
        assert not any(box.is_displayed() for box in find(browser, "input"))
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
