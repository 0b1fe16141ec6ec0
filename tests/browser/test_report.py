"""Pages of a study, a sweep and a training in a real browser: all is shown, nothing cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from docs.screenshots import browsing
from tests.report.conftest import study, study_page, sweep_page  # noqa: F401
from tests.report.made_store import Store
from vit_ray.evaluation.examples import picture
from vit_ray.report.page import Written, write_report

A4_WIDTH = 718
"""CSS pixels between the margins of a portrait page."""
AXE = Path(__file__).parents[2] / "build" / "axe.min.js"
CUT_OFF = """
const cut = [];
for (const part of document.querySelectorAll("main *, header *, footer *")) {
  const scrolls = part.closest(".scroll") && !matchMedia("print").matches;
  if (scrolls || !part.getClientRects().length) continue;
  const box = part.getBoundingClientRect();
  if (box.right > innerWidth + 1 || box.left < -1) cut.push(part.outerHTML.slice(0, 120));
}
return cut;
"""
NAMES = ["rose", "tulip", "x" * 100, "a name of many words that stands below its image", "daisy"]


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    with browsing() as driver:
        yield driver


@pytest.fixture(scope="session")
def training_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Of one training: twelve test images, six errors, a confusion matrix of five classes."""
    folder = tmp_path_factory.mktemp("training")
    made = Store(folder)
    run_id = made.put("my-flowers", {"eval/top1": 0.8}, kind="pretrain", group="g")
    files = Path(made.client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    (files / "evaluation").mkdir(parents=True)
    for name, num_images in (("examples", 12), ("errors", 6)):
        squares = [np.full((96, 96, 3), 20 * i, np.uint8) for i in range(num_images)]
        shift = int(name == "errors")
        about = [
            {"sample": i, "classes": [NAMES[i % 5]], "predicted": NAMES[(i + shift) % 5],
             "loss": 1.0, "probability": 0.5}
            for i in range(num_images)
        ]  # fmt: skip
        for file, content in picture(name, squares, about).items():
            (files / "evaluation" / file).write_bytes(content)
    rows = [f'"{true}","{taken}",{3 + (true == taken)}' for true in NAMES for taken in NAMES]
    counts = "\n".join(['"class","predicted","images"', *rows])
    (files / "evaluation" / "confusion.csv").write_text(counts)
    return write_report(made.uri, "made", folder / "report.html")


def show(browser: webdriver.Chrome, page: Path, width: int, media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    browser.get("about:blank")
    browser.get(page.as_uri())


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, selector)


@pytest.fixture(params=["study_page", "sweep_page", "training_page"])
def page(request: pytest.FixtureRequest) -> Path:
    written: Written = request.getfixturevalue(request.param)
    return written.page


def test_it_shows_every_figure_and_the_console_is_empty(page, browser):
    show(browser, page, 1280)
    assert find(browser, "figure img, .gallery li")
    widths = "return [...document.querySelectorAll('figure img')].map(one => one.naturalWidth)"
    assert all(width > 300 for width in browser.execute_script(widths))
    assert all(figure.get_attribute("alt") for figure in find(browser, "figure img"))
    images = [len(find(one, "li")) for one in find(browser, ".gallery")]
    assert images == ([12, 6] if "training" in str(page) else [])
    log: Any = browser.get_log("browser")
    assert log == []


@pytest.mark.parametrize("width", [1280, 390, A4_WIDTH])
def test_nothing_is_cut_off(page, browser, width):
    show(browser, page, width, media="print" if width == A4_WIDTH else "")
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT_OFF) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_wrong(page, browser, width):
    """Neither in parts that are folded."""
    show(browser, page, width)
    browser.execute_script(
        "for (const one of document.querySelectorAll('details')) one.open = true"
    )
    browser.execute_script(AXE.read_text())
    found: list[Any] = browser.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document).then(r => done(r.violations.map(v => [v.id, v.nodes.length,"
        " v.nodes[0].html, v.nodes[0].failureSummary])))"
    )
    assert found == []


@pytest.mark.parametrize("page", ["study_page"], indirect=True)
def test_a_script_that_somebody_brought_into_the_page_does_not_run(page, browser):
    show(browser, page, 1280)
    brought = (
        "const script = document.createElement('script');"
        "script.textContent = 'window.brought = true';"
        "document.body.append(script); return window.brought ?? false"
    )
    assert not browser.execute_script(brought)
    told: Any = browser.get_log("browser")  # and so not of the next test
    assert "Content Security Policy" in str(told)
