"""Stores with known answers, each written once."""

from pathlib import Path

import pytest

from tests.report.made_store import Store, write_study, write_sweep
from vit_ray.report.page import Written, write_report


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    made = Store(tmp_path_factory.mktemp("study"))
    return made, write_study(made)


@pytest.fixture(scope="session")
def study_page(study: tuple[Store, str], tmp_path_factory: pytest.TempPathFactory) -> Written:
    page = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(study[0].uri, study[1], page)


@pytest.fixture(scope="session")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("sweep")
    made = Store(folder)
    return write_report(made.uri, write_sweep(made), folder / "report.html")
