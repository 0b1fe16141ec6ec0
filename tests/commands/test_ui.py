"""`vit-ray ui` serves the right store, and prints the link to its newest runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.tracking.stored_runs import store_run
from vit_ray.commands import tracking_store
from vit_ray.tracking.mlflow_client import experiment_id, open_client


def store_with_a_sweep(folder: Path) -> str:
    uri = f"sqlite:///{folder}/mlflow.db"
    client = open_client(uri)
    old, new = (experiment_id(client, uri, name) for name in ("old", "new"))
    store_run(client, old, "first", tags={"vit_ray.kind": "pretrain"}, start_ms=1)
    parent = store_run(client, new, "sweep", tags={"vit_ray.kind": "sweep"}, start_ms=2)
    tags = {"vit_ray.kind": "sweep_trial", "mlflow.parentRunId": parent}
    store_run(client, new, "trial", tags=tags, start_ms=3)
    assert new == "2"
    return uri


def test_the_link_that_is_printed_is_served(tmp_path):
    uri = store_with_a_sweep(tmp_path)
    with socket.socket() as taken:  # another server on the port: the next free one is used
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["-m", "vit_ray", "ui", uri, "--port", str(taken.getsockname()[1])]
        server = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            link = server.stdout.readline().strip()
            found = re.fullmatch(
                r"(http://127\.0\.0\.1:\d+)/#/experiments/2/runs\?workflowType=machine_learning"
                r"&viewStateShareKey=sweep&compareRunsMode=CHART",
                link,
            )
            assert found, link
            for _ in range(600):
                try:
                    with urllib.request.urlopen(f"{found[1]}/health") as answer:
                        assert answer.read() == b"OK"
                    break
                except OSError:
                    time.sleep(0.2)
            else:
                pytest.fail("it does not answer")
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_a_store_that_is_not_there_or_is_empty_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        tracking_store.open_pages(f"sqlite:///{tmp_path}/nowhere.db", 5000)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    open_client(uri)
    with pytest.raises(ValueError, match="has no run yet"):
        tracking_store.open_pages(uri, 5000)


def test_a_variable_that_names_no_store_is_named_in_one_line(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(
        ValueError, match=r"^vit-ray ui: uri: a path .*MLFLOW_TRACKING_URI.*mlruns$"
    ):
        tracking_store.open_pages(None, 5000)


def test_port_0_is_one_that_the_system_chooses():
    assert tracking_store._free(0) > 0
