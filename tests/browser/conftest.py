"""A browser, and the pages that it opens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from docs.screenshots import browsing
from tests.browser.synthetic_study import write_study


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    with browsing() as driver:
        yield driver


@pytest.fixture(scope="session")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"))
