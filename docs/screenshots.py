"""Pictures of a sweep in MLflow's pages: `python docs/screenshots.py sqlite:///quickstart/mlflow.db`.

Opens them as a person does, in Chromium (Debian: `apt-get install chromium chromium-driver`), and
fails where a page does not show what it is for, or the browser's console has errors of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from vit_ray.metric_names import DEV_TOP1
from vit_ray.mlflow_internals import VIEW_PARAMETER

PICTURES = Path(__file__).parent / "pictures"
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WAIT_S = 60.0
"""For what a page is to show, on a busy machine."""
SIZE = (1500, 900)
TRAINING = "workflowType=machine_learning"

_CLOSED = """
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
"""
"""MLflow's assistant would take a quarter of each page."""
_EXPECTED = ("/users/current", "/favicon.ico", "ResizeObserver loop")
"""404 of a server without log-in to who is there, and of its icon; a resize that is put off."""


@dataclass(frozen=True)
class Sweep:
    """Runs of MLflow."""

    parent: Run
    trials: list[Run]


def newest_sweep(client: MlflowClient) -> Sweep:
    """The sweep that was begun last, with its trials by learning rate.

    Raises:
        ValueError: there is none.
    """
    everywhere = [one.experiment_id for one in client.search_experiments()]
    found = client.search_runs(everywhere, "tags.`vit_ray.kind` = 'sweep'", max_results=1)
    if not found:
        raise ValueError("the store holds no sweep; `make quickstart` makes one")
    wanted = f"tags.`mlflow.parentRunId` = '{found[0].info.run_id}'"
    children = client.search_runs([found[0].info.experiment_id], wanted)
    trials = [run for run in children if run.data.tags["vit_ray.kind"] == "sweep_trial"]
    return Sweep(
        found[0], sorted(trials, key=lambda r: float(r.data.params["optim.learning_rate"]))
    )


@contextlib.contextmanager
def serving(uri: str) -> Iterator[str]:
    """Address of an MLflow server of the store, inside the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--port", str(port), "--workers", "1"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(address, server)
            yield address
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # its workers, too; it has only been read
            server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health"):  # noqa: S310
            return
        time.sleep(0.2)
    raise RuntimeError(f"MLflow's server at {address} does not answer")


@contextlib.contextmanager
def browsing() -> Iterator[webdriver.Chrome]:
    """A browser without a window, inside the block.

    Raises:
        RuntimeError: there is none on this machine.
    """
    if not (BROWSER and DRIVER):
        raise RuntimeError(
            "the pages are seen in Chromium, which is not on the path with its chromedriver; "
            "install both (Debian: apt-get install chromium chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{word}")
    options.add_argument(f"--window-size={SIZE[0]},{SIZE[1]}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Pages:
    """MLflow's pages of one sweep, each opened, waited for and taken a picture of."""

    def __init__(self, driver: webdriver.Chrome, address: str, sweep: Sweep, folder: Path) -> None:
        self._driver, self._address, self._sweep, self._folder = driver, address, sweep, folder
        self.console_errors: list[str] = []
        """What the pages that were opened had to say."""
        folder.mkdir(parents=True, exist_ok=True)
        driver.get(f"{address}/health")  # what is kept is of this address
        driver.execute_script(_CLOSED)

    def runs(self) -> list[str]:
        """The run list in the view that links open; names of the trials that stand in it."""
        experiment = self._sweep.parent.info.experiment_id
        self._open(f"experiments/{experiment}/runs?{TRAINING}&{VIEW_PARAMETER}=sweep")
        self._find(f"//*[@role='columnheader'][contains(., '{DEV_TOP1}')]")
        names = [trial.info.run_name for trial in self._sweep.trials]
        found = [self._find(f"//a[normalize-space()='{name}']").text for name in names]
        self._shoot("runs")
        return found

    def view(self) -> list[str]:
        """The view that links open; titles of the axes of its first chart."""
        experiment = self._sweep.parent.info.experiment_id
        page = f"experiments/{experiment}/runs?{TRAINING}&{VIEW_PARAMETER}=sweep"
        self._open(f"{page}&compareRunsMode=CHART")
        titles = [f"//*[contains(@class, '{axis}title')]" for axis in "xy"]
        found = [self._find(title).text for title in titles]
        self._shoot("view")
        return found

    def compared(self) -> list[str]:
        """The compare view of the trials as it opens; titles of the axes that MLflow chose."""
        self._open(self._compare_view())
        self._find("//*[contains(@class, 'axis-title')]")
        self._shoot("compare")
        return [axis.text for axis in self._all("//*[contains(@class, 'axis-title')]")]

    def scatter(self, x: str, y: str) -> list[str]:
        """The compare view's scatter plot; titles of its axes."""
        self._open(self._compare_view())
        self._click("//button[normalize-space()='Scatter Plot']")
        for axis, key in (("x", x), ("y", y)):
            self._click(f"//*[@id='{axis}-axis-selector']")
            self._click(f"//*[@role='option'][normalize-space()='{key}']")
        titles = "//*[@class='{}title']"
        for axis, key in (("x", x), ("y", y)):
            self._until(lambda a=axis, k=key: self._find(titles.format(a)).text == k)
        self._shoot("scatter")
        return [self._find(titles.format(axis)).text for axis in "xy"]

    def artifacts(self) -> list[str]:
        """The parent's files; their names."""
        info = self._sweep.parent.info
        self._open(f"experiments/{info.experiment_id}/runs/{info.run_id}/artifacts?{TRAINING}")
        self._click("//*[@data-testid='artifact-tree-node'][contains(., 'report.html')]")
        self._shoot("artifacts")
        return [node.text for node in self._all("//*[@data-testid='artifact-tree-node']")]

    def _compare_view(self) -> str:
        runs = json.dumps([trial.info.run_id for trial in self._sweep.trials])
        experiments = json.dumps([self._sweep.parent.info.experiment_id])
        return f"compare-runs?runs={quote(runs)}&experiments={quote(experiments)}&{TRAINING}"

    def _open(self, page: str) -> None:
        self._driver.get("about:blank")  # a new document, although pages differ by what follows #
        self._driver.get(f"{self._address}/#/{page}")

    def _find(self, path: str) -> Any:
        return self._until(lambda: self._driver.find_element(By.XPATH, path), path)

    def _all(self, path: str) -> list[Any]:
        return self._driver.find_elements(By.XPATH, path)

    def _click(self, path: str) -> None:
        element = self._find(path)
        self._driver.execute_script("arguments[0].scrollIntoView({block: 'nearest'})", element)
        element.click()

    def _until(self, look: Callable[[], Any], what: str = "") -> Any:
        ignored = (NoSuchElementException, StaleElementReferenceException)
        wait = WebDriverWait(self._driver, WAIT_S, ignored_exceptions=ignored)
        return wait.until(lambda _: look(), f"not on {self._driver.current_url}: {what}")

    def _shoot(self, name: str) -> None:
        time.sleep(1.0)  # what fades in and slides
        self._driver.save_screenshot(str(self._folder / f"{name}.png"))
        log: Any = self._driver.get_log("browser")
        self.console_errors += [
            line["message"]
            for line in log
            if line["level"] == "SEVERE" and self._address in line["message"]
            if not any(expected in line["message"] for expected in _EXPECTED)
        ]


def take_pictures(uri: str, folder: Path) -> list[str]:
    """All pages of the store's newest sweep; errors of the browser's console."""
    sweep = newest_sweep(MlflowClient(uri))
    with serving(uri) as address, browsing() as driver:
        pages = Pages(driver, address, sweep, folder)
        pages.view()
        pages.runs()
        pages.compared()
        pages.artifacts()
        return pages.console_errors


def main() -> int:
    """Write the pictures, and print errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri", help="store of MLflow, such as sqlite:///quickstart/mlflow.db")
    parser.add_argument("--folder", type=Path, default=PICTURES)
    given = parser.parse_args()
    errors = take_pictures(given.uri, given.folder)
    print("\n".join(errors) or f"pictures are in {given.folder}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
