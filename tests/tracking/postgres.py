"""A PostgreSQL of a test, which can be away."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.ports import free_ports


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
        password: of the user `mlflow`.
        settings: of the server, as its command line takes them.
    """

    def __init__(self, password: str, settings: tuple[str, ...] = ()) -> None:
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
        self._run("initdb", "-A", "scram-sha-256", f"--pwfile={given}", "-U", "mlflow", "-N")

    def __enter__(self) -> "Postgres":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if Path(self._data, "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._folder)

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
