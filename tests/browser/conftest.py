"""A browser, and the pages that it opens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from selenium import webdriver

from docs.screenshots import browsing
from tests.report.conftest import study, study_page, sweep_page  # noqa: F401
from tests.report.made_store import Store
from vit_ray.evaluation.examples import picture
from vit_ray.report.page import Written, write_report

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
