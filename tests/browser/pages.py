"""A page in a real browser: shown and searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By

A4_WIDTH = 718
"""CSS pixels between the margins of a portrait page."""


def show(browser: webdriver.Chrome, page: Path, width: int, media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    browser.get("about:blank")
    browser.get(page.as_uri())


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, selector)
