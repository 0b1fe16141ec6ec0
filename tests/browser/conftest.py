"""A browser, and the pages that it opens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from docs.screenshots import browsing
from tests.report.made_store import Store, write_study, write_sweep
from vit_ray.report.page import write_report


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    with browsing() as driver:
        yield driver


@pytest.fixture(scope="session")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(folder := tmp_path_factory.mktemp("study"))
    return write_report(store.uri, write_study(store), folder / "report.html").page


@pytest.fixture(scope="session")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(folder := tmp_path_factory.mktemp("sweep"))
    return write_report(store.uri, write_sweep(store), folder / "report.html").page
