"""An MLflow server on PostgreSQL that is restarted, and away for a while, during a run."""

import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.ports import free_ports
from tests.tracking.test_tracker import Server
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking import tracker as sender
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker, replay

POINTS = 200
AWAY_S = 5.0


def program(name: str) -> str | None:
    """Of PostgreSQL, which Debian keeps off the path."""
    theirs = sorted(str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (theirs[-1] if theirs else None)


def need_postgres() -> None:
    """Skip the test where the server, or Python's driver for it, is not installed."""
    if program("initdb") is None:
        pytest.skip("no initdb: apt-get install postgresql")
    pytest.importorskip("psycopg2", reason="no psycopg2: pip install 'vit_ray[server]'")


class Postgres:
    """A cluster of databases, run by a user that is not root; inside the block it is up.

    Args:
        password: of the user `mlflow`; without one every connection is trusted.
        settings: of the server, as its command line takes them.
    """

    def __init__(self, password: str = "", settings: tuple[str, ...] = ()) -> None:
        (self.port,) = free_ports(1)
        self._user = "postgres" if os.geteuid() == 0 else None
        # Not pytest's own: those are for their owner alone.
        self._folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
        self._data = str(self._folder / "data")
        own = ("-p", str(self.port), "-c", "listen_addresses=127.0.0.1")
        self._options = " ".join((*settings, *own, "-k", str(self._folder)))
        given = self._folder / "password"
        given.write_text(password)
        if self._user:
            shutil.chown(self._folder, self._user)
            shutil.chown(given, self._user)
        asks = ["-A", "scram-sha-256", f"--pwfile={given}"] if password else ["-A", "trust"]
        self._run("initdb", *asks, "-U", "mlflow", "-N")

    def __enter__(self) -> "Postgres":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if Path(self._data, "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._folder)

    @property
    def uri(self) -> str:
        """Of the database that every cluster has."""
        return f"postgresql+psycopg2://mlflow@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-o", self._options, "-l", f"{self._data}/log", "start")

    def stop(self) -> None:
        """As its process dies: connections break, and no transaction is ended."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def restart(self) -> None:
        """Connections break, and others are taken a moment later."""
        options = ("-w", "-m", "immediate", "-o", self._options, "-l", f"{self._data}/log")
        self._run("pg_ctl", *options, "restart")

    def _run(self, name: str, *words: str) -> None:
        command = [program(name) or name, "-D", self._data, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=self._user, timeout=120)


@pytest.mark.slow  # MLflow makes its schema in a new database, and its server starts
def test_postgresql_restarted_and_away_in_the_middle_of_a_run_costs_no_point(tmp_path, monkeypatch):
    need_postgres()
    monkeypatch.setattr(sender, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(sender, "LAST_BACKOFF_S", 0.5)
    with Postgres() as database:
        _record_across_outages(tmp_path, database)


def _record_across_outages(tmp_path: Path, database: Postgres) -> None:
    server = Server(tmp_path, database.uri)
    log_path = tmp_path / "run" / "metrics.jsonl"
    try:
        server.start()
        config = TrackingConfig(uri=server.uri, experiment="trials")
        tracker = Tracker.begin(RunOpening(config, "restarted", log_path), wait_s=120)
        assert tracker.run_id is not None
        pause = threading.Event()
        for step in range(POINTS):
            tracker.log.metrics(step, {"train/loss": float(step)})
            pause.wait(0.02)
            if step == POINTS // 4:
                database.restart()
            if step == POINTS // 2:
                database.stop()
                pause.wait(AWAY_S)
            if step == POINTS * 3 // 4:
                database.start()
        assert tracker.finish(timeout_s=120)
        history = MlflowClient(server.uri).get_metric_history(tracker.run_id, "train/loss")
        assert [(p.step, p.value) for p in history] == [(s, float(s)) for s in range(POINTS)]
        again = replay(log_path, server.uri)
        assert (again.num_points, again.refused) == (0, [])
    finally:
        server.stop()
