"""The MLflow of `cluster/mlflow.yaml` as processes of this machine: PostgreSQL, S3, the server.

Commands, variables and settings are the manifest's own; only addresses, secrets and the bucket's
name are put in, as a cluster would.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.s3_server import s3_environment, serve_s3
from tests.net.cluster import free_ports

ROOT = Path(__file__).parents[2]
SECRETS = {
    ("mlflow-postgres", "password"): "of-the-database",
    ("mlflow-admin", "password"): "of-the-administrator",
    ("mlflow-admin", "secret_key"): "of-the-pages",
}
PASSWORD_OF_DATABASE = SECRETS["mlflow-postgres", "password"]
ADMIN = ("admin", SECRETS["mlflow-admin", "password"])
# As the containers: no root, no way to it, and a root that is read-only but for /tmp. Where the
# interpreter is in a home that is closed to others, only its folder there can be seen.
_CLOSED = """
mount -t tmpfs tmpfs /tmp
if [ -n "$1" ]; then
    mkdir /tmp/kept && mount --bind "$1/$2" /tmp/kept && mount -t tmpfs -o mode=755 tmpfs "$1"
    mkdir "$1/$2" && mount --move /tmp/kept "$1/$2" && mount -o remount,ro "$1"
fi
mount -o remount,bind,ro /
cd /tmp
cat > settings.ini
shift 2
exec setpriv --reuid=1000 --regid=100 --clear-groups --no-new-privs --bounding-set=-all "$@"
"""
_OPEN = 'cd "$(mktemp -d)" && cat > settings.ini && exec "$@"'


def _in_container(command: list[str]) -> list[str]:
    *above, place = [*reversed(Path(sys.base_prefix).resolve().parents), Path(sys.base_prefix)]
    closed = next((one for one in above if not one.stat().st_mode & 1), None)
    inside = place.relative_to(closed).parts[0] if closed else ""
    shell = ["bash", "-ec", _CLOSED, "-", str(closed or ""), inside]
    return ["unshare", "--mount", "--propagation=private", *shell, *command]


def _can_be_closed() -> bool:
    """Whether this process may make such containers, and the interpreter runs in them."""
    if os.geteuid() != 0:
        return False
    probe = _in_container([sys.executable, "-c", "import json, mlflow.version"])
    return subprocess.run(probe, input=b"", capture_output=True).returncode == 0


def document(kind: str, name: str) -> dict[str, Any]:
    """Of the manifest."""
    documents = yaml.safe_load_all((ROOT / "cluster" / "mlflow.yaml").read_text())
    (found,) = (one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod(name: str) -> dict[str, Any]:
    """Of a deployment, or of a job that is scheduled."""
    if name in ("mlflow-backup", "mlflow-gc"):
        return document("CronJob", name)["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return document("Deployment", name)["spec"]["template"]["spec"]


def program(name: str) -> str | None:
    """Of PostgreSQL, which Debian keeps off the path."""
    theirs = sorted(str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (theirs[-1] if theirs else None)


def need_programs() -> None:
    """Skip the test where PostgreSQL, or a package of the server, is not installed."""
    if program("initdb") is None:
        pytest.skip("no initdb: apt-get install postgresql")
    for package in ("psycopg2", "flask_wtf"):
        pytest.importorskip(package, reason=f"no {package}: pip install 'vit_ray[server]'")


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

    def __enter__(self) -> Postgres:
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

    def _run(self, name: str, *words: str) -> None:
        command = [program(name) or name, "-D", self._data, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=self._user, timeout=120)


class TeamServer:
    """The whole of it in a folder; `start` and `stop` are of the MLflow server alone."""

    def __init__(self, folder: Path, s3_port: int, database: Postgres) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self._is_closed = _can_be_closed()
        self._s3_port = s3_port
        self._server: subprocess.Popen[bytes] | None = None
        self.database = database
        self.postgresql("createdb", "mlflow")

    def stored(self, name: str) -> list[Path]:
        """The store's files of this name, in the bucket's folder for MLflow."""
        return list((self.folder / "buckets" / "bucket" / "mlflow").rglob(name))

    def postgresql(self, name: str, *words: str) -> None:
        """Run a client of the database as its user."""
        where = ["--host=127.0.0.1", f"--port={self.database.port}", "--username=mlflow"]
        subprocess.run(
            [program(name) or name, *where, *words],
            env={**os.environ, "PGPASSWORD": PASSWORD_OF_DATABASE}, check=True, timeout=120,
        )  # fmt: skip

    def _here(self, text: str) -> str:
        """With the addresses of this machine."""
        for theirs, ours in {
            "mlflow-postgres:5432": f"127.0.0.1:{self.database.port}",
            "http://mlflow:5000": self.uri,
            "mlflow:5000": f"mlflow:{self.port}",
            "s3://BUCKET": "s3://bucket",
            "/etc/mlflow/basic_auth.ini": "settings.ini",
            "0.0.0.0": "127.0.0.1",  # noqa: S104
        }.items():
            text = text.replace(theirs, ours)
        return str(self.port) if text == "5000" else text

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MLFLOW_"))}
        for one in container["env"]:
            ref = one.get("valueFrom", {}).get("secretKeyRef")
            found[one["name"]] = (
                SECRETS[ref["name"], ref["key"]] if ref else self._here(one["value"])
            )
        if container["name"] == "mlflow":  # by its role, in a cluster
            found |= s3_environment(self._s3_port)
        return found

    def _command(self, container: dict[str, Any]) -> list[str]:
        words = [self._here(w) for w in (*container["command"], *container.get("args", ()))]
        return _in_container(words) if self._is_closed else ["bash", "-c", _OPEN, "-", *words]

    @cached_property
    def _settings(self) -> bytes:
        return self._here(document("ConfigMap", "mlflow")["data"]["basic_auth.ini"]).encode()

    def run(self, name: str, container: dict[str, Any] | None = None, **values: str) -> None:
        """Run the container of a CronJob to its end, with other words in its text."""
        container = dict(container or pod(name)["containers"][0])
        for part in ("command", "args"):
            words = container.get(part, [])
            container[part] = [values.get(word, word) for word in words]
        done = subprocess.run(
            self._command(container), env=self._environment(container), input=self._settings,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout.decode()

    def back_up(self, folder: Path) -> Path:
        """Run the backup's own script in a folder; returns the new file."""
        container = pod("mlflow-backup")["containers"][0]
        (script,) = container["args"]
        before = set(folder.glob("*.dump"))
        subprocess.run(
            [*container["command"], script.replace("/backup", str(folder))],
            env=self._environment(container), check=True, timeout=120,
        )  # fmt: skip
        (new,) = set(folder.glob("*.dump")) - before
        return new

    def restore(self, backup: Path) -> None:
        """By the line of docs/clusters.md, with the server stopped."""
        page = (ROOT / "docs" / "clusters.md").read_text()
        (line,) = re.findall("^    pg_restore (.*) --dbname=.* FILE.dump$", page, re.M)
        self.postgresql("pg_restore", *line.split(), "--dbname=mlflow", str(backup))

    def migrate(self) -> None:
        """What runs before the server starts."""
        (container,) = pod("mlflow")["initContainers"]
        self.run("mlflow", container)

    def start(self, wait_s: float = 300) -> None:
        """Start the server, and wait for its health."""
        (container,) = pod("mlflow")["containers"]
        path = self.folder / "server.log"
        with open(path, "ab") as log:
            self._server = subprocess.Popen(
                self._command(container), env=self._environment(container),
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._server.stdin is not None
        self._server.stdin.write(self._settings)
        self._server.stdin.close()
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            assert self._server.poll() is None, path.read_text()[-3000:]
            with contextlib.suppress(OSError):
                if self.get("/health") == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"the server did not come up: {path.read_text()[-3000:]}")

    def stop(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None

    def get(self, path: str, **headers: str) -> int:
        """The status of a request."""
        request = urllib.request.Request(f"{self.uri}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code


@contextlib.contextmanager
def team_server(folder: Path) -> Iterator[TeamServer]:
    """Everything but the MLflow server is up; what is still up at the end is stopped."""
    buckets = folder / "buckets"
    (buckets / "bucket").mkdir(parents=True)
    (container,) = pod("mlflow-postgres")["containers"]
    database = Postgres(PASSWORD_OF_DATABASE, tuple(container["args"]))
    with serve_s3(buckets) as s3_port, database:
        team = TeamServer(folder, s3_port, database)
        try:
            yield team
        finally:
            team.stop()


def main() -> None:
    """Serve until Ctrl-C, for people who try it."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    with team_server(folder) as team:
        team.migrate()
        team.start()
        user, password = map(shlex.quote, ADMIN)
        print(
            f"export MLFLOW_TRACKING_URI={team.uri}\nexport MLFLOW_TRACKING_USERNAME={user}\n"
            f"export MLFLOW_TRACKING_PASSWORD={password}", flush=True,
        )  # fmt: skip
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
