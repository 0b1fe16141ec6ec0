"""A browser, and the pages that it opens."""

from collections.abc import Iterator

import pytest
from selenium import webdriver

from docs.screenshots import browsing
from tests.report.conftest import study, study_page, sweep_page  # noqa: F401


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    with browsing() as driver:
        yield driver
