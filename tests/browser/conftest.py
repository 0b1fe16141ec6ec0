"""A browser, and the pages that it opens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from docs.screenshots import browsing
from tests.browser.synthetic_study import PAIR, write_study
from vit_ray.report.comparison import compare, write_comparison


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    with browsing() as driver:
        yield driver


@pytest.fixture(scope="session")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def comparison_page(study_page: Path) -> Path:
    made = study_page.with_name("compare.html")
    write_comparison(compare(f"sqlite:///{study_page.parent}/mlflow.db", "synthetic", PAIR), made)
    return made
