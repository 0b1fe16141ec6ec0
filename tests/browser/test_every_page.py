"""What holds for each of our pages in a real browser: it fits, and axe finds nothing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from tests.browser.pages import A4_WIDTH, show

AXE = Path(__file__).parents[2] / "build" / "axe.min.js"


@pytest.fixture(params=["study_page", "comparison_page"])
def page(request: pytest.FixtureRequest) -> Path:
    made: Path = request.getfixturevalue(request.param)
    return made


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
def test_nothing_is_cut_off(page: Path, browser: webdriver.Chrome, width: int) -> None:
    show(browser, page, width, media="print" if width == A4_WIDTH else "")
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT_OFF) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_wrong(
    page: Path, browser: webdriver.Chrome, width: int, scheme: str
) -> None:
    show(browser, page, width, **{"color-scheme": scheme})
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
