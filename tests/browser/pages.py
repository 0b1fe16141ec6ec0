"""A page in a real browser: shown, waited for, searched."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

POINTS = ".mark-symbol.role-mark path"
A4_WIDTH = 718
"""CSS pixels between the margins of a portrait page."""


def show(browser: webdriver.Chrome, page: Path, width: int, **features: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {
            "media": features.pop("media", ""),
            "features": [{"name": f"prefers-{k}", "value": v} for k, v in features.items()],
        },
    )
    browser.get("about:blank")
    browser.get(page.as_uri())
    wait(browser, lambda: not find(browser, "figure > .chart .still"))
    time.sleep(0.2)  # what Vega puts off to the next frame


def wait(browser: webdriver.Chrome, look: Callable[[], Any]) -> Any:
    return WebDriverWait(browser, 60).until(lambda _: look())


def find(browser: webdriver.Chrome, selector: str) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, selector)


def tooltip(browser: webdriver.Chrome) -> str:
    """Text of what is shown at a point; empty while nothing is."""
    return "\n".join(one.text for one in find(browser, "#vg-tooltip-element.visible"))
